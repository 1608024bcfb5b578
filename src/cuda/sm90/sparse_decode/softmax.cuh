/* SPDX-License-Identifier: MIT
 *
 * Softmax of S^T, of 64 keys and 64 heads, by the scores' warps. A thread has two keys of a block and 16
 * heads; each thread keeps its own sums, which are joined at the end of a split. All weights of a head are
 * relative to a reference, the same in all threads, which moves up when some score exceeds it by more than 8
 * (in log2): no maximum is taken across lanes as long as it stays.
 */
#pragma once

#include "layout.cuh"

#include "../../device/local.cuh"
#include "../../device/reference.cuh"

namespace sparse_decode {

/* PREFILL: the largest scores are kept, and scores of any size are distinguished as fp32 does. */
template <typename Shared, bool PREFILL = false> struct Softmax {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;
    enum { WARPS = 4 };
    float sums[16],
        below[16]; /* of the thread's heads; below: minus the reference (with both, one is in local memory) */
    uint32_t kept; /* PREFILL: local memory for the thread's largest scores: no registers are left */
    bool careful;  /* PREFILL: whether some reference is beyond CAREFUL_REFERENCE */

    DEVICE Softmax(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
    }

    static DEVICE int head(int h) { return 8 * (h / 2) + 2 * (lane() % 4) + h % 2; }

    DEVICE void begin()
    {
#pragma unroll
        for (int h = 0; h < 16; h++) sums[h] = 0.0f, below[h] = -LEAST_REFERENCE;
        careful = false;
        if constexpr (PREFILL)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                store_local_16(kept + 16 * i, make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY));
    }

    /* Joins the values of eight lanes for 16 heads; returns the results of heads pair() and pair() + 1. A
     * lane hands over half of its values and takes half of the other's, so that 14 values are exchanged. */
    template <typename Join> static DEVICE float2 join_lanes(const float (&x)[16], const Join &join)
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
    static DEVICE float join_halves(float low, float high, int own, const Join &join)
    {
        const float other = __shfl_xor_sync(~0u, own & LANES ? low : high, LANES);
        return join(own & LANES ? high : low, other);
    }

    static DEVICE int pair()
    {
        const int own = lane();
        return head(2 * ((own & 4) + (own & 8) / 4 + (own & 16) / 16));
    }

    static DEVICE float larger_of_two_keys(const float (&s)[32], int h)
    {
        return fmaxf(s[4 * (h / 2) + h % 2], s[4 * (h / 2) + 2 + h % 2]);
    }

    DEVICE void load_largest(float (&largest)[16]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 four = load_local_16(kept + 16 * (uint32_t)i);
            largest[4 * i] = four.x, largest[4 * i + 1] = four.y;
            largest[4 * i + 2] = four.z, largest[4 * i + 3] = four.w;
        }
    }

    DEVICE void keep_largest(const float (&s)[32], float scale) const
    {
        float4 next = load_local_16(kept);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 four = next;
            if (i < 3) next = load_local_16(kept + 16 * (uint32_t)(i + 1));
            four.x = fmaxf(four.x, larger_of_two_keys(s, 4 * i) * scale);
            four.y = fmaxf(four.y, larger_of_two_keys(s, 4 * i + 1) * scale);
            four.z = fmaxf(four.z, larger_of_two_keys(s, 4 * i + 2) * scale);
            four.w = fmaxf(four.w, larger_of_two_keys(s, 4 * i + 3) * scale);
            store_local_16(kept + 16 * (uint32_t)i, four);
        }
    }

    DEVICE void move_references(const float (&s)[32], float scale, uint32_t p_stage)
    {
        float4 *most = (float4 *)shared.p[p_stage]; /* [head], of the four warps; free until P goes there */
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
            const float all = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)) * scale;
            const float to = fminf(-all, below[h]), factor = exp2_approx(to - below[h]);
            sums[h] *= factor, below[h] = to;
            if (threadIdx.x < 4) shared.factor[p_stage][row] = factor;
            if constexpr (PREFILL) careful |= fabsf(to) > CAREFUL_REFERENCE;
        }
        if constexpr (PREFILL) careful = __any_sync(~0u, careful);
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* P overwrites the maxima */
    }

    /* Returns by how much the thread's largest score exceeds its reference. */
    DEVICE float largest_excess(const float (&s)[32], float scale) const
    {
        float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}; /* four: short chains */
