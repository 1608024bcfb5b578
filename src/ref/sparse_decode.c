/* SPDX-License-Identifier: MIT */
#include "ref.h"

#include "../kvformat.h"

#include <math.h>
#include <string.h>

/* Workspace: the keys of one query token; the scores of one row, its output, and its query. */
struct memory {
    double *keys; /* [most_keys][d_qk] */
    double *scores, *sum, *q;
};

static size_t most_keys(const struct sparse_decode_problem *p)
{
    return (size_t)p->topk.topk + (size_t)p->topk.extra_topk;
}

fmla_status ref_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *p,
                                   size_t *bytes, size_t *alignment)
{
    (void)kernel, (void)alignment;
    size_t doubles;
    if (__builtin_mul_overflow(most_keys(p), (size_t)p->d_qk + 1, &doubles) ||
        __builtin_add_overflow(doubles, (size_t)(p->d_v + p->d_qk), &doubles) ||
        __builtin_mul_overflow(doubles, sizeof(double), bytes))
        return fail(FMLA_UNSUPPORTED, "sparse_decode: indices: %zu keys of a token would not fit into memory",
                    most_keys(p));
    return FMLA_OK;
}

static struct memory memory_of(const struct sparse_decode_problem *p)
{
    struct memory m = {.keys = p->workspace};
    m.scores = m.keys + most_keys(p) * (size_t)p->d_qk;
    m.sum = m.scores + most_keys(p);
    m.q = m.sum + p->d_v;
    return m;
}

static double load(const struct sparse_decode_problem *p, const uint16_t *at)
{
    return (double)(p->element == ELEMENT_BF16 ? num_from_bf16(*at) : num_from_fp16(*at));
}

static void store(const struct sparse_decode_problem *p, uint16_t *at, double x)
{
    *at = p->element == ELEMENT_BF16 ? num_to_bf16((float)x) : num_to_fp16((float)x);
}

/* Appends the keys that the first `count` indices name in a cache to `keys`; returns how many there are then. */
static int64_t list_keys(const struct sparse_decode_problem *p, const struct sparse_cache *cache,
                         int64_t request, int64_t token, int64_t count, double *keys, int64_t listed)
{
    const struct kv_layout layout = kv_layout_of(p->format, (int32_t)p->d_qk);
    const int32_t *indices =
        cache->indices + request * cache->indices_stride[0] + token * cache->indices_stride[1];
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = indices[i];
        if (index < 0 || index >= cache->pages * cache->page_size) continue;
        const uint8_t *page = cache->data + index / cache->page_size * cache->page_bytes;
        int64_t page_size = cache->page_size, slot = index % page_size;
        if (!layout.scale_bytes) { /* tokens may lie apart: each is a page of one slot */
            page += slot * cache->slot_bytes;
            page_size = 1, slot = 0;
        }
        double *key = keys + listed++ * p->d_qk;
        for (int64_t d = 0; d < p->d_qk; d++)
            key[d] = (double)kv_load(&layout, page, page_size, slot, (int32_t)d, 1.0f);
    }
    return listed;
}

/* One row over `count` keys. */
static void decode_row(const struct sparse_decode_problem *p, const struct memory *m, int64_t request,
                       int64_t token, int64_t head, int64_t count)
{
    const uint16_t *query = p->q + request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2];
    uint16_t *out = p->out + request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2];

    for (int64_t d = 0; d < p->d_qk; d++) m->q[d] = load(p, query + d);
    double max = -INFINITY;
    for (int64_t t = 0; t < count; t++) {
        const double *key = m->keys + t * p->d_qk;
        double dot = 0.0;
        for (int64_t d = 0; d < p->d_qk; d++) dot += m->q[d] * key[d];
        m->scores[t] = (double)p->scale * dot;
        if (m->scores[t] > max) max = m->scores[t];
    }
    if (max == -INFINITY) max = 0.0; /* no key, or no score above -inf: every exp below is 0 (or NaN) */

    double total = 0.0;
    memset(m->sum, 0, (size_t)p->d_v * sizeof *m->sum);
    for (int64_t t = 0; t < count; t++) {
        const double *key = m->keys + t * p->d_qk;
        const double e = exp(m->scores[t] - max);
        total += e;
        for (int64_t d = 0; d < p->d_v; d++) m->sum[d] += e * key[d];
    }

    const bool empty = total == 0.0;
    const double lse = max + log(total); /* natural */
    double factor = 1.0;
    if (p->rules.attn_sink && !empty) factor = 1.0 / (1.0 + exp((double)p->rules.attn_sink[head] - lse));
    for (int64_t d = 0; d < p->d_v; d++) store(p, out + d, empty ? 0.0 : m->sum[d] / total * factor);
    if (p->lse)
        p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token] =
            empty ? p->rules.lse_of_empty : (float)(lse * (double)p->rules.lse_factor);
}

static int64_t clamped(int64_t topk, const int32_t *length, int64_t request)
{
    const int64_t count = length ? length[request] : topk;
    return count < 0 ? 0 : count > topk ? topk : count;
}

fmla_status ref_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    const struct memory m = memory_of(p);
    const struct plan_topk *topk = &p->topk;
    for (int64_t request = 0; request < p->b; request++)
        for (int64_t token = 0; token < p->s_q; token++) {
            int64_t count = list_keys(p, &p->cache[0], request, token,
                                      clamped(topk->topk, topk->length, request), m.keys, 0);
            if (topk->extra_topk)
                count = list_keys(p, &p->cache[1], request, token,
                                  clamped(topk->extra_topk, topk->extra_length, request), m.keys, count);
            for (int64_t head = 0; head < p->h_q; head++) decode_row(p, &m, request, token, head, count);
        }
    return FMLA_OK;
}
