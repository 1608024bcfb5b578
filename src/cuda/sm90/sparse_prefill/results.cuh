/* SPDX-License-Identifier: MIT
 *
 * The end of a tile: rows to `out`, lse and max_logits.
 */
#pragma once

#include "softmax.cuh"

#include "../../device/result.cuh"
#include "../sides/results.cuh"

/* A row that is finished: lse and its largest score, in powers of two. */
struct RowEnd {
    float lse, largest; /* -inf: it saw no key */

    /* Row i of the thread's two; `over`: of all its keys. From the first key on the reference is a key's score; where scores
     * are NaN alone, it is still the least. */
    __device__ __forceinline__ RowEnd(const RowState &state, float over, int i)
    {
        const float reference = state.reference[i], sum = state.sum[i];
        lse = sum == 0.0f ? -INFINITY : reference + log2_approx(sum);
        largest = reference <= LEAST_REFERENCE ? -INFINITY : reference + over;
    }
};

/* What O is to be multiplied with. */
__device__ __forceinline__ float row_factor(const struct sparse_prefill_params &p, int head,
                                            const RowEnd &end, float sum)
{
    return sum == 0.0f ? 0.0f : result_sink_factor(p.rules, head, end.lse * LN_2) * reciprocal_approx(sum);
}

/* lse by the first side, max_logits by the other. */
__device__ __forceinline__ void store_row_end(const struct sparse_prefill_params &p, const Item &item,
                                              int head, int side, const RowEnd &end)
{
    if (side == 0 && p.lse) p.lse[item.token * p.lse_stride + head] = result_lse(p.rules, end.lse * LN_2);
    if (side == 1 && p.max_logits)
        p.max_logits[item.token * p.max_stride + head] = end.largest * LN_2 * p.rules.lse_factor;
}

/* The warp's 16 rows, 256 columns, to lines of four tiles of shared memory, the first at `lines`. */
template <typename Element>
__device__ __forceinline__ void stage_rows(const float (&left)[64], const float (&right)[64],
                                           const float (&factor)[2], uint32_t lines)
{
    const uint32_t lane = fresh_thread() % 32;
    const Scaled scaled = {factor};
    stage_group<Element, 0>(left, scaled, 0, lines, lane);
    stage_group<Element, 32>(left, scaled, 64, lines + TILE_BYTES, lane);
    stage_group<Element, 0>(right, scaled, 128, lines + 2 * TILE_BYTES, lane);
    stage_group<Element, 32>(right, scaled, 192, lines + 3 * TILE_BYTES, lane);
}

/* The unit's columns of all rows, from the unit to `out`; a group of bulk copies. */
__device__ __forceinline__ void store_unit(const struct sparse_prefill_sm90_params &p, const Item &item,
                                           int unit, uint32_t from)
{
    tma_store(&p.results, from, {0, item.tile * ROWS, 2 * unit, item.token, 0});
    bulk_commit();
}

/* A tile without keys; by the threads of both sides. */
__device__ __forceinline__ void store_empty(const struct sparse_prefill_params &p, const Item &item)
{
    enum { CHUNKS = D_V / CHUNK_ELEMENTS };
    const int thread = (int)(fresh_thread() - WARPGROUP_THREADS);
    const int first = item.tile * ROWS, heads = min((int)ROWS, p.h_q - first);
    if (thread < heads && p.lse) p.lse[item.token * p.lse_stride + first + thread] = p.rules.lse_of_empty;
    if (thread < heads && p.max_logits) p.max_logits[item.token * p.max_stride + first + thread] = -INFINITY;
#pragma unroll 1
    for (int i = thread; i < heads * CHUNKS; i += 2 * WARPGROUP_THREADS) {
        uint16_t *to = p.out + item.token * p.out_stride[0] + (first + i / CHUNKS) * p.out_stride[1];
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}
