/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over FP8 keys on Hopper: keys go through registers.
 *
 * A CTA takes a tile of 64 heads of one query token through the keys that the splits of its partition name,
 * 64 keys at a time:
 *
 *      who                    task                                                              registers
 *      warpgroup 0, scores    gathers raw keys and converts them to fp16, which is at once A of  160, 168
 *                             S^T = K Qᵀ and, stored to shared memory, V; softmax of S^T;
 *                             P to shared memory
 *      warpgroups 1, 2, sums  O of 256 columns each += P V; Q of the next split                       168
 *
 * Timeline of blocks k:
 *
 *      scores   raw k → S^T, V k; requests raw k + 1 | softmax k | raw k + 1 → S^T, V k + 1 | …
 *      sums                                          … P·V of k - 1 | P·V of k            | …
 *
 * The second warpgroup's products come half a block later than drawn, during the next softmax.
 *
 * The thread that requested raw bytes also converts them (producer.cuh). Their memory is filled again as soon
 * as it has been read, so that a block's 42 KB are always in flight. K Qᵀ does not read K from shared
 * memory: its A comes from registers. V has room for a block and a half: each half is freed by the warpgroup
 * whose columns it has.
 *
 * Barriers: full[count % 2], P and V of a block are stored; empty[half], V's half has been multiplied;
 * products_done, the products of a block's scores are done; sum_full, sum_empty: sums and references of a
 * split; q_full, q_empty[group]: Q of a split has arrived, a group of its tiles has been multiplied for the
 * last time.
 *
 * If some blocks have FP4 codes, the sums' warps convert them to e4m3 codes before the scores' threads take
 * them; barriers landed and converted (convert.cuh).
 *
 * fp16 does not hold all values of the formats: from the first block with such values on, a split is
 * multiplied in bf16 (scores.cuh).
 *
 * Shared memory (struct Shared): V 98304 bytes, Q 73728, P 16384, raw keys 32768 + 8192; constant addresses.
 *
 * The limit is the scores: one warp per scheduler computes them, in some 1000 instructions a block.
 *
 * Sparse prefill over FP8 pages is this kernel too (F::PREFILL): ../sparse_prefill/sparse_prefill_rope.cu.
 */
#pragma once

#include "convert.cuh"
#include "epilogue.cuh"
#include "layout.cuh"
#include "queries.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

namespace sparse_decode {

/* ---- The main loop --------------------------------------------------------------------------- */

static_assert(join_range_bytes(MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS) <= offsetof(Shared, p),
              "the join uses the memory of V and Q");

/* Of the warpgroups of the sums: O of 256 columns each += P V. */
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

/* ---- The kernel ------------------------------------------------------------------------------ */

enum { THREADS = 3 * WARPGROUP_THREADS, SUM_REGISTERS = 168 /* all threads begin with 168 */ };

template <typename F> DEVICE void prepare(uint32_t smem)
{
    enum { WARPS_OF_GROUP = WARPGROUP_THREADS / 32 };
    for (uint32_t i = 0; i < 2; i++) mbarrier_init(SHARED_AT(smem, full) + 8 * i, WARPS_OF_GROUP);
    for (uint32_t i = 0; i < HALVES; i++) mbarrier_init(SHARED_AT(smem, empty) + 8 * i, WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, products_done), WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, sum_full), 1);
    mbarrier_init(SHARED_AT(smem, sum_empty), 2 * WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, q_full), 2 * WARPS_OF_GROUP);
    for (uint32_t i = 0; i < Q_GROUPS; i++) mbarrier_init(SHARED_AT(smem, q_empty) + 8 * i, WARPS_OF_GROUP);
    if constexpr (F::FP4 != NO_BLOCKS)
        for (uint32_t i = 0; i < PAIRS; i++) {
            const bool publishes = F::FP4 == BLOCKS_OF_SOME_CACHE && i == 0; /* the kind of the block */
            mbarrier_init(SHARED_AT(smem, landed) + 8 * i, WARPGROUP_THREADS + publishes);
            mbarrier_init(SHARED_AT(smem, converted) + 8 * i, CONVERTING_WARPS);
        }
    mbarrier_fence_init();
}

template <typename F> DEVICE void kernel(const struct sparse_decode_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) prepare<F>(shared_address(memory)), shared.q_beyond = 0;
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    if (threadIdx.x == 0) shared.list = splits_of<F>(p, CtaCoord(p).worker);
    __syncthreads();
    if (threadIdx.x < WARPGROUP_THREADS) {
        give_registers<F::SCORE_REGISTERS>();
        if (__any_sync(~0u, shared.list.first <= shared.list.last)) Scores<F>(p, shared).run();
    } else {
        take_registers<SUM_REGISTERS>(); /* no more than it has, but ptxas spills without it */
        Mainloop<F>(p, shared).run();
    }
}

} // namespace sparse_decode

/* Defines both kernels of a format: the general one, and the one with one split per CTA. */
#define SPARSE_DECODE_KERNELS(NAME, FORMAT)                                                                  \
    DEFINE_KERNEL(NAME, sparse_decode_params, (sparse_decode::THREADS, 1),                                   \
                  sparse_decode::kernel<sparse_decode::FORMAT>(p))                                           \
    DEFINE_KERNEL(NAME##_together, sparse_decode_sm90_params, (sparse_decode::THREADS, 1),                   \
                  sparse_decode::kernel<sparse_decode::OneSplitFormat<sparse_decode::FORMAT>>(p.call))

/* The same for sparse prefill, over whole lists and over splits of them. */
#define SPARSE_PREFILL_BYTES_KERNELS(NAME, FORMAT)                                                           \
    DEFINE_KERNEL(NAME, sparse_prefill_fp8_params, (sparse_decode::THREADS, 1),                              \
                  sparse_decode::kernel<sparse_decode::PrefillFormat<sparse_decode::FORMAT>>(p.decode.call)) \
    DEFINE_KERNEL(                                                                                           \
        NAME##_together, sparse_prefill_fp8_params, (sparse_decode::THREADS, 1),                             \
        sparse_decode::kernel<sparse_decode::PrefillPartFormat<sparse_decode::FORMAT>>(p.decode.call))
