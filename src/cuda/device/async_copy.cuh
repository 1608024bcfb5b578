/* SPDX-License-Identifier: MIT
 *
 * cp.async: asynchronous copies of 16 bytes from global to shared memory (sm_80 and later).
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Returns the shared-memory address for PTX. */
DEVICE uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Copies 16 bytes, bypassing L1. If `valid` is false, reads nothing and writes zeros. */
DEVICE void cp_async_16(uint32_t to, const void *from, bool valid)
{
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* The same if `is`, with OFFSET bytes added to `from`; needs no branch, and no register for the address. */
template <int OFFSET> DEVICE void cp_async_16_if(bool is, uint32_t to, const void *from, bool valid)
{
    asm volatile("{\n.reg .pred p, none;\nsetp.ne.u32 p, %3, 0;\nsetp.eq.u32 none, %2, 0;\n"
                 "@p cp.async.cg.shared.global [%0], [%1 + %4], 16, none;\n}" ::"r"(to),
                 "l"(from), "r"((uint32_t)valid), "r"((uint32_t)is), "n"(OFFSET)
                 : "memory");
}

/* The same for 8 bytes, through L1. */
DEVICE void cp_async_8(uint32_t to, const void *from, bool valid)
{
    const int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* The same for 4 bytes, through L1. */
DEVICE void cp_async_4(uint32_t to, const void *from, bool valid)
{
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

INSTRUCTION(cp_async_commit, "cp.async.commit_group")

/* Waits until at most N of this thread's newest groups are in flight. */
INSTRUCTION_OF(cp_async_wait, "cp.async.wait_group")

/* Arrives at an mbarrier when all copies that this thread has issued so far have landed. The arrival is one
 * of the barrier's expected count. Needs sm_90 here, where mbarriers are used. */
DEVICE void cp_async_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void store_shared_2(uint32_t to, uint16_t bits)
{
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
}
