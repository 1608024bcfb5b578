/* SPDX-License-Identifier: MIT
 *
 * mbarrier: barriers in shared memory (8 bytes each) whose phases end when the expected threads have arrived and the
 * expected bytes have been written by TMA (sm_90). Addresses are those of shared_address.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* By the thread that initialised them, before anything asynchronous uses them. */
INSTRUCTION(mbarrier_fence_init, "fence.mbarrier_init.release.cluster")

DEVICE void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* In one instruction: no branch. */
DEVICE void mbarrier_arrive_if(bool is, uint32_t barrier)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
            barrier),
        "r"((uint32_t)is)
        : "memory");
}

/* For `count` that are expected. */
DEVICE void mbarrier_arrive_for(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* Arrives, and the phase lasts until `bytes` more bytes have been written. */
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

/* Has the phase of this parity ended? The phases are numbered from 0; a new barrier counts as one whose phase 1 has. */
MBARRIER_ASK(mbarrier_try, "try_wait")

/* The same, without waiting a while for it. */
MBARRIER_ASK(mbarrier_test, "test_wait")

/* One thread waits. */
DEVICE void mbarrier_wait_thread(uint32_t barrier, uint32_t parity)
{
    while (!mbarrier_try(barrier, parity)) {
    }
}

/* A converged warp waits long, and leaves the schedulers to others; half a microsecond late is soon enough. */
DEVICE void mbarrier_wait_long(uint32_t barrier, uint32_t parity)
{
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) __nanosleep(500);
}

/* A converged warp waits. The vote makes the branch uniform: after a loop that ptxas takes for a divergent one it keeps no
 * matrix descriptor in uniform registers. */
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    while (!__all_sync(~0u, mbarrier_try(barrier, parity))) {
    }
}
