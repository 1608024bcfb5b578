/* SPDX-License-Identifier: MIT
 *
 * The main loop of the warpgroups of the sums: O of 256 columns each += P V.
 */
#pragma once

#include "convert.cuh"
#include "epilogue.cuh"
#include "queries.cuh"
#include "scheduler.cuh"

namespace sparse_decode {

static_assert(join_range_bytes(MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS) <= offsetof(Shared, p),
              "the join uses the memory of V and Q");

template <typename F> struct Mainloop : Epilogue<F> {
    using Base = Epilogue<F>;
    using Base::Base, Base::p, Base::shared, Base::smem, Base::split;
    float o[128];

    /* Adds P·V of a block. The tensor cores are idle during a softmax, so the second warpgroup keeps its
     * product for the softmax of the following block, until the products of that block's scores are done
     * (`deferred`). */
    DEVICE void add_block(uint32_t count, uint32_t half, bool first, bool deferred)
    {
        const uint32_t p_stage = count & 1;
        mbarrier_wait(SHARED_AT(smem, full) + 8 * p_stage, count >> 1 & 1);
        if (__any_sync(~0u, deferred && side() == 1))
            mbarrier_wait(SHARED_AT(smem, products_done), (count + 1) & 1);
        const uint32_t block = shared.block[p_stage];
        if (__any_sync(~0u, block & BLOCK_MOVED)) {
            const float factor[2] = {shared.factor[p_stage][row()], shared.factor[p_stage][row() + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i] *= factor[i / 2 % 2];
        }
        if (SELDOM(__any_sync(~0u, block & BLOCK_BF16)))
            multiply<Bf16>(p_stage, half, first);
        else
            multiply<Fp16>(p_stage, half, first);
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, empty) + 8 * half);
    }

    template <typename Element> DEVICE void multiply(uint32_t p_stage, uint32_t half, bool first)
    {
        const uint32_t v = SHARED_AT(smem, v) + half * HALF_BYTES;
        hold(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_256_columns<Element>(o, wgmma_lines(SHARED_AT(smem, p) + p_stage * TILE_BYTES, k),
                                       wgmma_columns(v, k), k > 0 || !first);
        wgmma_commit();
        wgmma_wait<0>();
        hold(o);
    }

    DEVICE int begin_split(int i)
    {
        const Split now = split_of<F>(p, shared.list, i);
        if (lane() == 0) split() = now;
        __syncwarp();
        return blocks_of(now);
    }

    /* Prefetches the queries of the next split to L2 some blocks before the end of a split, and loads them
     * to shared memory during the scores of its last block: the product before that is not kept. Votes: as
     * in Scores. */
    DEVICE void prepare_queries(int i, int k, int blocks, uint32_t split)
    {
        const bool first = k < 0, more = shared.list.last - i >= shared.list.step;
        const bool near = more && k == max(0, blocks - PREFETCH_BLOCKS),
                   now = first || (more && k == blocks - 1);
        if (__any_sync(~0u, near | now)) {
            const int request = request_of<F>(p, shared.list, first ? i : i + shared.list.step);
            if (__any_sync(~0u, near)) prefetch_queries<F>(p, request);
            if (__any_sync(~0u, now)) load_queries<F>(p, request, shared, smem, split + !first);
        }
    }

    DEVICE void run_splits()
    {
        uint32_t count = 0, splits = 0 /* that have ended */, half = (uint32_t)side();
        if constexpr (F::ONE_SPLIT) {
            load_only_queries<F>(p, request_of<F>(p, shared.list, shared.list.first), shared, smem);
            prepare_to_join(); /* while the first keys are in flight */
        }
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        for (int i = shared.list.first; F::ONE_SPLIT ? splits == 0 : __any_sync(~0u, i <= shared.list.last);
             i += shared.list.step) {
            int blocks = F::ONE_SPLIT ? begin_split(i) : 1;
            /* Block -1: the code that loads the next queries also loads the first, and the code that
             * converts the keys of the next block also converts the first. */
            constexpr bool BEGINS_BEFORE = !F::ONE_SPLIT || F::FP4 != NO_BLOCKS;
            for (int k = !BEGINS_BEFORE || splits ? 0 : -1; __any_sync(~0u, k < blocks); k++) {
                if constexpr (!F::ONE_SPLIT) {
                    if (__any_sync(~0u, k == 0)) blocks = begin_split(i);
                    prepare_queries(i, k, blocks, splits);
                }
                if constexpr (F::FP4 != NO_BLOCKS) convert_fp4<F>(shared, smem, k < 0 ? 0 : count + 1);
                if constexpr (BEGINS_BEFORE)
                    if (__any_sync(~0u, k < 0)) continue;
                add_block(count, half, k == 0, k + 2 < blocks);
                count++, half += 2;
                if (half >= HALVES) half -= HALVES;
            }
            this->end_split(o, splits & 1);
            splits++;
        }
    }

    DEVICE void prepare_to_join() const
    {
        if (fresh_thread() == WARPGROUP_THREADS) prepare_group_barrier(p, shared.list.request);
        __syncwarp();
    }

    /* A CTA without a part joins its range all the same. */
    DEVICE void run()
    {
        if (__any_sync(~0u, shared.list.first <= shared.list.last))
            run_splits();
        else if (F::ONE_SPLIT)
            prepare_to_join();
        if constexpr (F::ONE_SPLIT) {
            const JoinRange<true, F::PREFILL> range(p, shared.list, HEADS);
            join_range<Bf16, MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS>(
                range, cta_group_barrier(p, CtaCoord(p), range.request), smem, WARPGROUP_THREADS,
                SUMS_BARRIER);
        }
    }
};

} // namespace sparse_decode
