/* SPDX-License-Identifier: MIT
 *
 * mbarrier: barriers in shared memory (8 bytes each) whose phases end when the expected threads have arrived
 * and the expected bytes have been written by TMA (sm_90). Addresses are those of shared_address.
 */
#pragma once

#include "async_copy.cuh"

#include <stdint.h>

DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Called by the thread that initialised the barriers, before any asynchronous operation uses them. */
INSTRUCTION(mbarrier_fence_init, "fence.mbarrier_init.release.cluster")

DEVICE void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* A single predicated instruction, without a branch. */
DEVICE void mbarrier_arrive_if(bool is, uint32_t barrier)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
            barrier),
        "r"((uint32_t)is)
        : "memory");
}

/* Arrives for `count` expected threads. */
DEVICE void mbarrier_arrive_for(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* Arrives, and extends the phase until `bytes` more bytes have been written. */
DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

#define MBARRIER_ASK(NAME, HOW)                                                                              \
    DEVICE bool NAME(uint32_t barrier, uint32_t parity)                                                      \
    {                                                                                                        \
        uint32_t ended;                                                                                      \
        asm volatile("{\n.reg .pred p;\nmbarrier." HOW ".parity.shared::cta.b64 p, [%1], %2;\n"              \
                     "selp.u32 %0, 1, 0, p;\n}"                                                              \
                     : "=r"(ended)                                                                           \
                     : "r"(barrier), "r"(parity)                                                             \
                     : "memory");                                                                            \
        return ended;                                                                                        \
    }

/* Returns whether the phase of this parity has ended. Phases are numbered from 0; for a new barrier, phase 1
 * counts as ended. */
MBARRIER_ASK(mbarrier_try, "try_wait")

/* The same, but returns at once; mbarrier_try may wait for a while. */
MBARRIER_ASK(mbarrier_test, "test_wait")

/* Waits in one thread. */
DEVICE void mbarrier_wait_thread(uint32_t barrier, uint32_t parity)
{
    while (!mbarrier_try(barrier, parity)) {
    }
}

/* Waits in a converged warp, for long waits: it leaves the schedulers to other warps, and half a microsecond
 * of delay does not matter. */
DEVICE void mbarrier_wait_long(uint32_t barrier, uint32_t parity)
{
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) __nanosleep(500);
}

/* Waits in a converged warp. The vote makes the branch uniform: after a loop that ptxas considers divergent,
 * it keeps no matrix descriptor in uniform registers. */
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) {
    }
}

/* An mbarrier that is a member of a struct in shared memory. */
struct Barrier {
    uint64_t state;

    DEVICE void init(int arrivals) { mbarrier_init(shared_address(this), arrivals); }
};

/* Returns the address of element `index` of an array of barriers that begins at `first`. */
DEVICE uint32_t barrier_at(uint32_t first, int index)
{
    return first + (uint32_t)index * (uint32_t)sizeof(Barrier);
}
