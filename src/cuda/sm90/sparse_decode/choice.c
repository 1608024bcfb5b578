/* SPDX-License-Identifier: MIT */
#include "choice.h"

enum { ALIGNMENT = 16 };

static bool strides_aligned(const int64_t *shape, const int64_t *stride, int dims, int64_t element_bytes)
{
    for (int i = 0; i < dims; i++)
        if (shape[i] > 1 && stride[i] * element_bytes % ALIGNMENT) return false;
    return true;
}

static bool aligned(const void *data)
{
    return (uintptr_t)data % ALIGNMENT == 0;
}

static bool cache_aligned(const struct sparse_cache *cache)
{
    return aligned(cache->data) && cache->page_bytes % ALIGNMENT == 0 && cache->slot_bytes % ALIGNMENT == 0;
}

const char *sm90_sparse_decode_refuses(const struct sparse_decode_problem *p, const char **argument)
{
    const int64_t shape[] = {p->b, p->s_q, p->h_q};
    if (!p->b) return NULL;
    *argument = "kv_format";
    if (p->format != KV_FP8_656 && p->format != KV_FP8_584) return "takes FP8_656 and FP8_584 caches";
    *argument = "q";
    if (p->element != ELEMENT_BF16) return "takes bfloat16 queries";
    if (!aligned(p->q) || !strides_aligned(shape, p->q_stride, 3, 2))
        return "takes queries whose base and strides are multiples of 16 bytes";
    *argument = "kv_cache";
    if (!cache_aligned(&p->cache[0])) return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "extra_kv_cache";
    if (p->topk.extra_topk && !cache_aligned(&p->cache[1]))
        return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "out";
    if (!aligned(p->out) || !strides_aligned(shape, p->out_stride, 3, 2))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
