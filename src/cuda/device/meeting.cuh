/* SPDX-License-Identifier: MIT
 *
 * Blocks of threads of a launch that wait for each other: all of them are at work at the same time (LAUNCH_TOGETHER).
 *
 * A meeting is a word of the workspace, which may hold anything: 40 bits of a ticket that no other launch has, but another replay
 * of its graph; a bit that says that the meeting is over, and counts for nothing in the next replay; and how many have come.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

static constexpr int MEETING_TICKET_SHIFT = 24;
static constexpr uint64_t MEETING_OVER = 1u << (MEETING_TICKET_SHIFT - 1), MEETING_COUNT = MEETING_OVER - 1;

/* By the thread of a block of threads that will come, as soon as the workspace is the call's: from here on the word is of this
 * launch. It takes a microsecond or two, for which there should be time. */
DEVICE void meeting_begin(uint64_t *word, uint64_t ticket)
{
    unsigned long long *const at = (unsigned long long *)word, own = ticket << MEETING_TICKET_SHIFT;
    unsigned long long now = *(volatile unsigned long long *)at;
    while ((now ^ own) >> MEETING_TICKET_SHIFT || now & MEETING_OVER) {
        const unsigned long long before = atomicCAS(at, now, own);
        if (before == now) break;
        now = before;
    }
}

/* By one thread, after a barrier of all whose stores the others read: comes, and waits until `all` have come; a barrier after it
 * hands on what the others stored. */
DEVICE void meet(uint64_t *word, uint32_t all)
{
    uint64_t now;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(now) : "l"(word) : "memory");
    if ((now & MEETING_COUNT) + 1 == all) {
        asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(word), "l"(MEETING_OVER) : "memory");
        return;
    }
    do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
    } while ((now & MEETING_COUNT) < all);
}
