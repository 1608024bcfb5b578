/* SPDX-License-Identifier: MIT
 *
 * CTAs of a launch that wait for each other; all of them are resident at the same time (LAUNCH_COOPERATIVE).
 *
 * A barrier is a word of the workspace with any initial content. It holds 40 bits of a ticket, which no other
 * launch has except another replay of the same graph; a bit that says that all have arrived, so that the
 * next replay ignores the word; and the number of CTAs that have arrived.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

static constexpr int CTA_GROUP_BARRIER_TICKET_SHIFT = 24;
static constexpr uint64_t CTA_GROUP_BARRIER_OVER = 1u << (CTA_GROUP_BARRIER_TICKET_SHIFT - 1),
                          CTA_GROUP_BARRIER_COUNT = CTA_GROUP_BARRIER_OVER - 1;

/* Called by the thread of each CTA that will arrive, as soon as the workspace belongs to the call: afterwards
 * the word belongs to this launch. It takes a microsecond or two, so it should be called early. */
DEVICE void cta_group_barrier_begin(uint64_t *word, uint64_t ticket)
{
    unsigned long long *const at = (unsigned long long *)word, own = ticket << CTA_GROUP_BARRIER_TICKET_SHIFT;
    unsigned long long now = *(volatile unsigned long long *)at;
    while ((now ^ own) >> CTA_GROUP_BARRIER_TICKET_SHIFT || now & CTA_GROUP_BARRIER_OVER) {
        const unsigned long long before = atomicCAS(at, now, own);
        if (before == now) break;
        now = before;
    }
}

/* Arrives, and waits until `all` have arrived. Called by one thread, after a barrier of all threads whose
 * stores the other CTAs read; a barrier after it makes the other CTAs' stores visible to them. */
DEVICE void cta_group_barrier_arrive_and_wait(uint64_t *word, uint32_t all)
{
    uint64_t now;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(now) : "l"(word) : "memory");
    if ((now & CTA_GROUP_BARRIER_COUNT) + 1 == all) {
        asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(word), "l"(CTA_GROUP_BARRIER_OVER)
                     : "memory");
        return;
    }
    do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
    } while ((now & CTA_GROUP_BARRIER_COUNT) < all);
}
