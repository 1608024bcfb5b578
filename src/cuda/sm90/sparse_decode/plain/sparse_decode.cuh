/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over BF16 and FP16 caches on Hopper: keys are gathered straight to where the products read
 * them.
 *
 * A CTA takes a tile of 64 heads of one query token through the keys that the splits of its partition name,
 * 64 keys at a time:
 *
 *      who                    task                                                              registers
 *      warpgroup 0, scores    indices; S^T = K Qᵀ, softmax, P to shared memory                        152
 *      warpgroups 1, 2, sums  O of 256 columns each += P V; gather those columns of the block         176
 *                             after next (cp.async) once they are multiplied; Q of the next split
 *
 * Barriers: arrived[kv_stage][group], tiles of a block's keys have arrived; full, P is stored, and `address`
 * has the addresses of the keys of the block after next; empty, P has been multiplied; q_full, Q of a split
 * has arrived; sum_full, sum_empty: sums and references of a split. Q and the rope columns need no barrier
 * before they are overwritten: whoever sees P knows that the scores are done.
 */
#pragma once

#include "layout.cuh"
#include "mainloop.cuh"
#include "scores.cuh"

namespace sparse_decode::plain {

enum { THREADS = 3 * WARPGROUP_THREADS, SCORE_REGISTERS = 152, SUM_REGISTERS = 176 };

template <typename R> DEVICE void prepare(uint32_t smem)
{
    using Shared = typename R::Shared;
    enum { WARPS_OF_GROUP = WARPGROUP_THREADS / 32, GATHERING_THREADS = 2 * WARPGROUP_THREADS };
    for (uint32_t i = 0; i < KV_STAGES * R::GROUPS; i++)
        mbarrier_init(SHARED_AT(smem, arrived) + 8 * i, GATHERING_THREADS);
    mbarrier_init(SHARED_AT(smem, full), WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, empty), 2 * WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, sum_full), WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, sum_empty), 2 * WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, q_full), GATHERING_THREADS);
    mbarrier_fence_init();
}

template <typename R> DEVICE void kernel(const struct sparse_decode_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    typename R::Shared &shared = *(typename R::Shared *)memory;
    if (threadIdx.x == 0) prepare<R>(shared_address(memory));
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    if (threadIdx.x == 0) shared.list = split_list(p, (unsigned)CtaCoord(p).worker);
    __syncthreads();
    if (threadIdx.x < WARPGROUP_THREADS) {
        give_registers<SCORE_REGISTERS>();
        if (__any_sync(~0u, shared.list.first <= shared.list.last)) Scores<R>(p, shared).run();
    } else {
        take_registers<SUM_REGISTERS>();
        if (__any_sync(~0u, shared.list.first <= shared.list.last)) Mainloop<R>(p, shared).run();
    }
}

} // namespace sparse_decode::plain

#define SPARSE_DECODE_KERNEL(NAME, D_QK, ELEMENT)                                                            \
    DEFINE_KERNEL(NAME, sparse_decode_params, (sparse_decode::plain::THREADS, 1),                            \
                  sparse_decode::plain::kernel<sparse_decode::plain::Rows<D_QK, ELEMENT>>(p))
