/* SPDX-License-Identifier: MIT
 *
 * The scores' warpgroup: S^T = K Qᵀ with K in registers, from where the producer stored it, and softmax. It asks for the
 * queries of the next tile as soon as it has read these for the last time.
 */
#pragma once

#include "../../../device/mma.cuh"
#include "../../../device/result.cuh"
#include "softmax.cuh"

template <typename F> struct Scores {
    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t base;
    float s[32];
    Softmax softmax;

    __device__ __forceinline__ Scores(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), softmax(params.call, memory)
    {
    }

    static __device__ __forceinline__ int lane() { return (int)(fresh_thread() % 32); }
    static __device__ __forceinline__ int warp() { return (int)(fresh_thread() / 32) % WARPS_OF_GROUP; }

    /* ---- Queries ---------------------------------------------------------------------------------- */

    /* Of the next tile that has keys; none: nothing. By the first warp. */
    __device__ __forceinline__ void ask_queries(int item)
    {
        for (; item < p.items; item += (int)gridDim.x) {
            const Item next(p, item);
            if (next.blocks == 0) continue;
            if (elect_one()) {
                const uint32_t full = SHARED_AT(base, q_full);
                mbarrier_arrive_expect(full, F::Q_TILES * TILE_BYTES);
#pragma unroll
                for (int c = 0; c < F::Q_TILES; c++)
                    tma_load_once(SHARED_AT(base, q) + (uint32_t)c * TILE_BYTES, &p.queries, full,
                                  {0, next.tile * ROWS, c, next.token, 0});
            }
            break;
        }
        __syncwarp();
    }

    /* ---- Scores ----------------------------------------------------------------------------------- */

    /* Products in pairs of steps, each of 16 columns: those of the rope columns first, if V does not have them. A's fragments are
     * loaded three pairs ahead. */
    enum { PAIRS = 2 * F::Q_TILES, PAIRS_OF_UNIT = 4, FRAGMENTS = 3 };
    typedef uint32_t Fragments[2][4];

    static __device__ __forceinline__ constexpr int tile_of(int pair) /* of V; -1: of the rope columns */
    {
        return pair / 2 - (F::Q_TILES - V_TILES);
    }

    __device__ __forceinline__ void load_pair(Fragments &f, const uint32_t (&line)[4], int pair, uint32_t count)
    {
        const uint32_t buffer = count % BUFFERS;
        const int tile = tile_of(pair);
        if (!F::ROPE_IS_V && pair == 0) mbarrier_wait(SHARED_AT(base, rope_full), count & 1);
        if (tile >= 0 && tile % 2 == 0 && pair % 2 == 0)
            mbarrier_wait(barrier_at(SHARED_AT(base, keys_full) + buffer * (UNITS * sizeof(Barrier)), tile / 2),
                          count / BUFFERS & 1);
        const uint32_t keys = tile < 0 ? SHARED_AT(base, rope) : half_at(base, buffer, 0) + (uint32_t)tile * TILE_BYTES;
#pragma unroll
        for (int k = 0; k < 2; k++) ldmatrix_x4(f[k], line[pair % 2 * 2 + k] + keys);
    }

    __device__ __forceinline__ void multiply_pair(const Fragments &f, int pair)
    {
        const uint64_t q = wgmma_lines(SHARED_AT(base, q), 0);
        const int tile = tile_of(pair) < 0 ? F::ROPE_TILE : tile_of(pair);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2; k++)
            wgmma_64<Bf16>(s, f[k], wgmma_behind(q, (uint32_t)(tile * TILE_BYTES + 32 * (pair % 2 * 2 + k))),
                           pair > 0 || k > 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void score_block(uint32_t count)
    {
        const uint32_t row = 16 * (uint32_t)warp() + (uint32_t)ldmatrix_tile_row(lane());
        const uint32_t first = swizzle_128(row, (uint32_t)ldmatrix_tile_chunk(lane()));
        const uint32_t line[4] = {first, first ^ 32, first ^ 64, first ^ 96};
        Fragments f[FRAGMENTS];
#pragma unroll
        for (int pair = 0; pair < FRAGMENTS - 1; pair++) load_pair(f[pair], line, pair, count);
        hold(s);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            multiply_pair(f[pair % FRAGMENTS], pair);
            if (!F::ROPE_IS_V && pair == 2 && lane() == 0) mbarrier_arrive(SHARED_AT(base, rope_empty));
            const int next = pair + FRAGMENTS - 1;
            if (next >= PAIRS) continue;
            if (pair >= 1) wgmma_wait<1>(); /* the pair before is done, whose fragments are replaced */
            load_pair(f[next % FRAGMENTS], line, next, count);
        }
        wgmma_wait<0>();
        hold(s);
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, scored));
    }

    /* Scores of entries that name no key do not count. */
    __device__ __forceinline__ void mask(uint32_t buffer)
    {
        const uint2 keys = *(const uint2 *)shared.there[buffer];
        if (__all_sync(~0u, (keys.x & keys.y) == ~0u)) return;
        const int key = lane() / 4, bit = 16 * (key / 4) + 4 * warp() + key % 4; /* and eight keys on */
        const bool valid[2] = {(bool)(keys.x >> bit & 1), (bool)(keys.y >> bit & 1)};
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (!valid[i])
#pragma unroll
                for (int j = 0; j < 8; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = -INFINITY;
    }

    __device__ __forceinline__ void run()
    {
        uint32_t count = 0;
        if (__all_sync(~0u, warp() == 0)) ask_queries((int)blockIdx.x);
        for (int i = (int)blockIdx.x; i < p.items; i += (int)gridDim.x) {
            const int blocks = Item(p, i).blocks;
            if (blocks == 0) continue;
            softmax.begin();
            mbarrier_wait(SHARED_AT(base, q_full), softmax.tiles & 1);
            for (int left = blocks; __any_sync(~0u, left > 0); left--, count++) {
                const uint32_t buffer = count % BUFFERS;
                score_block(count);
                mask(buffer);
                mbarrier_wait(barrier_at(SHARED_AT(base, p_empty), (int)buffer), (count / BUFFERS & 1) ^ 1);
                softmax.block(s, buffer);
                /* The vote was after all warps' products. */
                if (__all_sync(~0u, left == 1 && warp() == 0)) ask_queries(i + (int)gridDim.x);
            }
            softmax.end();
        }
    }
};
