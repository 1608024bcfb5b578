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

/* Fills the next stage of the ring by TMA; `load` issues the copies, which complete on `barrier`. Called by a whole
 * warp. */
template <typename Layout, int N, typename Load>
DEVICE void fill_stage(const Layout &l, uint32_t barrier, int empty, Ring<N> &ring, uint32_t bytes, Load load)
{
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
    DEVICE void write_empty(uint32_t address) const
    {
        const struct output_params &output = p.call.output;
        const TileRows tile = load_tile_rows(address);
        if constexpr (Layout::SPLITS) {
            const int first = load_tile_part(address).row;
            if (first >= 0) {
                for (int row = (int)threadIdx.x % 32; row < tile.rows; row += 32)
                    p.part_ends[first + row] = {-INFINITY, 0.0f};
                return;
            }
        }
#pragma unroll 1
        for (int row = 0; row < tile.rows; row++) {
            const RowCoord coord = coord_of_row(p, tile.token, tile.head, row);
            uint16_t *out = output.out + out_offset(output, tile.request, coord);
#pragma unroll 1
            for (int d = (int)threadIdx.x % 32; d < Layout::D_V; d += 32) out[d] = 0;
            if (threadIdx.x % 32 == 0) store_lse(output, tile.request, coord, -INFINITY);
        }
    }

    DEVICE void run() const
    {
        if (Layout::SINGLE_APART && p.call.b == 1 && (p.splits || p.blocks_of_split))
            run_of<true>();
        else
            run_of<false>();
    }

    /* Looks at the requests while the CTA starts. */
    template <bool SINGLE> DEVICE void run_of() const
    {
        using Window = RequestWindow<Layout::ROWS, Layout::KEYS,
                                     Layout::SPLITS ? Numbers::SPLITS : Numbers::TILES, SINGLE>;
        static_assert(Window::BYTES <= Layout::WINDOW_BYTES, "the window fits");
        wait_for_kernels_before(); /* the other warps wait for tiles */
        let_next_kernel_start();   /* not earlier: the join reads lengths before it waits for the parts */
        Window requests(p, l.smem + Layout::WINDOW_AT);
        const TileScheduler scheduler = {p};
        const bool one_each =
            !SINGLE && requests.all_have_one_tile(); /* of one request the host knows it: no counters */
        if (elect_one() && !one_each) scheduler.begin();
        __syncthreads();
        uint32_t published = 0; /* tiles published so far */
        int i = (int)blockIdx.x;
        for (;;) {
            const uint32_t stage = published % TILE_STAGES;
            mbarrier_wait(l.barrier(Layout::TILE_EMPTY, stage), published / TILE_STAGES % 2 ^ 1);
            const int blocks = requests.find(i, l.tile(stage));
            __syncwarp();
            if (blocks) {
                if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_FULL, stage));
                if (blocks < 0) break;
                mbarrier_wait(l.barrier(Layout::NEXT_WANTED, 0), published % 2);
                published++;
            } else {
                write_empty(l.tile(stage));
            }
            int next = one_each && !Layout::SINGLE_APART
                           ? INT_MAX
                           : 0; /* the other way ptxas keeps a register for it */
            if (elect_one() && !one_each) next = scheduler.next(i);
            next = __reduce_max_sync(~0u, next);
            i = one_each && Layout::SINGLE_APART ? INT_MAX : next;
        }
        if (elect_one() && !one_each) scheduler.end(i);
    }
};

