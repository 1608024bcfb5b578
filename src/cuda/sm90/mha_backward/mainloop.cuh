/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on Hopper.
 *
 *   CTA                  persistent, one per SM; takes items (128 keys of a key head) until none is left
 *     warpgroup 0        one warp loads (producer.cuh), two threads add to dQ in memory (dq.cuh)
 *     two consumers      64 keys of the item each; for every tile of 64 rows of every query head of the item:
 *
 *       wgmma   | S = K Q |        | dP = V dO | dV += P dO | dK += dS Q |
 *       warps      (wait)   | P of S |    (wait)    | dS, stored |
 *
 *     dQ = dS K of a tile, over the keys of both consumers, is computed
 *       192/128          by both, half the columns each, one tile later, so that they need not keep step:
 *                        S i + 1 | … | dQ i | dK i + 1
 *       128/128          by the consumers alternately, one tile later: halves what is read from shared memory
 *       64/64            by a warpgroup of its own: a consumer issues the next S and dP once it has dS
 *
 * S and dP have keys as rows, so that the fragments of P and dS have the layout of A and stay in registers.
 * At 192/128 registers do not suffice: dK reads dS from shared memory, as dQ does. While one consumer
 * computes P and dS, the products of the other one run. Where registers suffice, dP is issued together with
 * S.
 *
 * Limits for 64 rows by 128 keys, in clocks of an SM: products 3328 at 192/128, 2560 at 128/128, 1280 at
 * 64/64; ex2 512; shared memory, 128 bytes a clock: products read 336, 240 and 112 KiB, and others read or
 * write 104, 80 and 48 KiB more; then power.
 *
 * Summation order: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which CTAs
 * arrive or, if deterministic, in the order of the key blocks.
 */
#pragma once

#include "dq.cuh"
#include "epilogue.cuh"
#include "gradient.cuh"
#include "producer.cuh"

