/* SPDX-License-Identifier: MIT
 *
 * The producer: one thread issues TMA loads of keys, another of queries. It never drains: while the sides
 * finish a split, the keys of the next one arrive.
 */
#pragma once

#include "layout.cuh"

namespace dense_decode {

/* Returns the page of block `block` of a split. Without a table page r belongs to request r. */
DEVICE int block_page(const struct dense_decode_sm90_params &p, const Task &task, int block)
{
    if (!p.call.block_table) return task.split.request * p.page_step;
    const int index = fast_divide(task.split.begin + block * KEYS, p.call.page_divisor);
    return __ldg(p.call.block_table + task.split.request * p.call.block_table_stride + index) * p.page_step;
}

/* Returns the coordinates of the block in the cache. */
DEVICE TmaCoord block_coord(const struct dense_decode_sm90_params &p, const Task &task, int block, int page)
{
    const int key = task.split.begin + block * KEYS;
    const int first = p.call.block_table ? fast_divide(key, p.call.page_divisor) * p.call.page_size : 0;
    return {0, key - first, 0, page, task.kv_head};
}

/* Returns the same keys from column group `group` on. */
DEVICE TmaCoord columns_from(TmaCoord coord, int group)
{
    coord.z = group;
    return coord;
}

/* Keys that only this CTA reads are loaded with evict-first: partial results of split requests then stay
 * in L2 until they are joined, and never wait for memory. */
template <typename V>
DEVICE void load_keys(uint32_t to, const struct tensor_map *map, uint32_t barrier, TmaCoord at)
{
    if (V::SHARED_KEYS)
        tma_load(to, map, barrier, at);
    else
        tma_load_once(to, map, barrier, at);
}

/* Loads the keys of one block in the order in which the owner's products take them: the columns that are
 * released first come first. */
template <typename V>
DEVICE void load_block(const struct dense_decode_sm90_params &p, uint32_t smem, int side, uint32_t parity,
                       TmaCoord coord)
{
    if constexpr (V::ROPE) {
        const uint32_t full = barrier_at(SHARED_AT(smem, barriers.rope_full), side);
        mbarrier_wait_thread(barrier_at(SHARED_AT(smem, barriers.rope_empty), side), parity ^ 1);
        mbarrier_arrive_expect(full, TILE_BYTES);
        load_keys<V>(SHARED_AT(smem, tiles.rope) + (uint32_t)side * TILE_BYTES, &p.rope, full,
                     columns_from(coord, D_V / LINE_ELEMENTS));
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = unit_in_order(side, i);
        const uint32_t full = barrier_at(SHARED_AT(smem, barriers.keys_full), side * UNITS + unit);
        mbarrier_wait_thread(barrier_at(SHARED_AT(smem, barriers.keys_empty), side * UNITS + unit),
                             parity ^ 1);
        mbarrier_arrive_expect(full, UNIT_BYTES);
        load_keys<V>(unit_at(smem, side, unit), &p.keys, full, columns_from(coord, 2 * unit));
    }
}

/* Waits until nobody reads the stage of the side's next block. */
template <typename V> DEVICE void wait_for_stage(uint32_t smem, int side, uint32_t parity)
{
    if constexpr (V::ROPE)
        mbarrier_wait_thread(barrier_at(SHARED_AT(smem, barriers.rope_empty), side), parity ^ 1);
#pragma unroll 1
    for (int unit = 0; unit < UNITS; unit++)
        mbarrier_wait_thread(barrier_at(SHARED_AT(smem, barriers.keys_empty), side * UNITS + unit),
                             parity ^ 1);
}

template <typename V> DEVICE void prefetch_block(const struct dense_decode_sm90_params &p, TmaCoord coord)
{
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) tma_prefetch(&p.keys, columns_from(coord, 2 * unit));
    if (V::ROPE) tma_prefetch(&p.rope, columns_from(coord, D_V / LINE_ELEMENTS));
}

/* Returns the parities (bit `side`) that the next block of either side would have. */
template <typename V>
DEVICE uint32_t produce_keys(const struct dense_decode_sm90_params &p, const SplitList &list,
                             const CtaCoord &cta, const Shared &shared, uint32_t smem)
{
    uint32_t parities = 0; /* bit `side`: parity of the side's blocks so far */
    for (int i = list.first; i <= list.last; i += list.step) {
        const WorkTile work = work_tile_of<V>(p, list, shared, i, cta);
        if (work.blocks == 0) continue;
        const int last = work.blocks - 1;
        int until_prefetch = cta.tile; /* blocks until it is this tile that prefetches */
        int page = block_page(p, work.task, 0),
            page_ahead = V::SHARED_KEYS ? block_page(p, work.task, min(V::BLOCKS_AHEAD, last)) : 0;
        for (int block = 0; block <= last; block++) {
            /* The table is read one block ahead. */
            const int next = block_page(p, work.task, min(block + 1, last));
            if (V::SHARED_KEYS) {
                const int ahead = block + V::BLOCKS_AHEAD;
                const int next_ahead = block_page(p, work.task, min(ahead + 1, last));
                if (until_prefetch == 0 && ahead <= last)
                    prefetch_block<V>(p, block_coord(p, work.task, ahead, page_ahead));
                until_prefetch = until_prefetch == 0 ? p.tiles_of_head - 1 : until_prefetch - 1;
                page_ahead = next_ahead;
            }
            const int side = block & 1;
            load_block<V>(p, smem, side, parities >> side & 1, block_coord(p, work.task, block, page));
            parities ^= 1u << side;
            page = next;
        }
    }
    return parities;
}

template <typename V>
DEVICE void produce_queries(const struct dense_decode_sm90_params &p, const SplitList &list,
                            const CtaCoord &cta, const Shared &shared, uint32_t smem)
{
    const uint32_t full = SHARED_AT(smem, barriers.q_full);
    const int row = cta.tile * ROWS;
    uint32_t count = 0;
    for (int i = list.first; i <= list.last; i += list.step) {
        const WorkTile work = work_tile_of<V>(p, list, shared, i, cta);
        if (work.blocks == 0) continue;
        mbarrier_wait_thread(SHARED_AT(smem, barriers.q_empty), ~count & 1);
        mbarrier_arrive_expect(full, UNITS * UNIT_BYTES);
        TmaCoord at = {0, cta.kv_head * p.q_heads + row % p.q_heads, row / p.q_heads, 0,
                       work.task.split.request * p.request_step};
        for (int unit = 0; unit < UNITS; unit++, at.v += 2)
            tma_load(SHARED_AT(smem, tiles.q) + (uint32_t)unit * UNIT_BYTES, &p.queries, full, at);
        if (V::ROPE) tma_prefetch(&p.queries, at); /* the sides read these columns themselves */
        count++;
    }
}

} // namespace dense_decode
