/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward at 256/256: a cluster of two CTAs shares a work tile of 128 keys.
 *
 * dK and dV of 64 keys are half of an SM's registers, so a CTA has 64 keys. Its consumers compute S and dP of 32
 * rows each, exchange P and dS in shared memory, and have half the columns of dK and dV. The CTAs exchange dS, so
 * that each computes half the columns of dQ over all 128 keys: alone, each would add all of dQ to memory, twice as
 * many bytes, and L2 would be the bound.
 *
 *   consumer  issue  S(n), dK(n−1), dQ(n−1) │              dP(n), dV(n) │           │ S(n+1), dK(n), dQ(n)
 *             warps                    wait │ P(n), stored        wait  │ dS(n), stored │
 *   CTA              ◄── the other's dS(n−1)                                        ──► copy of dS(n)
 *
 * Limits for 64 rows by 64 keys, in clocks of an SM: products 3072 (2560, but S and dP of 32 columns take half as
 * much again), shared memory alike; additions to dQ 32 KiB.
 */
#pragma once

#include "dq.cuh"
#include "epilogue.cuh"
#include "gradient.cuh"
#include "pair_layout.cuh"

#include "../../device/cluster.cuh"

namespace mha_backward {

enum { CONSUMERS_BARRIER = 1 /* a named barrier */ };

template <typename Element, typename Layout> struct PairConsumer : Gradient<Element, Layout> {
    using Base = Gradient<Element, Layout>;
    using Base::SCORES, Base::ROW_STEPS, Base::p, Base::l, Base::group, Base::n, Base::q_stage, Base::q_parity;
    static constexpr int COLUMNS = Layout::CONSUMER_COLUMNS;

    Ring<WORK_STAGES> work_stage;

    /* A thread's fragments of a tile of rows, as in Consumer. */
    struct Fragments {
        float s[SCORES], dp[SCORES];
        float4 lse[ROW_STEPS], delta[ROW_STEPS];
        uint32_t unused[ROW_STEPS][4];
    };

    DEVICE bool is_leader() const { return threadIdx.x % WARPGROUP_THREADS == 0; }

    DEVICE void consumer_release(int empty, int stage = 0) const
    {
        mbarrier_arrive_if(is_leader(), l.barrier(empty, stage));
    }

    DEVICE void begin_scores(Fragments &tile) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, q_stage(n)), q_parity(n));
        this->load_stats(tile.lse, 0, n), this->load_stats(tile.delta, 1, n);
        hold(tile.s);
        wgmma_fence();
        this->issue_scores(tile.s, n);
    }

    /* Computes P and stores it for both consumers. */
    DEVICE void share_weights(Fragments &tile, int keys, int diagonal) const
    {
        uint32_t w[ROW_STEPS][4];
        if (63 - Layout::ROW_STEP * group + diagonal > 0) this->mask(tile.s, diagonal);
        if (keys < Layout::CTA_KEYS) this->mask_tail(tile.s, keys);
        this->softmax_block(tile.s, tile.lse, w, tile.unused);
        this->store_lines(l.p((int)(n % Layout::P_STAGES)), w);
        fence_async_shared();
        barrier_sync(CONSUMERS_BARRIER, Layout::CONSUMERS * WARPGROUP_THREADS);
    }

    /* Issues dV += P dO: this consumer's columns, summed over the rows of the tile. */
    DEVICE void issue_dv(float (&dv)[COLUMNS / 2]) const
    {
        const uint32_t of_p = l.in_descriptor(l.p((int)(n % Layout::P_STAGES))),
                       dout = l.in_descriptor(l.dout(0)) + columns_at();
#pragma unroll
        for (int i = 0; i < Layout::ROWS / 16; i++)
            add_product<Element>(
                dv, descriptor_of<SWIZZLE_128>(of_p, 0, (uint32_t)i * 32),
                descriptor_of<SWIZZLE_128>(dout, Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* Issues dK += dS Q of tile `n`. */
    DEVICE void issue_dk(float (&dk)[COLUMNS / 2], uint32_t n) const
    {
        const uint32_t ds = l.in_descriptor(l.ds()), q = l.in_descriptor(l.q(q_stage(n))) + columns_at();
#pragma unroll
        for (int i = 0; i < Layout::ROWS / 16; i++)
            add_product<Element>(
                dk, descriptor_of<SWIZZLE_128>(ds, 0, (uint32_t)i * 32),
                descriptor_of<SWIZZLE_128>(q, Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    DEVICE void issue_half_dq(float (&dq)[Layout::DQ_VALUES], uint32_t ds, uint32_t k, int add) const
    {
#pragma unroll
        for (int i = 0; i < Layout::CTA_KEYS / 16; i++)
            product_of_columns<Element>(
                dq, descriptor_of<SWIZZLE_128>(ds, Layout::DS_TILE, (uint32_t)i * 16 * LINE_BYTES),
                descriptor_of<SWIZZLE_128>(k, Layout::K_TILE, (uint32_t)i * 16 * LINE_BYTES), add || i);
    }

    /* Returns where this consumer's columns of Q and dO begin in a stage. */
    DEVICE uint32_t columns_at() const { return (uint32_t)(group * (COLUMNS / 64)) * Layout::ROW_TILE; }

    /* Sends dS of tile `n`, then issues dK and dQ of it. */
    DEVICE void begin_dk_dq(float (&dk)[COLUMNS / 2], float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DS_FULL), n % 2);
        if (threadIdx.x == WARPGROUP_THREADS) {
            const int other = 1 - cluster_rank();
            mbarrier_arrive_expect(l.barrier(Layout::OTHER_DS_FULL), Layout::DS_BYTES);
            bulk_copy_mapped(map_shared(l.other_ds(), other), l.ds(), Layout::DS_BYTES,
                             map_shared(l.barrier(Layout::OTHER_DS_FULL), other));
        }
        __syncwarp();
        const uint32_t part = (uint32_t)(2 * cluster_rank() + group);
        hold(dk);
        wgmma_fence();
        issue_dk(dk, n);
        hold(dq);
        wgmma_fence();
        issue_half_dq(dq, l.in_descriptor(l.ds()), l.in_descriptor(l.k()) + part * Layout::K_TILE, 0);
        mbarrier_wait(l.barrier(Layout::OTHER_DS_FULL), n % 2);
        issue_half_dq(dq, l.in_descriptor(l.other_ds()),
                      l.in_descriptor(l.other_k()) + (uint32_t)group * Layout::K_TILE, 1);
        wgmma_commit();
    }

    /* Releases dS of the tile whose dQ is complete, here and in the other CTA. */
    DEVICE void release_ds() const
    {
        consumer_release(Layout::DS_EMPTY);
        mbarrier_arrive_mapped_if(is_leader(), map_shared(l.barrier(Layout::OTHER_DS_EMPTY), 1 - cluster_rank()));
    }

    /* Stores a piece of dQ of tile `n` for the adder. */
    DEVICE void store_dq(const float (&dq)[Layout::DQ_VALUES], int piece, uint32_t n, int row_tile,
                         uint32_t order) const
    {
        const uint32_t to = l.dq(group) + fresh_thread() % WARPGROUP_THREADS * 16;
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, group), (uint32_t)piece ^ 1);
#pragma unroll
        for (int i = 0; i < Layout::PIECE_VALUES; i += 4) {
            const float *const four = dq + piece * Layout::PIECE_VALUES + i;
            store_shared_16(to + (uint32_t)(i * WARPGROUP_THREADS * 4),
                            make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
                                       __float_as_uint(four[3])));
        }
        publish_dq(row_tile, order);
        (void)n;
    }

    DEVICE void publish_dq(int row_tile, uint32_t order) const
    {
        if (is_leader())
            store_shared_4(l.dq_tile(group), (uint32_t)row_tile), store_shared_4(l.dq_tile(group) + 4, order);
        fence_async_shared();
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DQ_FULL, group));
    }

    /* Computes dS and stores it for both consumers and both CTAs, once the tile before has been read. */
    DEVICE void share_ds(Fragments &tile) const
    {
        uint32_t ds[ROW_STEPS][4];
        this->softmax_gradient(tile.s, tile.unused, tile.unused, tile.dp, tile.delta, ds);
        mbarrier_wait(l.barrier(Layout::DS_EMPTY), n % 2 ^ 1);
        mbarrier_wait(l.barrier(Layout::OTHER_DS_EMPTY), n % 2 ^ 1);
        this->store_lines(l.ds(), ds);
        fence_async_shared();
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DS_FULL));
    }

    DEVICE void begin_dp_dv(Fragments &tile, float (&dv)[COLUMNS / 2]) const
    {
        this->begin_dp(tile.dp, n);
        hold(dv);
        wgmma_fence();
        issue_dv(dv);
    }

    /* Processes the tiles of rows of the work tile at `work`. */
    DEVICE void mainloop(uint32_t work, float (&dk)[COLUMNS / 2], float (&dv)[COLUMNS / 2])
    {
        Fragments tile;
        float dq[Layout::DQ_VALUES];
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)), before = Layout::CTA_KEYS * cluster_rank();
        RowTiles<Layout> t;
        t.begin(p, work);
        begin_scores(tile);
        wgmma_wait<0>();
        hold(tile.s);
        share_weights(tile, keys, t.diagonal + before);
        begin_dp_dv(tile, dv);
        wgmma_wait<1>();
        hold(tile.dp);
        share_ds(tile);
        int previous = t.index;
        uint32_t order = dq_order(p, t, work);
        while (t.advance(p, work)) {
            n++;
            begin_scores(tile);
            begin_dk_dq(dk, dq, n - 1);
            wgmma_wait<2>();
            hold(tile.s), hold(dv);
            consumer_release(Layout::DO_EMPTY);
            share_weights(tile, keys, t.diagonal + before);
            wgmma_wait<1>();
            hold(dk);
            consumer_release(Layout::Q_EMPTY, q_stage(n - 1));
            begin_dp_dv(tile, dv);
            wgmma_wait<2>();
            hold(dq);
            release_ds();
            store_dq(dq, 0, n - 1, previous, order);
            wgmma_wait<1>();
            hold(tile.dp);
            share_ds(tile);
            store_dq(dq, 1, n - 1, previous, order);
            previous = t.index, order = dq_order(p, t, work);
        }
        begin_dk_dq(dk, dq, n);
        wgmma_wait<0>();
        hold(dv), hold(dk), hold(dq);
        consumer_release(Layout::DO_EMPTY);
        consumer_release(Layout::Q_EMPTY, q_stage(n));
        release_ds();
        store_dq(dq, 0, n, previous, order);
        store_dq(dq, 1, n, previous, order);
        n++;
    }

    DEVICE bool process_work()
    {
        const uint32_t at = l.work(work_stage.index);
        mbarrier_wait(l.barrier(Layout::WORK_FULL, work_stage.index), work_stage.parity);
        const int tiles = load_uniform(at + offsetof(WorkTile, q.tiles));
        if (tiles < 0) return false;
        float dk[COLUMNS / 2], dv[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) dk[i] = 0.0f, dv[i] = 0.0f;
        if (tiles) {
            const uint32_t phase = (uint32_t)load_uniform(at + offsetof(WorkTile, q.phase));
            mbarrier_wait(l.barrier(Layout::K_FULL), phase);
            mbarrier_wait(l.barrier(Layout::OTHER_K_FULL), phase);
            mbarrier_wait(l.barrier(Layout::V_FULL), phase);
            mainloop(at, dk, dv);
            consumer_release(Layout::KEYS_EMPTY);
        }
        const WorkKeys work = load_work_keys(at);
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::WORK_EMPTY, work_stage.index));
        work_stage.advance();
        store_gradients<Element>(p.call, work, 0, group * COLUMNS, dk, dv);
        return true;
    }

    DEVICE void run()
    {
        while (process_work()) {
        }
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, group), 1);
        publish_dq(-1, 0);
    }
};

