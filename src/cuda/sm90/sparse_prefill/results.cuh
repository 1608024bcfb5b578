/* SPDX-License-Identifier: MIT
 *
 * The end of a tile: rows to `out`, lse and max_logits.
 */
#pragma once

#include "softmax.cuh"

#include "../sides/results.cuh"

/* `reference`, `over`: of the row, in powers of two; `sum`: of weights relative to the reference, 0 where no key was seen: the
 * reference is a key's score, whose weight is 1. Returns what its O is to be multiplied with. One lane of four stores
 * lse where the side is the first, else max_logits. */
__device__ __forceinline__ float finish_row(const struct sparse_prefill_params &p, const Item &item, int row,
                                            int side, float reference, float over, float sum, bool stores)
{
    const bool empty = sum == 0.0f;
    const int asked = item.tile * ROWS + row, head = min(asked, p.h_q - 1);
    const float lse = empty ? -INFINITY : (reference + log2f(sum)) * LN_2;
    if (stores && asked < p.h_q) {
        if (side == 0 && p.lse) p.lse[item.token * p.lse_stride + head] = result_lse(p.rules, lse);
        if (side == 1 && p.max_logits)
            p.max_logits[item.token * p.max_stride + head] =
                empty ? -INFINITY : (reference + over) * LN_2 * p.rules.lse_factor;
    }
    return empty ? 0.0f : result_sink_factor(p.rules, head, lse) / sum;
}

/* The warp's 16 rows from `tile_row` on, 256 columns from `column` on, to `out`; `lines`: the warp's, of its side's P. */
template <typename Element>
__device__ __forceinline__ void store_out(const struct sparse_prefill_params &p, const Item &item,
                                          const float (&left)[64], const float (&right)[64],
                                          const float (&factor)[2], int tile_row, int column, uint32_t lines)
{
    int64_t offset[4];
    bool stores[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int head = item.tile * ROWS + tile_row + (int)(fresh_thread() % 32) / 8 + 4 * i;
        stores[i] = head < p.h_q;
        offset[i] = item.token * p.out_stride[0] + (stores[i] ? head : 0) * p.out_stride[1];
    }
    const Scaled scaled = {factor};
    uint16_t *to = p.out + column;
    store_group<Element, 0>(to, offset, stores, left, scaled, 0, lines);
    store_group<Element, 32>(to + 64, offset, stores, left, scaled, 64, lines);
    store_group<Element, 0>(to + 128, offset, stores, right, scaled, 128, lines);
    store_group<Element, 32>(to + 192, offset, stores, right, scaled, 192, lines);
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
