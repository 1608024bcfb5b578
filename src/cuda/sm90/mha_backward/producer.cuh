/* SPDX-License-Identifier: MIT
 *
 * The producer warp takes work tiles (a block of keys of a key head), publishes them to the consumers, and
 * loads K and V of a work tile and, for every head and tile of rows that sees one of its keys, Q, dO, lse and
 * delta.
 *
 * Past the last token of a ragged request stand another request's data, and past the last one in use padding, which
 * would be multiplied by 0. They are cleared before the consumers see them, so that the consumers need no masks for them.
 */
#pragma once

#include "scheduler.cuh"

#include "../../device/cluster.cuh"

namespace mha_backward {

template <typename Layout> struct Producer {
    static constexpr int ROWS = Layout::ROWS, KEYS = Layout::KEYS;

    const mha_backward_sm90_params &p;
    const Layout l;

    Ring<Layout::Q_STAGES> q_stage;
    Ring<Layout::DO_STAGES> dout_stage;
    Ring<WORK_STAGES> work_stage;
    uint32_t keys_parities = (1u << Layout::KEY_STAGES) - 1, /* of KEYS_EMPTY, a bit a stage */
        raw_parity = 0, next_parity = 0;

    /* Returns which CTA of those that share a work tile this is. */
    static DEVICE int rank() { return Layout::CTAS == 1 ? 0 : cluster_rank(); }

    /* Issues `load`, which completes on the barrier `full`. The first `used` of the `lines` lines of each
     * tile are valid; where the call needs it, the others are cleared. */
    template <typename Load>
    DEVICE void fill(uint32_t full, uint32_t bytes, uint32_t at, uint32_t tile_bytes, uint32_t line_bytes,
                     int tiles, int used, int lines, Load load)
    {
        const bool clears = p.clears && used < lines;
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
             l.q(q_stage.index), Layout::Q_TILE, Layout::Q_LINE, Layout::D_QK / Layout::Q_COLUMNS, used, ROWS,
             [&](uint32_t barrier) {
                 tma_load(l.q(q_stage.index), &p.q, barrier, {0, token, head, 0, request});
                 bulk_load(l.stats(q_stage.index),
                           p.rows + ((int64_t)head * p.row_tiles + r.row_tile + tile) * 2 * ROWS,
                           Layout::STATS_BYTES, barrier);
             });
        q_stage.advance();
        mbarrier_wait(l.barrier(Layout::DO_EMPTY, dout_stage.index), dout_stage.parity ^ 1);
        fill(l.barrier(Layout::DO_FULL, dout_stage.index), Layout::DO_BYTES, l.dout(dout_stage.index),
             Layout::DO_TILE, LINE_BYTES, Layout::D_V / 64, used, ROWS, [&](uint32_t barrier) {
                 tma_load(l.dout(dout_stage.index), &p.dout, barrier, {0, token, head, 0, request});
             });
        dout_stage.advance();
    }

    /* Loads K of the CTA that has the keys from `key` on, `used` of them valid: `tiles` tiles of columns from
     * tile `first` on. */
    DEVICE void load_k(uint32_t full, uint32_t to, int key, int head, int request, int used, int first,
                       int tiles)
    {
        fill(full, (uint32_t)tiles * Layout::K_TILE, to, Layout::K_TILE, Layout::K_LINE, tiles, used,
             Layout::CTA_KEYS, [&](uint32_t barrier) {
#pragma unroll
                 for (int i = 0; i < tiles; i += Layout::K_BOX_TILES)
                     tma_load(to + (uint32_t)i * Layout::K_TILE, &p.k, barrier,
                              {0, key, head, first + i, request});
             });
    }

    DEVICE uint32_t keys_parity(int stage) const
    {
        return Layout::KEY_STAGES == 1 ? keys_parities : keys_parities >> stage & 1;
    }

    DEVICE void load_keys(const Request &r, int head, int block, int stage)
    {
        constexpr int TILES = Layout::D_QK / Layout::K_COLUMNS;
        const int first = block * KEYS + rank() * Layout::CTA_KEYS, key = r.key + first,
                  used = keys_from(r, first), request = p.call.starts_q ? 0 : r.index;
        mbarrier_wait(l.barrier(Layout::KEYS_EMPTY, stage), keys_parity(stage));
        keys_parities ^= 1u << stage;
        load_k(l.barrier(Layout::K_FULL, stage), l.k(stage), key, head, request, used, 0, TILES);
        fill(l.barrier(Layout::V_FULL, stage), Layout::V_BYTES, l.v(stage), Layout::V_TILE, LINE_BYTES,
             Layout::D_V / 64, used, Layout::CTA_KEYS, [&](uint32_t barrier) {
                 tma_load(l.v(stage), &p.v, barrier, {0, key, head, 0, request});
             });
        if constexpr (Layout::CTAS > 1) {
            const int other = block * KEYS + (1 - rank()) * Layout::CTA_KEYS;
            load_k(l.barrier(Layout::OTHER_K_FULL), l.other_k(), r.key + other, head, request,
                   keys_from(r, other), rank() * (TILES / 2), TILES / 2);
        }
    }

    /* Returns how many of a CTA's keys from key `first` of the request on exist. */
    static DEVICE int keys_from(const Request &r, int first)
    {
        const int keys = min(r.keys - first, Layout::CTA_KEYS);
        return Layout::CTAS == 1 ? keys : max(keys, 0);
    }

