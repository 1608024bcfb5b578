/* SPDX-License-Identifier: MIT
 *
 * Clusters: CTAs that run at the same time and reach each other's shared memory, by addresses that map_shared
 * makes of their own (sm_90).
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

DEVICE int cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

/* Waits for all threads of the cluster; what they wrote to shared memory before is visible to all. */
DEVICE void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Returns the address at which CTA `rank` has what stands at `address` here. */
DEVICE uint32_t map_shared(uint32_t address, int rank)
{
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/* Arrives at a barrier of any CTA. */
DEVICE void mbarrier_arrive_mapped_if(bool is, uint32_t barrier)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n"
                 "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
                 "r"((uint32_t)is)
                 : "memory");
}

/* Copies `bytes` bytes, a multiple of 16, to shared memory of any CTA; they count towards the phase of that CTA's
 * barrier. */
DEVICE void bulk_copy_mapped(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* Stores a word in shared memory of any CTA; its four bytes count towards the phase of that CTA's barrier. */
DEVICE void store_mapped_4(uint32_t to, uint32_t word, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
                 "r"(word), "r"(barrier)
                 : "memory");
}
