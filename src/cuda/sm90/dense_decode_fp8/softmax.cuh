/* SPDX-License-Identifier: MIT
 *
 * The warps that make weights of S^T, where keys are the first factor: a thread has a row, so neither its largest score nor its sum of
 * weights is anybody else's business. Scores and references are in powers of two.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/reference.cuh"
#include "../../device/shared.cuh"
#include "../dense_decode/finish.cuh"
#include "clear.cuh"
#include "layout.cuh"
#include "producer.cuh"

#include <float.h>

template <typename V> struct Softmax {
    using Shared = SharedOf<V>;
    static constexpr int GROUP = V::SOFTMAX_REGISTERS < 48 ? 8 : 16 /* keys at a time */,
                         KEYS_OF_LANE = KEYS / 2,
                         LINE = V::ROWS * (int)sizeof(float) /* bytes of a key's scores */;
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t base;
    float scale, reference, sum;
    Turn<V::SLOTS> slot;
    uint32_t turns = 0;  /* bit 0: of blocks; bit 1: of pieces */
    int masked;          /* keys at the end of the piece that some row does not see */
    uint32_t s_at, p_at; /* the thread's first score; where its row begins in a slot of weights */
    BoxWriter<V> boxes;

    DEVICE Softmax(const struct dense_decode_fp8_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), boxes(params, memory)
    {
        const int row = this->row();
        s_at = SHARED_AT(base, s) + score_place<V::ROWS>(key(), row);
        p_at = (uint32_t)(row * LINE_BYTES + (row % 8 ^ key() / 8) * CHUNK_BYTES);
        /* Kept: a thread's number, read anew for every address, is what a block waits for. */
        asm volatile("" : "+r"(s_at), "+r"(p_at));
    }

    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    DEVICE static int warp() { return (int)(fresh_thread() / 32); }
    /* A lane has half of the keys of a row. */
    DEVICE static int row() { return SOFTMAX_ROWS * warp() + lane() % SOFTMAX_ROWS; }
    DEVICE static int key() { return lane() / SOFTMAX_ROWS * KEYS_OF_LANE; }

    DEVICE Task &task() const { return shared.task[12 + warp()]; }

    /* Where the row's scores stand of the keys whose number is i modulo 4. */
    DEVICE uint32_t score_at(int i) const { return s_at ^ score_place<V::ROWS>(i, 0) % LINE; }

    /* The row's scores of keys GROUP i and after. */
    DEVICE static void load(float (&s)[GROUP], const uint32_t (&at)[4], int i)
    {
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            s[k] = __uint_as_float(load_shared_4(at[k % 4] + (uint32_t)((GROUP * i + k) * LINE)));
    }

    /* Scores of keys that the row does not see. */
    DEVICE void mask(int left)
    {
        const Task &task = this->task();
        const int first_key = task.piece.begin + (blocks_of(task) - 1 - left) * KEYS,
                  end = min(task.end, visible_end(p.dense.call, task, row()));
#pragma unroll 1
        for (int k = max(end - first_key, key()); k < key() + KEYS_OF_LANE; k++)
            store_shared_4(SHARED_AT(base, s) + score_place<V::ROWS>(k, row()), __float_as_uint(-INFINITY));
        __syncwarp();
    }

    /* Raises the reference to what the block needs, where some row of the warp needs it; `factor` rescales what was summed so far. */
    DEVICE bool move_reference(float &factor)
    {
        float most = -INFINITY;
        const uint32_t at[4] = {score_at(0), score_at(1), score_at(2), score_at(3)};
#pragma unroll 1
        for (int i = 0; i < KEYS_OF_LANE / GROUP; i++) {
            float s[GROUP];
            load(s, at, i);
#pragma unroll
            for (int k = 0; k < GROUP; k++) most = fmaxf(most, s[k]);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, SOFTMAX_ROWS)) * scale;
        const bool moves = __any_sync(~0u, most > reference + REFERENCE_LATE);
        const float to = moves ? fmaxf(reference, fminf(most, FLT_MAX) - REFERENCE_BELOW) : reference;
        factor = exp2_approx(reference - to);
        sum *= factor, reference = to;
        return moves;
    }

    /* Weights of a block to the row's line; returns the largest ones of even and odd keys, where they are fp16. */
    template <typename Element> DEVICE uint32_t weigh(float &added)
    {
        const uint32_t to = weights_tile<V>(base, slot.index) + p_at;
        const uint32_t at[4] = {score_at(0), score_at(1), score_at(2), score_at(3)};
        uint32_t largest = 0;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int i = 0; i < KEYS_OF_LANE / GROUP; i++) {
            float s[GROUP];
            load(s, at, i);
            uint32_t words[GROUP / 2];
#pragma unroll
            for (int k = 0; k < GROUP; k += 2) {
                const float low = exp2_approx(fmaf(s[k], scale, -reference)),
                            high = exp2_approx(fmaf(s[k + 1], scale, -reference));
                sums[0] += low, sums[1] += high;
                words[k / 2] = Element::pack(low, high);
                if (!Element::IS_BF16) largest = largest_halves(largest, words[k / 2]);
            }
#pragma unroll
            for (int j = 0; j < GROUP / 8; j++)
                store_shared_16(
                    to ^ (uint32_t)((GROUP / 8 * i + j) * CHUNK_BYTES),
                    make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]));
        }
        added = sums[0] + sums[1];
        return largest;
    }

    /* P of a block. Weights are computed relative to the references that are there; where one is too large, which is seldom, all of the
     * warp's are computed again. Behind the first block of a piece, and for bf16, the largest scores are looked at before. Returns whether
     * references have moved. */
    DEVICE bool make_weights(bool first, bool fits)
    {
        float factor = 1.0f, added;
        bool moved = false;
        if (first || !fits) moved = move_reference(factor);
        if (V::SCALED && SELDOM(!fits)) {
            weigh<Bf16>(added);
        } else {
            const uint32_t largest = weigh<Fp16>(added);
            if (SELDOM(__any_sync(~0u, __vmaxu2(largest, LARGEST_WEIGHTS) != LARGEST_WEIGHTS)) && !moved) {
                moved = move_reference(factor);
                weigh<Fp16>(added);
            }
        }
        if (moved) shared.factor[slot.index][row()] = factor;
        sum += added;
        return moved;
    }

    DEVICE void finish()
    {
        const Task &task = this->task();
        const bool direct = task.piece.slot == DIRECT;
        const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
        sum += __shfl_xor_sync(~0u, sum, SOFTMAX_ROWS);
        const float left =
            finish_row(p.dense.call, task, direct, score_lse(reference, sum), row(), lane() < SOFTMAX_ROWS);
        shared.finish[slot.index][row()] = sum == 0.0f ? 0.0f
                                                       : (direct      ? left * of_cache
                                                          : V::SCALED ? 1.0f
                                                                      : SLOT_UNIT) /
                                                             sum;
        __syncwarp();
    }

    DEVICE void run_block(int left, bool first)
    {
        if (warp() == V::SOFTMAX_WARPS - 1) boxes.leave();
        mbarrier_wait(barrier_at(SHARED_AT(base, p_empty), slot.index), slot.parity ^ 1);
        mbarrier_wait(SHARED_AT(base, s_full), turns & 1);
        turns ^= 1;
        if (first) scale = V::BY_LINES ? 1.0f : shared.q_scales[turns >> 1 & 1][row()];
        const bool is_masked = __any_sync(~0u, KEYS * left < masked);
        if (SELDOM(is_masked)) mask(left);
        static_assert(!V::SCALED || V::SLOTS == V::BUFFERS, "");
        const bool moved = make_weights(first, !V::SCALED || __any_sync(~0u, shared.fits[slot.index]));
        __syncwarp();
        if (lane() == 0) {
            mbarrier_arrive(SHARED_AT(base, s_empty));
            shared.flags[slot.index].moved[warp()] = moved && !first;
            if (warp() == 0) shared.flags[slot.index].cleared = is_masked;
        }
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, p_full), slot.index));
        if (__all_sync(~0u, left == 0)) finish();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, done), slot.index));
        slot.next();
    }

    DEVICE void run_piece(const Work &work)
    {
        if (__all_sync(~0u, work.blocks == 0)) return;
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
        reference = LEAST_REFERENCE, sum = 0.0f, masked = masked_keys(work);
        bool first = true;
#pragma unroll 1
        for (int left = work.blocks - 1; __all_sync(~0u, left >= 0); left--, first = false)
            run_block(left, __all_sync(~0u, first));
        turns ^= 2;
    }

    DEVICE void run()
    {
        if (warp() == V::SOFTMAX_WARPS - 1) boxes.begin();
        for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
            run_piece(work_of<V>(p.dense, shared, i, Place(p.dense)));
    }
};
