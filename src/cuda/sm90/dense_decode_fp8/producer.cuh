/* SPDX-License-Identifier: MIT
 *
 * The producer: one thread asks for keys, another for queries that are given as codes; TMA brings them.
 */
#pragma once

#include "layout.cuh"

/* The page of block `block` of a piece; without a table page r belongs to request r. */
DEVICE int page_of_block(const struct dense_decode_sm90_params &p, const Task &task, int block)
{
    if (!p.call.block_table) return task.piece.request * p.page_step;
    const int index = fast_divide(task.piece.begin + block * KEYS, p.call.page_divisor);
    return __ldg(p.call.block_table + task.piece.request * p.call.block_table_stride + index) * p.page_step;
}

DEVICE BoxPlace place_of_block(const struct dense_decode_sm90_params &p, const Task &task, int block,
                               int page)
{
    const int key = task.piece.begin + block * KEYS;
    const int first = p.call.block_table ? fast_divide(key, p.call.page_divisor) * p.call.page_size : 0;
    return {0, key - first, 0, page, 0};
}

/* Keys that only this block of threads reads leave L2 first. */
DEVICE void load_keys(uint32_t to, const struct tensor_map *map, uint32_t full, const BoxPlace &at,
                      bool alone)
{
    if (alone)
        tma_load_once(to, map, full, at);
    else
        tma_load(to, map, full, at);
}

template <typename V>
DEVICE void produce_keys(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared,
                         const Place &place, uint32_t base)
{
    using Shared = SharedOf<V>;
    const bool alone = p.dense.tiles_of_head == 1;
    Turn<V::BUFFERS> turn;
    for (int i = shared.list.first; i <= shared.list.last; i += shared.list.step) {
        const Work work = work_of<V>(p.dense, shared, i, place);
        if (work.blocks == 0) continue;
        int page = page_of_block(p.dense, work.task, 0);
        for (int block = 0; block < work.blocks; block++, turn.next()) {
            /* The table is read a block before it is needed. */
            const int next = page_of_block(p.dense, work.task, min(block + 1, work.blocks - 1));
            const uint32_t full = barrier_at(SHARED_AT(base, keys_full), turn.index),
                           to = SHARED_AT(base, keys) + (uint32_t)(turn.index * V::KEYS_BYTES);
            const BoxPlace at = place_of_block(p.dense, work.task, block, page);
            mbarrier_wait_thread(barrier_at(SHARED_AT(base, keys_empty), turn.index), turn.parity ^ 1);
            mbarrier_arrive_expect(full, V::KEYS_BYTES);
            load_keys(to, &p.dense.keys, full, at, alone);
            load_keys(to + LINES * KEY_TILE_BYTES, &p.dense.rope, full, at, alone);
            if (V::SCALED) load_keys(to + LINES * KEY_TILE_BYTES + ROPE_BYTES, &p.scales, full, at, alone);
            page = next;
        }
    }
}

template <typename V>
DEVICE void produce_queries(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared,
                            const Place &place, uint32_t base)
{
    using Shared = SharedOf<V>;
    const uint32_t full = SHARED_AT(base, q_full), to = SHARED_AT(base, q);
    const int row = place.tile * V::ROWS;
    uint32_t count = 0;
    for (int i = shared.list.first; i <= shared.list.last; i += shared.list.step) {
        const Work work = work_of<V>(p.dense, shared, i, place);
        if (work.blocks == 0) continue;
        const BoxPlace at = {0, row % p.dense.q_heads, row / p.dense.q_heads, 0,
                             work.task.piece.request * p.dense.request_step};
        mbarrier_wait_thread(SHARED_AT(base, q_empty), ~count & 1);
        mbarrier_arrive_expect(full, V::ROWS * D_QK);
        tma_load(to, &p.dense.queries, full, at);
        tma_load(to + LINES * Shared::QUERY_TILE_BYTES, &p.queries_end, full, at);
        count++;
    }
}
