/* SPDX-License-Identifier: MIT
 *
 * TMA: boxes of a tensor that the host has described (src/cuda/tensor_map.h), copied by the hardware (sm_90).
 */
#pragma once

#include "../params.h"
#include "kernel.cuh"

/* Where a box begins, innermost dimension first. */
struct BoxPlace {
    int x, y, z, v, w;
};

/* Copies the box to shared memory; its bytes count towards the barrier's phase. What lies outside the tensor is zero. */
DEVICE void tma_load(uint32_t to, const struct tensor_map *map, uint32_t barrier, BoxPlace at)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w)
                 : "memory");
}

/* The same of what nobody reads again soon: the first to leave L2. */
DEVICE void tma_load_once(uint32_t to, const struct tensor_map *map, uint32_t barrier, BoxPlace at)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w), "l"(policy)
        : "memory");
}

/* Copies a box from shared memory; what lies outside the tensor is not written, and what is written is the first to leave L2. It
 * counts towards the thread's next group. */
DEVICE void tma_store_once(const struct tensor_map *map, uint32_t from, BoxPlace at)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
                 "r"(from), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w), "l"(policy)
                 : "memory");
}

INSTRUCTION(bulk_commit, "cp.async.bulk.commit_group")

/* Until at most N of this thread's newest groups of stores are yet to read what they copy; the place of others is free. */
INSTRUCTION_OF(bulk_wait_read, "cp.async.bulk.wait_group.read")
/* Until what they write is there, too. */
INSTRUCTION_OF(bulk_wait, "cp.async.bulk.wait_group")

/* Brings the box to L2 alone. */
DEVICE void tma_prefetch(const struct tensor_map *map, BoxPlace at)
{
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
                 "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.v), "r"(at.w)
                 : "memory");
}

/* Without a description: `bytes` bytes in a row, a multiple of 16, both addresses aligned to 16. */
DEVICE void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* From shared memory, likewise. */
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

/* The description itself, ahead of its first use. */
DEVICE void tma_prefetch_map(const struct tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
