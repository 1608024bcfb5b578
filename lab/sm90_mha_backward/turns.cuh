/* SPDX-License-Identifier: MIT
 *
 * Deterministic: the blocks of keys of a head add to a tile's dQ in an order that hangs on the sizes alone. A counter a tile and consumer
 * says how many have; a warp of the first warpgroup waits for it ahead of its consumer, and counts what that has added, so that the
 * consumer itself waits neither for memory nor for a fence.
 *
 *   causal   the last block first, as it is the first to come to the tile: each begins at its own diagonal. They are taken in that order,
 *            so that a block of threads waits only for others that are at work
 *   full     the first block first; all begin with the first tile, and are taken in that order
 */
#pragma once

#include "walk.cuh"

template <typename Layout> struct TurnKeeper {
    const lab_backward_sm90_params &p;
    const Layout l;
    const int group; /* of which consumer */

    /* How many blocks add to the tile before this item's does. */
    DEVICE int before(const Walk<Layout> &t, uint32_t item) const
    {
        const int block = word_at(item + offsetof(Item, block)), blocks = word_at(item + offsetof(Item, blocks));
        if (p.call.causal) return min((Layout::ROWS - 1 - t.diagonal) / Layout::KEYS, blocks - 1 - block);
        return block;
    }

    DEVICE void run() const
    {
        uint32_t n = 0;
        for (Ring<ITEM_SLOTS> slot;; slot.step()) {
            const uint32_t item = l.item(slot.at);
            mbarrier_wait(l.barrier(Layout::ITEM_FULL, slot.at), slot.parity);
            if (word_at(item + offsetof(Item, tiles)) < 0) return;
            Walk<Layout> t;
            t.begin(p, item);
            for (bool more = t.left; more; n++) {
                uint32_t *counter = p.turns + (int64_t)t.at * Layout::CONSUMERS + group, now;
                const uint32_t wanted = (uint32_t)before(t, item);
                do {
                    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
                } while (__any_sync(~0u, now != wanted));
                if (elect_one()) mbarrier_arrive(l.barrier(Layout::TURN + 2 * group, (int)(n % 2)));
                mbarrier_wait(l.barrier(Layout::ADDED + 2 * group, (int)(n % 2)), n / 2 % 2);
                if (elect_one()) /* what the consumer has added comes before it, as this warp has seen that consumer arrive */
                    asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(counter), "r"(wanted + 1) : "memory");
                more = t.step(p, item);
            }
            __syncwarp();
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::ITEM_EMPTY, slot.at));
        }
    }
};
