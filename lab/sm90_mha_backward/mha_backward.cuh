/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on Hopper.
 *
 *   a block of threads   one an SM; takes items (128 keys of a key head) until there are none
 *     warpgroup 0        its first warp loads (producer.cuh)
 *     two consumers      64 keys of the item each; for every tile of rows, of every head that reads the keys:
 *
 *       products    | S = K Q of i |        | dP = V dO of i | dV += P dO    | dQ = dS K of i - 1 | dK += dS Q of i | S of i + 1 …
 *       the warps         (wait)    | P of S |     (wait)     | dS, stored    |       (wait)       | dQ added in memory
 *
 * S and dP have keys as rows, so that the fragments of P are those of A, and stay in registers. dS goes through shared memory: dK takes
 * its own keys of it, and dQ, of which each consumer makes half, all 128, one tile later, so that the consumers need not keep step. While
 * one makes P and dS the other one's products run. At 128/128 and 64/64 dP is asked for together with S.
 *
 *   limits, of 64 rows by 128 keys, in clocks of an SM: products 3328 at 192/128, 2560 at 128/128, 1280 at 64/64; ex2 512; additions to dQ
 *   48, 32, 16 KiB; then power
 *
 * Bits: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which blocks of threads
 * come, or, deterministic, in one that hangs on the sizes alone (turns.cuh).
 */
#pragma once

#include "producer.cuh"
#include "results.cuh"
#include "turns.cuh"

