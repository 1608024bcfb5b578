/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on Hopper.
 *
 *   CTA                  persistent, one per SM; takes work tiles (128 keys of a key head) until none is left
 *     warpgroup 0        one warp loads (producer.cuh), two threads add to dQ in memory (dq.cuh)
 *     two consumers      64 keys of the work tile each; for every tile of 64 rows of every query head:
 *
 *       wgmma   | S = K Q |        | dP = V dO | dV += P dO | dK += dS Q |
 *       warps      (wait)   | P of S |    (wait)    | dS, stored |
 *
 *     dQ = dS K of a tile, over the keys of both consumers, is computed
 *       192/128          by both, half the columns each, one tile later, so that they need not keep step:
 *                        S i + 1 | … | dQ i | dK i + 1
 *       128/128          by the consumers alternately, one tile later: halves what is read from shared memory
 *       96/64            the same, with S of the next tile issued behind dK, or behind dQ, which is stored while S runs
 *       64/64            by a warpgroup of its own: a consumer issues the next S and dP once it has dS
 *
 * S and dP have keys as rows, so that the fragments of P and dS have the layout of A and stay in registers.
 * At 192/128 registers do not suffice: dK reads dS from shared memory, as dQ does. While one consumer
 * computes P and dS, the products of the other one run. Where registers suffice, dP is issued together with
 * S.
 *
 * Limits for 64 rows by 128 keys, in clocks of an SM: products 3328 at 192/128, 2560 at 128/128, 1664 at
 * 96/64, 1280 at 64/64; ex2 512; shared memory, 128 bytes a clock: products read 336, 240, 144 and 112 KiB, and
 * others read or write 104, 80, 60 and 48 KiB more; then power.
 *
 * Summation order: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which CTAs
 * arrive or, if deterministic, in the order of the key blocks.
 */
#pragma once

#include "dq.cuh"
#include "epilogue.cuh"
#include "gradient.cuh"
#include "pair.cuh"
#include "producer.cuh"

