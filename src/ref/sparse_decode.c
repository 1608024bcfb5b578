/* SPDX-License-Identifier: MIT */
#include "sparse.h"

static size_t most_keys(const struct sparse_decode_problem *p)
{
    return (size_t)p->topk.topk + (size_t)p->topk.extra_topk;
}

fmla_status ref_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *p,
                                   size_t *bytes, size_t *alignment)
{
    (void)kernel, (void)alignment;
    return ref_memory_size("sparse_decode", most_keys(p), p->d_qk, p->d_v, bytes);
}

/* Appends the keys of one of the caches, of which `length` entries of `topk` count. */
static int64_t list_keys(const struct sparse_decode_problem *p, const struct sparse_cache *cache,
                         int64_t request, int64_t token, int64_t topk, const int32_t *length, double *keys,
                         int64_t listed)
{
    const int32_t *indices =
        cache->indices + request * cache->indices_stride[0] + token * cache->indices_stride[1];
    return ref_list_keys(cache, p->format, p->d_qk, indices, ref_count(topk, length, request), keys, listed);
}

static struct ref_row row_of(const struct sparse_decode_problem *p, int64_t request, int64_t token,
                             int64_t head)
{
    return (struct ref_row){
        .d_qk = p->d_qk,
        .d_v = p->d_v,
        .head = head,
        .element = p->element,
        .scale = p->scale,
        .rules = &p->rules,
        .q = p->q + request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2],
        .out = p->out + request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2],
        .lse = p->lse ? p->lse + request * p->lse_stride[0] + head * p->lse_stride[1] + token : NULL,
    };
}

fmla_status ref_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    (void)kernel;
    const struct ref_memory m = ref_memory_of(p->workspace, most_keys(p), p->d_qk, p->d_v);
    const struct plan_topk *topk = &p->topk;
    for (int64_t request = 0; request < p->b; request++)
        for (int64_t token = 0; token < p->s_q; token++) {
            int64_t count = list_keys(p, &p->cache[0], request, token, topk->topk, topk->length, m.keys, 0);
            if (topk->extra_topk)
                count = list_keys(p, &p->cache[1], request, token, topk->extra_topk, topk->extra_length,
                                  m.keys, count);
            for (int64_t head = 0; head < p->h_q; head++) {
                const struct ref_row row = row_of(p, request, token, head);
                ref_attend(&row, &m, count);
            }
        }
    return FMLA_OK;
}