template <typename Element, typename Layout, bool DETERMINISTIC> struct Consumer {
    static constexpr int ROWS = Layout::ROWS, KEYS = Layout::KEYS, D_QK = Layout::D_QK, D_V = Layout::D_V;
    static constexpr int SCORES = ROWS / 2, ROW_STEPS = ROWS / 16; /* a thread's; steps of 16 rows */

    const lab_backward_sm90_params &p;
    const Layout l;
    const int group; /* which consumer: keys 64 · group … of an item */

    const uint32_t columns;  /* offset of the thread's columns of eight among a tile's numbers */
    const uint32_t ds_at; /* and of where it stores dS, in a tile of it */
    uint32_t n = 0; /* the tile: its stage of Q and dO, and its place of two of dS, and their parities, hang on it */
    Ring<ITEM_SLOTS> slot;

    static DEVICE int place(uint32_t n) { return (int)(n % 2); }
    static DEVICE uint32_t parity(uint32_t n) { return n / 2 % 2; }
    static DEVICE int stage(uint32_t n) { return (int)(n % Layout::STAGES); }
    static DEVICE uint32_t stage_parity(uint32_t n) { return n / Layout::STAGES % 2; }

    DEVICE bool speaks() const { return threadIdx.x % WARPGROUP_THREADS == 0; }
    DEVICE void arrive(int barriers, int at = 0) const { mbarrier_arrive_if(speaks(), l.barrier(barriers, at)); }

    /* Words are made before the products that follow. */
    static DEVICE void hold_words(uint32_t (&w)[ROW_STEPS][4])
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(w[i][j])::"memory");
    }

    /* ---- Products -------------------------------------------------------------------------------- */

    DEVICE void issue_scores(float (&s)[SCORES], uint32_t n) const
    {
        const uint32_t k = l.k() + (uint32_t)group * 64 * Layout::K_LINE, q = l.q(stage(n));
#pragma unroll
        for (int i = 0; i < D_QK / 16; i++)
            product_of_lines<Element>(
                s,
                descriptor_of<Layout::K_SWIZZLE>(k, 0, (uint32_t)(i / Layout::K_STEPS) * Layout::K_TILE +
                                                           (uint32_t)(i % Layout::K_STEPS) * 32),
                descriptor_of<SWIZZLE_128>(q, 0, (uint32_t)(i / 4) * Layout::ROW_TILE + (uint32_t)(i % 4) * 32), i != 0);
        wgmma_commit();
    }

    DEVICE void issue_dp(float (&dp)[SCORES], uint32_t n) const
    {
        const uint32_t v = l.v() + (uint32_t)group * TILE_BYTES, dout = l.dout(stage(n));
#pragma unroll
        for (int i = 0; i < D_V / 16; i++)
            product_of_lines<Element>(
                dp, descriptor_of<SWIZZLE_128>(v, 0, (uint32_t)(i / 4) * Layout::V_TILE + (uint32_t)(i % 4) * 32),
                descriptor_of<SWIZZLE_128>(dout, 0, (uint32_t)(i / 4) * Layout::ROW_TILE + (uint32_t)(i % 4) * 32), i != 0);
        wgmma_commit();
    }

    DEVICE void begin_dp(float (&dp)[SCORES]) const
    {
        mbarrier_wait(l.barrier(Layout::DO_FULL, stage(n)), stage_parity(n));
        hold(dp);
        wgmma_fence();
        issue_dp(dp, n);
    }

    /* Over the rows of the tile. */
    DEVICE void issue_dv(float (&dv)[D_V / 2], const uint32_t (&w)[ROW_STEPS][4], uint32_t n) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(
                dv, w[i], descriptor_of<SWIZZLE_128>(l.dout(stage(n)), Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* dS from shared memory: registers are needed for dQ meanwhile. */
    DEVICE void issue_dk(float (&dk)[D_QK / 2], uint32_t n) const
    {
        const uint32_t ds = l.ds(place(n)) + (uint32_t)group * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(
                dk, descriptor_of<SWIZZLE_128>(ds, 0, (uint32_t)(i / 4) * Layout::DS_TILE + (uint32_t)(i % 4) * 32),
                descriptor_of<SWIZZLE_128>(l.q(stage(n)), Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* This consumer's part. */
    DEVICE void issue_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        constexpr uint32_t K_OF_CONSUMER = Layout::HALVES_ROWS ? 0 : Layout::DQ_COLUMNS / Layout::K_COLUMNS * Layout::K_TILE;
        constexpr uint32_t DS_OF_CONSUMER = Layout::HALVES_ROWS ? Layout::DS_TILE : 0;
        const uint32_t ds = l.ds(place(n)) + (uint32_t)group * DS_OF_CONSUMER, k = l.k() + (uint32_t)group * K_OF_CONSUMER;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            product_of_columns<Element>(dq, descriptor_of<SWIZZLE_128>(ds, Layout::DS_TILE, (uint32_t)i * 16 * LINE_BYTES),
                                        descriptor_of<Layout::K_SWIZZLE>(k, Layout::K_TILE, (uint32_t)i * 16 * Layout::K_LINE),
                                        i != 0);
        wgmma_commit();
    }

    /* ---- P and dS -------------------------------------------------------------------------------- */

    /* Rows are columns of Sᵀ: a thread has two of every eight. */
    DEVICE float2 numbers(int which, int eight) const
    {
        float2 pair;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(pair.x), "=f"(pair.y)
                     : "r"(l.numbers(stage(n)) + columns + (uint32_t)(which * ROWS + eight * 8) * 4));
        return pair;
    }

    /* Scores of keys that a row does not see become -inf. `diagonal`: row i of this tile sees key t if t + diagonal <= i. */
    DEVICE void mask(float (&s)[SCORES], int diagonal) const
    {
        const int thread = (int)fresh_thread() % WARPGROUP_THREADS,
                  first = 64 * group + thread / 32 * 16 + thread % 32 / 4 + diagonal - thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if ((i >> 2) * 8 + (i & 1) < first + (i >> 1 & 1) * 8) s[i] = -INFINITY;
    }

    /* P, of 16 bits: what dV takes, and, where registers do not hold more, what dS is made of. */
    DEVICE void load_numbers(float2 (&to)[ROWS / 8], int which) const
    {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) to[j] = numbers(which, j);
    }

    /* P, of 16 bits: what dV takes, and, where registers do not hold more, what dS is made of. */
    DEVICE void make_p(float (&s)[SCORES], const float2 (&lse)[ROWS / 8], uint32_t (&w)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i += 2) {
                s[i] = exp2_approx(fmaf(s[i], p.call.scale_log2, -lse[j].x));
                s[i + 1] = exp2_approx(fmaf(s[i + 1], p.call.scale_log2, -lse[j].y));
                w[i / 8][i / 2 % 4] = Element::pack(s[i], s[i + 1]);
            }
    }

    DEVICE void make_ds(const uint32_t (&w)[ROW_STEPS][4], const float (&dp)[SCORES], const float2 (&delta)[ROWS / 8],
                        uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i += 2) {
                const uint32_t pair = w[i / 8][i / 2 % 4];
                ds[i / 8][i / 2 % 4] = Element::pack(Element::to_float((uint16_t)pair) * (dp[i] - delta[j].x),
                                                     Element::to_float((uint16_t)(pair >> 16)) * (dp[i + 1] - delta[j].y));
            }
    }

    /* Stores this consumer's keys of dS, a line each. Chunk c of key k is at c ^ k % 8, so that steps of two chunks are exclusive ors. */
    DEVICE void store_ds(const uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            store_matrices((l.ds(place(n)) + (uint32_t)(i / 4) * Layout::DS_TILE + ds_at) ^ (uint32_t)(i % 4 * 2 * CHUNK_BYTES), ds[i]);
    }

    /* ---- Items ----------------------------------------------------------------------------------- */

    /* Adds to dQ what tile `n` gives. */
    DEVICE void add_to_dq(uint32_t n, int head_and_tile) const
    {
        float dq[Layout::DQ_VALUES];
        mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * (1 - group), place(n)), parity(n)); /* the other's; its own it has awaited */
        wgmma_fence();
        issue_dq(dq, n);
        wgmma_wait<0>();
        hold(dq);
        arrive(Layout::DS_EMPTY, place(n));
        if constexpr (DETERMINISTIC) mbarrier_wait(l.barrier(Layout::TURN + 2 * group, place(n)), parity(n));
        add_queries<Layout>(p, group, head_and_tile, dq);
        if constexpr (DETERMINISTIC) {
            __syncwarp();
            mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::ADDED + 2 * group, place(n)));
        }
    }

    /* The tiles of the item that is told of at `item`. dQ of a tile follows dS of the next one: the consumers need not keep step. */
    DEVICE void take_tiles(uint32_t item, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        float s[SCORES], dp[SCORES];
        uint32_t w[ROW_STEPS][4], ds[ROW_STEPS][4];
        Walk<Layout> t;
        t.begin(p, item);
        int before = -1; /* the tile before this one */
        for (;;) {
            mbarrier_wait(l.barrier(Layout::Q_FULL, stage(n)), stage_parity(n));
            wgmma_fence();
            issue_scores(s, n);
            float2 lse[ROWS / 8];
            load_numbers(lse, 0);
            if constexpr (Layout::DP_EARLY) begin_dp(dp);
            wgmma_wait<Layout::DP_EARLY ? 2 : 1>();
            hold(dk);
            if (before >= 0) arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
            wgmma_wait<Layout::DP_EARLY ? 1 : 0>();
            hold(s);
            if (64 * group + 63 + t.diagonal > 0) mask(s, t.diagonal);
            make_p(s, lse, w);
            if constexpr (!Layout::DP_EARLY) begin_dp(dp);
            hold(dv), hold_words(w);
            wgmma_fence();
            issue_dv(dv, w, n);
            float2 delta[ROWS / 8];
            load_numbers(delta, 1);
            wgmma_wait<1>();
            hold(dp);
            make_ds(w, dp, delta, ds);
            mbarrier_wait(l.barrier(Layout::DS_EMPTY, place(n)), parity(n) ^ 1);
            store_ds(ds);
            fence_async_shared();
            __syncwarp();
            mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DS_FULL + 2 * group, place(n)));
            wgmma_wait<0>();
            hold(dv);
            arrive(Layout::DO_EMPTY, stage(n));
            if (before >= 0) add_to_dq(n - 1, before);
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * group, place(n)), parity(n));
            hold(dk);
            wgmma_fence();
            issue_dk(dk, n);
            before = t.at;
            n++;
            if (!t.step(p, item)) break;
        }
        wgmma_wait<0>();
        hold(dk);
        arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
        add_to_dq(n - 1, before);
    }

    DEVICE bool take_item()
    {
        mbarrier_wait(l.barrier(Layout::ITEM_FULL, slot.at), slot.parity);
        const int tiles = word_at(l.item(slot.at) + offsetof(Item, tiles));
        if (tiles < 0) return false;
        float dk[D_QK / 2], dv[D_V / 2];
#pragma unroll
        for (int i = 0; i < D_QK / 2; i++) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) dv[i] = 0.0f;
        if (tiles) {
            const uint32_t phase = (uint32_t)word_at(l.item(slot.at) + offsetof(Item, phase));
            mbarrier_wait(l.barrier(Layout::K_FULL), phase);
            mbarrier_wait(l.barrier(Layout::V_FULL), phase);
            take_tiles(l.item(slot.at), dk, dv);
            arrive(Layout::KEYS_EMPTY);
        }
        const uint4 keys = load_shared_16(l.item(slot.at)); /* key, keys, request, head */
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::ITEM_EMPTY, slot.at));
        slot.step();
        const lab_backward_params &call = p.call;
        const int64_t key = (int64_t)keys.x + 64 * group;
        const int left = (int)keys.y - 64 * group;
        write_keys<Element>(call.dv + keys.z * call.dv_stride[0] + key * call.dv_stride[1] + keys.w * call.dv_stride[2],
                            call.dv_stride[1], left, 1.0f, dv);
        write_keys<Element>(call.dk + keys.z * call.dk_stride[0] + key * call.dk_stride[1] + keys.w * call.dk_stride[2],
                            call.dk_stride[1], left, call.scale, dk);
        return true;
    }

    DEVICE void run()
    {
        while (take_item()) {
        }
    }
};

