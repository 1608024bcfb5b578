/* SPDX-License-Identifier: MIT
 *
 * The queries of a tile to shared memory, their columns in the order of the keys' (layout.cuh).
 */
#pragma once

#include "convert.cuh"

__device__ __forceinline__ const uint16_t *first_query(const struct sparse_decode_params &p, int request,
                                                       const Place &place)
{
    return p.q + request * p.q_stride[0] + place.token * p.q_stride[1] +
           (int64_t)(place.tile * HEADS) * p.q_stride[2];
}

/* By the scores' warps: the tile of another request to L2, ahead of its use. */
template <typename F>
__device__ __forceinline__ void prefetch_queries(const struct sparse_decode_params &p, int request)
{
    const Place place(p);
    const char *from = (const char *)first_query(p, request, place);
    const int heads = min((int)HEADS, p.h_q - place.tile * HEADS);
#pragma unroll 1
    for (int line = (int)threadIdx.x; line < heads * F::Q_TILES; line += WARPGROUP_THREADS)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line / F::Q_TILES * (2 * p.q_stride[2]) +
                                                      line % F::Q_TILES * LINE_BYTES));
}

/* By the scores' warps; whether fp16 holds the queries. Eight lanes take 128 bytes of a head, so that both sides of the copy
 * take all banks and whole sectors. */
template <typename F, typename Element>
__device__ __forceinline__ bool load_queries(const struct sparse_decode_params &p, int request, uint32_t base)
{
    enum { HEADS_OF_ROUND = 2, HEADS_APART = 16 };
    const Place place(p);
    const int lane = (int)fresh_thread() % 32, piece = lane % 8, t = piece / 2;
    const int first_head = 4 * ((int)fresh_thread() / 32) + lane / 8, heads = p.h_q - place.tile * HEADS;
    const uint16_t *from =
        first_query(p, request, place) + first_head * p.q_stride[2] + CHUNK_ELEMENTS * piece;
    /* A line of a tile by itself: its chunk 2 · step, and the one after it, XOR the head. */
    const uint32_t chunk = (4 * (uint32_t)(piece % 2)) ^ (first_head & 7u);
    uint32_t to = SHARED_AT(base, q) + (uint32_t)(first_head * LINE_BYTES + 4 * t);
    uint32_t most = 0;
    barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* all products with the queries before are done */
#pragma unroll 1
    for (int head = first_head; head < HEADS; head += HEADS_OF_ROUND * HEADS_APART) {
        uint4 words[HEADS_OF_ROUND][F::Q_TILES];
#pragma unroll
        for (int i = 0; i < HEADS_OF_ROUND; i++)
#pragma unroll
            for (int c = 0; c < F::Q_TILES; c++)
                words[i][c] =
                    head + i * HEADS_APART < heads
                        ? __ldg((const uint4 *)(from + i * HEADS_APART * p.q_stride[2] + LINE_ELEMENTS * c))
                        : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < HEADS_OF_ROUND; i++)
#pragma unroll
            for (int c = 0; c < F::Q_TILES; c++) {
                const uint32_t line = to + (uint32_t)(i * HEADS_APART * LINE_BYTES + c * TILE_BYTES);
                const uint4 x = words[i][c];
                const uint32_t two[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (uint32_t k = 0; k < 4; k++) {
                    if (!Element::IS_BF16) most = larger_bf16x2(most, two[k]);
                    store_shared_4(line + (chunk ^ k) * CHUNK_BYTES, convert_bf16x2<Element>(two[k]));
                }
            }
        from += HEADS_OF_ROUND * HEADS_APART * p.q_stride[2];
        to += HEADS_OF_ROUND * HEADS_APART * LINE_BYTES;
    }
    fence_async_shared();
    return !any_of_scores(too_large_for_fp16(most)); /* and all queries are there */
}