namespace mha_backward {

template <typename Element, typename Layout> struct Consumer : KeysOfConsumer<Element, Layout> {
    using Keys = KeysOfConsumer<Element, Layout>;
    using Keys::D_QK, Keys::D_V, Keys::SCORES, Keys::ROW_STEPS, Keys::p, Keys::l, Keys::group, Keys::n,
        Keys::place, Keys::parity, Keys::stage, Keys::stage_parity, Keys::dout_stage;

    Ring<ITEM_SLOTS> slot;

    /* A thread's part of a tile: S, which becomes P, dP, and the lse and delta of its rows. */
    struct Tile {
        float s[SCORES], dp[SCORES];
        float4 lse[ROW_STEPS], delta[Layout::DELTA_EARLY];
    };

    DEVICE void arrive(int barriers, int at = 0) const
    {
        mbarrier_arrive_if(threadIdx.x % WARPGROUP_THREADS == 0, l.barrier(barriers, at));
    }

    /* Waits for tile `n` and loads its lse. Loads wait behind wgmma that this warp has issued, so they are
     * issued before it. */
    DEVICE void await_rows(Tile &tile, uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, stage(n)), stage_parity(n));
        this->load_numbers(tile.lse, 0, n);
    }

    /* Computes P and dS of tile n. S is complete; dP has been issued if DP_EARLY. On return dV is in flight,
     * and dK if DK_EARLY. `next`: also loads the lse of the next tile. */
    DEVICE void take_tile(Tile &tile, float (&dk)[D_QK / 2], float (&dv)[D_V / 2], int keys, int diagonal,
                          bool next) const
    {
        uint32_t w[ROW_STEPS][4], exact[ROW_STEPS][4], ds[ROW_STEPS][4];
        if (64 * group + 63 + diagonal > 0) this->mask(tile.s, diagonal);
        if (keys < 64) this->mask_tail(tile.s, keys);
        this->make_p(tile.s, tile.lse, w, exact);
        if constexpr (!Layout::DP_EARLY) this->begin_dp(tile.dp, n);
        hold(dv), this->hold_words(w);
        wgmma_fence();
        this->issue_dv(dv, w, n);
        this->load_numbers(tile.delta, 1, n);
        wgmma_wait<1>();
        hold(tile.dp);
        this->make_ds(tile.s, w, exact, tile.dp, tile.delta, ds);
        if (next) await_rows(tile, n + 1);
        mbarrier_wait(l.barrier(Layout::DS_EMPTY, place(n)), parity(n) ^ 1);
        this->store_ds(ds);
        if constexpr (Layout::DK_EARLY) {
            hold(dk), this->hold_words(ds);
            wgmma_fence();
            this->issue_dk(dk, ds, n);
        } else {
            fence_async_shared();
        }
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DS_FULL + 2 * group, place(n)));
    }

    /* ---- dQ by a warpgroup of its own ------------------------------------------------------------ */

    DEVICE void begin_tile(Tile &tile, const uint32_t (&k)[D_QK / 16][4]) const
    {
        wgmma_fence();
        this->issue_scores(tile.s, k, n);
        this->begin_dp(tile.dp, n);
    }

    DEVICE void free_rows(uint32_t n) const
    {
        arrive(Layout::DO_EMPTY, dout_stage(n)), arrive(Layout::Q_EMPTY, stage(n));
    }

    /* Processes the tiles of the item at `item`. */
    DEVICE void take_tiles_apart(uint32_t item, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Tile tile;
        uint32_t k[D_QK / 16][4];
        const int keys = word_at(item + offsetof(Item, keys)) - 64 * group;
        Walk<Layout> t;
        t.begin(p, item);
        hold(dk), hold(dv);
        this->load_keys(k);
        await_rows(tile, n);
        begin_tile(tile, k);
        for (bool later = false;; later = true) {
            wgmma_wait<1>();
            hold(tile.s), hold(dv), hold(dk);
            if (later) free_rows(n - 1);
            take_tile(tile, dk, dv, keys, t.diagonal, t.left > 1);
            n++;
            if (!t.step(p, item)) break;
            hold(tile.s), hold(tile.dp);
            begin_tile(tile, k);
        }
        wgmma_wait<0>();
        hold(dv), hold(dk);
        free_rows(n - 1);
    }

    /* ---- dQ by consumers ------------------------------------------------------------------------- */

    DEVICE QueryMaker<Element, Layout> queries() const { return {p, l, Layout::MAKERS == 1 ? 0 : group}; }

    /* Returns whether this consumer computes dQ of tile `n`, or half of it. */
    DEVICE bool makes(uint32_t n) const { return Layout::DQ_BY == DQ_BY_HALVES || (int)(n % 2) == group; }

    DEVICE void wait_for_ds(int of, uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * of, place(n)), parity(n));
    }

    DEVICE void end_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n, int head_and_tile, uint32_t turn) const
    {
        hold(dq);
        arrive(Layout::DS_EMPTY, place(n));
        queries().hand_over(n, head_and_tile, turn, dq);
    }

    /* Computes dQ of tile `n` and hands it over. */
    DEVICE void make_dq(uint32_t n, int head_and_tile, uint32_t turn) const
    {
        float dq[Layout::DQ_VALUES];
        wait_for_ds(1 - group, n), wait_for_ds(group, n);
        fence_async_shared();
        wgmma_fence();
        queries().issue(dq, n);
        wgmma_wait<0>();
        end_dq(dq, n, head_and_tile, turn);
    }

    DEVICE void take_tiles_in_turns(uint32_t item, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Tile tile;
        const int keys = word_at(item + offsetof(Item, keys)) - 64 * group;
        Walk<Layout> t;
        t.begin(p, item);
        int before = -1; /* the previous tile */
        uint32_t turn = 0;
        for (;;) {
            await_rows(tile, n);
            wgmma_fence();
            this->issue_scores(tile.s, n);
            this->begin_dp(tile.dp, n);
            wgmma_wait<1>();
            hold(tile.s);
            take_tile(tile, dk, dv, keys, t.diagonal, false);
            wgmma_wait<1>();
            hold(dv);
            arrive(Layout::DO_EMPTY, dout_stage(n));
            wgmma_wait<0>();
            hold(dk);
            arrive(Layout::Q_EMPTY, stage(n));
            if (before >= 0 && makes(n - 1)) make_dq(n - 1, before, turn);
            before = t.at, turn = turn_of(p, t, item);
            n++;
            if (!t.step(p, item)) break;
        }
        if (makes(n - 1)) make_dq(n - 1, before, turn);
    }

    /* dK reads dS from shared memory. It is issued after dQ, and dQ is handed over while dK runs. */
    DEVICE void take_tiles_by_halves(uint32_t item, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        Tile tile;
        float dq[Layout::DQ_VALUES];
        const int keys = word_at(item + offsetof(Item, keys)) - 64 * group;
        Walk<Layout> t;
        t.begin(p, item);
        int before = -1;
        uint32_t turn = 0;
        for (;;) {
            await_rows(tile, n);
            wgmma_fence();
            this->issue_scores(tile.s, n);
            wgmma_wait<1>();
            hold(dk);
            if (before >= 0) arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
            wgmma_wait<0>();
            hold(tile.s);
            take_tile(tile, dk, dv, keys, t.diagonal, false);
            wgmma_wait<0>();
            hold(dv);
            arrive(Layout::DO_EMPTY, dout_stage(n));
            /* The first tile has no predecessor: the dQ computed here is discarded. */
            if (before >= 0) wait_for_ds(1 - group, n - 1);
            hold(dk);
            wgmma_fence();
            queries().issue(dq, n - 1);
            wait_for_ds(group, n);
            wgmma_fence();
            this->issue_dk(dk, n);
            wgmma_wait<1>();
            if (before >= 0) end_dq(dq, n - 1, before, turn);
            before = t.at, turn = turn_of(p, t, item);
            n++;
            if (!t.step(p, item)) break;
        }
        wgmma_wait<0>();
        hold(dk);
        arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
        make_dq(n - 1, before, turn);
    }

    /* ---- Items ----------------------------------------------------------------------------------- */

    DEVICE bool take_item()
    {
        mbarrier_wait(l.barrier(Layout::ITEM_FULL, slot.index), slot.parity);
        const int tiles = word_at(l.item(slot.index) + offsetof(Item, tiles));
        if (tiles < 0) return false;
        float dk[D_QK / 2], dv[D_V / 2];
#pragma unroll
        for (int i = 0; i < D_QK / 2; i++) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) dv[i] = 0.0f;
        if (tiles) {
            const uint32_t phase = (uint32_t)word_at(l.item(slot.index) + offsetof(Item, phase));
            mbarrier_wait(l.barrier(Layout::K_FULL), phase);
            mbarrier_wait(l.barrier(Layout::V_FULL), phase);
            if constexpr (Layout::DQ_BY == DQ_APART)
                take_tiles_apart(l.item(slot.index), dk, dv);
            else if constexpr (Layout::DQ_BY == DQ_IN_TURNS)
                take_tiles_in_turns(l.item(slot.index), dk, dv);
            else
                take_tiles_by_halves(l.item(slot.index), dk, dv);
            arrive(Layout::KEYS_EMPTY);
        }
        const uint4 keys = load_shared_16(l.item(slot.index)); /* key, keys, request, head */
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::ITEM_EMPTY, slot.index));
        slot.advance();
        store_gradients<Element>(p.call, keys, 64 * group, dk, dv);
        return true;
    }

    DEVICE void run()
    {
        while (take_item()) {
        }
        if constexpr (Layout::DQ_BY == DQ_APART) return;
        queries().end(makes(n) ? n : n + 1);
    }
};

