/* SPDX-License-Identifier: MIT
 *
 * Softmax of S^T, of 64 keys and 64 heads, by the scores' warps. A thread has two keys of a block and 16 heads. All weights of a
 * head are relative to a reference, the same in all threads, which moves up when some score is beyond it by 2^8: so that no
 * maximum is taken across lanes as long as it stays. Sums and largest scores are kept a thread, and joined at a tile's end.
 */
#pragma once

#include "layout.cuh"

static constexpr float LEAST_REFERENCE = -1.7e38f, REFERENCE_SLACK = 8.0f; /* in powers of two */

struct Softmax {
    const struct sparse_prefill_params &p;
    Shared &shared;
    const uint32_t base;
    float sums[16], largest[16]; /* of the thread's heads; largest: relative to the reference */
    uint32_t tiles = 0;
    bool first; /* of the tile's blocks */

    __device__ __forceinline__ Softmax(const struct sparse_prefill_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory))
    {
    }

    static __device__ __forceinline__ int lane() { return (int)(fresh_thread() % 32); }
    static __device__ __forceinline__ int warp() { return (int)(fresh_thread() / 32) % WARPS_OF_GROUP; }
    static __device__ __forceinline__ int head(int h) { return 8 * (h / 2) + 2 * (lane() % 4) + h % 2; }

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int h = 0; h < 16; h++) sums[h] = 0.0f, largest[h] = -INFINITY;
        first = true;
    }

    /* Minus the references; of a tile's first block none has been set. */
    __device__ __forceinline__ void load_below(float (&below)[16]) const
    {
#pragma unroll
        for (int h = 0; h < 16; h += 2) {
            const float2 two = *(const float2 *)&shared.below[head(h)];
            below[h] = first ? -LEAST_REFERENCE : two.x, below[h + 1] = first ? -LEAST_REFERENCE : two.y;
        }
    }

    /* Of what eight lanes have for 16 heads, what all of them make of heads pair() and pair() + 1. A lane hands over half of what
     * it has and takes half of the other's, so that 14 values are exchanged. */
    template <typename Join>
    static __device__ __forceinline__ float2 join_lanes(const float (&x)[16], const Join &join)
    {
        const int own = lane();
        float eight[8], four[4], two[2];
#pragma unroll
        for (int h = 0; h < 8; h++) eight[h] = join_halves<4>(x[h], x[h + 8], own, join);
#pragma unroll
        for (int h = 0; h < 4; h++) four[h] = join_halves<8>(eight[h], eight[h + 4], own, join);
#pragma unroll
        for (int h = 0; h < 2; h++) two[h] = join_halves<16>(four[h], four[h + 2], own, join);
        return make_float2(two[0], two[1]);
    }

    template <int LANES, typename Join>
    static __device__ __forceinline__ float join_halves(float low, float high, int own, const Join &join)
    {
        const float other = __shfl_xor_sync(~0u, own & LANES ? low : high, LANES);
        return join(own & LANES ? high : low, other);
    }

    static __device__ __forceinline__ int pair()
    {
        const int own = lane();
        return head(2 * ((own & 4) + (own & 8) / 4 + (own & 16) / 16));
    }

    static __device__ __forceinline__ float larger_of_two_keys(const float (&s)[32], int h)
    {
        return fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + 2 + h % 2]);
    }

    __device__ __forceinline__ void move_references(const float (&s)[32], float (&below)[16], uint32_t buffer)
    {
        mbarrier_wait(SHARED_AT(base, end_empty), ~tiles & 1); /* those of the last tile have been read */
        float4 *most = (float4 *)shared.p[buffer]; /* [head], of the four warps; free until P goes there */
        float m[16];
#pragma unroll
        for (int h = 0; h < 16; h++) m[h] = larger_of_two_keys(s, h);
        const float2 two = join_lanes(m, [](float a, float b) { return fmaxf(a, b); });
        const int own = pair();
        ((float *)(most + own))[warp()] = two.x, ((float *)(most + own + 1))[warp()] = two.y;
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
#pragma unroll
        for (int h = 0; h < 16; h++) {
            const int row = head(h);
            const float4 of = most[row];
            const float all = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)) * p.scale_log2;
            const float to = fminf(-all, below[h]), by = to - below[h], factor = exp2_approx(by);
            sums[h] *= factor, below[h] = to;
            largest[h] = fmaxf(largest[h] + by, fmaf(larger_of_two_keys(s, h), p.scale_log2, to));
            if (threadIdx.x % WARPGROUP_THREADS < 4) shared.factor[buffer][row] = factor, shared.below[row] = to;
        }
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* P goes where the maxima are */
    }

    /* Weights of a block to P; tells the sums' warpgroups that P and the keys are there. */
    __device__ __forceinline__ void block(const float (&s)[32], uint32_t buffer)
    {
        float over = -INFINITY, now[16], below[16];
        load_below(below);
#pragma unroll
        for (int h = 0; h < 16; h++) now[h] = fmaf(larger_of_two_keys(s, h), p.scale_log2, below[h]);
#pragma unroll
        for (int h = 0; h < 16; h++) over = fmaxf(over, now[h]);
        const bool moves = any_of_scores(over > REFERENCE_SLACK) | first; /* then they are written for the first time */
        if (moves) {
            move_references(s, below, buffer);
        } else {
#pragma unroll
            for (int h = 0; h < 16; h++) largest[h] = fmaxf(largest[h], now[h]);
        }
        if (threadIdx.x % WARPGROUP_THREADS == 0) shared.moved[buffer] = moves;
        first = false;
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
                    words[2 * h + i] = Bf16::pack(x, y);
                }
            const uint32_t matrix = (uint32_t)lane() / 8,
                           row = 8 * ((uint32_t)j + matrix / 2) + (uint32_t)lane() % 8;
            store_matrices_transposed(p_tile + swizzle_128(row, 2 * (uint32_t)warp() + matrix % 2), words);
        }
        /* Of the keys too, which the producer stored and this warp has waited for. */
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, p_full), (int)buffer));
    }

    /* What the tile came to, to the sums' warpgroups. */
    __device__ __forceinline__ void end()
    {
        const float2 sum = join_lanes(sums, [](float a, float b) { return a + b; });
        const float2 most = join_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
        mbarrier_wait(SHARED_AT(base, end_empty), ~tiles & 1);
        *(float2 *)&shared.sum[warp()][pair()] = sum, *(float2 *)&shared.largest[warp()][pair()] = most;
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, end_full));
        tiles++;
    }
};
