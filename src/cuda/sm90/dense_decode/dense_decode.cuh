/* SPDX-License-Identifier: MIT
 *
 * Dense decode on Hopper: the seesaw of two sides (docs/kernels/dense-decode.md draws it,
 * ../latent/mainloop.cuh runs it), with keys that TMA loads.
 *
 * A CTA takes a tile of 64 rows of one key head through the keys of its splits, 64 keys at a time. Two sides,
 * one warpgroup each, do the same work on alternate blocks of keys, so that one side's softmax overlaps the
 * other's products:
 *
 *      who                    task                                                              registers
 *      warpgroup 0, producer  one thread issues TMA loads of keys, one of queries; never drains        40
 *      warpgroup 1, side 0    S and softmax of even blocks; O of columns   0 … 255, of all blocks     232
 *      warpgroup 2, side 1    S and softmax of odd blocks;  O of columns 256 … 511, of all blocks     232
 *
 * Timeline of blocks k - 1 (side 1) and k (side 0). A unit is 128 columns; a side's home units are the two
 * that hold its columns of V:
 *
 *      side 0   early Q·Kᵀ k | P·V k-1, home | late Q·Kᵀ k | softmax k | P·V k, home | …
 *      side 1   … softmax k-1 | P·V k-1, home | early Q·Kᵀ k+1 | P·V k | late Q·Kᵀ k+1 | softmax k+1 …
 *
 * A side keeps P of its own block in registers and passes it to the other side through shared memory. The
 * sides also share the references that both sum relative to: when a warp moves its reference, it publishes
 * the new one to the warp of the other side that has the same rows. V is the first 512 columns of K: a block
 * of keys is loaded once, and both products use the same copy in shared memory. Its units are released one by
 * one, in the order in which the block after next needs them. Only K's rope columns pass through shared
 * memory: Q's stay in registers.
 *
 * Shared memory (struct Shared): two blocks of keys 147456 bytes, Q 65536, P of either side 8192. All
 * addresses are constants.
 *
 * On an H200 the kernel is limited by power with many rows (the SMs run at 1.4 to 1.75 of 1.98 GHz), and by
 * memory bandwidth with one tile of rows.
 */
#pragma once

#include "layout.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "second_part.cuh"

namespace dense_decode {

enum { THREADS = 3 * WARPGROUP_THREADS, PRODUCER_REGISTERS = 40, SIDE_REGISTERS = 232 };

template <typename V> DEVICE void prepare(const struct dense_decode_sm90_params &p, Shared &shared)
{
    tma_prefetch_map(&p.keys), tma_prefetch_map(&p.queries);
    if (V::ROPE) tma_prefetch_map(&p.rope);
    shared.barriers.init_blocks([](int, int) { return 1; }, 1);
    shared.poisoned = shared.second_part = 0;
    shared.keys_asked.init(1), shared.second_full.init(32);
    shared.barriers.init_queries();
    mbarrier_fence_init();
    fence_async_shared();
}

template <typename V> DEVICE void kernel(const struct dense_decode_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t smem = shared_address(memory);
    if (threadIdx.x == 0) prepare<V>(p, shared);
    if (!V::JOIN_IN_KERNEL) __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    const CtaCoord cta(p);
    SplitList list;
    if constexpr (V::JOIN_IN_KERNEL) {
        if (threadIdx.x / 32 == 1) shared.one.parts = 0, __syncwarp(), share_out(p, cta.worker, shared.one);
        __syncthreads();
        if (!__any_sync(~0u, shared.one.parts)) return;
        list.first = list.last = 0, list.step = 1;
    } else {
        list = split_list(p.call, (unsigned)cta.worker);
    }
    if (SELDOM(threadIdx.x >= WARPGROUP_THREADS)) {
        take_registers<SIDE_REGISTERS>();
        Side<V>(p, shared).run(list);
    } else {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 0 && elect_one()) {
            shared.parities = produce_keys<V>(p, list, cta, shared, smem);
            mbarrier_arrive(SHARED_AT(smem, keys_asked));
        }
        if (threadIdx.x / 32 == 1 && elect_one()) produce_queries<V>(p, list, cta, shared, smem);
        if constexpr (!V::JOIN_IN_KERNEL)
            if (threadIdx.x / 32 == 2) produce_second_part<V>(p, list, cta, shared, smem);
    }
}

} // namespace dense_decode

#define DENSE_DECODE_KERNEL(NAME, ELEMENT, D_QK, SHARED_KEYS, JOIN_IN_KERNEL)                                \
    DEFINE_KERNEL(                                                                                           \
        NAME, dense_decode_sm90_params, (dense_decode::THREADS, 1),                                          \
        dense_decode::kernel<dense_decode::Variant<ELEMENT, D_QK, SHARED_KEYS, JOIN_IN_KERNEL>>(p))
