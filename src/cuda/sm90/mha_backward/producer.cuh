/* SPDX-License-Identifier: MIT
 *
 * The producer warp takes work tiles (a block of keys of a key head), publishes them to the consumers, and
 * loads K and V of a work tile and, for every head and tile of rows that sees one of its keys, Q, dO, lse and
 * delta.
 *
 * Past the last token of a ragged request stand another request's data, which would be multiplied by 0. They
 * are cleared before the consumers see them, so that the consumers need no masks for them.
 */
#pragma once

#include "layout.cuh"

#include "../../device/backward_requests.cuh"

namespace mha_backward {

template <typename Layout> struct Producer {
    static constexpr int ROWS = Layout::ROWS, KEYS = Layout::KEYS;

    const mha_backward_sm90_params &p;
    const Layout l;

    Ring<Layout::Q_STAGES> q_stage;
    Ring<Layout::DO_STAGES> dout_stage;
    Ring<WORK_STAGES> work_stage;
    uint32_t keys_parity = 1, raw_parity = 0;

    /* Issues `load`, which completes on the barrier `full`. The first `used` of the `lines` lines of each
     * tile are valid; in ragged calls the others are cleared. */
    template <typename Load>
    DEVICE void fill(uint32_t full, uint32_t bytes, uint32_t at, uint32_t tile_bytes, uint32_t line_bytes,
                     int tiles, int used, int lines, Load load)
    {
        const bool clears = p.call.starts_q && used < lines;
        const uint32_t barrier = clears ? l.barrier(Layout::RAW) : full;
        if (elect_one()) {
            mbarrier_arrive_expect(barrier, bytes);
            load(barrier);
        }
        if (!clears) return;
        mbarrier_wait(barrier, raw_parity);
        raw_parity ^= 1;
        const int chunks = (lines - used) * (int)line_bytes / CHUNK_BYTES;
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < chunks * tiles; i += 32)
            store_zero_16(at + (uint32_t)(i / chunks) * tile_bytes + (uint32_t)used * line_bytes +
                          (uint32_t)(i % chunks) * CHUNK_BYTES);
        fence_async_shared();
        __syncwarp();
        if (elect_one()) mbarrier_arrive(full);
    }

    DEVICE void load_rows(const Request &r, int head, int tile)
    {
        const int token = r.token + tile * ROWS, used = min(r.tokens - tile * ROWS, ROWS);
        const int request = p.call.starts_q ? 0 : r.index;
        mbarrier_wait(l.barrier(Layout::Q_EMPTY, q_stage.index), q_stage.parity ^ 1);
        fill(l.barrier(Layout::Q_FULL, q_stage.index), Layout::Q_BYTES + Layout::STATS_BYTES,
             l.q(q_stage.index), Layout::ROW_TILE, LINE_BYTES, Layout::D_QK / 64, used, ROWS,
             [&](uint32_t barrier) {
                 tma_load(l.q(q_stage.index), &p.q, barrier, {0, token, head, 0, request});
                 bulk_load(l.stats(q_stage.index),
                           p.rows + ((int64_t)head * p.row_tiles + r.row_tile + tile) * 2 * ROWS,
                           Layout::STATS_BYTES, barrier);
             });
        q_stage.advance();
        mbarrier_wait(l.barrier(Layout::DO_EMPTY, dout_stage.index), dout_stage.parity ^ 1);
        fill(l.barrier(Layout::DO_FULL, dout_stage.index), Layout::DO_BYTES, l.dout(dout_stage.index),
             Layout::ROW_TILE, LINE_BYTES, Layout::D_V / 64, used, ROWS, [&](uint32_t barrier) {
                 tma_load(l.dout(dout_stage.index), &p.dout, barrier, {0, token, head, 0, request});
             });
        dout_stage.advance();
    }