namespace mha_backward {

template <typename Element, typename Layout> struct Consumer : Gradient<Element, Layout> {
    using Base = Gradient<Element, Layout>;
    using Base::D_QK, Base::D_V, Base::SCORES, Base::ROW_STEPS, Base::HELD_STEPS, Base::p, Base::l,
        Base::group, Base::n, Base::key_stage, Base::ds_stage, Base::ds_parity, Base::q_stage, Base::q_parity,
        Base::dout_stage;

    Ring<WORK_STAGES> work_stage;

    /* A thread's fragments of a tile of rows: S, which becomes P, dP, and the lse and delta of its rows. */
    struct Fragments {
        float s[SCORES], dp[SCORES];
        float4 lse[ROW_STEPS], delta[Layout::DELTA_EARLY];
    };

    /* Releases a stage to its producer: the leader arrives for the whole warpgroup. `empty`: the first of the
     * empty barriers. */
    DEVICE void consumer_release(int empty, int stage = 0) const
    {
        mbarrier_arrive_if(threadIdx.x % WARPGROUP_THREADS == 0, l.barrier(empty, stage));
    }

    /* Waits for tile `n` and loads its lse. Loads wait behind wgmma that this warp has issued, so they are
     * issued before it. */
    DEVICE void wait_for_rows(Fragments &tile, uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, q_stage(n)), q_parity(n));
        this->load_stats(tile.lse, 0, n);
    }

    /* Computes P and dS of tile n. S is complete; dP has been issued if DP_EARLY. On return dV is in flight,
     * and dK if DK_EARLY. `loads_next`: also loads the lse of the next tile. */
    DEVICE void process_tile(Fragments &tile, float (&dk)[D_QK / 2], float (&dv)[D_V / 2], int keys,
                             int diagonal, bool loads_next) const
    {
        uint32_t w[ROW_STEPS][4], exact[ROW_STEPS][4], ds[ROW_STEPS][4];
        if (64 * group + 63 + diagonal > 0) this->mask(tile.s, diagonal);
        if (keys < 64) this->mask_tail(tile.s, keys);
        this->softmax_block(tile.s, tile.lse, w, exact);
        if constexpr (!Layout::DP_EARLY) this->begin_dp(tile.dp, n);
        hold(dv), this->hold_words(w);
        wgmma_fence();
        this->issue_dv(dv, w, n);
        this->load_stats(tile.delta, 1, n);
        wgmma_wait<1>();
        hold(tile.dp);
        this->softmax_gradient(tile.s, w, exact, tile.dp, tile.delta, ds);
        if (loads_next) wait_for_rows(tile, n + 1);
        mbarrier_wait(l.barrier(Layout::DS_EMPTY, ds_stage(n)), ds_parity(n) ^ 1);
        this->store_ds(l.ds(ds_stage(n)), ds);
        if constexpr (Layout::DK_EARLY) {
            hold(dk), this->hold_words(ds);
            wgmma_fence();
            this->issue_dk(dk, ds, n);
        } else {
            fence_async_shared();
        }
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DS_FULL + 2 * group, ds_stage(n)));
    }

    /* ---- dQ by a warpgroup of its own ------------------------------------------------------------ */

    DEVICE void issue_tile(Fragments &tile, const uint32_t (&k)[HELD_STEPS][4]) const
    {
        wgmma_fence();
        this->issue_scores(tile.s, k, n);
        this->begin_dp(tile.dp, n);
    }

    DEVICE void release_rows(uint32_t n) const
    {
        consumer_release(Layout::DO_EMPTY, dout_stage(n));
        consumer_release(Layout::Q_EMPTY, q_stage(n));
    }

    /* Processes the tiles of rows of the work tile at `work`, as do the other two mainloops. dV and dK of a
     * tile run on until S of the next one is complete. */
    DEVICE void mainloop_with_dq_warpgroup(uint32_t work, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Fragments tile;
        uint32_t k[HELD_STEPS][4];
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)) - 64 * group;
        RowTiles<Layout> t;
        t.begin(p, work);
        hold(dk), hold(dv);
        this->load_keys(k);
        wait_for_rows(tile, n);
        issue_tile(tile, k);
        for (bool has_previous = false;; has_previous = true) {
            wgmma_wait<1>();
            hold(tile.s), hold(dv), hold(dk);
            if (has_previous) release_rows(n - 1);
            process_tile(tile, dk, dv, keys, t.diagonal, t.left > 1);
            n++;
            if (!t.advance(p, work)) break;
            hold(tile.s), hold(tile.dp);
            issue_tile(tile, k);
        }
        wgmma_wait<0>();
        hold(dv), hold(dk);
        release_rows(n - 1);
    }

    /* ---- dQ by consumers ------------------------------------------------------------------------- */

    DEVICE DqProducer<Element, Layout> dq_producer() const
    {
        return {p, l, Layout::DQ_PRODUCERS == 1 ? 0 : group};
    }

    /* Returns whether this consumer computes dQ of tile `n`, or half of it. */
    DEVICE bool computes_dq(uint32_t n) const
    {
        return Layout::DQ_BY == DQ_BY_HALVES || (int)(n % 2) == group;
    }

    DEVICE void wait_for_ds(int of, uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * of, ds_stage(n)), ds_parity(n));
    }

    DEVICE void store_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n, int row_tile, uint32_t order) const
    {
        hold(dq);
        consumer_release(Layout::DS_EMPTY, ds_stage(n));
        dq_producer().store(n, row_tile, order, dq);
    }

    /* Computes dQ of tile `n` and stores it for the adder. */
    DEVICE void compute_dq(uint32_t n, int row_tile, uint32_t order) const
    {
        float dq[Layout::DQ_VALUES];
        issue_dq(dq, n);
        wgmma_wait<0>();
        store_dq(dq, n, row_tile, order);
    }

    DEVICE void issue_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        wait_for_ds(1 - group, n), wait_for_ds(group, n);
        fence_async_shared();
        wgmma_fence();
        dq_producer().issue(dq, n);
    }

    /* The consumers compute dQ of alternate tiles, one tile later. */
    DEVICE void mainloop_with_alternate_dq(uint32_t work, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Fragments tile;
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)) - 64 * group;
        RowTiles<Layout> t;
        t.begin(p, work);
        int previous = -1; /* the previous tile; -1: none */
        uint32_t order = 0;
        for (;;) {
            wait_for_rows(tile, n);
            wgmma_fence();
            this->issue_scores(tile.s, n);
            this->begin_dp(tile.dp, n);
            wgmma_wait<1>();
            hold(tile.s);
            process_tile(tile, dk, dv, keys, t.diagonal, false);
            wgmma_wait<1>();
            hold(dv);
            consumer_release(Layout::DO_EMPTY, dout_stage(n));
            wgmma_wait<0>();
            hold(dk);
            consumer_release(Layout::Q_EMPTY, q_stage(n));
            if (previous >= 0 && computes_dq(n - 1)) compute_dq(n - 1, previous, order);
            previous = t.index, order = dq_order(p, t, work);
            n++;
            if (!t.advance(p, work)) break;
        }
        if (computes_dq(n - 1)) compute_dq(n - 1, previous, order);
    }

    /* The same, but S of the next tile is issued before dV and dK are complete, or behind dQ, which is stored while S
     * runs. dP comes after that, for dQ needs its registers. */
    DEVICE void mainloop_with_alternate_dq_and_early_s(uint32_t work, float (&dk)[D_QK / 2],
                                                       float (&dv)[D_V / 2])
    {
        Fragments tile;
        uint32_t k[HELD_STEPS][4];
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)) - 64 * group;
        RowTiles<Layout> t;
        t.begin(p, work);
        hold(dk), hold(dv);
        this->load_keys(k);
        wait_for_rows(tile, n);
        issue_tile(tile, k);
        int previous = -1; /* the previous tile; -1: none */
        uint32_t order = 0;
        for (bool holds_previous = false;;) {
            wgmma_wait<1>();
            hold(tile.s), hold(dv), hold(dk);
            if (holds_previous) release_rows(n - 1);
            process_tile(tile, dk, dv, keys, t.diagonal, t.left > 1);
            if (t.left == 1) break;
            holds_previous = previous < 0 || !computes_dq(n - 1);
            if (holds_previous) {
                issue_next_scores(tile, k);
            } else {
                float dq[Layout::DQ_VALUES];
                issue_dq(dq, n - 1);
                wgmma_wait<1>();
                hold(dv), hold(dk);
                release_rows(n);
                issue_next_scores(tile, k);
                wgmma_wait<1>();
                store_dq(dq, n - 1, previous, order);
            }
            previous = t.index, order = dq_order(p, t, work);
            n++;
            t.advance(p, work);
            this->begin_dp(tile.dp, n);
        }
        wgmma_wait<0>();
        hold(dv), hold(dk);
        release_rows(n);
        if (computes_dq(n))
            compute_dq(n, t.index, dq_order(p, t, work));
        else if (previous >= 0)
            compute_dq(n - 1, previous, order);
        n++;
    }

    DEVICE void issue_next_scores(Fragments &tile, const uint32_t (&k)[HELD_STEPS][4]) const
    {
        hold(tile.s), hold(tile.dp);
        wgmma_fence();
        this->issue_scores(tile.s, k, n + 1);
    }

    /* Both consumers compute half of dQ, one tile later. dK reads dS from shared memory. It is issued after
     * dQ, and dQ is stored while dK runs. */
    DEVICE void mainloop_with_half_dq(uint32_t work, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Fragments tile;
        float dq[Layout::DQ_VALUES];
        const int keys = load_uniform(work + offsetof(WorkTile, k.keys)) - 64 * group;
        RowTiles<Layout> t;
        t.begin(p, work);
        int previous = -1;
        uint32_t order = 0;
        for (;;) {
            wait_for_rows(tile, n);
            wgmma_fence();
            this->issue_scores(tile.s, n);
            wgmma_wait<1>();
            hold(dk);
            if (previous >= 0) {
                consumer_release(Layout::Q_EMPTY, q_stage(n - 1));
                consumer_release(Layout::DS_EMPTY, ds_stage(n - 1));
            }
            wgmma_wait<0>();
            hold(tile.s);
            process_tile(tile, dk, dv, keys, t.diagonal, false);
            wgmma_wait<0>();
            hold(dv);
            consumer_release(Layout::DO_EMPTY, dout_stage(n));
            /* The first tile has no predecessor: the dQ computed here is discarded. */
            if (previous >= 0) wait_for_ds(1 - group, n - 1);
            hold(dk);
            wgmma_fence();
            dq_producer().issue(dq, n - 1);
            wait_for_ds(group, n);
            wgmma_fence();
            this->issue_dk(dk, n);
            wgmma_wait<1>();
            if (previous >= 0) store_dq(dq, n - 1, previous, order);
            previous = t.index, order = dq_order(p, t, work);
            n++;
            if (!t.advance(p, work)) break;
        }
        wgmma_wait<0>();
        hold(dk);
        consumer_release(Layout::Q_EMPTY, q_stage(n - 1));
        consumer_release(Layout::DS_EMPTY, ds_stage(n - 1));
        compute_dq(n - 1, previous, order);
    }

    /* ---- Work tiles ------------------------------------------------------------------------------ */

    DEVICE bool process_work()
    {
        mbarrier_wait(l.barrier(Layout::WORK_FULL, work_stage.index), work_stage.parity);
        const int tiles = load_uniform(l.work(work_stage.index) + offsetof(WorkTile, q.tiles));
        if (tiles < 0) return false;
        float dk[D_QK / 2], dv[D_V / 2];
#pragma unroll
        for (int i = 0; i < D_QK / 2; i++) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) dv[i] = 0.0f;
        if (tiles) {
            const uint32_t phase = phase_of<Layout>(
                (uint32_t)load_uniform(l.work(work_stage.index) + offsetof(WorkTile, q.phase)));
            key_stage = l.key_stage(work_stage.index);
            mbarrier_wait(l.barrier(Layout::K_FULL, key_stage), phase);
            mbarrier_wait(l.barrier(Layout::V_FULL, key_stage), phase);
            if constexpr (Layout::DQ_BY == DQ_BY_OWN_WARPGROUP)
                mainloop_with_dq_warpgroup(l.work(work_stage.index), dk, dv);
            else if constexpr (Layout::DQ_BY == DQ_BY_ALTERNATE_TILES && Layout::S_EARLY)
                mainloop_with_alternate_dq_and_early_s(l.work(work_stage.index), dk, dv);
            else if constexpr (Layout::DQ_BY == DQ_BY_ALTERNATE_TILES)
                mainloop_with_alternate_dq(l.work(work_stage.index), dk, dv);
            else
                mainloop_with_half_dq(l.work(work_stage.index), dk, dv);
            consumer_release(Layout::KEYS_EMPTY, key_stage);
        }
        const HeadSums heads = head_sums(p, l.work(work_stage.index), group, Layout::CONSUMERS, D_QK + D_V);
        heads.wait_for_heads_before();
        if (heads.is_last) {
            const WorkKeys work = load_work_keys(l.work(work_stage.index));
            store_dv<Element>(p.call, work, 64 * group, dv, heads, 0);
            store_dk<Element>(p.call, work, 64 * group, dk, heads, D_V / 2);
        } else {
            heads.add(dv, 0), heads.add(dk, D_V / 2);
            heads.count();
        }
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::WORK_EMPTY, work_stage.index));
        work_stage.advance();
        return true;
    }

    DEVICE void run()
    {
        while (process_work()) {
        }
        if constexpr (Layout::DQ_BY == DQ_BY_OWN_WARPGROUP) return;
        dq_producer().end(computes_dq(n) ? n : n + 1);
    }
};

