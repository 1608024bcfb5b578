/* SPDX-License-Identifier: MIT
 *
 * Two warps that bring in what the consumers read, by blocks of keys, the last one of a tile first: one takes the tiles, tells the
 * others of them, and loads Q and K; the other one loads V. Two, since one warp does not get out of L2 what there is.
 */
#pragma once

#include "tiles.cuh"

/* The next place of a ring, filled by TMA: `load` says by what. By a warp. */
template <typename Layout, int N, typename Load>
DEVICE void fill(const Layout &l, int full, int empty, Ring<N> &ring, uint32_t bytes, Load load)
{
    const uint32_t barrier = l.barrier(full, ring.at);
    mbarrier_wait(l.barrier(empty, ring.at), ring.parity ^ 1);
    if (elect_one()) {
        mbarrier_arrive_expect(barrier, bytes);
        load(ring.at, barrier);
    }
    ring.step();
}

/* The next tile is taken when so many blocks of this one are left to load: it is known by the time that they are. */
enum { BLOCKS_AHEAD = 2 };

template <typename Layout> struct KeyProducer {
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
            store_shared_16(l.tile(slot.at) + 16, make_uint4(t.keys, t.seen, t.blocks, t.first_key));
            mbarrier_arrive(l.barrier(Layout::TILE_FULL, slot.at));
        }
        slot.step();
    }

    DEVICE void load_q(const Tile &t)
    {
        const uint32_t bytes = (uint32_t)p.tile_rows * LINE_BYTES * Layout::QK_TILES;
        fill(l, Layout::Q_FULL, Layout::Q_EMPTY, place, bytes, [&](int at, uint32_t full) {
#pragma unroll
            for (int i = 0; i < Layout::QK_TILES; i++)
                tma_load(l.q(at) + i * Layout::Q_TILE, &p.q, full, {0, t.head, t.token, i, t.request});
        });
    }

    /* Q has a single place where it is large: it is in L2 by the time that the place is free. Answers the next tile's number in the
     * lane that takes turns. A tile that was taken earlier would wait behind a long one, while other blocks of threads have none. */
    DEVICE int load(const Tile &t, Turns &turns)
    {
        int next = 0;
        const int key_head = t.head / p.call.group;
        if (elect_one())
#pragma unroll
            for (int i = 0; i < Layout::QK_TILES; i++) tma_prefetch(&p.q, {0, t.head, t.token, i, t.request});
        for (int n = t.blocks - 1; n >= 0; n--) {
            const int key = t.first_key + n * Layout::KEYS;
            if (n == min(t.blocks, BLOCKS_AHEAD) - 1 && elect_one()) next = turns.next();
            fill(l, Layout::K_FULL, Layout::K_EMPTY, stage, Layout::K_BYTES, [&](int at, uint32_t full) {
                tma_load(l.k(at), &p.k, full, {0, key, key_head, 0, t.request});
            });
            if (n == t.blocks - 1) load_q(t);
        }
        return next;
    }

    /* Rows that see no key. */
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
        if (elect_one()) turns.begin();
        for (int i = (int)blockIdx.x; requests.find(i, Layout::KEYS, t);) {
            int next = 0;
            if (t.blocks) {
                tell(t);
                next = load(t, turns);
            } else {
                if (elect_one()) next = turns.next();
                write_empty(t);
            }
            i = __reduce_max_sync(~0u, next);
        }
        t.blocks = -1;
        tell(t);
        if (elect_one()) turns.end();
    }
};

template <typename Layout> struct ValueProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    DEVICE void run()
    {
        Ring<TILE_SLOTS> slot;
        Ring<Layout::STAGES> stage;
        for (;; slot.step()) {
            mbarrier_wait(l.barrier(Layout::TILE_FULL, slot.at), slot.parity);
            const uint4 place = load_shared_16(l.tile(slot.at)), keys = load_shared_16(l.tile(slot.at) + 16);
            const int request = (int)place.z, key_head = (int)place.w / p.call.group, blocks = (int)keys.z;
            if (blocks < 0) return;
            for (int n = blocks - 1; n >= 0; n--) {
                const int key = (int)keys.w + n * Layout::KEYS;
                fill(l, Layout::V_FULL, Layout::V_EMPTY, stage, Layout::V_BYTES, [&](int at, uint32_t full) {
                    tma_load(l.v(at), &p.v, full, {0, key, key_head, 0, request});
                });
            }
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, slot.at));
        }
    }
};
