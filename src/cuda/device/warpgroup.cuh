/* SPDX-License-Identifier: MIT
 *
 * Warp specialisation on Hopper: the elected thread of a warp, register reallocation between warpgroups,
 * named barriers, fences between ordinary and asynchronous accesses, overlapping kernels (sm_90).
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Read threadIdx.x and blockIdx.x anew, so that values computed from them in a rare step are not kept in
 * registers through the surrounding loops. */
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

/* Returns true in one lane of a converged warp. ptxas recognises the form and issues TMA under it once, not
 * in a loop over lanes. */
DEVICE bool elect_one()
{
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}

/* Set the registers that each thread may use from here on, a multiple of 8. All warps of a warpgroup must
 * call. */
template <int REGISTERS> DEVICE void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> DEVICE void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* Waits at barrier `id` (1 … 15; 0 is __syncthreads) for `threads` threads. */
DEVICE void barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives without waiting. This thread's earlier writes are visible to the threads that wait with
 * barrier_sync. */
DEVICE void barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Orders this thread's accesses to shared memory, and the writes that it has observed, before later accesses
 * by wgmma and TMA. */
INSTRUCTION(fence_async_shared, "fence.proxy.async.shared::cta")

/* Orders writes to global memory by other CTAs that this thread has acquired before reads by later bulk
 * copies. */
INSTRUCTION(fence_async_global, "fence.proxy.async.global")

/* In a kernel launched with LAUNCH_OVERLAP: waits until the preceding kernels have ended and their writes are
 * visible. */
INSTRUCTION(wait_for_kernels_before, "griddepcontrol.wait")

/* Allows the next kernel of the stream to launch as soon as every CTA has called this or ended. */
INSTRUCTION(let_next_kernel_start, "griddepcontrol.launch_dependents")
