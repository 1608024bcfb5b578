/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill over FP8 pages on Hopper.
 */
#pragma once

#include "producer.cuh"
#include "scores.cuh"
#include "sums.cuh"

/* Of 128 that all begin with. */
enum { THREADS = 4 * WARPGROUP_THREADS, PRODUCER_REGISTERS = 80, SCORE_REGISTERS = 112, SUM_REGISTERS = 160 };

template <typename F> __device__ __forceinline__ void prepare(const struct sparse_prefill_sm90_params &p, Shared &shared)
{
    const auto init = [](Barrier &barrier, int arrivals) {
        mbarrier_init(shared_address(&barrier), arrivals);
    };
    tma_prefetch_map(&p.queries), tma_prefetch_map(&p.results);
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
        for (int unit = 0; unit < UNITS; unit++)
            init(shared.keys_full[buffer][unit],
                 WARPS_OF_GROUP + (F::ROPE_IS_V && unit == UNITS - 1 ? WARPGROUP_THREADS : 0));
        for (int half = 0; half < HALVES; half++) init(shared.keys_empty[buffer][half], WARPS_OF_GROUP);
        init(shared.p_full[buffer], WARPS_OF_GROUP), init(shared.p_empty[buffer], 2 * WARPS_OF_GROUP);
    }
    init(shared.rope_full, WARPGROUP_THREADS), init(shared.rope_empty, WARPS_OF_GROUP);
    init(shared.q_full, 1), init(shared.scored, WARPS_OF_GROUP);
    init(shared.end_full, WARPS_OF_GROUP), init(shared.end_empty, 2 * WARPS_OF_GROUP);
    mbarrier_fence_init();
    fence_async_shared();
}

template <typename F>
__device__ __forceinline__ void sparse_prefill_codes(const struct sparse_prefill_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) prepare<F>(p, shared);
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    if (threadIdx.x < WARPGROUP_THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        Producer<F>(p, shared).run();
    } else if (threadIdx.x < 2 * WARPGROUP_THREADS) {
        give_registers<SCORE_REGISTERS>();
        Scores<F>(p, shared).run();
    } else {
        take_registers<SUM_REGISTERS>();
        Sums(p, shared).run();
    }
}

#define SPARSE_PREFILL_CODES_KERNEL(NAME, FORMAT)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                 \
        NAME(const __grid_constant__ struct sparse_prefill_sm90_params p)                                    \
    {                                                                                                        \
        sparse_prefill_codes<Format<FORMAT>>(p);                                                             \
    }
