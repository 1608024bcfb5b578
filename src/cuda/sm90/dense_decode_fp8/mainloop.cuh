/* SPDX-License-Identifier: MIT
 *
 * The main loop of a warpgroup with values: O^T += V^T P^T of half of the columns, 64 per warp, for all
 * blocks. ldmatrix.trans reads 16 columns of 32 keys as pairs of columns; a byte permute puts the even
 * column's two keys before the odd one's, and each two become fp16: a row of A, so that rows g and g + 8 of a
 * product are columns 2 g and 2 g + 1. Fragments are read two ahead, and converted one ahead.
 */
#pragma once

#include "../../device/mma.cuh"
#include "../../device/shared.cuh"
#include "../latent/scheduler.cuh"
#include "convert.cuh"
#include "epilogue.cuh"
#include "layout.cuh"
#include "producer.cuh"

namespace dense_decode_fp8 {

enum { KEY_STEP = 32 /* keys of a fragment */, FRAGMENTS = GROUPS * KEYS / KEY_STEP };

template <typename V> struct Mainloop : Epilogue<V> {
    using Base = Epilogue<V>;
    using Base::lane, Base::column_tile, Base::task;
    using Base::p, Base::shared, Base::smem, Base::side;
    using typename Base::Shared;
    uint32_t v_at; /* offset of the lane's row of the first fragment, in a block of keys */
    typename Base::Sums o;
    uint32_t fragment[2][2][4], raw[2][4];
    /* FP8_656: fp16 scales of two keys, for the fragments of each half of a block. */
    uint32_t pairs[2][KEY_STEP / 8];
    Ring<V::KV_STAGES> kv_stage;
    Ring<V::P_STAGES> p_stage;

    DEVICE Mainloop(const struct dense_decode_fp8_params &params, Shared &memory, int which)
        : Base(params, memory, which)
    {
        const int column = HALF_ROW_TILE * column_tile();
        v_at = (uint32_t)(column / CODES_OF_LINE * KEY_TILE_BYTES) +
               swizzle_128((uint32_t)lane(), (uint32_t)(column % CODES_OF_LINE / CHUNK_BYTES));
        asm volatile("" : "+r"(v_at)); /* kept: computed again for every fragment it cost 8 % in all */
    }

    DEVICE uint32_t keys_at(int index) const
    {
        return SHARED_AT(smem, keys) + (uint32_t)(index * V::KEYS_BYTES);
    }

    /* ---- Fragments ----------------------------------------------------------------------------------- */

    DEVICE void load(uint32_t (&to)[4], uint32_t keys, int i)
    {
        const uint32_t at =
            ((keys + v_at) ^ (uint32_t)(CHUNK_BYTES * (i / 2))) + (uint32_t)(i % 2 * KEY_STEP * LINE_BYTES);
        ldmatrix_x4_trans(to, at);
    }

    /* Converts fragment i to fp16. */
    DEVICE void convert(uint32_t (&a)[2][4], const uint32_t (&codes)[4], int i)
    {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t &even = a[k / 2][2 * (k % 2)], &odd = a[k / 2][2 * (k % 2) + 1];
            fp16_of_e4m3(even, odd, __byte_perm(codes[k], 0, 0x3120));
            if constexpr (V::SCALED)
                even = multiply_halves(even, pairs[i % 2][k]), odd = multiply_halves(odd, pairs[i % 2][k]);
        }
    }