template <typename Element, typename Layout> DEVICE void kernel(const mha_backward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* alignment of the tiles */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    if (threadIdx.x == 0) l.init_barriers();
    if (!p.joins) wait_for_kernels_before();
    let_next_kernel_start(); /* the next kernel reads counters that the prepare kernel has cleared */
    if constexpr (Layout::CTAS == 1)
        __syncthreads();
    else
        cluster_sync();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
        if (warp == 0) Producer<Layout>{p, l}.run();
        if ((warp == 1 || warp == 2) && elect_one()) {
            if constexpr (Layout::CTAS == 1)
                add_dq(p, l, warp - 1);
            else
                add_dq_pieces(p, l, warp - 1);
        }
        /* One warp waits for the CTAs that this launch joins, so that they have ended when it ends. The
         * instruction stops the whole warp, so the warp must have no other work. It is in one CTA only, because
         * dq is finished where the others were. */
        if (warp == 3 && p.joins && blockIdx.x == 0) wait_for_kernels_before();
    } else if (warpgroup <= Layout::CONSUMERS) {
        take_registers<Layout::CONSUMER_REGISTERS>();
        const uint32_t lane = threadIdx.x % 32, key = (threadIdx.x - WARPGROUP_THREADS) / 32 * 16 +
                                                      lane % 16 -
                                                      (uint32_t)((warpgroup - 1) * (64 - Layout::KEY_STEP));
        const Gradient<Element, Layout> of_tile = {p, l, warpgroup - 1, lane % 4 * 16,
                                                   swizzle_128(key, lane / 16)};
        if constexpr (Layout::CTAS == 1)
            Consumer<Element, Layout>{of_tile}.run();
        else
            run_pair_consumer<Element, Layout>(of_tile);
    } else if constexpr (Layout::DQ_BY == DQ_BY_OWN_WARPGROUP) {
        give_registers<Layout::DQ_REGISTERS>();
        DqProducer<Element, Layout>{p, l, 0}.run();
    }
    if constexpr (Layout::CTAS > 1) cluster_sync(); /* the other CTA may still write here */
}

} // namespace mha_backward

#define MHA_BACKWARD_KERNEL(NAME, ELEMENT, D_QK, D_V)                                                        \
    DEFINE_KERNEL(NAME, mha_backward_sm90_params, (mha_backward::BackwardLayout<D_QK, D_V>::THREADS, 1),     \
                  mha_backward::kernel<ELEMENT, mha_backward::BackwardLayout<D_QK, D_V>>(p))
