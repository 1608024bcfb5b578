/* SPDX-License-Identifier: MIT
 *
 * The warps that compute weights from S^T, where keys are the first factor. Four lanes share two rows, so
 * neither the row maxima nor the sums of weights involve another warp. Scores and references are in powers
 * of two.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/reference.cuh"
#include "../../device/shared.cuh"
#include "../latent/epilogue.cuh"
#include "layout.cuh"
#include "producer.cuh"

#include <float.h>

namespace dense_decode_fp8 {

/* A reference moves to SOFTMAX_BELOW below the largest score, and only if that score is SOFTMAX_SLACK above
 * it: weights are at most 2^11, which fp16 can hold, and those down to 2^-20 of the largest keep all their
 * bits. */
static constexpr float SOFTMAX_BELOW = 6.0f, SOFTMAX_SLACK = 11.0f;

template <typename V> struct Softmax {
    using Shared = SharedOf<V>;
    /* A lane has two rows, and two of the block's eight chunks of keys: one of the first four, and the
     * same one of the last four. */
    enum {
        LANES_OF_ROW = 4,
        CHUNKS = KEYS / CHUNK_ELEMENTS / LANES_OF_ROW,
        KEYS_OF_LANE = CHUNKS * CHUNK_ELEMENTS
    };
    /* If no weight of a row exceeds 2^SOFTMAX_SLACK, a lane's weights sum to at most this. */
    static constexpr float LARGEST_SUM = KEYS_OF_LANE * 2048.0f;
    using Rows = float[2];
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t smem;
    Rows scale, reference, sum;
    Ring<V::P_STAGES> p_stage;
    uint32_t parities = 0; /* bit 0: of blocks; bit 1: of splits */
    int masked;            /* keys at the end of the split that some row does not see */
    uint32_t s_at, p_at;   /* address of the thread's first scores; offset of their weights in a stage */

    DEVICE Softmax(const struct dense_decode_fp8_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
        s_at = SHARED_AT(smem, s) + score_offset<V::ROWS>(key(0), row());
        p_at = (uint32_t)(row() * LINE_BYTES + (row() % 8 ^ key(0) / CHUNK_ELEMENTS) * CHUNK_BYTES);
        /* Kept in registers: reading the thread index again for every address would stall the block. */
        asm volatile("" : "+r"(s_at), "+r"(p_at));
    }

    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    DEVICE static int warp() { return (int)(fresh_thread() / 32); }
    /* Returns the lane's first row. The rows of eight lanes differ by 4, so that their weights go to all
     * banks. */
    DEVICE static int row()
    {
        return SOFTMAX_ROWS * warp() + lane() / 16 * 8 + lane() / 4 % 2 * 4 + lane() / 8 % 2 * 2;
    }
    /* Returns the lane's key k. */
    DEVICE static int key(int k)
    {
        return (lane() % LANES_OF_ROW + k / CHUNK_ELEMENTS * LANES_OF_ROW) * CHUNK_ELEMENTS +
               k % CHUNK_ELEMENTS;
    }

    DEVICE Task &task() const { return shared.task[12 + warp()]; }

    /* Loads the scores of the lane's key k. */
    DEVICE void load(Rows &s, int k) const
    {
        const int chunk = k / CHUNK_ELEMENTS, i = k % CHUNK_ELEMENTS;
        const uint2 both =
            load_shared_8(s_at + score_offset<V::ROWS>(chunk * LANES_OF_ROW * CHUNK_ELEMENTS + i, 0));
        s[0] = __uint_as_float(both.x), s[1] = __uint_as_float(both.y);
    }

    /* Masks scores of keys that a row does not see. */
    DEVICE void mask(int left)
    {
        const Task &task = this->task();
        const int first_key = task.split.begin + (blocks_of(task) - 1 - left) * KEYS;
#pragma unroll 1
        for (int r = 0; r < 2; r++) {
            const int end = min(task.end, visible_end(p.dense.call, task, row() + r)) - first_key;
#pragma unroll 1
            for (int k = 0; k < KEYS_OF_LANE; k++)
                if (key(k) >= end)
                    store_shared_4(SHARED_AT(smem, s) + score_offset<V::ROWS>(key(k), row() + r),
                                   __float_as_uint(-INFINITY));
        }
        __syncwarp();
    }

    /* Raises the references to what the block needs, if some row of the warp needs it, and rescales the
     * earlier sums. Returns whether references have moved. */
    DEVICE bool move_references()
    {
        Rows most = {-INFINITY, -INFINITY}, factor;
#pragma unroll 4
        for (int k = 0; k < KEYS_OF_LANE; k++) {
            Rows s;
            load(s, k);
#pragma unroll
            for (int r = 0; r < 2; r++) most[r] = fmaxf(most[r], s[r]);
        }
        bool needs_rescale = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int lanes = 1; lanes < LANES_OF_ROW; lanes *= 2)
                most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], lanes));
            most[r] = fminf(most[r] * scale[r], FLT_MAX);
            needs_rescale |= most[r] > reference[r] + SOFTMAX_SLACK;
        }
        if (!__any_sync(~0u, needs_rescale)) return false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float to = fmaxf(reference[r], most[r] - SOFTMAX_BELOW);
            factor[r] = exp2_approx(reference[r] - to);
            sum[r] *= factor[r], reference[r] = to;
        }
        if (lane() % LANES_OF_ROW == 0)
            *(float2 *)&shared.factor[p_stage.index][row()] = make_float2(factor[0], factor[1]);
        return true;
    }

    DEVICE float weight_of(float score, int r) const
    {
        return exp2_approx(fmaf(score, scale[r], -reference[r]));
    }

    /* Returns the address of the weights of a row and a chunk. */
    DEVICE uint32_t weights_at(int r, int chunk) const
    {
        return ((weights_tile<V>(smem, p_stage.index) + p_at) ^
                (uint32_t)((r + LANES_OF_ROW * chunk) * CHUNK_BYTES)) +
               (uint32_t)(r * LINE_BYTES);
    }

    /* Computes the weights of a block, in fp16, and the sums of the lane's. All scores are loaded at once:
     * the tensor cores read shared memory meanwhile, and a load takes long. */
    DEVICE void softmax_block(Rows &added) const
    {
        Rows s[KEYS_OF_LANE];
#pragma unroll
        for (int k = 0; k < KEYS_OF_LANE; k++) load(s[k], k);
        __syncwarp(); /* so that no load is deferred */
        added[0] = added[1] = 0.0f;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            uint32_t words[2][4];
#pragma unroll
            for (int k = 0; k < CHUNK_ELEMENTS; k += 2)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float low = weight_of(s[CHUNK_ELEMENTS * chunk + k][r], r),
                                high = weight_of(s[CHUNK_ELEMENTS * chunk + k + 1][r], r);
                    added[r] += low, added[r] += high;
                    words[r][k / 2] = Fp16::pack(low, high);
                }