/* Adder of a consumer's pieces of dQ: as add_dq, but a part of a tile comes in pieces. */
template <typename Layout> DEVICE void add_dq_pieces(const mha_backward_sm90_params &p, const Layout &l, int consumer)
{
    const int producer = Layout::CONSUMERS * cluster_rank() + consumer;
    for (;;) {
        uint32_t *added = NULL;
        bool stores = false, claimed = false;
#pragma unroll 1
        for (int piece = 0; piece < Layout::DQ_PIECES; piece++) {
            mbarrier_wait_thread(l.barrier(Layout::DQ_FULL, consumer), (uint32_t)piece);
            const int row_tile = (int)load_shared_4(l.dq_tile(consumer));
            if (row_tile < 0) return;
            if (!piece) {
                const uint32_t order = load_shared_4(l.dq_tile(consumer) + 4);
                added = p.added + (int64_t)row_tile * Layout::DQ_PRODUCERS + producer;
                if (p.in_order) wait_for_order(added, order);
                claimed = !p.in_order && claim(added);
                stores = p.in_order ? order == 0 : claimed;
            }
            float *const sums = p.dq_sums + (int64_t)row_tile * Layout::DQ_TILE + producer * Layout::DQ_OF_PRODUCER +
                                piece * (Layout::DQ_OF_PRODUCER / Layout::DQ_PIECES);
            if (stores)
                bulk_store(sums, l.dq(consumer), Layout::DQ_BYTES);
            else
                bulk_add(sums, l.dq(consumer), Layout::DQ_BYTES);
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(l.barrier(Layout::DQ_EMPTY, consumer));
        }
        count(added, claimed ? 1 - CLAIMED : 1);
    }
}

} // namespace mha_backward
