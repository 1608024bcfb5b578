/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on Hopper.
 *
 *   a block of threads   one an SM; takes items (128 keys of a key head) until there are none
 *     warpgroup 0        one warp loads (producer.cuh), two threads add to dQ in memory (results.cuh)
 *     two consumers      64 keys of the item each; for every tile of rows, of every head that reads the keys:
 *
 *       products    | S = K Q of i |        | dP = V dO of i | dV += P dO    | dQ = dS K of i - 1, dK += dS Q of i | S of i + 1 …
 *       the warps         (wait)    | P of S |     (wait)     | dS, stored    |    (wait)    | dQ handed over
 *
 * S and dP have keys as rows, so that the fragments of P and dS are those of A, and stay in registers. dS goes through shared memory too:
 * dQ, of which each consumer makes half, is over the keys of both, one tile later, so that the consumers need not keep step. While one
 * makes P and dS the other one's products run. Where registers suffice (128/128, 64/64) dP is asked for with S and dK with dV; else dK
 * takes dS from shared memory. At 64/64 S of the next tile is asked for with dQ.
 *
 *   limits, of 64 rows by 128 keys, in clocks of an SM: products 3328 at 192/128, 2560 at 128/128, 1280 at 64/64; ex2 512; shared
 *   memory, 128 bytes a clock, of which products read 336, 256, 128 KiB, and others write or read 152, 112, 64 KiB; then power
 *
 * Bits: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which blocks of threads come, or of blocks of keys.
 */
#pragma once

#include "producer.cuh"
#include "results.cuh"
#include "walk.cuh"