template <typename Layout> struct QueryKeyProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    /* Returns whether padding follows the tile's rows. Calls that may have some take the kernel with splits
     * (choice.c). */
    DEVICE bool has_padding(const TileRows &tile) const
    {
        return Layout::SPLITS && p.call.used_q && tile.rows < p.tile_rows;
    }

    /* Clears Q behind the tile's rows. Rows of a warp take one path through the softmax: the bits of some would depend
     * on what the padding behind them holds. */
    DEVICE void clear_padding(int rows, int stage, uint32_t &parity) const
    {
        const int bytes = (p.tile_rows - rows) * LINE_BYTES;
        mbarrier_wait(l.barrier(Layout::Q_RAW, 0), parity);
        parity ^= 1;
#pragma unroll 1
        for (int i = 0; i < Layout::QK_TILES; i++)
#pragma unroll 1
            for (int at = (int)threadIdx.x % 32 * 16; at < bytes; at += 32 * 16)
                store_zero_16(l.q(stage) + (uint32_t)(i * (int)Layout::Q_TILE + rows * LINE_BYTES + at));
        fence_async_shared();
        __syncwarp();
        if (elect_one()) mbarrier_arrive(l.barrier(Layout::Q_FULL, stage));
    }

    /* Q may have a single stage; the prefetch brings it into L2 before the stage is free. */
    DEVICE void run()
    {
        if (elect_one()) tma_prefetch_map(&p.k), tma_prefetch_map(&p.q);
        __syncthreads();
        const uint32_t q_bytes = (uint32_t)p.tile_rows * LINE_BYTES * Layout::QK_TILES;
        Ring<Layout::KV_STAGES> k_stage;
        Ring<Layout::Q_STAGES> q_stage;
        uint32_t raw_parity = 0;
        for (Ring<TILE_STAGES> tile_stage;; tile_stage.advance()) {
            mbarrier_wait(l.barrier(Layout::TILE_FULL, tile_stage.index), tile_stage.parity);
            const TileRows rows = load_tile_rows(l.tile(tile_stage.index));
            const TileKeys keys = load_tile_keys(l.tile(tile_stage.index));
            const int token = rows.token, request = (int)rows.request, head = rows.head,
                      key_head = head / p.call.group, blocks = keys.blocks;
            if (blocks < 0) return;
            if (elect_one())
#pragma unroll
                for (int i = 0; i < Layout::QK_TILES; i++) tma_prefetch(&p.q, {0, head, token, i, request});
            for (int n = blocks - 1; n >= 0; n--) {
                const int key = keys.first_key + n * Layout::KEYS;
                if (n == min(blocks, BLOCKS_AHEAD) - 1 && elect_one())
                    mbarrier_arrive(l.barrier(Layout::NEXT_WANTED, 0));
                fill_stage(l, l.barrier(Layout::K_FULL, k_stage.index), Layout::K_EMPTY, k_stage,
                           Layout::K_BYTES, [&](int stage, uint32_t full) {
                               tma_load(l.k(stage), &p.k, full, {0, key, key_head, 0, request});
                           });
                if (n < blocks - 1) continue;
                const bool clears = has_padding(rows);
                const int q_at = q_stage.index;
                fill_stage(l, clears ? l.barrier(Layout::Q_RAW, 0) : l.barrier(Layout::Q_FULL, q_at),
                           Layout::Q_EMPTY, q_stage, q_bytes, [&](int stage, uint32_t full) {
#pragma unroll
                               for (int i = 0; i < Layout::QK_TILES; i++)
                                   tma_load(l.q(stage) + i * Layout::Q_TILE, &p.q, full,
                                            {0, head, token, i, request});
                           });
                if (clears) clear_padding(rows.rows, q_at, raw_parity);
            }
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, tile_stage.index));
        }
    }
};

template <typename Layout> struct ValueProducer {
    const mha_forward_sm90_params &p;
    const Layout l;

    DEVICE void run()
    {
        if (elect_one()) tma_prefetch_map(&p.v);
        __syncthreads();
        Ring<Layout::KV_STAGES> v_stage;
        for (Ring<TILE_STAGES> tile_stage;; tile_stage.advance()) {
            mbarrier_wait(l.barrier(Layout::TILE_FULL, tile_stage.index), tile_stage.parity);
            const TileRows rows = load_tile_rows(l.tile(tile_stage.index));
            const TileKeys keys = load_tile_keys(l.tile(tile_stage.index));
            const int request = (int)rows.request, key_head = rows.head / p.call.group, blocks = keys.blocks;
            if (blocks < 0) return;
            for (int n = blocks - 1; n >= 0; n--) {
                const int key = keys.first_key + n * Layout::KEYS;
                fill_stage(l, l.barrier(Layout::V_FULL, v_stage.index), Layout::V_EMPTY, v_stage,
                           Layout::V_BYTES, [&](int stage, uint32_t full) {
                               tma_load(l.v(stage), &p.v, full, {0, key, key_head, 0, request});
                           });
            }
            if (elect_one()) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, tile_stage.index));
        }
    }
};

} // namespace mha_forward
