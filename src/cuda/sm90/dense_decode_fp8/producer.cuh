/* SPDX-License-Identifier: MIT
 *
 * The producer: one thread asks for keys, another for queries that are given as codes; TMA brings them.
 */
#pragma once

#include "layout.cuh"

/* Keys that only this block of threads reads leave L2 first. */
DEVICE void load_keys(uint32_t to, const struct tensor_map *map, uint32_t full, const BoxPlace &at,
                      bool alone)
{
    if (alone)
        tma_load_once(to, map, full, at);
    else
        tma_load(to, map, full, at);
}

/* Asks for a block of keys, by one thread. */
template <typename V>
DEVICE void ask_for_keys(const struct dense_decode_fp8_params &p, uint32_t base, int buffer,
                         const KeyBox &box)
{
    using Shared = SharedOf<V>;
    const uint32_t full = barrier_at(SHARED_AT(base, keys_full), buffer),
                   to = SHARED_AT(base, keys) + (uint32_t)(buffer * V::KEYS_BYTES);
    const BoxPlace at = {0, box.key, 0, box.page, 0};
    const bool alone = p.dense.tiles_of_head == 1;
    mbarrier_arrive_expect(full, V::KEYS_BYTES);
    load_keys(to, &p.dense.keys, full, at, alone);
    load_keys(to + LINES * KEY_TILE_BYTES, &p.dense.rope, full, at, alone);
    if (V::SCALED) load_keys(to + LINES * KEY_TILE_BYTES + ROPE_BYTES, &p.scales, full, at, alone);
}

/* Where all blocks of keys stand, piece after piece, one after the other; a warp goes together. A block costs few instructions, and a page is read
 * from the table a page before it is needed. Without a table page r belongs to request r. */
template <typename V> struct KeyBoxes {
    const struct dense_decode_sm90_params &p;
    const SharedOf<V> &shared;
    Turn<V::BUFFERS> turn; /* the block's buffer */
    int piece, left = 0 /* blocks of the piece, this one included; none at the end of all */;
    int key = 0, page = 0 /* where the block stands */, page_behind = 0;
    const int32_t *table; /* behind the page of the block */

    DEVICE KeyBoxes(const struct dense_decode_sm90_params &params, const SharedOf<V> &memory)
        : p(params), shared(memory), piece(memory.list.first), table(params.call.block_table)
    {
        find_piece();
    }

    DEVICE int page_size() const { return p.call.block_table ? p.call.page_size : INT32_MAX; }

    /* The first piece from the one in hand on that has blocks. */
    DEVICE void find_piece()
    {
        left = 0;
#pragma unroll 1
        for (; __all_sync(~0u, piece <= shared.list.last); piece += shared.list.step) {
            const Work work = work_of<V>(p, shared, piece, Place(p));
            if (__all_sync(~0u, work.blocks == 0)) continue;
            left = work.blocks, key = work.task.piece.begin, page = work.task.piece.request;
            if (!p.call.block_table) return;
            const int number = fast_divide(key, p.call.page_divisor);
            table = p.call.block_table + page * p.call.block_table_stride + number;
            key -= number * p.call.page_size;
            page = __ldg(table++);
            if ((unsigned)(left * KEYS) > (unsigned)(page_size() - key)) page_behind = __ldg(table);
            return;
        }
    }

    DEVICE bool more() const
    {
        return __all_sync(~0u, left > 0);
    }

    /* The next one; behind the last one a page of -1. */
    DEVICE KeyBox next()
    {
        const KeyBox box = {key, left > 0 ? page * p.page_step : -1};
        turn.next();
        left--;
        if (__all_sync(~0u, left <= 0)) {
            piece += shared.list.step;
            find_piece();
            return box;
        }
        key += KEYS;
        if (key == page_size()) {
            key = 0, page = page_behind, table++;
            if ((unsigned)(left * KEYS) > (unsigned)page_size()) page_behind = __ldg(table);
        }
        return box;
    }
};

/* By a warp of its own. */
template <typename V>
DEVICE void produce_keys(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared, uint32_t base)
{
    using Shared = SharedOf<V>;
    KeyBoxes<V> boxes(p.dense, shared);
#pragma unroll 1
    while (boxes.more()) {
        const Turn<V::BUFFERS> turn = boxes.turn;
        const KeyBox box = boxes.next();
        mbarrier_wait(barrier_at(SHARED_AT(base, keys_empty), turn.index), turn.parity ^ 1);
        if (elect_one()) ask_for_keys<V>(p, base, turn.index, box);
        __syncwarp();
    }
}

/* Where softmax has no warp to spare: asks for the first blocks, and then leaves with each block where that stands which comes into its
 * buffer. Who is the last to need the buffer asks for it (Values). */
template <typename V> struct BoxWriter {
    const struct dense_decode_fp8_params &p;
    SharedOf<V> &shared;
    KeyBoxes<V> boxes;

    DEVICE BoxWriter(const struct dense_decode_fp8_params &params, SharedOf<V> &memory)
        : p(params), shared(memory), boxes(params.dense, memory)
    {
    }

    DEVICE void begin()
    {
#pragma unroll 1
        for (int i = 0; i < V::BUFFERS; i++) {
            const KeyBox box = boxes.next();
            if (__all_sync(~0u, box.page >= 0) && elect_one())
                ask_for_keys<V>(p, shared_address(&shared), i, box);
            __syncwarp();
        }
    }

    /* With the block that is in the buffer now. */
    DEVICE void leave()
    {
        const int buffer = boxes.turn.index;
        const KeyBox box = boxes.next();
        if (elect_one()) shared.box[buffer] = box;
    }
};

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
