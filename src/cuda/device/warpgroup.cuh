/* SPDX-License-Identifier: MIT
 *
 * Hopper's block of threads in roles: one thread of a warp, registers moved between warpgroups, barriers of some warps,
 * the order of ordinary and asynchronous accesses, kernels that overlap (sm_90).
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* threadIdx.x and blockIdx.x, read anew: what a rare step computes from them is not kept in registers through the loops
 * around it. */
DEVICE unsigned fresh_thread()
{
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

DEVICE int fresh_block()
{
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

/* True in one lane of a converged warp. ptxas knows the form: TMA under it is issued once, not in a loop over lanes. */
DEVICE bool elect_one()
{
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}

/* By all warps of a warpgroup: the registers that each thread may use from here on, a multiple of 8. */
template <int REGISTERS> DEVICE void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> DEVICE void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* Barrier `id` (1 … 15; 0 is __syncthreads) of `threads` threads. */
DEVICE void barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives there for threads that wait by barrier_sync: what this thread wrote comes before what they do then. */
DEVICE void barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* What this thread wrote to shared memory, read from it, or has seen written there, comes before what wgmma and TMA do after it. */
INSTRUCTION(fence_async_shared, "fence.proxy.async.shared::cta")

/* What other blocks of threads wrote to global memory, and this thread has acquired, comes before what bulk copies read. */
INSTRUCTION(fence_async_global, "fence.proxy.async.global")

/* In a kernel launched with LAUNCH_OVERLAP: waits until the kernels in front have ended and their writes are seen. */
INSTRUCTION(wait_for_kernels_before, "griddepcontrol.wait")

/* The next kernel of the stream may be launched as soon as every block has come here or ended. */
INSTRUCTION(let_next_kernel_start, "griddepcontrol.launch_dependents")