#pragma unroll
            for (int r = 0; r < 2; r++)
                store_shared_16(weights_at(r, chunk),
                                make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]));
        }
    }

    /* The same in less code, in fp16 or bf16. */
    DEVICE void softmax_block_compact(Rows &added, bool halves) const
    {
        added[0] = added[1] = 0.0f;
#pragma unroll 1
        for (int k = 0; k < KEYS_OF_LANE; k += 2) {
            Rows s, next;
            load(s, k), load(next, k + 1);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float low = weight_of(s[r], r), high = weight_of(next[r], r);
                added[r] += low + high;
                store_shared_4(weights_at(r, k / CHUNK_ELEMENTS) + (uint32_t)(k % CHUNK_ELEMENTS * 2),
                               !V::SCALED || halves ? Fp16::pack(low, high) : Bf16::pack(low, high));
            }
        }
    }

    /* Computes P of a block. Weights are computed relative to the current references; if one is too large,
     * which is rare, all of the warp's are computed again. In the first block of a split, and for bf16,
     * the largest scores are checked beforehand. Returns whether references have moved. */
    DEVICE bool make_weights(bool first, bool halves)
    {
        Rows added;
        bool looks = first || !halves, again = false, moved = false;
        for (;;) {
            if (SELDOM(looks)) moved |= move_references();
            if (SELDOM(again) || (V::SCALED && SELDOM(!halves))) {
                softmax_block_compact(added, halves);
                break;
            }
            softmax_block(added);
            if (!__any_sync(~0u, fmaxf(added[0], added[1]) > LARGEST_SUM) || moved) break;
            looks = again = true;
        }
        sum[0] += added[0], sum[1] += added[1];
        return moved;
    }

    DEVICE void finish()
    {
        const Task &task = this->task();
        const bool direct = task.split.part == DIRECT, second = lane() % 2;
        const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int lanes = 1; lanes < LANES_OF_ROW; lanes *= 2)
                sum[r] += __shfl_xor_sync(~0u, sum[r], lanes);
        /* A lane finishes one of its rows, so that two of a row's four lanes finish it. */
        const float own_sum = second ? sum[1] : sum[0], own_reference = second ? reference[1] : reference[0];
        const int own_row = row() + second;
        const float left = finish_row(p.dense.call, task, direct, {own_reference, own_sum}, own_row,
                                      lane() % LANES_OF_ROW < 2);
        shared.finish[p_stage.index][own_row] = own_sum == 0.0f ? 0.0f
                                                                : (direct      ? left * of_cache
                                                                   : V::SCALED ? 1.0f
                                                                               : PART_UNIT) /
                                                                      own_sum;
        __syncwarp();
    }

    DEVICE void run_block(int left, bool first)
    {
        if (V::REFILLS && warp() == V::ROW_WARPS - 1) leave_next_box(p, shared);
        mbarrier_wait(barrier_at(SHARED_AT(smem, p_empty), p_stage.index), p_stage.parity ^ 1);
        mbarrier_wait(SHARED_AT(smem, s_full), parities & 1);
        parities ^= 1;
        if (first) {
            const float2 both = V::BY_LINES ? make_float2(1.0f, 1.0f)
                                            : *(const float2 *)&shared.q_scales[parities >> 1 & 1][row()];
            scale[0] = both.x, scale[1] = both.y;
        }
        const bool is_masked = __any_sync(~0u, KEYS * left < masked);
        if (SELDOM(is_masked)) mask(left);
        static_assert(!V::SCALED || V::P_STAGES == V::KV_STAGES, "");
        const bool moved =
            make_weights(first, !V::SCALED || __all_sync(~0u, shared.fits[p_stage.index] == ALL_FIT));
        __syncwarp();
        if (lane() == 0) {
            mbarrier_arrive(SHARED_AT(smem, s_empty));
            shared.flags[p_stage.index].moved[warp()] = moved && !first;
            if (warp() == 0) shared.flags[p_stage.index].cleared = is_masked;
        }
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, p_full), p_stage.index));
        if (__all_sync(~0u, left == 0)) finish();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, done), p_stage.index));
        p_stage.advance();
    }

    DEVICE void run_split(const WorkTile &work)
    {
        if (__all_sync(~0u, work.blocks == 0)) return;
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
        masked = masked_keys(work);
        reference[0] = reference[1] = LEAST_REFERENCE, sum[0] = sum[1] = 0.0f;
        bool first = true;
#pragma unroll 1
        for (int left = work.blocks - 1; __all_sync(~0u, left >= 0); left--, first = false)
            run_block(left, __all_sync(~0u, first));
        parities ^= 2;
    }

    DEVICE void run()
    {
        for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
            run_split(work_tile_of<V>(p.dense, shared, i, CtaCoord(p.dense)));
    }
};

} // namespace dense_decode_fp8