    /* Converts fragment i to bf16. `scales`: address of the scale of the warp's columns for the lane's
     * first key of the block. */
    DEVICE void convert_wide(uint32_t (&a)[2][4], const uint32_t (&codes)[4], uint32_t scales, int i)
    {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t at = scales + (uint32_t)((KEY_STEP * (i % 2) + 8 * k) * SCALES_OF_KEY * 4);
            const float2 both = make_float2(__uint_as_float(load_shared_4(at)),
                                            __uint_as_float(load_shared_4(at + SCALES_OF_KEY * 4)));
            bf16_of_e4m3(a[k / 2][2 * (k % 2)], a[k / 2][2 * (k % 2) + 1], __byte_perm(codes[k], 0, 0x3120),
                         both, both);
        }
    }

    /* Loads the fp16 scales of half of a block, for the warp's columns. */
    DEVICE void load_pairs(int index, int half)
    {
        if constexpr (V::SCALED) {
            const uint4 four =
                load_shared_16(SHARED_AT(smem, half_scales) +
                               (uint32_t)(index * HALF_SCALES_BYTES + column_tile() / 2 * HALF_LINE_BYTES +
                                          lane() % 4 * 32 + 16 * half));
            pairs[half][0] = four.x, pairs[half][1] = four.y, pairs[half][2] = four.z,
            pairs[half][3] = four.w;
        }
    }

    /* Waits for the keys of the current stage, and for their scales. */
    DEVICE void wait_for_keys() const
    {
        mbarrier_wait(barrier_at(SHARED_AT(smem, keys_full), kv_stage.index), kv_stage.parity);
        if constexpr (V::SCALED)
            mbarrier_wait(barrier_at(SHARED_AT(smem, scales_full), kv_stage.index), kv_stage.parity);
    }

    /* Tests the same barriers without waiting. Called early, since the answer has a latency. */
    DEVICE bool test_keys() const
    {
        const int index = kv_stage.index;
        bool arrived = mbarrier_test(barrier_at(SHARED_AT(smem, keys_full), index), kv_stage.parity);
        if (V::SCALED)
            arrived &= mbarrier_test(barrier_at(SHARED_AT(smem, scales_full), index), kv_stage.parity);
        return arrived;
    }

    /* Reads the first fragments of a block, and converts the very first. */
    DEVICE void begin(int index)
    {
        load_pairs(index, 0), load_pairs(index, 1);
        load(raw[0], keys_at(index), 0);
        convert(fragment[0], raw[0], 0);
        load(raw[1], keys_at(index), 1);
    }

    /* ---- A block -------------------------------------------------------------------------------- */

    /* Rescales the sums. `moved_rows`: a byte for each 16 rows. */
    DEVICE void rescale(uint32_t moved_rows)
    {
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++) {
            const bool moved = moved_rows >> 8 * (n / 2) & 255; /* for other rows no factor is written */
            const float2 both = *(const float2 *)&shared.factor[p_stage.index][8 * n + 2 * (lane() % 4)];
            const float x = moved ? both.x : 1.0f, y = moved ? both.y : 1.0f;
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
                o[m][4 * n] *= x, o[m][4 * n + 1] *= y, o[m][4 * n + 2] *= x, o[m][4 * n + 3] *= y;
        }
    }

    template <typename Element>
    DEVICE void multiply(float (&sums)[V::ROWS / 2], const uint32_t (&a)[2][4], uint32_t weights, int keys)
    {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; i++)
            wgmma_lines_of<Element>(sums, a[i], wgmma_lines(weights, 2 * keys + i), 1);
        wgmma_commit();
    }

    DEVICE void hold_sums()
    {
#pragma unroll
        for (int m = 0; m < GROUPS; m++) hold(o[m]);
    }

    /* Multiplies a block in bf16 whose scales do not fit in fp16. Such blocks are rare, so both halves of
     * the keys share one copy of the code. */
    DEVICE void multiply_wide(int index, uint32_t weights)
    {
        const uint32_t keys = keys_at(index),
                       scales = keys + (uint32_t)(SCALES_AT + column_tile() / 2 * 4 +
                                                  2 * (lane() % 4) * SCALES_OF_KEY * 4);
#pragma unroll(V::OF_CODES &&V::ROWS == 64 ? GROUPS : 1)
        for (int m = 0; m < GROUPS; m++) {
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                load(raw[0], keys, 2 * m + half);
                convert_wide(fragment[0], raw[0], scales, half);
                hold(o[0]);
                multiply<Bf16>(o[0], fragment[0], weights, half);
                wgmma_wait<0>();
                hold(o[0]);
            }
            next_group();
        }
    }

    /* Moves the sums of each column group to the registers of the previous one. */
    DEVICE void next_group()
    {
#pragma unroll
        for (int e = 0; e < V::ROWS / 2; e++) {
            const float first = o[0][e];
#pragma unroll
            for (int m = 0; m + 1 < GROUPS; m++) o[m][e] = o[m + 1][e];
            o[GROUPS - 1][e] = first;
        }
    }

    /* Multiplies a block in fp16. The first fragments of the next block are read as this one ends; after
     * the last block of a split they are not used. */
    DEVICE void multiply_narrow(uint32_t keys, uint32_t weights, bool last)
    {
        const bool keys_asked = test_keys();
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) {
            if (i == FRAGMENTS - 2) {
                keys = keys_at(kv_stage.index);
                if (!last && !__all_sync(~0u, keys_asked)) wait_for_keys();
                load_pairs(kv_stage.index, 0);
            }
            if (i == FRAGMENTS - 1) load_pairs(kv_stage.index, 1);
            load(raw[i % 2], keys, (i + 2) % FRAGMENTS);
            multiply<Fp16>(o[i / 2], fragment[i % 2], weights, i % 2);
            if (i > 0) wgmma_wait<1>();
            convert(fragment[(i + 1) % 2], raw[(i + 1) % 2], i + 1);
        }
        wgmma_wait<0>();
    }

    DEVICE void run_block(bool last)
    {
        const uint32_t weights = weights_tile<V>(smem, p_stage.index);
        mbarrier_wait(barrier_at(SHARED_AT(smem, p_full), p_stage.index), p_stage.parity);
        const uint2 flags =
            load_shared_8(SHARED_AT(smem, flags) + (uint32_t)(p_stage.index * (int)sizeof(BlockFlags)));
        if (SELDOM(__any_sync(~0u, flags.x))) rescale(flags.x);
        const bool fits = !V::SCALED || __all_sync(~0u, shared.fits[kv_stage.index] == ALL_FIT);
        if (SELDOM(__any_sync(~0u, flags.y))) begin(kv_stage.index);
        hold_sums();
        const int own = kv_stage.index;
        const uint32_t round = kv_stage.parity;
        kv_stage.advance();
        if (SELDOM(!fits)) {
            multiply_wide(own, weights);
            if (!last) wait_for_keys();
            begin(kv_stage.index);
        } else {
            multiply_narrow(keys_at(own), weights, last);
        }
        hold_sums();
        release_keys(own, round);
    }

    /* Releases the stage, which the warp no longer needs. */
    DEVICE void release_keys(int stage, uint32_t round)
    {
        constexpr uint32_t WARPS = 2 * WARPGROUP_THREADS / 32;
        __syncwarp();
        if constexpr (V::REFILLS) {
            const uint32_t before =
                lane() == 0 ? count_shared(SHARED_AT(smem, released) + 4 * (uint32_t)stage) : 0;
            if (__any_sync(~0u, before % WARPS == WARPS - 1)) {
                const uint2 box =
                    load_shared_8(SHARED_AT(smem, box[0]) +
                                  (round * V::KV_STAGES + (uint32_t)stage) * (uint32_t)sizeof(KeyBox));
                if (__all_sync(~0u, (int)box.y >= 0) && elect_one())
                    ask_for_keys<V>(p, smem, stage, {(int)box.x, (int)box.y});
                __syncwarp();
            }
        } else {
            if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, keys_empty), stage));
        }
    }

    DEVICE void release_weights()
    {
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, p_empty), p_stage.index));
        p_stage.advance();
    }

    /* ---- Splits --------------------------------------------------------------------------------- */

    DEVICE void run_split(const WorkTile &work)
    {
        const int blocks = work.blocks;
        if (__all_sync(~0u, blocks == 0)) return;
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
#pragma unroll
        for (int m = 0; m < GROUPS; m++)
#pragma unroll
            for (int i = 0; i < V::ROWS / 2; i++) o[m][i] = 0.0f;
        wait_for_keys();
        begin(kv_stage.index);
#pragma unroll 1
        for (int left = blocks - 1; __all_sync(~0u, left >= 0); left--) {
            run_block(__all_sync(~0u, left == 0));
            if (__all_sync(~0u, left > 0)) release_weights();
        }
        mbarrier_wait(barrier_at(SHARED_AT(smem, done), p_stage.index), p_stage.parity);
        this->store(o, p_stage.index);
        release_weights();
    }

    DEVICE void run()
    {
        if constexpr (V::JOIN_IN_KERNEL) {
            run_and_join();
        } else {
            for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
                run_split(work_tile_of<V>(p.dense, shared, i, CtaCoord(p.dense)));
        }
    }

    DEVICE void run_and_join()
    {
        const CtaCoord cta(p.dense);
        const OneSplit &one = shared.one;
        /* The thread that will arrive at the group barrier prepares it while the first keys are in flight. */
        if (fresh_thread() == VALUES * WARPGROUP_THREADS)
            cta_group_barrier_begin(cta_group_barrier(p.dense, cta, one.request), p.dense.ticket);
        __syncwarp();
        run_split(WorkTile(p.dense, one, cta.kv_head, cta.tile * V::ROWS, V::ROWS));
        const JoinRange<false> range(p.dense.call, one, cta.kv_head, cta.tile * V::ROWS, V::ROWS);
        join_range<Bf16, MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS>(
            range, cta_group_barrier(p.dense, cta, range.request), smem, VALUES * WARPGROUP_THREADS,
            VALUES_BARRIER);
    }
};

} // namespace dense_decode_fp8
