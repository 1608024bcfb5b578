/* SPDX-License-Identifier: MIT
 *
 * The warpgroup with the scores: S of all blocks and, one block behind, their weights. S of the next block
 * is computed during softmax. Its products are issued a few at a time, and late: a warp whose products wait
 * for the tensor cores computes nothing, and S is done long before softmax is.
 *
 * A thread has two rows of the tile. References and scores are in powers of two.
 */
#pragma once

#include "../latent/epilogue.cuh"
#include "../latent/softmax.cuh"
#include "convert.cuh"
#include "queries.cuh"

#include <float.h>

namespace dense_decode_fp8 {

enum {
    STEPS = D_QK / 32 /* products of S */,
    STEPS_OF_LINE = CODES_OF_LINE / 32,
    Q_IN_REGISTERS = 2 /* steps with Q in registers: leaves shared memory to others */
};

/* A reference moves to REFERENCE_BELOW below the largest score, and only if that score is 8.5 above it:
 * weights are at most 2^8.5, and those down to 2^-20 of the largest keep all bits of fp16. */
static constexpr float REFERENCE_BELOW = 6.0f;

/* 2^8.5 in fp16, in both halves of a word. */
static constexpr uint32_t LARGEST_WEIGHTS = 0x5da85da8u;

/* Returns the larger ones of two pairs of fp16, ignoring NaN. */
DEVICE uint32_t largest_halves(uint32_t a, uint32_t b)
{
    uint32_t most;
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

template <typename V> struct Scores {
    using Shared = SharedOf<V>;
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t smem;
    float s[32], next[32]; /* S; that of the next block, in progress */
    uint32_t q[Q_IN_REGISTERS][4];
    float scale[2], reference[2], sum[2];
    Ring<V::KV_STAGES> kv_stage; /* of the block whose products are issued next */
    Ring<V::P_STAGES> p_stage;
    uint32_t splits = 0;

    DEVICE Scores(const struct dense_decode_fp8_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
    }

    /* Computed again each time: this warpgroup is limited by registers. */
    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    DEVICE static int warp() { return (int)(fresh_thread() / 32 % 4); }
    DEVICE static int row() { return 16 * warp() + lane() / 4; }

    /* Returns whether the warp has rows of the tile. */
    DEVICE static bool has_rows() { return V::ROW_WARPS == 4 || __any_sync(~0u, warp() < V::ROW_WARPS); }

    /* The task of the current split, in shared memory; every warp has its own copy. */
    DEVICE Task &task() const { return shared.task[warp()]; }

    DEVICE uint32_t keys_at(int index) const
    {
        return SHARED_AT(smem, keys) + (uint32_t)(index * V::KEYS_BYTES);
    }

    /* ---- Queries --------------------------------------------------------------------------------- */

    DEVICE void load_q()
    {
        const uint32_t line = (uint32_t)(16 * warp() + lane() % 16);
#pragma unroll
        for (int i = 0; i < Q_IN_REGISTERS; i++)
            ldmatrix_x4(q[i], SHARED_AT(smem, q) + (uint32_t)(i / STEPS_OF_LINE * Shared::QUERY_TILE_BYTES) +
                                  swizzle_128(line, (uint32_t)(2 * (i % STEPS_OF_LINE) + lane() / 16)));
    }

    /* Takes the queries of a split, and computes the factors that make scores of sums of their codes. */
    DEVICE void take_queries(int i)
    {
        const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
        float of_queries[2];
        if (__any_sync(~0u, p.q_given)) {
            of_queries[0] = of_queries[1] = p.q_scale ? __ldg(p.q_scale) : 1.0f;
            mbarrier_wait(SHARED_AT(smem, q_full), splits & 1);
        } else {
            if constexpr (!V::JOIN_IN_KERNEL) {
                barrier_sync(SCORES_BARRIER,
                             WARPGROUP_THREADS); /* all warps have scored the previous split */
                load_queries<V>(p, task(), {warp(), WARPGROUP_THREADS / 32}, smem, 0);
                prefetch_next_queries(p, shared, i);
                barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) of_queries[i] = has_rows() ? shared.q_scales[0][row() + 8 * i] : 1.0f;
        }
        /* Finite, so that no score is 0 times infinity; a NaN of the queries is in their codes. */
#pragma unroll
        for (int i = 0; i < 2; i++)
            scale[i] = fminf(of_queries[i] * of_cache * p.dense.call.scale_log2, FLT_MAX);
        load_q();
    }

    /* ---- S ----------------------------------------------------------------------------------------- */

    /* Issues products FROM … TO - 1 of the next block. */
    template <int FROM, int TO> DEVICE void score(uint32_t keys)
    {
        const uint32_t queries = SHARED_AT(smem, q);
        if (FROM == 0) hold(next);
        wgmma_fence();
#pragma unroll
        for (int i = FROM; i < TO; i++) {
            const uint32_t line = (uint32_t)(i / STEPS_OF_LINE);
            if (i < Q_IN_REGISTERS)
                wgmma_64_e4m3(next, q[i < Q_IN_REGISTERS ? i : 0],
                              wgmma_lines(keys + line * KEY_TILE_BYTES, i % STEPS_OF_LINE), i > 0);
            else if (i < LINES * STEPS_OF_LINE)
                wgmma_64_e4m3(next, wgmma_lines(queries + line * Shared::QUERY_TILE_BYTES, i % STEPS_OF_LINE),
                              wgmma_lines(keys + line * KEY_TILE_BYTES, i % STEPS_OF_LINE), 1);
            else
                wgmma_64_e4m3(
                    next, wgmma_short_lines(queries + LINES * Shared::QUERY_TILE_BYTES, i % STEPS_OF_LINE),
                    wgmma_short_lines(keys + LINES * KEY_TILE_BYTES, i % STEPS_OF_LINE), 1);
        }
        wgmma_commit();
    }

    /* ---- Weights ----------------------------------------------------------------------------------- */

    /* Masks scores of keys that a row does not see, and clears codes that must not reach a product. */
    DEVICE void mask(int first_key, uint32_t keys)
    {
        const Task &task = this->task();
        int limit[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            limit[i] = min(task.end, visible_end(p.dense.call, task, row() + 8 * i)) - first_key;
#pragma unroll
        for (int e = 0; e < 32; e++)
            if (wgmma_d_column(lane(), e) >= limit[e / 2 % 2]) s[e] = -INFINITY;
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* every warp's products have read the block */
        clear_codes(keys, clamp_int(task.all_see - first_key, 0, KEYS));
        fence_async_shared();
        barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
    }

    /* Finishes the rows, and stores the final factors of the rows' sums over the split. */
    DEVICE void finish()
    {
        const Task &task = this->task();
        const bool direct = task.split.part == DIRECT;
        const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = quad_sum(sum[i]);
            const float left =
                finish_row(p.dense.call, task, direct, {reference[i], whole}, row() + 8 * i, lane() % 4 == 0);
            if (lane() % 4 == 0)
                shared.finish[p_stage.index][row() + 8 * i] =
                    whole == 0.0f ? 0.0f : (direct ? left * of_cache : PART_UNIT) / whole;
        }
        __syncwarp();
    }

    /* Raises the references of the warp's rows to what the block needs; `factor` rescales the earlier
     * sums. */
    DEVICE void move_references(float (&factor)[2])
    {
        float most[2];
        row_maxima(s, most);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float to =
                fmaxf(reference[i], fminf(quad_max(most[i]) * scale[i], FLT_MAX) - REFERENCE_BELOW);
            factor[i] = exp2_approx(reference[i] - to);
            sum[i] *= factor[i], reference[i] = to;
        }
    }

    /* Stores weights of keys 16 i … 16 i + 15 to the row's line; updates their sums and the largest
     * weights so far. */
    DEVICE void softmax_step(uint32_t line, int i, float (&added)[2], uint32_t &largest)
    {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int e = 8 * i + 2 * j;
            const float low = exp2_approx(fmaf(s[e], scale[j % 2], -reference[j % 2])),
                        high = exp2_approx(fmaf(s[e + 1], scale[j % 2], -reference[j % 2]));
            added[j % 2] += low + high;
            words[j] = Fp16::pack(low, high);
        }
        largest = largest_halves(
            largest, largest_halves(largest_halves(words[0], words[1]), largest_halves(words[2], words[3])));
        store_weights(line, i, (uint32_t)lane(), words);
    }

