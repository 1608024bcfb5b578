/* SPDX-License-Identifier: MIT
 *
 * The producer: one thread issues TMA loads of keys, another of queries that are given as codes.
 */
#pragma once

#include "layout.cuh"

namespace dense_decode_fp8 {

/* Loads keys. Those that only this CTA reads (`alone`) are loaded with evict-first. */
DEVICE void load_keys(uint32_t to, const struct tensor_map *map, uint32_t full, const TmaCoord &at,
                      bool alone)
{
    if (alone)
        tma_load_once(to, map, full, at);
    else
        tma_load(to, map, full, at);
}

/* Requests a block of keys; called by one thread. */
template <typename V>
DEVICE void ask_for_keys(const struct dense_decode_fp8_params &p, uint32_t smem, int stage, const KeyBox &box)
{
    using Shared = SharedOf<V>;
    const uint32_t full = barrier_at(SHARED_AT(smem, keys_full), stage),
                   to = SHARED_AT(smem, keys) + (uint32_t)(stage * V::KEYS_BYTES);
    const TmaCoord at = {0, box.key, 0, box.page, 0};
    const bool alone = p.dense.tiles_of_head == 1;
    mbarrier_arrive_expect(full, V::KEYS_BYTES);
    load_keys(to, &p.dense.keys, full, at, alone);
    load_keys(to + LINES * KEY_TILE_BYTES, &p.dense.rope, full, at, alone);
    if (V::SCALED) load_keys(to + LINES * KEY_TILE_BYTES + ROPE_BYTES, &p.scales, full, at, alone);
}

/* Iterates over the positions of all blocks of keys, split after split; the lanes of a warp call it
 * together. A block costs few instructions, and the table is read one page ahead. Without a table page r
 * belongs to request r. */
template <typename V> struct KeyBoxes {
    const struct dense_decode_sm90_params &p;
    const SharedOf<V> &shared;
    KeyPosition at;

    DEVICE KeyBoxes(const struct dense_decode_sm90_params &params, const SharedOf<V> &memory,
                    const KeyPosition &from)
        : p(params), shared(memory), at(from)
    {
    }

    DEVICE KeyBoxes(const struct dense_decode_sm90_params &params, const SharedOf<V> &memory)
        : p(params), shared(memory)
    {
        at.index = 0, at.split = memory.list.first;
        find_split();
    }

    DEVICE int page_size() const { return p.call.block_table ? p.call.page_size : INT32_MAX; }

    /* Finds the first split that has blocks, from the current one on. */
    DEVICE void find_split()
    {
        at.left = at.key = at.page = at.page_behind = 0, at.table = NULL;
#pragma unroll 1
        for (; __all_sync(~0u, at.split <= shared.list.last); at.split += shared.list.step) {
            const WorkTile work = work_tile_of<V>(p, shared, at.split, CtaCoord(p));
            if (__all_sync(~0u, work.blocks == 0)) continue;
            at.left = work.blocks, at.key = work.task.split.begin, at.page = work.task.split.request;
            if (!p.call.block_table) return;
            const int number = fast_divide(at.key, p.call.page_divisor);
            at.table = p.call.block_table + at.page * p.call.block_table_stride + number;
            at.key -= number * p.call.page_size;
            at.page = __ldg(at.table++);
            if ((unsigned)(at.left * KEYS) > (unsigned)(page_size() - at.key))
                at.page_behind = __ldg(at.table);
            return;
        }
    }

    DEVICE int kv_stage() const
    {
        return at.index % V::KV_STAGES;
    }
    DEVICE uint32_t round() const
    {
        return at.index >= V::KV_STAGES;
    }

    DEVICE bool more() const
    {
        return __all_sync(~0u, at.left > 0);
    }

    /* Returns the next block; past the last one its page is -1. */
    DEVICE KeyBox next()
    {
        const KeyBox box = {at.key, at.left > 0 ? at.page * p.page_step : -1};
        at.index = at.index == 2 * V::KV_STAGES - 1 ? 0 : at.index + 1;
        at.left--;
        if (__all_sync(~0u, at.left <= 0)) {
            at.split += shared.list.step;
            find_split();
            return box;
        }
        at.key += KEYS;
        if (at.key == page_size()) {
            at.key = 0, at.page = at.page_behind, at.table++;
            if ((unsigned)(at.left * KEYS) > (unsigned)page_size()) at.page_behind = __ldg(at.table);
        }
        return box;
    }
};

/* Requests all keys; called by a warp that has no other role. */
template <typename V>
DEVICE void produce_keys(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared, uint32_t smem)
{
    using Shared = SharedOf<V>;
    KeyBoxes<V> boxes(p.dense, shared);
#pragma unroll 1
    while (boxes.more()) {
        const int stage = boxes.kv_stage();
        const uint32_t round = boxes.round();
        const KeyBox box = boxes.next();
        mbarrier_wait(barrier_at(SHARED_AT(smem, keys_empty), stage), round ^ 1);
        if (elect_one()) ask_for_keys<V>(p, smem, stage, box);
        __syncwarp();
    }
}

/* Requests the first blocks; called by a softmax warp where softmax has no warp to spare. */
template <typename V>
DEVICE void ask_for_first_keys(const struct dense_decode_fp8_params &p, SharedOf<V> &shared)
{
    KeyBoxes<V> boxes(p.dense, shared);
#pragma unroll 1
    for (int i = 0; i < V::KV_STAGES; i++) {
        const KeyBox box = boxes.next();
        if (__all_sync(~0u, box.page >= 0) && elect_one())
            ask_for_keys<V>(p, shared_address(&shared), i, box);
        __syncwarp();
    }
    if (elect_one()) boxes.at.index = 0, shared.behind_boxes = boxes.at;
    __syncwarp();
}

/* Stores the position of the block that the next stage receives; called by the same warp with each block.
 * The last warp that needs the stage requests that block (Mainloop). The previous position for this stage
 * may not have been read yet, so there are two. */
template <typename V> DEVICE void leave_next_box(const struct dense_decode_fp8_params &p, SharedOf<V> &shared)
{
    KeyBoxes<V> boxes(p.dense, shared, shared.behind_boxes);
    KeyBox &to = shared.box[boxes.round()][boxes.kv_stage()];
    const KeyBox box = boxes.next();
    __syncwarp(); /* all lanes have read */
    if (elect_one()) to = box, shared.behind_boxes = boxes.at;
    __syncwarp();
}

template <typename V>
DEVICE void produce_queries(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared,
                            const CtaCoord &cta, uint32_t smem)
{
    using Shared = SharedOf<V>;
    const uint32_t full = SHARED_AT(smem, q_full), to = SHARED_AT(smem, q);
    const int row = cta.tile * V::ROWS;
    uint32_t count = 0;
    for (int i = shared.list.first; i <= shared.list.last; i += shared.list.step) {
        const WorkTile work = work_tile_of<V>(p.dense, shared, i, cta);
        if (work.blocks == 0) continue;
        const TmaCoord at = {0, row % p.dense.q_heads, row / p.dense.q_heads, 0,
                             work.task.split.request * p.dense.request_step};
        mbarrier_wait_thread(SHARED_AT(smem, q_empty), ~count & 1);
        mbarrier_arrive_expect(full, V::ROWS * D_QK);
        tma_load(to, &p.dense.queries, full, at);
        tma_load(to + LINES * Shared::QUERY_TILE_BYTES, &p.queries_end, full, at);
        count++;
    }
}

} // namespace dense_decode_fp8