    DEVICE void publish(const WorkKeys &k, const WorkRows &q, int start, int order, int head, int block)
    {
        mbarrier_wait(l.barrier(Layout::WORK_EMPTY, work_stage.index), work_stage.parity ^ 1);
        if (elect_one()) {
            const uint32_t work = l.work(work_stage.index);
            store_shared_16(work + offsetof(WorkTile, k), make_uint4(k.key, k.keys, k.request, k.head));
            store_shared_16(work + offsetof(WorkTile, q),
                            make_uint4(q.first_tile, q.tiles, q.diagonal, q.phase));
            store_shared_16(work + offsetof(WorkTile, start), make_uint4(start, order, head, block));
            mbarrier_arrive(l.barrier(Layout::WORK_FULL, work_stage.index));
        }
        work_stage.advance();
    }

    /* Publishes the work tile of number `i` and loads its keys and the tiles of rows that see them. Returns how many
     * numbers must be taken before this CTA takes another one in order. */
    DEVICE int produce(int i)
    {
        const KeyBlock b = find_key_block<Layout>(p, i);
        const Request &r = b.request;
        const int head = b.head, block = b.block, blocks = b.blocks;
        if (block >= blocks) return 0; /* the number has no keys */
        const int diagonal = p.call.causal ? block * KEYS - (r.keys - r.tokens) : -KEYS;
        const int first = max(diagonal, 0) / ROWS, tiles = max((r.tokens + ROWS - 1) / ROWS - first, 0);
        int start = 0, order = !p.call.causal ? block : b.rows_descend ? ~block : blocks - 1 - block;
        uint32_t packed = MHA_BACKWARD_SM90_HAS_GROUPS(Layout::D_QK) ? pack_group(0, 1, 31) : 0;
        if (!p.call.causal && !p.in_order) {
            start = (int)((int64_t)block * tiles / blocks);
        } else if (MHA_BACKWARD_SM90_HAS_GROUPS(Layout::D_QK) && !p.call.causal) {
            const int members = min(blocks_of_group<Layout>(p), blocks - (block - b.member));
            if (tiles >= members) {
                const int shift = 31 - __clz(tiles / members);
                start = b.member << shift, order = block - b.member;
                packed = pack_group(b.member, members, shift);
            }
        }
        const int first_key = block * KEYS + rank() * Layout::CTA_KEYS,
                  key_stage = l.key_stage(work_stage.index);
        publish({r.key + first_key, keys_from(r, first_key), p.call.starts_q ? 0u : (uint32_t)r.index,
                 (uint32_t)b.key_head},
                {r.row_tile + first, tiles, diagonal - first * ROWS, (keys_parity(key_stage) ^ 1) | packed},
                start, order, head, r.key_block + block);
        if (!tiles) return 0;
        /* The second stage of keys is empty. The only one is not before the last rows have been read: rows first. */
        if constexpr (Layout::KEY_STAGES > 1) load_keys(r, b.key_head, block, key_stage);
        const auto load = [&](int h, int tile) {
            load_rows(r, h, first + (b.rows_descend ? tiles - 1 - tile : tile));
        };
        load(head, start);
        if constexpr (Layout::KEY_STAGES == 1) load_keys(r, b.key_head, block, key_stage);
#pragma unroll 1
        for (int h = head; h < head + p.work_heads; h++) {
#pragma unroll 1
            for (int tile = start + (h == head); tile < tiles; tile++) load(h, tile);
#pragma unroll 1
            for (int tile = 0; tile < start; tile++) load(h, tile);
        }
        return b.group_end;
    }

    /* Returns the number that CTA 0 of those that share work tiles has taken; `number` is the maximum over the
     * warp there. */
    DEVICE int share_number(int number)
    {
        const int taken = __reduce_max_sync(~0u, number);
        if constexpr (Layout::CTAS == 1) {
            return taken;
        } else {
            next_parity ^= 1;
            if (rank() == 0) {
                mbarrier_wait(l.barrier(Layout::NEXT_EMPTY), next_parity);
                if (elect_one())
                    store_mapped_4(map_shared(l.next(), 1), (uint32_t)taken,
                                   map_shared(l.barrier(Layout::NEXT_FULL), 1));
                return taken;
            }
            if (elect_one()) mbarrier_arrive_expect(l.barrier(Layout::NEXT_FULL), sizeof(uint32_t));
            mbarrier_wait(l.barrier(Layout::NEXT_FULL), next_parity ^ 1);
            const int received = load_uniform(l.next());
            mbarrier_arrive_mapped_if(elect_one(), map_shared(l.barrier(Layout::NEXT_EMPTY), 0));
            return received;
        }
    }

    DEVICE void wait_until_taken(int numbers) const
    {
        while (!__all_sync(~0u, (int)load_acquire(p.taken) >= numbers)) __nanosleep(200);
    }

    /* The next number is taken when the last rows are being loaded: one taken at a work tile's begin would wait behind it
     * while other CTAs have none. A pair, which lost 1.5 % by that, takes it at the begin; but not in order, where work
     * tiles wait for those of smaller numbers, which must have begun. */
    DEVICE void run()
    {
        const bool in_order = p.in_order || p.work_heads < p.call.group,
                   ahead = Layout::CTAS != 1 && !in_order, takes = rank() == 0;
        const int shares = (int)gridDim.x / Layout::CTAS, share = (int)blockIdx.x / Layout::CTAS;
        for (int i = in_order ? share_number(takes ? next_number(p) : 0) : share; i < p.items;) {
            int next = ahead && takes ? shares + next_number(p) : 0;
            const int end = produce(i);
            if (!ahead && takes) {
                if (in_order && blocks_of_group<Layout>(p) > 1) wait_until_taken(end);
                next = (in_order ? 0 : shares) + next_number(p);
            }
            i = share_number(next);
        }
        publish({0, 0, 0, 0}, {0, -1, 0, 0}, 0, 0, 0, 0);
    }
};

} // namespace mha_backward
