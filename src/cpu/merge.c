/* SPDX-License-Identifier: MIT
 *
 * Merge on the CPU. A work item is a query token of a request, with all its heads. The result may replace a
 * part: the values of all parts are read before those of the result are written, and a row's lse is written last.
 */
#include "cpu.h"

#include "cost.h"
#include "result.h"

/* Values of a row summed at a time; they stay in registers and the L1 cache for any d_v. */
enum { SPAN = 128 };

static float part_lse(const struct merge_problem *p, int64_t part, int64_t request, int64_t head,
                      int64_t token)
{
    return merge_part_lse(p, part, request, token, head) / p->rules.lse_factor;
}

/* Returns ln Σ exp(lse) over the parts, added in their order. */
static float whole_lse(const struct merge_problem *p, int64_t request, int64_t head, int64_t token)
{
    float max = -INFINITY, sum = 0.0f;
    for (int64_t n = 0; n < p->n; n++) {
        const float lse = part_lse(p, n, request, head, token);
        if (isinf(lse)) continue;
        if (lse > max)
            sum = sum * expf(max - lse) + 1.0f, max = lse; /* for the first part: 0 · exp(-inf) + 1 */
        else /* a NaN takes this branch, also as the first part: it must reach the sum */
            sum += max == -INFINITY ? lse : expf(lse - max);
    }
    return sum == 0.0f ? -INFINITY : max == -INFINITY ? sum : max + logf(sum);
}

static void merge_row(const struct merge_problem *p, int64_t request, int64_t token, int64_t head)
{
    const float lse = whole_lse(p, request, head, token);
    const float factor = result_sink_factor(&p->rules, head, lse);
    const int64_t at = request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2];
    for (int64_t first = 0; first < p->d_v; first += SPAN) {
        const int64_t count = p->d_v - first < SPAN ? p->d_v - first : SPAN;
        float sum[SPAN] = {0};
        for (int64_t n = p->out_first; n < p->out_first + p->out_count; n++) {
            const float partial = part_lse(p, n, request, head, token);
            int64_t in;
            if (isinf(partial)) continue; /* the part saw no key: its out is not read */
            const float weight = expf(partial - lse);
            const void *const out = merge_part_out(p, n, request, token, head, &in);
            for (int64_t d = 0; d < count; d++)
                sum[d] += weight * result_load(out, p->part_element, in + first + d);
        }
        result_store(p->out, p->out_element, at + first, sum, factor, count);
    }
    if (p->lse)
        p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token] = result_lse(&p->rules, lse);
}

static void merge_token(void *data, int64_t index, int32_t worker)
{
    const struct merge_problem *p = data;
    (void)worker;
    for (int64_t head = 0; head < p->h_q; head++) merge_row(p, index / p->s_q, index % p->s_q, head);
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct merge_problem *p = problem.merge;
    (void)driver, (void)prepared;
    if (!p->h_q || (!p->d_v && !p->lse)) return FMLA_OK; /* nothing to write, for any number of tokens */
    const struct thread_pool pool = threads_now();
    struct merge_problem copy = *p;
    const double rows = (double)p->b * (double)p->s_q * (double)p->h_q;
    threads_run(&pool, p->b * p->s_q,
                cost_of_moving(rows * (double)(p->out_count + 1) * (double)(p->d_v + 1) * sizeof(float)),
                merge_token, &copy);
    return FMLA_OK;
}

const struct kernel_driver cpu_merge_driver = {.run = run};
