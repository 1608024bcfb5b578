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

#include "layout.cuh"
#include "mainloop.cuh"
#include "scheduler.cuh"
#include "scores.cuh"

namespace sparse_decode {

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
