/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward at 256/256: a cluster of two CTAs shares a work tile of 128 keys.
 *
 * dK and dV of 64 keys are half of an SM's registers, so a CTA has 64 keys: the first consumer computes S, P and
 * dV, the second dP, dS and dK. The CTAs exchange dS, so that each computes half the columns of dQ over all 128
 * keys: alone, each would add all of dQ to memory, twice as many bytes, and L2 would be the bound.
 *
 *   first   issue  S(n+1) | dQ(n), a quarter |           | dV(n+1) | S(n+2)
 *           warps                     (wait) | P(n+1)  ──┐         | store dQ(n)
 *   second  issue                            |           ▼ dK(n+1) | dQ(n+1), a quarter |          | dP(n+2)
 *           warps                     (dP)   | (wait) dS(n+1), stored                   (wait) | store dQ(n+1)
 *   CTA                                                 copy of dS(n+1) ──► the other; the other's ──► here
 *
 * Limits for 64 rows by 64 keys, in clocks of an SM: products 2560; shared memory, 128 bytes a clock, 3300: products
 * read 256 KiB, and others read or write 168 KiB more; additions to dQ 32 KiB.
 */
#pragma once

#include "dq.cuh"
#include "epilogue.cuh"
#include "gradient.cuh"
#include "pair_layout.cuh"

#include "../../device/cluster.cuh"

namespace mha_backward {

/* Returns the value in another register: ptxas makes wgmma wait where an accumulator is used while later ones are in
 * flight. */
DEVICE float copy_of(float value)
{
    float copy;
    asm volatile("mov.b32 %0, %1;" : "=f"(copy) : "f"(value));
    return copy;
}

/* What both consumers do. */
template <typename Element, typename Layout> struct PairConsumer : Gradient<Element, Layout> {
    using Base = Gradient<Element, Layout>;
    using Base::D_QK, Base::D_V, Base::SCORES, Base::ROW_STEPS, Base::PACKS_P, Base::p, Base::l, Base::group,
        Base::n, Base::q_stage, Base::q_parity;

    static constexpr int SECOND = Layout::DQ_VALUES - Layout::FIRST_VALUES; /* of dQ's second piece */

    Ring<WORK_STAGES> work_stage;

    DEVICE bool is_leader() const { return threadIdx.x % WARPGROUP_THREADS == 0; }

    DEVICE void consumer_release(int empty, int stage = 0) const
    {
        mbarrier_arrive_if(is_leader(), l.barrier(empty, stage));
    }

    DEVICE void warp_arrive(int barrier) const
    {
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(barrier));
    }

    /* ---- dQ -------------------------------------------------------------------------------------- */

    DEVICE void issue_half_dq(float (&dq)[Layout::DQ_VALUES], uint32_t ds, uint32_t k, int add) const
    {
#pragma unroll
        for (int i = 0; i < Layout::CTA_KEYS / 16; i++)
            product_of_columns<Element>(
                dq,
                descriptor_of<SWIZZLE_128>(l.in_descriptor(ds), Layout::DS_TILE,
                                           (uint32_t)i * 16 * LINE_BYTES),
                descriptor_of<SWIZZLE_128>(l.in_descriptor(k), Layout::K_TILE, (uint32_t)i * 16 * LINE_BYTES),
                add || i);
    }

