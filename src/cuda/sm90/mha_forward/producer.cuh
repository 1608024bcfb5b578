/* SPDX-License-Identifier: MIT
 *
 * The warp that takes tiles, tells the consumers of them, and brings in what they read: K and V by blocks, the last one first. Rows that
 * see no key are its own to write.
 */
#pragma once

#include "tiles.cuh"

template <typename Layout> struct Producer {
    const mha_forward_sm90_params &p;
    const Layout l;
    Ring<TILE_SLOTS> slot;
    Ring<Layout::Q_PLACES> place;
    Ring<Layout::STAGES> stage;

    /* blocks < 0: the end. */
    DEVICE void tell(const Tile &t)
    {
        mbarrier_wait(l.barrier(Layout::TILE_EMPTY, slot.at), slot.parity ^ 1);
        if (elect_one()) {
            store_shared_16(l.tile(slot.at), make_uint4(t.token, t.rows, t.request, t.head));
            store_shared_16(l.tile(slot.at) + 16, make_uint4(t.keys, t.seen, t.blocks, 0));
            mbarrier_arrive(l.barrier(Layout::TILE_FULL, slot.at));
        }
        slot.step();
    }

    DEVICE void load_q(const Tile &t)
    {
        const uint32_t full = l.barrier(Layout::Q_FULL, place.at), bytes = (uint32_t)p.tile_rows * LINE_BYTES;
        mbarrier_wait(l.barrier(Layout::Q_EMPTY, place.at), place.parity ^ 1);
        if (elect_one()) {
            mbarrier_arrive_expect(full, bytes * Layout::QK_TILES);
#pragma unroll
            for (int i = 0; i < Layout::QK_TILES; i++)
                tma_load(l.q(place.at) + i * Layout::Q_TILE, &p.q, full, {0, t.head, t.token, i, t.request});
        }
        place.step();
    }

    DEVICE void load_keys(const Tile &t, int key)
    {
        const uint32_t full = l.barrier(Layout::K_FULL, stage.at);
        mbarrier_wait(l.barrier(Layout::K_EMPTY, stage.at), stage.parity ^ 1);
        if (elect_one()) {
            mbarrier_arrive_expect(full, Layout::K_BYTES);
            tma_load(l.k(stage.at), &p.k, full, {0, key, t.key_head, 0, t.request});
        }
    }

    DEVICE void load_values(const Tile &t, int key)
    {
        const uint32_t full = l.barrier(Layout::V_FULL, stage.at);
        mbarrier_wait(l.barrier(Layout::V_EMPTY, stage.at), stage.parity ^ 1);
        if (elect_one()) {
            mbarrier_arrive_expect(full, Layout::V_BYTES);
            tma_load(l.v(stage.at), &p.v, full, {0, key, t.key_head, 0, t.request});
        }
        stage.step();
    }

    /* Q has a single place where it is large: it is in L2 by the time that the place is free. */
    DEVICE void load(const Tile &t, int first_key)
    {
        if (elect_one())
#pragma unroll
            for (int i = 0; i < Layout::QK_TILES; i++) tma_prefetch(&p.q, {0, t.head, t.token, i, t.request});
        for (int n = t.blocks - 1; n >= 0; n--) {
            load_keys(t, first_key + n * Layout::KEYS);
            if (n == t.blocks - 1) load_q(t);
            load_values(t, first_key + n * Layout::KEYS);
        }
    }

    DEVICE void write_empty(const Tile &t) const
    {
        const struct output_params &output = p.call.output;
#pragma unroll 1
        for (int row = 0; row < t.rows; row++) {
            const RowPlace at = place_of(p, t.token, t.head, row);
            uint16_t *out = output.out + out_offset(output, t.request, at);
            for (int d = (int)threadIdx.x % 32; d < Layout::D_V; d += 32) out[d] = 0;
            if (threadIdx.x % 32 == 0) store_lse(output, t.request, at, -INFINITY);
        }
    }

    DEVICE void run()
    {
        Requests requests(p);
        Turns turns = {p};
        Tile t = {};
        int key;
        if (elect_one()) turns.begin();
        for (int i = (int)blockIdx.x; requests.find(i, Layout::KEYS, t, &key);) {
            int next = 0;
            if (elect_one()) next = turns.next();
            if (t.blocks)
                tell(t), load(t, key);
            else
                write_empty(t);
            i = __reduce_max_sync(~0u, next);
        }
        t.blocks = -1;
        tell(t);
        if (elect_one()) turns.end();
    }
};