template <typename Element, typename Layout> DEVICE void kernel(const mha_backward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* alignment of the tiles */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    if (threadIdx.x == 0) l.init_barriers();
    wait_for_kernels_before();
    let_next_kernel_start(); /* the finish kernel reads counters that the prepare kernel has cleared */
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
        if (warp == 0) Producer<Layout>{p, l}.run();
        if ((warp == 1 || warp == 2) && elect_one()) add_queries(p, l, warp - 1);
    } else if (warpgroup <= Layout::CONSUMERS) {
        take_registers<Layout::CONSUMER_REGISTERS>();
        const uint32_t lane = threadIdx.x % 32, key = (threadIdx.x - WARPGROUP_THREADS) / 32 * 16 + lane % 16;
        Consumer<Element, Layout>{{p, l, warpgroup - 1, lane % 4 * 16, swizzle_128(key, lane / 16)}}.run();
    } else if constexpr (Layout::DQ_BY == DQ_APART) {
        give_registers<Layout::MAKER_REGISTERS>();
        QueryMaker<Element, Layout>{p, l, 0}.run();
    }
}

} // namespace mha_backward

#define MHA_BACKWARD_KERNEL(NAME, ELEMENT, D_QK, D_V)                                                        \
    DEFINE_KERNEL(NAME, mha_backward_sm90_params, (mha_backward::BackwardLayout<D_QK, D_V>::THREADS, 1),     \
                  mha_backward::kernel<ELEMENT, mha_backward::BackwardLayout<D_QK, D_V>>(p))
