/* SPDX-License-Identifier: MIT
 *
 * Blocks of threads of a launch that wait for each other: all of them are at work at the same time (LAUNCH_TOGETHER).
 *
 * A meeting is a word of the workspace, which may hold anything: 40 bits of a ticket that no other launch has, 12 bits that count
 * who has left, 12 that count who has come. The last one to leave takes the ticket away, so that a graph can be launched again.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

static constexpr int MEETING_LEFT_SHIFT = 12, MEETING_TICKET_SHIFT = 24;
static constexpr uint64_t MEETING_COUNT = (1u << MEETING_LEFT_SHIFT) - 1;

/* By the thread of a block of threads that will come, as soon as the workspace is the call's: from here on the word is of this
 * launch. It takes a microsecond or two, for which there should be time. */
DEVICE void meeting_begin(uint64_t *word, uint64_t ticket)
{
    unsigned long long *const at = (unsigned long long *)word, own = ticket << MEETING_TICKET_SHIFT;
    unsigned long long now = *(volatile unsigned long long *)at;
    while ((now ^ own) >> MEETING_TICKET_SHIFT) {
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
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"((uint64_t)1) : "memory");
    do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
    } while ((now & MEETING_COUNT) < all);
    now = atomicAdd((unsigned long long *)word, 1ull << MEETING_LEFT_SHIFT);
    if ((now >> MEETING_LEFT_SHIFT & MEETING_COUNT) + 1 == all) *(volatile uint64_t *)word = 0;
}