    /* Issues this consumer's columns of dQ of tile `n`. */
    DEVICE void issue_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        const uint32_t part = (uint32_t)(Layout::CONSUMERS * cluster_rank() + group);
        mbarrier_wait(l.barrier(Layout::DS_FULL), n % 2);
        mbarrier_wait(l.barrier(Layout::OTHER_DS_FULL), n % 2);
        wgmma_fence();
        issue_half_dq(dq, l.ds(), l.k() + part * Layout::K_TILE, 0);
        issue_half_dq(dq, l.other_ds(), l.other_k() + (uint32_t)group * Layout::K_TILE, 1);
        wgmma_commit();
    }

    /* Releases dS of the tile whose dQ is complete, here and in the other CTA. */
    DEVICE void release_ds() const
    {
        consumer_release(Layout::DS_EMPTY);
        mbarrier_arrive_mapped_if(is_leader(),
                                  map_shared(l.barrier(Layout::OTHER_DS_EMPTY), 1 - cluster_rank()));
    }

    /* Stores the first piece of dQ for the adder; returns the second one. */
    DEVICE void store_first_dq(const float (&dq)[Layout::DQ_VALUES], int row_tile, uint32_t order,
                               float (&second)[SECOND]) const
    {
        store_dq(dq, 1);
        publish_dq(row_tile, order);
#pragma unroll
        for (int i = 0; i < SECOND; i++) second[i] = copy_of(dq[Layout::FIRST_VALUES + i]);
    }

    DEVICE void store_second_dq(const float (&second)[SECOND]) const
    {
        store_dq(second, 0);
        warp_arrive(Layout::DQ_FULL + group);
    }

    /* Stores as much as there is room for. */
    template <int N> DEVICE void store_dq(const float (&dq)[N], uint32_t parity) const
    {
        const uint32_t to = l.dq(group) + fresh_thread() % WARPGROUP_THREADS * 16;
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, group), parity);
#pragma unroll
        for (int i = 0; i < N && i < Layout::FIRST_VALUES; i += 4)
            store_shared_16(to + (uint32_t)(i * WARPGROUP_THREADS * 4),
                            make_uint4(__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                                       __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])));
    }

    /* Notifies the adder of a tile's first piece; row_tile < 0: no more tiles. */
    DEVICE void publish_dq(int row_tile, uint32_t order) const
    {
        if (is_leader())
            store_shared_4(l.dq_tile(group), (uint32_t)row_tile), store_shared_4(l.dq_tile(group) + 4, order);
        warp_arrive(Layout::DQ_FULL + group);
    }

    DEVICE void end_dq() const
    {
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, group), 1);
        publish_dq(-1, 0);
    }

    /* ---- Work tiles ------------------------------------------------------------------------------ */

    /* Waits for a work tile and its keys. Returns its tiles of rows; < 0: no more work tiles. */
    DEVICE int await_work() const
    {
        const uint32_t at = l.work(work_stage.index);
        mbarrier_wait(l.barrier(Layout::WORK_FULL, work_stage.index), work_stage.parity);
        const int tiles = load_uniform(at + offsetof(WorkTile, q.tiles));
        if (tiles <= 0) return tiles;
        const uint32_t phase = phase_of<Layout>((uint32_t)load_uniform(at + offsetof(WorkTile, q.phase)));
        mbarrier_wait(l.barrier(Layout::K_FULL), phase);
        mbarrier_wait(l.barrier(Layout::OTHER_K_FULL), phase);
        mbarrier_wait(l.barrier(Layout::V_FULL), phase);
        return tiles;
    }

    /* Processes work tiles until none is left: `mainloop` adds the tiles of rows to `d`, dK or dV, and `store` writes it
     * if all heads have been added. */
    template <typename Mainloop, typename Store> DEVICE void run_work(Mainloop mainloop, Store store)
    {
        for (int tiles; (tiles = await_work()) >= 0;) {
            float d[D_QK / 2];
#pragma unroll
            for (int i = 0; i < D_QK / 2; i++) d[i] = 0.0f;
            if (tiles) mainloop(l.work(work_stage.index), d);
            end_work(tiles, d, store);
        }
        end_dq();
    }

    /* Releases the work tile, and its keys if it has tiles of rows; adds `d` to that of the heads before. */
    template <typename Store> DEVICE void end_work(int tiles, float (&d)[D_QK / 2], Store store)
    {
        if (tiles) consumer_release(Layout::KEYS_EMPTY);
        const uint32_t at = l.work(work_stage.index);
        const int part = Layout::CONSUMERS * cluster_rank() + group;
        const HeadSums heads = head_sums(p, at, part, Layout::CTAS * Layout::CONSUMERS, D_QK);
        heads.wait_for_heads_before();
        if (heads.is_last) {
            store(load_work_keys(at), d, heads);
        } else {
            heads.add(d, 0);
            heads.count();
        }
        warp_arrive(Layout::WORK_EMPTY + work_stage.index);
        work_stage.advance();
    }
};

