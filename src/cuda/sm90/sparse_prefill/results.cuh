/* SPDX-License-Identifier: MIT
 *
 * The end of a tile, of either kernel: rows to `out`, lse and max_logits. After the kernel's layout.cuh.
 */
#pragma once

#include "../../device/result.cuh"
#include "../../device/tma.cuh"
#include "../sides/results.cuh"
#include "item.cuh"

/* A row that is finished: lse and its largest score, in powers of two. */
struct RowEnd {
    float lse, largest; /* -inf: it saw no key */

    /* `sum`: of weights relative to the reference, 0 where no key was seen. */
    __device__ __forceinline__ RowEnd(float reference, float sum, float largest)
        : lse(sum == 0.0f ? -INFINITY : reference + log2_approx(sum)), largest(largest)
    {
    }
};

/* What O is to be multiplied with. */
__device__ __forceinline__ float row_factor(const struct sparse_prefill_params &p, int head,
                                            const RowEnd &end, float sum)
{
    return sum == 0.0f ? 0.0f : result_sink_factor(p.rules, head, end.lse * LN_2) * reciprocal_approx(sum);
}

/* lse by one warpgroup, max_logits by the other. */
__device__ __forceinline__ void store_row_end(const struct sparse_prefill_params &p, const Item &item,
                                              int head, int part, const RowEnd &end)
{
    if (part == 0 && p.lse) p.lse[item.token * p.lse_stride + head] = result_lse(p.rules, end.lse * LN_2);
    if (part == 1 && p.max_logits)
        p.max_logits[item.token * p.max_stride + head] = end.largest * LN_2 * p.rules.lse_factor;
}

/* The unit's columns of all rows, from the unit to `out`; a group of bulk copies. */
__device__ __forceinline__ void store_unit(const struct sparse_prefill_sm90_params &p, const Item &item,
                                           int unit, uint32_t from)
{
    tma_store(&p.results, from, {0, item.tile * ROWS, 2 * unit, item.token, 0});
    bulk_commit();
}

/* A tile without keys; `thread` of two warpgroups. */
__device__ __forceinline__ void store_empty(const struct sparse_prefill_params &p, const Item &item, int thread)
{
    enum { CHUNKS = D_V / CHUNK_ELEMENTS };
    const int first = item.tile * ROWS, heads = min((int)ROWS, p.h_q - first);
    if (thread < heads && p.lse) p.lse[item.token * p.lse_stride + first + thread] = p.rules.lse_of_empty;
    if (thread < heads && p.max_logits) p.max_logits[item.token * p.max_stride + first + thread] = -INFINITY;
#pragma unroll 1
    for (int i = thread; i < heads * CHUNKS; i += 2 * WARPGROUP_THREADS) {
        uint16_t *to = p.out + item.token * p.out_stride[0] + (first + i / CHUNKS) * p.out_stride[1];
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}