    /* Computes P of a block, and issues the products of the next one (`keys`), if there is one. `ready`: the
     * stage of P is empty, and those keys have arrived. Weights are computed relative to the current
     * references; if one is too large, which is rare, all of the warp's are computed again. Products are
     * issued late, between weights: a warp whose products wait for the tensor cores computes nothing. */
    DEVICE void softmax(bool first, bool last, bool masked, bool ready, uint32_t keys)
    {
        const uint32_t line = weights_line(weights_tile<V>(smem, p_stage.index), warp(), lane());
        const bool has_rows = this->has_rows();
        float factor[2], added[2] = {0.0f, 0.0f};
        uint32_t largest = 0;
        if (!ready) wait_for_next(last);
        if (first && has_rows) move_references(factor);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!last) score_part(i, keys);
            if (has_rows) softmax_step(line, i, added, largest);
        }
        if (!last) score<12, STEPS>(keys);
        if (!has_rows) return;
        const bool needs_rescale = __any_sync(~0u, __vmaxu2(largest, LARGEST_WEIGHTS) != LARGEST_WEIGHTS);
        if (SELDOM(needs_rescale)) {
            move_references(factor);
            added[0] = added[1] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) softmax_step(line, i, added, largest);
            if (lane() % 4 == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) shared.factor[p_stage.index][row() + 8 * i] = factor[i];
        }
        sum[0] += added[0], sum[1] += added[1];
        if (fresh_thread() == SCORES * WARPGROUP_THREADS) shared.flags[p_stage.index].cleared = masked;
        if (lane() == 0) shared.flags[p_stage.index].moved[warp()] = needs_rescale && !first;
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, p_full), p_stage.index));
        if (last) finish();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, done), p_stage.index));
    }

    /* Issues some of the first twelve products of the next block. */
    DEVICE void score_part(int i, uint32_t keys)
    {
        if (i == 0) score<0, 2>(keys);
        if (i == 1) score<2, 5>(keys);
        if (i == 2) score<5, 8>(keys);
        if (i == 3) score<8, 12>(keys);
    }

    /* Returns whether the stage of P of this block is empty and the keys of the next one, in `kv_stage`, have
     * arrived. Called early, since the answer has a latency. */
    DEVICE bool asks_for_next(bool last) const
    {
        const bool p_empty =
            mbarrier_test(barrier_at(SHARED_AT(smem, p_empty), p_stage.index), p_stage.parity ^ 1);
        const bool keys =
            mbarrier_test(barrier_at(SHARED_AT(smem, keys_full), kv_stage.index), kv_stage.parity);
        return p_empty && (last || keys);
    }

    DEVICE void wait_for_next(bool last) const
    {
        mbarrier_wait(barrier_at(SHARED_AT(smem, p_empty), p_stage.index), p_stage.parity ^ 1);
        if (!last) mbarrier_wait(barrier_at(SHARED_AT(smem, keys_full), kv_stage.index), kv_stage.parity);
    }

    /* ---- A split, all splits ------------------------------------------------------------------------- */

    DEVICE void run_split(const WorkTile &work, int i)
    {
        const int blocks = work.blocks, all_see = work.task.all_see;
        int first_key = work.task.split.begin;
        if (__all_sync(~0u, blocks == 0)) {
            store_empty(p.dense.call, work.task, V::ROWS);
            return;
        }
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
        reference[0] = reference[1] = LEAST_REFERENCE, sum[0] = sum[1] = 0.0f;
        take_queries(i);
        mbarrier_wait(barrier_at(SHARED_AT(smem, keys_full), kv_stage.index), kv_stage.parity);
        score<0, STEPS>(keys_at(kv_stage.index));
#pragma unroll 1
        for (int left = blocks - 1; __all_sync(~0u, left >= 0); left--, first_key += KEYS) {
            const uint32_t own = keys_at(kv_stage.index);
            const bool last = __all_sync(~0u, left == 0);
            kv_stage.advance();
            const bool asked = asks_for_next(last);
            wgmma_wait<0>();
            hold(next);
#pragma unroll
            for (int i = 0; i < 32; i++) asm volatile("mov.b32 %0, %1;" : "=f"(s[i]) : "f"(next[i]));
            const bool masked = __any_sync(~0u, all_see - first_key < KEYS);
            if (masked) mask(first_key, own);
            if (last && lane() == 0) mbarrier_arrive(SHARED_AT(smem, q_empty));
            softmax(__all_sync(~0u, left + 1 == blocks), last, masked, __all_sync(~0u, asked),
                    keys_at(kv_stage.index));
            p_stage.advance();
        }
        splits++;
    }

    DEVICE void run()
    {
        for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
            run_split(work_tile_of<V>(p.dense, shared, i, CtaCoord(p.dense)), i);
    }
};

} // namespace dense_decode_fp8