/* The first consumer: S, P, dV. */
template <typename Element, typename Layout> struct WeightsConsumer : PairConsumer<Element, Layout> {
    using Base = PairConsumer<Element, Layout>;
    using Base::D_V, Base::SECOND, Base::SCORES, Base::ROW_STEPS, Base::PACKS_P, Base::p, Base::l, Base::n,
        Base::q_stage, Base::q_parity, Base::work_stage;

    /* dV of a tile runs on beside S of the next one; in fp16 ptxas finds no registers for that. */
    static constexpr bool DV_OVERLAPS = Element::IS_BF16;
    static constexpr int LSE_EARLY = 2; /* · 16 rows whose lse is loaded before P is computed */

    struct Fragments {
        float s[SCORES];
        float4 lse[LSE_EARLY];
    };

    DEVICE void begin_scores(Fragments &tile) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, q_stage(n)), q_parity(n));
        wgmma_fence();
        this->issue_scores(tile.s, n);
    }

    /* Computes P, sends it to the other consumer, and issues dV. */
    DEVICE void process_scores(Fragments &tile, uint32_t (&w)[ROW_STEPS][4], float (&dv)[D_V / 2], int keys,
                               int diagonal) const
    {
        hold(tile.s);
        if (63 + diagonal > 0) this->mask(tile.s, diagonal);
        if (keys < Layout::CTA_KEYS) this->mask_tail(tile.s, keys);
        mbarrier_wait(l.barrier(Layout::P_EMPTY), n % 2 ^ 1);
        const uint32_t to = l.p() + fresh_thread() % WARPGROUP_THREADS * 16;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++) {
            uint32_t exact[4];
            const float4 lse = tile.lse[i % LSE_EARLY];
            if (i + LSE_EARLY < ROW_STEPS) tile.lse[i % LSE_EARLY] = this->stats(0, i + LSE_EARLY, n);
            this->softmax_step(tile.s, i, lse, w[i], exact);
            if constexpr (PACKS_P) {
                store_shared_16(to + (uint32_t)(i * WARPGROUP_THREADS * 16),
                                make_uint4(exact[0], exact[1], exact[2], exact[3]));
            } else {
#pragma unroll
                for (int j = 8 * i; j < 8 * i + 8; j += 4)
                    store_shared_16(to + (uint32_t)(j / 4 * WARPGROUP_THREADS * 16),
                                    make_uint4(__float_as_uint(tile.s[j]), __float_as_uint(tile.s[j + 1]),
                                               __float_as_uint(tile.s[j + 2]),
                                               __float_as_uint(tile.s[j + 3])));
            }
        }
        this->consumer_release(Layout::Q_EMPTY, q_stage(n)); /* S and lse have been read */
        this->warp_arrive(Layout::P_FULL);
        mbarrier_wait(l.barrier(Layout::DO_FULL), n % 2);
        hold(dv), this->hold_words(w);
        wgmma_fence();
        this->issue_dv(dv, w, n);
    }

    /* Processes the tiles of rows of the work tile at `work`. */
    DEVICE void mainloop(uint32_t work, float (&dv)[D_V / 2])
    {
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)),
                  before = Layout::CTA_KEYS * cluster_rank();
        uint32_t w[ROW_STEPS][4]; /* P, as A of dV */
        float second[SECOND];
        RowTiles<Layout> t;
        t.begin(p, work);
        {
            Fragments tile;
            begin_scores(tile);
            this->load_stats(tile.lse, 0, n);
            wgmma_wait<0>();
            process_scores(tile, w, dv, keys, t.diagonal + before);
        }
        int previous = t.index;
        uint32_t order = dq_order(p, t, work);
        bool has_second = false;
        for (; t.advance(p, work); has_second = true) {
            n++;
            Fragments tile; /* of this iteration, so that nothing of the last one stays in registers */
            float dq[Layout::DQ_VALUES];
            if constexpr (!DV_OVERLAPS) wgmma_wait<0>();
            if constexpr (!DV_OVERLAPS) hold(dv), this->hold_words(w);
            begin_scores(tile);
            if (has_second) this->store_second_dq(second);
            wgmma_wait<1>();
            hold(dv), this->hold_words(w);
            this->consumer_release(Layout::DO_EMPTY);
            this->load_stats(tile.lse, 0, n);
            this->issue_dq(dq, n - 1);
            wgmma_wait<1>();
            process_scores(tile, w, dv, keys, t.diagonal + before);
            wgmma_wait<1>();
            hold(dq);
            this->release_ds();
            this->store_first_dq(dq, previous, order, second);
            previous = t.index, order = dq_order(p, t, work);
        }
        if (has_second) this->store_second_dq(second);
        wgmma_wait<0>();
        hold(dv);
        this->consumer_release(Layout::DO_EMPTY);
        float dq[Layout::DQ_VALUES];
        this->issue_dq(dq, n);
        wgmma_wait<0>();
        hold(dq);
        this->release_ds();
        this->store_first_dq(dq, previous, order, second);
        this->store_second_dq(second);
        n++;
    }

    DEVICE void run()
    {
        this->run_work([&](uint32_t work, float(&dv)[D_V / 2]) { mainloop(work, dv); },
                       [&](const WorkKeys &work, const float(&dv)[D_V / 2], const HeadSums &heads) {
                           store_dv<Element>(p.call, work, 0, dv, heads, 0);
                       });
    }
};