template <typename Element, typename Layout> struct Consumer {
    static constexpr int ROWS = Layout::ROWS, KEYS = Layout::KEYS, D_QK = Layout::D_QK, D_V = Layout::D_V;
    static constexpr int SCORES = ROWS / 2, ROW_STEPS = ROWS / 16; /* a thread's; steps of 16 rows */
    static constexpr bool PACKS_P = !Layout::KEEPS_P && Element::IS_BF16;
    static constexpr float DS_SCALE = Layout::template DS_SCALE<Element>;

    const mha_backward_sm90_params &p;
    const Layout l;
    const int group; /* which consumer: keys 64 · group … of an item */

    const uint32_t columns; /* offset of the thread's columns of eight among a tile's numbers */
    const uint32_t ds_at;   /* and of where it stores dS, in a tile of it */
    uint32_t n =
        0; /* the tile: its stage of Q and dO, and its place of two of dS, and their parities, hang on it */
    Ring<ITEM_SLOTS> slot;

    static DEVICE int place(uint32_t n) { return (int)(n % 2); }
    static DEVICE uint32_t parity(uint32_t n) { return n / 2 % 2; }
    static DEVICE int stage(uint32_t n) { return (int)(n % Layout::STAGES); }
    static DEVICE uint32_t stage_parity(uint32_t n) { return n / Layout::STAGES % 2; }
    static DEVICE int dout_stage(uint32_t n) { return (int)(n % Layout::DO_STAGES); }
    static DEVICE uint32_t dout_parity(uint32_t n) { return n / Layout::DO_STAGES % 2; }

    DEVICE bool speaks() const { return threadIdx.x % WARPGROUP_THREADS == 0; }
    DEVICE void arrive(int barriers, int at = 0) const
    {
        mbarrier_arrive_if(speaks(), l.barrier(barriers, at));
    }

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
                descriptor_of<Layout::K_SWIZZLE>(k, 0,
                                                 (uint32_t)(i / Layout::K_STEPS) * Layout::K_TILE +
                                                     (uint32_t)(i % Layout::K_STEPS) * 32),
                descriptor_of<SWIZZLE_128>(q, 0,
                                           (uint32_t)(i / 4) * Layout::ROW_TILE + (uint32_t)(i % 4) * 32),
                i != 0);
        wgmma_commit();
    }

    DEVICE void issue_dp(float (&dp)[SCORES], uint32_t n) const
    {
        const uint32_t v = l.v() + (uint32_t)group * TILE_BYTES, dout = l.dout(dout_stage(n));
#pragma unroll
        for (int i = 0; i < D_V / 16; i++)
            product_of_lines<Element>(
                dp,
                descriptor_of<SWIZZLE_128>(v, 0, (uint32_t)(i / 4) * Layout::V_TILE + (uint32_t)(i % 4) * 32),
                descriptor_of<SWIZZLE_128>(dout, 0,
                                           (uint32_t)(i / 4) * Layout::ROW_TILE + (uint32_t)(i % 4) * 32),
                i != 0);
        wgmma_commit();
    }

    DEVICE void begin_dp(float (&dp)[SCORES]) const
    {
        mbarrier_wait(l.barrier(Layout::DO_FULL, dout_stage(n)), dout_parity(n));
        hold(dp);
        wgmma_fence();
        issue_dp(dp, n);
    }

    /* Over the rows of the tile. */
    DEVICE void issue_dv(float (&dv)[D_V / 2], const uint32_t (&w)[ROW_STEPS][4], uint32_t n) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(dv, w[i],
                                 descriptor_of<SWIZZLE_128>(l.dout(dout_stage(n)), Layout::ROW_TILE,
                                                            (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* dS from shared memory: registers are needed for dQ meanwhile. */
    DEVICE void issue_dk(float (&dk)[D_QK / 2], uint32_t n) const
    {
        const uint32_t ds = l.ds(place(n)) + (uint32_t)group * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(
                dk,
                descriptor_of<SWIZZLE_128>(ds, 0,
                                           (uint32_t)(i / 4) * Layout::DS_TILE + (uint32_t)(i % 4) * 32),
                descriptor_of<SWIZZLE_128>(l.q(stage(n)), Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* dS as it was made. */
    DEVICE void issue_dk(float (&dk)[D_QK / 2], const uint32_t (&ds)[ROW_STEPS][4], uint32_t n) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(
                dk, ds[i],
                descriptor_of<SWIZZLE_128>(l.q(stage(n)), Layout::ROW_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* This consumer's part. */
    DEVICE void issue_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        constexpr uint32_t K_OF_CONSUMER =
            Layout::HALVES_ROWS ? 0 : Layout::DQ_COLUMNS / Layout::K_COLUMNS * Layout::K_TILE;
        constexpr uint32_t DS_OF_CONSUMER = Layout::HALVES_ROWS ? Layout::DS_TILE : 0;
        const uint32_t ds = l.ds(place(n)) + (uint32_t)group * DS_OF_CONSUMER,
                       k = l.k() + (uint32_t)group * K_OF_CONSUMER;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            product_of_columns<Element>(
                dq, descriptor_of<SWIZZLE_128>(ds, Layout::DS_TILE, (uint32_t)i * 16 * LINE_BYTES),
                descriptor_of<Layout::K_SWIZZLE>(k, Layout::K_TILE, (uint32_t)i * 16 * Layout::K_LINE),
                i != 0);
        wgmma_commit();
    }

    /* ---- P and dS -------------------------------------------------------------------------------- */

    /* Rows are columns of Sᵀ: a thread has two of every eight, four of sixteen. */
    DEVICE float4 numbers(int which, int sixteen, uint32_t n) const
    {
        float4 four;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "r"(l.numbers(stage(n)) + columns + (uint32_t)(which * ROWS + sixteen * 16) * 4));
        return four;
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

    /* Keys behind the request's last one are zeros, whose P may be infinite: 0 × inf is NaN in dQ. `keys`: that are there, of this
     * consumer's. */
    DEVICE void mask_tail(float (&s)[SCORES], int keys) const
    {
        const int thread = (int)fresh_thread() % WARPGROUP_THREADS,
                  first = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (first + (i >> 1 & 1) * 8 >= keys) s[i] = -INFINITY;
    }

    /* The first numbers of a kind, beside the products. */
    template <int N> DEVICE void load_numbers(float4 (&to)[N], int which, uint32_t n) const
    {
#pragma unroll
        for (int j = 0; j < N; j++) to[j] = numbers(which, j, n);
    }

    /* P, of 16 bits: what dV takes. dS is made of P with more bits: keys that weigh alike have the same rounding, which would stay in the
     * sum dQ. Where registers do not hold fp32 until dP is there, `exact` are pairs of fp16, P · 2^15, so that a small P keeps its bits. */
    DEVICE void make_p(float (&s)[SCORES], const float4 (&early)[Layout::LSE_EARLY],
                       uint32_t (&w)[ROW_STEPS][4], uint32_t (&exact)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROW_STEPS; j++) {
            const float4 lse = j < Layout::LSE_EARLY ? early[j % Layout::LSE_EARLY] : numbers(0, j, n);
#pragma unroll
            for (int i = 8 * j; i < 8 * j + 8; i += 2) {
                s[i] = exp2_approx(fmaf(s[i], p.call.scale_log2, -(i & 4 ? lse.z : lse.x)));
                s[i + 1] = exp2_approx(fmaf(s[i + 1], p.call.scale_log2, -(i & 4 ? lse.w : lse.y)));
                w[j][i / 2 % 4] = Element::pack(s[i], s[i + 1]);
                if constexpr (PACKS_P) exact[j][i / 2 % 4] = Fp16::pack(s[i], s[i + 1]);
            }
        }
    }

    /* Times P_SCALE, where P is, and DS_SCALE, as delta is. It comes in as it is needed: registers do not hold all of it. */
    DEVICE void make_ds(const float (&s)[SCORES], const uint32_t (&w)[ROW_STEPS][4],
                        const uint32_t (&exact)[ROW_STEPS][4], const float (&dp)[SCORES],
                        const float4 (&early)[Layout::DELTA_EARLY], uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROW_STEPS; j++) {
            const float4 delta = j < Layout::DELTA_EARLY ? early[j % Layout::DELTA_EARLY] : numbers(1, j, n);
#pragma unroll
            for (int i = 8 * j; i < 8 * j + 8; i += 2) {
                float a = s[i], b = s[i + 1];
                if constexpr (!Layout::KEEPS_P) {
                    const uint32_t pair = PACKS_P ? exact[j][i / 2 % 4] : w[j][i / 2 % 4];
                    a = Fp16::to_float((uint16_t)pair), b = Fp16::to_float((uint16_t)(pair >> 16));
                }
                ds[j][i / 2 % 4] = Element::pack(a * fmaf(dp[i], DS_SCALE, -(i & 4 ? delta.z : delta.x)),
                                                 b * fmaf(dp[i + 1], DS_SCALE, -(i & 4 ? delta.w : delta.y)));
            }
        }
    }

    /* Stores this consumer's keys of dS, a line each. Chunk c of key k is at c ^ k % 8, so that steps of two chunks are exclusive ors. */
    DEVICE void store_ds(const uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            store_matrices((l.ds(place(n)) + (uint32_t)(i / 4) * Layout::DS_TILE + ds_at) ^
                               (uint32_t)(i % 4 * 2 * CHUNK_BYTES),
                           ds[i]);
    }

    /* ---- Items ----------------------------------------------------------------------------------- */

    /* The place for dQ of tile `n`, which the warp that adds it reads. */
    DEVICE void hand_over(uint32_t n, int head_and_tile, uint32_t turn,
                          const float (&dq)[Layout::DQ_VALUES]) const
    {
        mbarrier_wait(l.barrier(Layout::DQ_EMPTY, group), n % 2 ^ 1);
        const int thread = (int)fresh_thread() % WARPGROUP_THREADS;
        if (head_and_tile >= 0)
#pragma unroll
            for (int i = 0; i < Layout::DQ_VALUES; i += 4)
                store_shared_16(l.dq(group) + (uint32_t)(i * WARPGROUP_THREADS * 4 + thread * 16),
                                make_uint4(__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                                           __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])));
        if (thread == 0)
            store_shared_4(l.where(group), (uint32_t)head_and_tile), store_shared_4(l.where(group) + 4, turn);
        __syncwarp();
        mbarrier_arrive_if(thread % 32 == 0, l.barrier(Layout::DQ_FULL, group));
    }

    /* dQ of tile `n`. */
    DEVICE void begin_dq(float (&dq)[Layout::DQ_VALUES], uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * (1 - group), place(n)),
                      parity(n)); /* the other's; its own it has awaited */
        wgmma_fence();
        issue_dq(dq, n);
    }

    /* S of tile `n`, and its lse beside it. */
    DEVICE void begin_scores(float (&s)[SCORES], float4 (&lse)[Layout::LSE_EARLY], uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, stage(n)), stage_parity(n));
        load_numbers(lse, 0, n);
        wgmma_fence();
        issue_scores(s, n);
    }

    /* dQ of the tile before, and with it dK of this one, or S of the next: dQ is handed over beside them. Before the first tile there is
     * none: what is made then goes nowhere. */
    template <bool LAST>
    DEVICE void end_tile(float (&s)[SCORES], float4 (&lse)[Layout::LSE_EARLY], float (&dk)[D_QK / 2],
                         int before, uint32_t turn) const
    {
        constexpr bool S_TOO = Layout::S_EARLY && !LAST;
        float dq[Layout::DQ_VALUES];
        if (before >= 0)
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * (1 - group), place(n - 1)),
                          parity(n - 1)); /* the other's; its own it has awaited */
        if (Layout::DK_EARLY && before >= 0)
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * group, place(n - 1)), parity(n - 1));
        if (Layout::DK_EARLY) fence_async_shared();
        if (S_TOO) hold(s);
        if (!Layout::DK_EARLY) hold(dk);
        wgmma_fence();
        issue_dq(dq, n - 1);
        if (!Layout::DK_EARLY) {
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * group, place(n)), parity(n));
            wgmma_fence();
            issue_dk(dk, n);
        }
        if (S_TOO) begin_scores(s, lse, n + 1);
        if (Layout::DK_EARLY) {
            wgmma_wait<S_TOO + 1>();
            hold(dk);
            arrive(Layout::Q_EMPTY, stage(n));
            wgmma_wait<S_TOO>();
        } else {
            wgmma_wait<S_TOO + 1>();
        }
        hold(dq);
        if (before >= 0) {
            arrive(Layout::DS_EMPTY, place(n - 1));
            hand_over(n - 1, before, turn, dq);
        }
    }

    /* P and dS of tile n, dV, and dK where it is early. */
    DEVICE void begin_tile(float (&s)[SCORES], float4 (&lse)[Layout::LSE_EARLY], float (&dk)[D_QK / 2],
                           float (&dv)[D_V / 2], int before, int keys, int diagonal) const
    {
        float dp[SCORES];
        uint32_t w[ROW_STEPS][4], exact[ROW_STEPS][4], ds[ROW_STEPS][4];
        float4 delta[Layout::DELTA_EARLY];
        if constexpr (!Layout::S_EARLY) begin_scores(s, lse, n);
        if constexpr (Layout::DP_EARLY) begin_dp(dp);
        if (!Layout::DK_EARLY) {
            wgmma_wait<Layout::DP_EARLY ? 2 : 1>();
            hold(dk);
            if (before >= 0) arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
        }
        wgmma_wait<Layout::DP_EARLY ? 1 : 0>();
        hold(s);
        if (64 * group + 63 + diagonal > 0) mask(s, diagonal);
        if (keys < 64) mask_tail(s, keys);
        make_p(s, lse, w, exact);
        if constexpr (!Layout::DP_EARLY) begin_dp(dp);
        hold(dv), hold_words(w);
        wgmma_fence();
        issue_dv(dv, w, n);
        load_numbers(delta, 1, n);
        wgmma_wait<1>();
        hold(dp);
        make_ds(s, w, exact, dp, delta, ds);
        mbarrier_wait(l.barrier(Layout::DS_EMPTY, place(n)), parity(n) ^ 1);
        store_ds(ds);
        if (Layout::DK_EARLY) {
            hold(dk), hold_words(ds);
            wgmma_fence();
            issue_dk(dk, ds, n);
        }
        if (!Layout::DK_EARLY) fence_async_shared();
        __syncwarp();
        mbarrier_arrive_if(threadIdx.x % 32 == 0, l.barrier(Layout::DS_FULL + 2 * group, place(n)));
        wgmma_wait<Layout::DK_EARLY>();
        hold(dv);
        arrive(Layout::DO_EMPTY, dout_stage(n));
    }

    /* The tiles of the item that is told of at `item`. dQ of a tile follows dS of the next one: the consumers need not keep step. */
    DEVICE void take_tiles(uint32_t item, float (&dk)[D_QK / 2], float (&dv)[D_V / 2])
    {
        float s[SCORES];
        float4 lse[Layout::LSE_EARLY];
        const int keys = word_at(item + offsetof(Item, keys)) - 64 * group;
        Walk<Layout> t;
        t.begin(p, item);
        int before = -1; /* the tile before this one */
        uint32_t turn = 0;
        if constexpr (Layout::S_EARLY) begin_scores(s, lse, n);
        for (;;) {
            begin_tile(s, lse, dk, dv, before, keys, t.diagonal);
            if (t.left == 1) break;
            end_tile<false>(s, lse, dk, before, turn);
            before = t.at, turn = turn_of(t, item);
            t.step(p, item);
            n++;
        }
        end_tile<true>(s, lse, dk, before, turn);
        before = t.at, turn = turn_of(t, item);
        n++;
        if (!Layout::DK_EARLY) {
            wgmma_wait<0>();
            hold(dk);
            arrive(Layout::Q_EMPTY, stage(n - 1)), arrive(Layout::DS_EMPTY, place(n - 1));
        } else {
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * group, place(n - 1)), parity(n - 1));
            mbarrier_wait(l.barrier(Layout::DS_FULL + 2 * (1 - group), place(n - 1)), parity(n - 1));
            fence_async_shared();
        }
        float dq[Layout::DQ_VALUES];
        begin_dq(dq, n - 1);
        wgmma_wait<0>();
        hold(dq);
        arrive(Layout::DS_EMPTY, place(n - 1));
        hand_over(n - 1, before, turn, dq);
    }

    /* How many blocks of keys add to dQ of the tile before this one does. */
    DEVICE uint32_t turn_of(const Walk<Layout> &t, uint32_t item) const
    {
        const int order = word_at(item + offsetof(Item, order));
        return (uint32_t)(p.call.causal ? min((ROWS - 1 - t.diagonal) / KEYS, order) : order);
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
        const mha_backward_params &call = p.call;
        const int64_t key = (int64_t)keys.x + 64 * group;
        const int left = (int)keys.y - 64 * group;
        write_keys<Element>(call.dv.data + keys.z * call.dv.request + key * call.dv.token +
                                keys.w * call.dv.head,
                            call.dv.token, left, 1.0f / P_SCALE, dv);
        write_keys<Element>(call.dk.data + keys.z * call.dk.request + key * call.dk.token +
                                keys.w * call.dk.head,
                            call.dk.token, left, call.scale * Layout::template DS_UNSCALE<Element>, dk);
        return true;
    }

    DEVICE void run()
    {
        while (take_item()) {
        }
        float dq[Layout::DQ_VALUES];
        hand_over(n, -1, 0, dq);
    }
};

template <typename Element, typename Layout> DEVICE void mha_backward(const mha_backward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* as tiles ask */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    if (threadIdx.x == 0) l.init_barriers();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
        if (warp == 0) Producer<Layout>{p, l}.run();
        if (warp > 0 && warp <= Layout::CONSUMERS && elect_one()) add_queries<Layout>(p, l, warp - 1);
    } else {
        take_registers<Layout::CONSUMER_REGISTERS>();
        const uint32_t lane = threadIdx.x % 32, key = (threadIdx.x - WARPGROUP_THREADS) / 32 * 16 + lane % 16;
        Consumer<Element, Layout>{p, l, warpgroup - 1, lane % 4 * 16, swizzle_128(key, lane / 16)}.run();
    }
}

#define MHA_BACKWARD_KERNEL(NAME, ELEMENT, D_QK, D_V)                                                        \
    DEFINE_KERNEL(NAME, mha_backward_sm90_params, (BackwardLayout<D_QK, D_V>::THREADS, 1),                   \
                  mha_backward<ELEMENT, BackwardLayout<D_QK, D_V>>(p))
