/* SPDX-License-Identifier: MIT */
#include "choice.h"

enum { ALIGNMENT = 16 };

/* Units of a block of 64 keys and a tile of 16 heads, an SM. Measured on an H200 (64 and 128 heads, 2048 entries): at 1024
 * units, 7.8 an SM, the kernel for small batches takes 32.5 µs and the large one 35.5; at 2048 units it is 47 and 44, since
 * every tile converts the keys for itself. */
enum { SMALL_MOST_UNITS = 8 };

/* Up to so many blocks a piece the plan's overhead of a request would cut them unevenly. */
enum { FEW_BLOCKS = 8, MOST_PARTITIONS = 65536 };

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

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t blocks_of(const struct sm90_sparse_shape *shape)
{
    return ceil_div(plan_topk_length(shape->topk, shape->extra_topk, shape->extra_topk), PLAN_BLOCK);
}

bool sm90_sparse_decode_is_small(const struct sm90_sparse_shape *shape, bool batch_invariant)
{
    if (shape->h_q <= SM90_SPARSE_DECODE_SMALL_HEADS) return true;
    if (batch_invariant || !shape->b) return false;
    const double tiles =
        (double)shape->b * (double)shape->s_q * (double)ceil_div(shape->h_q, SM90_SPARSE_DECODE_SMALL_HEADS);
    return tiles * (double)blocks_of(shape) <= (double)SMALL_MOST_UNITS * shape->sms;
}

int32_t sm90_sparse_decode_partitions(const struct sm90_sparse_shape *shape)
{
    const bool small = sm90_sparse_decode_is_small(shape, false);
    const int64_t heads = small ? SM90_SPARSE_DECODE_SMALL_HEADS : SM90_SPARSE_DECODE_HEADS,
                  of_sm = small ? SM90_SPARSE_DECODE_SMALL_BLOCKS_OF_SM : 1;
    const int64_t fit = of_sm * shape->sms / (shape->s_q * ceil_div(shape->h_q, heads));
    const int64_t at_once = fit > 1 ? fit : 1, b = shape->b, blocks = blocks_of(shape);
    for (int64_t piece = 1; b && piece <= FEW_BLOCKS; piece++) {
        if (b * ceil_div(blocks, piece) > at_once) continue;
        if (piece >= blocks) return (int32_t)b; /* none is cut */
        /* The planner then cuts after at most `piece` blocks; what is too many stays idle. */
        const int64_t partitions = ceil_div(b * (blocks + PLAN_OVERHEAD), piece);
        return (int32_t)(partitions < MOST_PARTITIONS ? partitions : MOST_PARTITIONS);
    }
    return (int32_t)at_once;
}