/* The second consumer: dP, dS, dK. */
template <typename Element, typename Layout> struct GradientsConsumer : PairConsumer<Element, Layout> {
    using Base = PairConsumer<Element, Layout>;
    using Base::D_QK, Base::SECOND, Base::SCORES, Base::ROW_STEPS, Base::PACKS_P, Base::p, Base::l, Base::n,
        Base::q_stage, Base::q_parity, Base::work_stage;

    struct Fragments {
        float dp[SCORES];
        float4 delta[ROW_STEPS];
        uint32_t ds[ROW_STEPS][4];
    };

    DEVICE void begin_tile(Fragments &tile) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, q_stage(n)), q_parity(n));
        this->load_stats(tile.delta, 1, n);
        mbarrier_wait(l.barrier(Layout::DO_FULL), n % 2);
        wgmma_fence();
        this->issue_dp(tile.dp, n);
    }

    /* Computes dS from the other consumer's P, stores it, sends it to the other CTA, and issues dK. */
    DEVICE void process_tile(Fragments &tile, float (&dk)[D_QK / 2]) const
    {
        uint32_t exact[ROW_STEPS][4];
        float of_fp32[SCORES]; /* one of both is P */
        mbarrier_wait(l.barrier(Layout::P_FULL), n % 2);
        const uint32_t from = l.p() + fresh_thread() % WARPGROUP_THREADS * 16;
#pragma unroll
        for (int i = 0; i < (PACKS_P ? ROW_STEPS : 2 * ROW_STEPS); i++) {
            const uint4 four = load_shared_16(from + (uint32_t)(i * WARPGROUP_THREADS * 16));
            if constexpr (PACKS_P) {
                exact[i][0] = four.x, exact[i][1] = four.y, exact[i][2] = four.z, exact[i][3] = four.w;
            } else {
                of_fp32[4 * i] = __uint_as_float(four.x), of_fp32[4 * i + 1] = __uint_as_float(four.y);
                of_fp32[4 * i + 2] = __uint_as_float(four.z), of_fp32[4 * i + 3] = __uint_as_float(four.w);
            }
        }
        this->warp_arrive(Layout::P_EMPTY);
        wgmma_wait<0>();
        hold(tile.dp);
        this->consumer_release(Layout::DO_EMPTY);
        this->softmax_gradient(of_fp32, exact, exact, tile.dp, tile.delta, tile.ds);
        mbarrier_wait(l.barrier(Layout::DS_EMPTY), n % 2 ^ 1);
        mbarrier_wait(l.barrier(Layout::OTHER_DS_EMPTY), n % 2 ^ 1);
        this->store_ds(l.ds(), tile.ds);
        fence_async_shared();
        this->warp_arrive(Layout::DS_FULL);
        hold(dk), this->hold_words(tile.ds);
        wgmma_fence();
        this->issue_dk(dk, tile.ds, n);
        mbarrier_wait(l.barrier(Layout::DS_FULL), n % 2);
        if (this->is_leader()) send_ds();
        __syncwarp();
    }

    DEVICE void send_ds() const
    {
        const int other = 1 - cluster_rank();
        mbarrier_arrive_expect(l.barrier(Layout::OTHER_DS_FULL), Layout::DS_BYTES);
        bulk_copy_mapped(map_shared(l.other_ds(), other), l.ds(), Layout::DS_BYTES,
                         map_shared(l.barrier(Layout::OTHER_DS_FULL), other));
    }

    DEVICE void mainloop(uint32_t work, float (&dk)[D_QK / 2])
    {
        Fragments tile;
        float second[SECOND];
        RowTiles<Layout> t;
        t.begin(p, work);
        begin_tile(tile);
        for (;;) {
            float dq[Layout::DQ_VALUES];
            process_tile(tile, dk);
            this->issue_dq(dq, n);
            wgmma_wait<1>();
            hold(dk);
            this->consumer_release(Layout::Q_EMPTY, q_stage(n));
            wgmma_wait<0>();
            hold(dq);
            this->release_ds();
            this->store_first_dq(dq, t.index, dq_order(p, t, work), second);
            n++;
            if (!t.advance(p, work)) break;
            begin_tile(tile);
            this->store_second_dq(second);
        }
        this->store_second_dq(second);
    }

    DEVICE void run()
    {
        this->run_work([&](uint32_t work, float(&dk)[D_QK / 2]) { mainloop(work, dk); },
                       [&](const WorkKeys &work, const float(&dk)[D_QK / 2], const HeadSums &heads) {
                           store_dk<Element>(p.call, work, 0, dk, heads, 0);
                       });
    }
};

