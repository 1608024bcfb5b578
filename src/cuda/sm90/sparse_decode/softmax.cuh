/* SPDX-License-Identifier: MIT
 *
 * Softmax of S^T, of 64 keys and 64 heads, by the scores' warps. A thread has two keys of a block and 16 heads; sums are kept a
 * thread, and joined at the end of a piece. All weights of a head are relative to a reference, the same in all threads, which
 * moves up when some score is beyond it by 2^8: so that no maximum is taken across lanes as long as it stays.
 */
#pragma once

#include "layout.cuh"

static constexpr float LEAST_REFERENCE = -1e30f, REFERENCE_SLACK = 8.0f; /* in powers of two */

struct Softmax {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t base;
    float sums[16],
        below[16]; /* of the thread's heads; below: minus the reference, and only that: of both one
                                    would be in local memory */

    __device__ __forceinline__ Softmax(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory))
    {
    }

    static __device__ __forceinline__ int lane() { return (int)fresh_thread() % 32; }
    static __device__ __forceinline__ int warp() { return (int)fresh_thread() / 32; }
    static __device__ __forceinline__ int head(int h) { return 8 * (h / 2) + 2 * (lane() % 4) + h % 2; }

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int h = 0; h < 16; h++) sums[h] = 0.0f, below[h] = -LEAST_REFERENCE;
    }

    __device__ __forceinline__ void move_references(const float (&s)[32], uint32_t buffer)
    {
        float(*most)[HEADS] = (float(*)[HEADS])shared.p[buffer]; /* free until P goes there */
#pragma unroll
        for (int h = 0; h < 16; h++) {
            float m = fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + 2 + h % 2]) * p.scale_log2;
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
            if (lane() < 4) most[warp()][head(h)] = m;
        }
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
#pragma unroll
        for (int h = 0; h < 16; h++) {
            const int row = head(h);
            const float m = fmaxf(fmaxf(most[0][row], most[1][row]), fmaxf(most[2][row], most[3][row]));
            const float to = fminf(-m, below[h]), factor = exp2_approx(to - below[h]);
            sums[h] *= factor, below[h] = to;
            if (lane() < 4 && warp() == 0) shared.factor[buffer][row] = factor;
        }
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* P goes where the maxima are */
    }

    /* Weights of a block to P; tells the other warpgroups that P and V are there. What `mine` is asked of all threads for
     * comes with a vote that is taken anyway: is it true in any of them? */
    template <typename Element>
    __device__ __forceinline__ bool block(const float (&s)[32], uint32_t buffer, bool mine)
    {
        float over = -INFINITY;
#pragma unroll
        for (int h = 0; h < 16; h++)
            over = fmaxf(over, fmaf(fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + 2 + h % 2]), p.scale_log2,
                                    below[h]));
        bool any = false, moves = false;
        if (any_of_scores(mine | (over > REFERENCE_SLACK))) {
            any = any_of_scores(mine), moves = any_of_scores(over > REFERENCE_SLACK);
            if (moves) move_references(s, buffer);
        }
        if (threadIdx.x == 0) /* the first block of a piece finds no O that counts */
            shared.block[buffer] = (moves ? BLOCK_MOVED : 0) | (Element::IS_BF16 ? BLOCK_BF16 : 0);
        const uint32_t p_tile = SHARED_AT(base, p) + buffer * TILE_BYTES;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int e = 4 * (j + h) + 2 * i, own = 2 * (j + h);
                    const float x = exp2_approx(fmaf(s[e], p.scale_log2, below[own])),
                                y = exp2_approx(fmaf(s[e + 1], p.scale_log2, below[own + 1]));
                    sums[own] += x, sums[own + 1] += y;
                    words[2 * h + i] = Element::pack(x, y);
                }
            const uint32_t matrix = (uint32_t)lane() / 8,
                           row = 8 * ((uint32_t)j + matrix / 2) + (uint32_t)lane() % 8;
            store_matrices_transposed(p_tile + swizzle_128(row, 2 * (uint32_t)warp() + matrix % 2), words);
        }
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, full) + 8 * buffer);
        return any;
    }

    /* The sums of the piece and its references to the other warpgroups. `parts`: free memory of [warps, HEADS], which the first
     * warp alone reads; `parity`: of the piece. */
    __device__ __forceinline__ void end(float (*parts)[HEADS], uint32_t parity)
    {
#pragma unroll
        for (int h = 0; h < 16; h++) {
            float sum = sums[h];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (lane() < 4) parts[warp()][head(h)] = sum;
        }
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
        if (warp() > 0) return;
        mbarrier_wait(SHARED_AT(base, sum_empty), parity ^ 1);
#pragma unroll
        for (int row = lane(); row < HEADS; row += 32)
            shared.sum[row] = parts[0][row] + parts[1][row] + parts[2][row] + parts[3][row];
        if (lane() < 4)
#pragma unroll
            for (int h = 0; h < 16; h++) shared.below[head(h)] = below[h];
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, sum_full));
    }
};