template <typename Element, typename Layout, bool DETERMINISTIC> DEVICE void mha_backward(const lab_backward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* as tiles ask */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    if (threadIdx.x == 0) l.init_barriers(DETERMINISTIC);
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        const int warp = (int)threadIdx.x / 32;
        if (warp == 0) Producer<Layout>{p, l}.run();
        if constexpr (DETERMINISTIC)
            if (warp == 1 || warp == 2) TurnKeeper<Layout>{p, l, warp - 1}.run();
    } else {
        take_registers<Layout::CONSUMER_REGISTERS>();
        const uint32_t lane = threadIdx.x % 32, key = (threadIdx.x - WARPGROUP_THREADS) / 32 * 16 + lane % 16;
        Consumer<Element, Layout, DETERMINISTIC>{p, l, warpgroup - 1, lane % 4 * 8, swizzle_128(key, lane / 16)}.run();
    }
}

#define MHA_BACKWARD_KERNEL(NAME, ELEMENT, D_QK, D_V, DETERMINISTIC)                                         \
    DEFINE_KERNEL(NAME, lab_backward_sm90_params, (BackwardLayout<D_QK, D_V>::THREADS, 1),                   \
                  mha_backward<ELEMENT, BackwardLayout<D_QK, D_V>, DETERMINISTIC>(p))