#pragma unroll
        for (int h = 0; h < 16; h++)
            most[h % 4] = fmaxf(most[h % 4], fmaf(larger_of_two_keys(s, h), scale, below[h]));
        return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    }

    /* Stores the weights of a block to P, and signals the other warpgroups that P and V are stored. Returns
     * whether `mine` is true in any thread, which comes with a vote that is taken anyway. The `first`
     * block of a split sets all references. */
    template <typename Element> DEVICE bool block(float (&s)[32], uint32_t p_stage, bool mine, bool first)
    {
        float scale = p.scale_log2, excess = 0.0f;
        if (PREFILL && careful) scale_scores(s, scale), scale = 1.0f;
        if (!first) excess = largest_excess(s, scale);
        bool any = false, moves = first;
        if (any_of_scores(mine | (excess > REFERENCE_SLACK))) {
            any = first || any_of_scores(mine);
            moves |= any_of_scores(excess > REFERENCE_SLACK);
        }
        if (moves) {
            move_references(s, scale, p_stage);
            if (PREFILL && careful) scale_scores(s, scale), scale = 1.0f;
        }
        /* A reference is a score that has been kept, so only scores above it need keeping. */
        if (PREFILL && __any_sync(~0u, moves | (excess > 0.0f))) keep_largest(s, scale);
        if (Shared::ALL_PUBLISH || threadIdx.x == 0) /* O does not count yet at the first block */
            shared.block[p_stage] = (moves && !first ? BLOCK_MOVED : 0) | (Element::IS_BF16 ? BLOCK_BF16 : 0);
        const uint32_t p_tile = SHARED_AT(smem, p) + p_stage * TILE_BYTES;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int e = 4 * (j + h) + 2 * i, own = 2 * (j + h);
                    const float x = exp2_approx(fmaf(s[e], scale, below[own])),
                                y = exp2_approx(fmaf(s[e + 1], scale, below[own + 1]));
                    sums[own] += x, sums[own + 1] += y;
                    words[2 * h + i] = Element::pack(x, y);
                }
            const uint32_t matrix = (uint32_t)lane() / 8,
                           row = 8 * ((uint32_t)j + matrix / 2) + (uint32_t)lane() % 8;
            store_matrices_transposed(p_tile + swizzle_128(row, 2 * (uint32_t)warp() + matrix % 2), words);
        }
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, full) + 8 * p_stage);
        return any;
    }

    /* Passes the sums of the split and its references to the other warpgroups. `parts`: free memory of
     * [warps, HEADS], twice that for prefill. Only the first warp reads it, and does so before it writes
     * keys there: the others go on. `parity`: of the split. */
    DEVICE void end(float (*parts)[HEADS], uint32_t parity)
    {
        static_assert((PREFILL ? 2 : 1) * WARPS * HEADS * sizeof(float) <= 16 * LINE_BYTES,
                      "its own 16 lines of keys");
        *(float2 *)&parts[warp()][pair()] = join_lanes(sums, [](float a, float b) { return a + b; });
        if constexpr (PREFILL) {
            float largest[16];
            load_largest(largest);
            *(float2 *)&parts[WARPS + warp()][pair()] =
                join_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
        }
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
        if (__any_sync(~0u, warp() > 0)) return;
        mbarrier_wait(SHARED_AT(smem, sum_empty), parity ^ 1);
#pragma unroll
        for (int row = lane(); row < HEADS; row += 32) {
            shared.sum[row] = parts[0][row] + parts[1][row] + parts[2][row] + parts[3][row];
            if constexpr (PREFILL)
                shared.largest[row] =
                    fmaxf(fmaxf(parts[4][row], parts[5][row]), fmaxf(parts[6][row], parts[7][row]));
        }
        if (lane() < 4)
#pragma unroll
            for (int h = 0; h < 16; h++) shared.below[head(h)] = below[h];
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, sum_full));
    }
};

} // namespace sparse_decode