template <typename Element, typename Layout>
DEVICE void run_pair_consumer(const Gradient<Element, Layout> &of_tile)
{
    if (of_tile.group == 0)
        WeightsConsumer<Element, Layout>{{of_tile}}.run();
    else
        GradientsConsumer<Element, Layout>{{of_tile}}.run();
}

/* Adder of a consumer's part of dQ, as add_dq; a part comes in two pieces. */
template <typename Layout>
DEVICE void add_dq_pieces(const mha_backward_sm90_params &p, const Layout &l, int consumer)
{
    const int producer = Layout::CONSUMERS * cluster_rank() + consumer;
    for (;;) {
        uint32_t *added = NULL;
        bool stores = false, claimed = false;
#pragma unroll 1
        for (int piece = 0; piece < 2; piece++) {
            mbarrier_wait_thread(l.barrier(Layout::DQ_FULL, consumer), (uint32_t)piece);
            const int row_tile = (int)load_shared_4(l.dq_tile(consumer));
            if (row_tile < 0) return;
            fence_async_shared();
            if (!piece) {
                const uint32_t order = load_shared_4(l.dq_tile(consumer) + 4);
                added = p.added + (int64_t)row_tile * Layout::DQ_PRODUCERS + producer;
                if (p.in_order) wait_for_order(added, order);
                claimed = !p.in_order && claim(added);
                stores = p.in_order ? order == 0 : claimed;
            }
            float *const sums = p.dq_sums + (int64_t)row_tile * Layout::DQ_TILE +
                                producer * Layout::DQ_OF_PRODUCER + piece * (Layout::DQ_BYTES / 4);
            const uint32_t bytes = piece ? Layout::DQ_OF_PRODUCER * 4 - Layout::DQ_BYTES : Layout::DQ_BYTES;
            if (stores)
                bulk_store(sums, l.dq(consumer), bytes);
            else
                bulk_add(sums, l.dq(consumer), bytes);
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(l.barrier(Layout::DQ_EMPTY, consumer));
        }
        count(added, claimed ? 1 - CLAIMED : 1);
    }
}

} // namespace mha_backward
