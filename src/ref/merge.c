/* SPDX-License-Identifier: MIT
 *
 * Merge by the oracle. Each element of all parts is read before that of the result is written, and each lse of
 * a row before the row's: the result may replace a part.
 */
#include "ref.h"

#include <math.h>

static double natural_lse(const struct merge_problem *p, int64_t part, int64_t request, int64_t token,
                          int64_t head)
{
    return (double)merge_part_lse(p, part, request, token, head) / (double)p->rules.lse_factor;
}

static void merge_row(const struct merge_problem *p, int64_t request, int64_t token, int64_t head)
{
    double max = -INFINITY;
    for (int64_t n = 0; n < p->n; n++) {
        const double lse = natural_lse(p, n, request, token, head);
        if (!isinf(lse) && lse > max) max = lse;
    }
    if (max == -INFINITY) max = 0.0;
    double total = 0.0;
    for (int64_t n = 0; n < p->n; n++) {
        const double lse = natural_lse(p, n, request, token, head);
        if (!isinf(lse)) total += exp(lse - max);
    }

    const bool empty = total == 0.0;
    const double lse = max + log(total);
    double factor = 1.0;
    if (p->rules.attn_sink && !empty) factor = 1.0 / (1.0 + exp((double)p->rules.attn_sink[head] - lse));
    for (int64_t d = 0; d < p->d_v; d++) {
        double sum = 0.0;
        for (int64_t n = p->out_first; n < p->out_first + p->out_count; n++) {
            const double part = natural_lse(p, n, request, token, head);
            int64_t at;
            if (isinf(part)) continue; /* saw no key: its out is not read */
            const void *const out = merge_part_out(p, n, request, token, head, &at);
            sum += exp(part - lse) * (double)ref_load(out, p->part_element, at + d);
        }
        ref_store(p->out, p->out_element,
                  request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2] + d,
                  (float)(sum * factor));
    }
    if (p->lse)
        p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token] =
            empty ? p->rules.lse_of_empty : (float)(lse * (double)p->rules.lse_factor);
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct merge_problem *p = problem.merge;
    (void)driver, (void)prepared;
    for (int64_t request = 0; request < p->b; request++)
        for (int64_t token = 0; token < p->s_q; token++)
            for (int64_t head = 0; head < p->h_q; head++) merge_row(p, request, token, head);
    return FMLA_OK;
}

const struct kernel_driver ref_merge_driver = {.run = run};
