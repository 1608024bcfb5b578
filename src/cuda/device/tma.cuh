/* SPDX-License-Identifier: MIT
 *
 * TMA: copies boxes of a tensor that the host has described (src/cuda/tensor_map.h) (sm_90).
 */
#pragma once

#include "../params.h"
#include "kernel.cuh"

/* The start of a box, innermost dimension first. */
struct TmaCoord {
    int x, y, z, v, w;
};

/* Copies the box to shared memory; its bytes count towards the barrier's phase. Elements outside the tensor
 * are zero. */
DEVICE void tma_load(uint32_t to, const struct tensor_map *map, uint32_t barrier, TmaCoord at)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w)
                 : "memory");
}

/* The same with L2 evict-first, for data that is not read again soon. */
DEVICE void tma_load_once(uint32_t to, const struct tensor_map *map, uint32_t barrier, TmaCoord at)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w), "l"(policy)
        : "memory");
}

/* Copies a box from shared memory with L2 evict-first. Elements outside the tensor are not written. The copy
 * counts towards the thread's next group. */
DEVICE void tma_store_once(const struct tensor_map *map, uint32_t from, TmaCoord at)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
                 "r"(from), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w), "l"(policy)
                 : "memory");
}

INSTRUCTION(bulk_commit, "cp.async.bulk.commit_group")

/* Waits until at most N of this thread's newest groups of stores have yet to read their source; the memory of
 * the others may be reused. */
INSTRUCTION_OF(bulk_wait_read, "cp.async.bulk.wait_group.read")
/* Waits until at most N of them have yet to complete their writes. */
INSTRUCTION_OF(bulk_wait, "cp.async.bulk.wait_group")

/* Prefetches the box into L2. */
DEVICE void tma_prefetch(const struct tensor_map *map, TmaCoord at)
{
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
                 "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w)
                 : "memory");
}

/* Copies `bytes` contiguous bytes, a multiple of 16, without a tensor map; both addresses are 16-byte
 * aligned. */
DEVICE void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* The same, from shared to global memory. */
DEVICE void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

DEVICE void bulk_prefetch(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/* Prefetches the tensor map. */
DEVICE void tma_prefetch_map(const struct tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