    DEVICE void load_keys(const Request &r, int head, int block)
    {
        const int key = r.key + block * KEYS, used = min(r.keys - block * KEYS, KEYS);
        const int request = p.call.starts_q ? 0 : r.index;
        mbarrier_wait(l.barrier(Layout::KEYS_EMPTY), keys_parity);
        keys_parity ^= 1;
        fill(l.barrier(Layout::K_FULL), Layout::K_BYTES, l.k(), Layout::K_TILE, Layout::K_LINE,
             Layout::D_QK / Layout::K_COLUMNS, used, KEYS, [&](uint32_t barrier) {
                 tma_load(l.k(), &p.k, barrier, {0, key, head, 0, request});
             });
        fill(l.barrier(Layout::V_FULL), Layout::V_BYTES, l.v(), Layout::V_TILE, LINE_BYTES, Layout::D_V / 64,
             used, KEYS, [&](uint32_t barrier) {
                 tma_load(l.v(), &p.v, barrier, {0, key, head, 0, request});
             });
    }

    DEVICE void publish(const uint4 &keys, const uint4 &rows, int start, int order)
    {
        mbarrier_wait(l.barrier(Layout::WORK_EMPTY, work_stage.index), work_stage.parity ^ 1);
        if (elect_one()) {
            store_shared_16(l.work(work_stage.index), keys),
                store_shared_16(l.work(work_stage.index) + 16, rows);
            store_shared_4(l.work(work_stage.index) + offsetof(WorkTile, start), (uint32_t)start);
            store_shared_4(l.work(work_stage.index) + offsetof(WorkTile, order), (uint32_t)order);
            mbarrier_arrive(l.barrier(Layout::WORK_FULL, work_stage.index));
        }
        work_stage.advance();
    }

    /* Processes item number `i`. Within a request, items are ordered by sets of key heads whose rows and sums
     * of dQ fit L2; within a set, the key blocks with the most rows come first. */
    DEVICE void take(int i)
    {
        const Request r = find_request<false, ROWS, KEYS>(p.call, fast_divide(i, p.key_heads_divisor));
        const int within = i - r.key_block * p.call.h_kv, set = within / (r.room * p.heads_of_set),
                  first_of_set = set * p.heads_of_set,
                  heads = min(p.call.h_kv - first_of_set, p.heads_of_set),
                  in_set = within - first_of_set * r.room, head = first_of_set + in_set % heads;
        const int number = in_set / heads, blocks = (r.keys + KEYS - 1) / KEYS,
                  block = p.in_order && p.call.causal ? r.room - 1 - number : number;
        if (block >= blocks) return; /* the number has no keys */
        const int diagonal = p.call.causal ? block * KEYS - (r.keys - r.tokens) : -KEYS;
        const int first = max(diagonal, 0) / ROWS, tiles = max((r.tokens + ROWS - 1) / ROWS - first, 0);
        const int start = p.call.causal || p.in_order ? 0 : (int)((int64_t)block * tiles / blocks);
        publish(make_uint4(r.key + block * KEYS, min(r.keys - block * KEYS, KEYS),
                           p.call.starts_q ? 0 : r.index, head),
                make_uint4(r.row_tile + first, tiles, diagonal - first * ROWS, keys_parity ^ 1), start,
                p.call.causal ? blocks - 1 - block : block);
        if (!tiles) return;
        const int first_head = head * p.call.group;
        load_rows(r, first_head, first + start);
        load_keys(r, head, block);
#pragma unroll 1
        for (int h = first_head; h < first_head + p.call.group; h++) {
#pragma unroll 1
            for (int tile = start + (h == first_head); tile < tiles; tile++) load_rows(r, h, first + tile);
#pragma unroll 1
            for (int tile = 0; tile < start; tile++) load_rows(r, h, first + tile);
        }
    }

    /* Takes the next item number; the result is valid in the elected lane. */
    DEVICE int take_number() const
    {
        return elect_one() ? (int)atomicAdd(p.taken, 1u) : 0;
    }

    /* The next number is taken ahead, except in order: items wait for those of smaller numbers, and a number
     * taken ahead would keep them waiting until the current item is done. */
    DEVICE void run()
    {
        const bool in_order = p.in_order, ahead = !in_order;
        for (int i = in_order ? __reduce_max_sync(~0u, take_number()) : (int)blockIdx.x; i < p.items;) {
            int next = ahead ? (int)gridDim.x + take_number() : 0;
            take(i);
            if (in_order) next = take_number();
            i = __reduce_max_sync(~0u, next);
        }
        publish(make_uint4(0, 0, 0, 0), make_uint4(0, ~0u, 0, 0), 0, 0);
    }
};

} // namespace mha_backward
