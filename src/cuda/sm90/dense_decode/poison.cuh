/* SPDX-License-Identifier: MIT
 *
 * Keeps V of keys that a row does not see out of its result. Such a key has weight 0 in that row, but 0 × NaN
 * is NaN:
 * - Keys that no row of the tile sees may hold anything: they are zeroed before they are multiplied.
 * - Keys that only some rows see (causal, several tokens) count in those rows, whatever they hold. An
 *   infinity or a NaN among them poisons the split: it is redone row by row after all other splits.
 */
#pragma once

#include "../../device/by_rows.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include "../sides/products.cuh"

/* Zeroes keys from … 63 of a block; called by all threads of the side. */
DEVICE void clear_keys(uint32_t base, int side, int from)
{
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
#pragma unroll 1
    for (int i = (int)(fresh_thread() % WARPGROUP_THREADS); i < (KEYS - from) * CHUNKS;
         i += WARPGROUP_THREADS)
        store_zero_16(unit_at(base, side, 0) + (uint32_t)(i / 8 % 8) * TILE_BYTES +
                      (uint32_t)(from + i / CHUNKS) * LINE_BYTES + (uint32_t)(i % 8) * CHUNK_BYTES);
}

/* Returns true in the threads of a side that found an infinity or a NaN in keys from … to - 1 of its
 * block. */
template <typename Element> DEVICE bool not_finite(uint32_t base, int side, int from, int to)
{
    constexpr int WORDS = D_V / 2;
    bool found = false;
#pragma unroll 1
    for (int i = (int)(fresh_thread() % WARPGROUP_THREADS); i < (to - from) * WORDS; i += WARPGROUP_THREADS)
        found |= any_not_finite<Element>(
            load_shared_4(unit_at(base, side, 0) + (uint32_t)(i / 32 % 8) * TILE_BYTES +
                          (uint32_t)(from + i / WORDS) * LINE_BYTES + (uint32_t)(i % 32) * 4));
    return found;
}

/* Returns whether a split is poisoned. Every warp checks for itself, in the cache. */
template <typename Element> DEVICE bool poisoned(const struct dense_decode_params &p, const Task &task)
{
    bool found = false;
    for (int key = max(task.split.begin, task.all_see); key < task.end; key++) {
        const uint32_t *words = (const uint32_t *)key_of(p, task, key);
        for (int i = (int)threadIdx.x % 32; i < D_V / 2; i += 32) found |= any_not_finite<Element>(words[i]);
    }
    return __any_sync(~0u, found);
}

/* Rewrites the results of the poisoned splits; called by the warps of both sides after the last split. */
template <typename Element>
DEVICE void redo_poisoned(const struct dense_decode_sm90_params &p, const SplitList &list, const Place &place)
{
    const int warp = (int)(threadIdx.x - WARPGROUP_THREADS) / 32, warps = 2 * WARPGROUP_THREADS / 32;
#pragma unroll 1
    for (int i = list.first; i <= list.last; i += list.step) {
        const Work work(p, list, i, place.kv_head, place.tile * ROWS, ROWS);
        if (poisoned<Element>(p.call, work.task))
            attend_by_rows<Element>(p.call, work.task, ROWS, warp, warps);
    }
}
