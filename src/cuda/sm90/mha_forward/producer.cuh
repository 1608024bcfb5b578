/* SPDX-License-Identifier: MIT
 *
 * Three producer warps: one takes tiles and publishes them, one loads Q and K, one loads V. Key blocks are
 * loaded from a tile's last block to its first. Two warps load because one cannot use the full L2 bandwidth.
 * A separate warp takes tiles because its state does not fit the registers that are left beside three
 * consumers.
 */
#pragma once

#include "scheduler.cuh"

namespace mha_forward {

/* Fills the next stage of the ring by TMA; `load` issues the copies. Called by a whole warp. */
template <typename Layout, int N, typename Load>
DEVICE void fill(const Layout &l, int full, int empty, Ring<N> &ring, uint32_t bytes, Load load)
{
    const uint32_t barrier = l.barrier(full, ring.index);
    mbarrier_wait(l.barrier(empty, ring.index), ring.parity ^ 1);
    if (elect_one()) {
        mbarrier_arrive_expect(barrier, bytes);
        load(ring.index, barrier);
    }
    ring.advance();
}

/* The next tile is taken when this many blocks of the current tile are left to load, so that it is known when
 * they are loaded. A tile that is taken earlier would wait behind a long tile while other CTAs are idle. */
enum { BLOCKS_AHEAD = 3 };

template <typename Layout> struct TileProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    /* Writes the results of rows that see no key. */
    DEVICE void write_empty(uint32_t place) const
    {
        const struct output_params &output = p.call.output;
        const uint4 tile = load_shared_16(place); /* token, rows, request, head */
#pragma unroll 1
        for (int row = 0; row < (int)tile.y; row++) {
            const RowPlace at = place_of(p, tile.x, tile.w, row);
            uint16_t *out = output.out + out_offset(output, tile.z, at);
#pragma unroll 1
            for (int d = (int)threadIdx.x % 32; d < Layout::D_V; d += 32) out[d] = 0;
            if (threadIdx.x % 32 == 0) store_lse(output, tile.z, at, -INFINITY);
        }
    }

    DEVICE void run() const
    {
        static_assert(Requests::BYTES <= Layout::WINDOW_BYTES, "the window fits");
        Requests requests(p, l.base + Layout::WINDOW_AT);
        const Turns turns = {p};
        if (elect_one()) turns.begin();
        uint32_t told = 0; /* tiles published so far */
        for (int i = (int)blockIdx.x;;) {
            const uint32_t slot = told % TILE_SLOTS;
            mbarrier_wait(l.barrier(Layout::TILE_EMPTY, slot), told / TILE_SLOTS % 2 ^ 1);
            const int blocks = requests.find(i, Layout::KEYS, l.tile(slot));
            __syncwarp();
            if (blocks) {
                if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_FULL, slot));
                if (blocks < 0) break;
                mbarrier_wait(l.barrier(Layout::NEXT_WANTED, 0), told % 2);
                told++;
            } else {
                write_empty(l.tile(slot));
            }
            int next = 0;
            if (elect_one()) next = turns.next(i);
            i = __reduce_max_sync(~0u, next);
        }
        if (elect_one()) turns.end();
    }
};

template <typename Layout> struct KeyProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    /* Q has a single stage at 192; the prefetch brings it into L2 before the stage is free. */
    DEVICE void run()
    {
        const uint32_t q_bytes = (uint32_t)p.tile_rows * LINE_BYTES * Layout::QK_TILES;
        Ring<Layout::STAGES> stage;
        Ring<Layout::Q_PLACES> q_place;
        for (Ring<TILE_SLOTS> slot;; slot.advance()) {
            mbarrier_wait(l.barrier(Layout::TILE_FULL, slot.index), slot.parity);
            const uint4 place = load_shared_16(l.tile(slot.index)),
                        keys = load_shared_16(l.tile(slot.index) + 16);
            const int token = (int)place.x, request = (int)place.z, head = (int)place.w,
                      key_head = head / p.call.group, blocks = (int)keys.z;
            if (blocks < 0) return;
            if (elect_one())
#pragma unroll
                for (int i = 0; i < Layout::QK_TILES; i++) tma_prefetch(&p.q, {0, head, token, i, request});
            for (int n = blocks - 1; n >= 0; n--) {
                const int key = (int)keys.w + n * Layout::KEYS;
                if (n == min(blocks, BLOCKS_AHEAD) - 1 && elect_one())
                    mbarrier_arrive(l.barrier(Layout::NEXT_WANTED, 0));
                fill(l, Layout::K_FULL, Layout::K_EMPTY, stage, Layout::K_BYTES, [&](int at, uint32_t full) {
                    tma_load(l.k(at), &p.k, full, {0, key, key_head, 0, request});
                });
                if (n < blocks - 1) continue;
                fill(l, Layout::Q_FULL, Layout::Q_EMPTY, q_place, q_bytes, [&](int at, uint32_t full) {
#pragma unroll
                    for (int i = 0; i < Layout::QK_TILES; i++)
                        tma_load(l.q(at) + i * Layout::Q_TILE, &p.q, full, {0, head, token, i, request});
                });
            }
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, slot.index));
        }
    }
};

template <typename Layout> struct ValueProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    DEVICE void run()
    {
        Ring<Layout::STAGES> stage;
        for (Ring<TILE_SLOTS> slot;; slot.advance()) {
            mbarrier_wait(l.barrier(Layout::TILE_FULL, slot.index), slot.parity);
            const uint4 place = load_shared_16(l.tile(slot.index)),
                        keys = load_shared_16(l.tile(slot.index) + 16);
            const int request = (int)place.z, key_head = (int)place.w / p.call.group, blocks = (int)keys.z;
            if (blocks < 0) return;
            for (int n = blocks - 1; n >= 0; n--) {
                const int key = (int)keys.w + n * Layout::KEYS;
                fill(l, Layout::V_FULL, Layout::V_EMPTY, stage, Layout::V_BYTES, [&](int at, uint32_t full) {
                    tma_load(l.v(at), &p.v, full, {0, key, key_head, 0, request});
                });
            }
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, slot.index));
        }
    }
};

} // namespace mha_forward
