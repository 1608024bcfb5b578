/* SPDX-License-Identifier: MIT */
#include "ref.h"

#include "../num.h"

#include <math.h>
#include <string.h>

/* Workspace: the scores of one row, its output, and its query. */
fmla_status ref_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *p,
                                  size_t *bytes, size_t *alignment)
{
    (void)kernel, (void)alignment;
    *bytes = ((size_t)p->capacity + (size_t)p->d_v + (size_t)p->d_qk) * sizeof(double);
    return FMLA_OK;
}

static double load(const struct dense_decode_problem *p, const uint16_t *at)
{
    return (double)(p->element == ELEMENT_BF16 ? num_from_bf16(*at) : num_from_fp16(*at));
}

static void store(const struct dense_decode_problem *p, uint16_t *at, double x)
{
    *at = p->element == ELEMENT_BF16 ? num_to_bf16((float)x) : num_to_fp16((float)x);
}

static const uint16_t *key_at(const struct dense_decode_problem *p, int64_t request, int64_t head, int64_t t)
{
    const int64_t page =
        p->block_table ? p->block_table[request * p->block_table_stride + t / p->page_size] : request;
    return p->kv + page * p->kv_stride[0] + (t % p->page_size) * p->kv_stride[1] +
           head / (p->h_q / p->h_kv) * p->kv_stride[2];
}

static void decode_row(const struct dense_decode_problem *p, int64_t request, int64_t token, int64_t head,
                       int64_t s_k)
{
    double *scores = p->workspace;
    double *sum = scores + p->capacity;
    double *q = sum + p->d_v;
    const uint16_t *query = p->q + request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2];
    uint16_t *out = p->out + request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2];

    int64_t seen = p->causal ? s_k - p->s_q + token + 1 : s_k; /* keys t < seen */
    if (seen < 0) seen = 0;

    for (int64_t d = 0; d < p->d_qk; d++) q[d] = load(p, query + d);
    double max = -INFINITY;
    for (int64_t t = 0; t < seen; t++) {
        const uint16_t *key = key_at(p, request, head, t);
        double dot = 0.0;
        for (int64_t d = 0; d < p->d_qk; d++) dot += q[d] * load(p, key + d);
        scores[t] = (double)p->scale * dot;
        if (scores[t] > max) max = scores[t];
    }
    if (max == -INFINITY) max = 0.0; /* no key, or no score above -inf: every exp below is 0 (or NaN) */

    double total = 0.0;
    memset(sum, 0, (size_t)p->d_v * sizeof *sum);
    for (int64_t t = 0; t < seen; t++) {
        const uint16_t *key = key_at(p, request, head, t);
        const double e = exp(scores[t] - max);
        total += e;
        for (int64_t d = 0; d < p->d_v; d++) sum[d] += e * load(p, key + d);
    }

    const bool empty = total == 0.0;
    const double lse = max + log(total); /* natural */
    double factor = 1.0;
    if (p->rules.attn_sink && !empty) factor = 1.0 / (1.0 + exp((double)p->rules.attn_sink[head] - lse));
    for (int64_t d = 0; d < p->d_v; d++) store(p, out + d, empty ? 0.0 : sum[d] / total * factor);
    if (p->lse)
        p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token] =
            empty ? p->rules.lse_of_empty : (float)(lse * (double)p->rules.lse_factor);
}

fmla_status ref_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *p)
{
    (void)kernel;
    for (int64_t request = 0; request < p->b; request++) {
        int64_t s_k = p->seqlens[request];
        s_k = s_k < 0 ? 0 : s_k > p->capacity ? p->capacity : s_k;
        for (int64_t t = 0; p->block_table && t < s_k; t += p->page_size) {
            const int32_t page = p->block_table[request * p->block_table_stride + t / p->page_size];
            if (page < 0 || page >= p->pages)
                return fail(FMLA_INVALID_ARGUMENT,
                            "dense_decode: block_table: entry [%lld, %lld] is %d, must be in [0, %lld)",
                            (long long)request, (long long)(t / p->page_size), page, (long long)p->pages);
        }
    }
    for (int64_t request = 0; request < p->b; request++) {
        int64_t s_k = p->seqlens[request];
        s_k = s_k < 0 ? 0 : s_k > p->capacity ? p->capacity : s_k;
        for (int64_t token = 0; token < p->s_q; token++)
            for (int64_t head = 0; head < p->h_q; head++) decode_row(p, request, token, head, s_k);
    }
    return FMLA_OK;
}
