/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on Hopper, in the lab: right on the cases of bench.cu, and not fast enough yet (NOTES.md).
 *
 *   a block of threads          one an SM; takes tiles of 128 query rows of a head, longest first
 *     warpgroup 0, one thread   producer: Q of the tile; K and V by blocks of 128 keys, the last ones first, through STAGES stages
 *     warpgroups 1 and 2        64 rows each:
 *                                 S = Q Kᵀ of block n - 1 is under way while O += P V of block n is; then softmax of n - 1
 *                                 P stays in registers: the fragments of S are those of A
 *   tiles are taken by a counter; those of the heads whose K and V fit L2 together come before those of other heads
 *
 *   shared memory, 192/128      Q 48 KiB | K 2 × 48 | V 2 × 32 | barriers                                        208 KiB
 *                 128/128       Q 32 | K 2 × 32 | V 2 × 32                                                        160 KiB
 *   registers of a consumer     O 64 (d_v 128) + S 64 + P 32, of 240
 *
 *   limit: per 128 × 128 block and SM 2560 clocks of products at 192/128 (2048 at 128/128), 1024 of ex2; then power.
 */
#pragma once

#include "../../src/cuda/device/element.cuh"
#include "../../src/cuda/device/mbarrier.cuh"
#include "../../src/cuda/device/quad.cuh"
#include "../../src/cuda/device/result.cuh"
#include "../../src/cuda/device/shared.cuh"
#include "../../src/cuda/device/tma.cuh"
#include "../../src/cuda/device/warpgroup.cuh"
#include "../../src/cuda/device/wgmma.cuh"

#ifndef STAGES
#define STAGES 2
#endif
#ifndef TRACE
#define TRACE 0
#endif
#ifndef EARLY_VALUES /* of a tile's last block the values come before the next tile's first scores */
#define EARLY_VALUES 0
#endif
#ifndef MOST /* weights of a thread in a row of a block: where they are more together, the row's base is raised */
#define MOST 4096.0f
#endif
#ifndef EARLY/* weights that are made before the older values have been added */
#define EARLY 0
#endif
#define SLACK 8
#ifndef PREFETCH_Q
#define PREFETCH_Q 1
#endif
#ifndef QBUFS /* places of Q; 0: two where there is room */
#define QBUFS 0
#endif
#ifndef POLY /* of eight weights so many by multiply-adds in place of ex2 */
#define POLY 0
#endif

#ifndef CONSUMERS /* warpgroups of 64 rows */
#define CONSUMERS 2
#endif
#ifndef KEYS /* of a block: 64, 96, 128, 160 or 176 */
#define KEYS 128
#endif

enum { MHA_ROWS = 64 * CONSUMERS, MHA_KEYS = KEYS, MHA_THREADS = 128 * (CONSUMERS + 1), MHA_CONSUMERS = 128 * CONSUMERS };
enum { COLUMN_TILE = MHA_KEYS * LINE_BYTES, Q_TILE = MHA_ROWS * LINE_BYTES /* 64 columns of a block */ };

struct mha_params {
    struct tensor_map q, k, v; /* boxes of 64 columns × 128 tokens × 1 head × all column tiles × 1 request */
    int b, h_q, group, s_q, s_k; /* s_q, s_k: the most, where requests are ragged */
    const int32_t *cu_q, *cu_k; /* NULL: requests are apart */
    int tokens_q, tokens_k;     /* of all requests */
    int tiles_of_request;       /* of 128 rows: the most */
    int heads_at_once;          /* of all requests: those whose K and V are to stay in L2 together */
    uint16_t *out;
    int64_t out_stride[3]; /* request, token, head */
    float *lse;
    int64_t lse_stride[2]; /* request, head */
    float scale, scale_log2, slack, lse_of_empty, lse_factor; /* slack: SLACK in units of products */
    int causal, never;
    uint2 *trace;
    int *counters; /* [2], 0 before a launch and after it: tiles that were taken beside the first ones, blocks of threads that have ended */
};

/* clang-format off */
#define WGMMA_NAMES_80 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D_80(d) WGMMA_D_64(d), WGMMA_SUMS_8(d, 64), WGMMA_SUMS_8(d, 72)
#define WGMMA_D_88(d) WGMMA_D_80(d), WGMMA_SUMS_8(d, 80)
/* clang-format on */

#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D_48(d) WGMMA_D_32(d), WGMMA_SUMS_8(d, 32), WGMMA_SUMS_8(d, 40)

/* D (+)= A·B, a block of columns, A and B in lines. */
template <typename Element> DEVICE void wgmma_block(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    wgmma_64<Element>(d, a, b, add);
}

template <typename Element> DEVICE void wgmma_block(float (&d)[48], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n96k16", WGMMA_NAMES_48, "%50", "%48", "%49", "0, 0", WGMMA_D_48, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_block(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%66", "%64", "%65", "0, 0", WGMMA_D_64, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_block(float (&d)[80], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n160k16", WGMMA_NAMES_80, "%82", "%80", "%81", "0, 0", WGMMA_D_80, "l"(a), "l"(b), "r"(add));
}

template <typename Element> DEVICE void wgmma_block(float (&d)[88], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n176k16", WGMMA_NAMES_88, "%90", "%88", "%89", "0, 0", WGMMA_D_88, "l"(a), "l"(b), "r"(add));
}

/* 64 columns, A in registers, B as columns. */
template <typename Element> DEVICE void wgmma_64_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%37", "{%32, %33, %34, %35}", "%36", "1", WGMMA_D_32, "r"(a[0]), "r"(a[1]),
             "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* A tile of rows, as the producer tells the consumers of it. */
struct MhaTile {
    int token, rows;   /* its first one, of all requests; rows from it on, which may be more than the tile */
    int request, head;
    int keys, seen;    /* of the request; of those that the first row of the tile sees, which may be below 0 */
    int blocks;        /* of keys; 0: no row sees any; < 0: there are no more tiles */
    int first_key;     /* the producer's */
};

template <typename Element, int D_QK, int D_V> struct Mha {
    static constexpr int KEPT = CONSUMERS == 3 ? 32 : 24, TAKEN = CONSUMERS == 3 ? 160 : 240; /* registers */
    static_assert(KEPT + CONSUMERS * TAKEN <= (CONSUMERS + 1) * (65536 / MHA_THREADS / 8 * 8), "else they wait for ever");
    static constexpr int QK_TILES = D_QK / 64, V_TILES = D_V / 64;
    static constexpr uint32_t Q_BYTES = MHA_ROWS * D_QK * 2, K_BYTES = MHA_KEYS * D_QK * 2, V_BYTES = MHA_KEYS * D_V * 2;
    static constexpr int QS = QBUFS ? QBUFS : 2 * Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 20480 <= 227 * 1024 ? 2 : 1, SLOTS = 3;
    static constexpr uint32_t K_AT = QS * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;
    static constexpr uint32_t TILES_AT = BARRIERS_AT + (12 + 4 * STAGES) * 8, ROWS_AT = (TILES_AT + SLOTS * 32 + 127) / 128 * 128, ROWS_OF_WARP = 8 * D_V * 2;
    static constexpr uint32_t SHARED_BYTES = ROWS_AT + 4 * CONSUMERS * ROWS_OF_WARP + 1024; /* the base is moved up to 1024 */

    const mha_params &p;
    const uint32_t base;

    DEVICE uint32_t barrier(int i) const { return base + BARRIERS_AT + 8u * (uint32_t)i; }
    DEVICE uint32_t q_full(int s) const { return barrier(s); }
    DEVICE uint32_t q_empty(int s) const { return barrier(2 + s); }
    DEVICE uint32_t tile_full(int s) const { return barrier(4 + s); }
    DEVICE uint32_t tile_empty(int s) const { return barrier(8 + s); }
    DEVICE uint32_t k_full(int s) const { return barrier(12 + s); }
    DEVICE uint32_t k_empty(int s) const { return barrier(12 + STAGES + s); }
    DEVICE uint32_t v_full(int s) const { return barrier(12 + 2 * STAGES + s); }
    DEVICE uint32_t v_empty(int s) const { return barrier(12 + 3 * STAGES + s); }
    DEVICE uint32_t tile_at(int s) const { return base + TILES_AT + 32u * (uint32_t)s; }

    DEVICE int tiles() const { return p.b * p.h_q * p.tiles_of_request; }

    /* The tiles with the most keys come first: of a causal call those of the last rows. Heads that read the same keys follow each other. */
    DEVICE MhaTile tile_of(int i) const
    {
        const int all = p.b * p.h_q, group = i / (p.heads_at_once * p.tiles_of_request), before = group * p.heads_at_once;
        const int heads = min(p.heads_at_once, all - before), within = i - before * p.tiles_of_request;
        const int order = within / heads, of = before + within % heads;
        MhaTile t;
        t.request = of / p.h_q, t.head = of % p.h_q;
        const int first_row = (p.causal ? p.tiles_of_request - 1 - order : order) * MHA_ROWS;
        int tokens = p.s_q;
        t.token = first_row, t.first_key = 0, t.keys = p.s_k;
        if (p.cu_q) {
            const int q0 = min(max(p.cu_q[t.request], 0), p.tokens_q), q1 = min(max(p.cu_q[t.request + 1], q0), p.tokens_q);
            const int k0 = min(max(p.cu_k[t.request], 0), p.tokens_k), k1 = min(max(p.cu_k[t.request + 1], k0), p.tokens_k);
            t.token += q0, tokens = q1 - q0, t.first_key = k0, t.keys = k1 - k0, t.request = 0;
        }
        t.rows = tokens - first_row;
        t.seen = p.causal ? t.keys - tokens + first_row + 1 : t.keys;
        const int most = p.causal ? min(t.keys, t.seen + MHA_ROWS - 1) : t.keys;
        t.blocks = most <= 0 ? 0 : (most + MHA_KEYS - 1) / MHA_KEYS;
        return t;
    }

    /* ---- Trace --------------------------------------------------------------------------------- */
    int traced = 0;
    DEVICE void trace(int tag)
    {
        if (!TRACE || !p.trace || blockIdx.x != 5 || threadIdx.x % 128 != 0 || traced >= 4096) return;
        uint32_t c;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(c)::"memory");
        p.trace[(threadIdx.x / 128) * 4096 + traced++] = make_uint2(tag, c);
    }

    /* ---- Producer: one thread ------------------------------------------------------------------ */

    DEVICE void produce()
    {
        int stage = 0, slot = 0, q = 0;
        uint32_t phase = 0, slot_phase = 0, q_phase = 0;
        int i = blockIdx.x;
        for (;;) {
            MhaTile t;
            t.blocks = -1, t.rows = 0;
            while (i < tiles()) {
                t = tile_of(i);
                i = (int)gridDim.x + atomicAdd(p.counters, 1);
                if (t.rows > 0 && t.blocks) break;
                if (t.rows > 0) empty(t);
                t.blocks = -1;
            }
            mbarrier_wait_thread(tile_empty(slot), slot_phase ^ 1);
            store_shared_16(tile_at(slot), make_uint4(t.token, t.rows, t.request, t.head));
            store_shared_16(tile_at(slot) + 16, make_uint4(t.keys, t.seen, t.blocks, 0));
            mbarrier_arrive(tile_full(slot));
            if (++slot == SLOTS) slot = 0, slot_phase ^= 1;
            if (t.blocks < 0) break;
            if (PREFETCH_Q) tma_prefetch(&p.q, {0, t.token, t.head, 0, t.request});
            const int key_head = t.head / p.group;
            for (int n = t.blocks - 1; n >= 0; n--) {
                const int key = t.first_key + n * MHA_KEYS;
                mbarrier_wait_thread(k_empty(stage), phase ^ 1);
                mbarrier_arrive_expect(k_full(stage), K_BYTES);
                tma_load(base + K_AT + stage * K_BYTES, &p.k, k_full(stage), {0, key, key_head, 0, t.request});
                if (n == t.blocks - 1) {
                    mbarrier_wait_thread(q_empty(q), q_phase ^ 1);
                    mbarrier_arrive_expect(q_full(q), Q_BYTES);
                    tma_load(base + q * Q_BYTES, &p.q, q_full(q), {0, t.token, t.head, 0, t.request});
                    if (++q == QS) q = 0, q_phase ^= 1;
                }
                mbarrier_wait_thread(v_empty(stage), phase ^ 1);
                mbarrier_arrive_expect(v_full(stage), V_BYTES);
                tma_load(base + V_AT + stage * V_BYTES, &p.v, v_full(stage), {0, key, key_head, 0, t.request});
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        if (atomicAdd(p.counters + 1, 1) == (int)gridDim.x - 1) p.counters[0] = 0, p.counters[1] = 0;
    }

    /* ---- Consumer: a warpgroup, 64 rows ---------------------------------------------------------- */

    struct Rows { /* a thread's two rows of the fragments: what their weights are relative to, of which scores differ by a bounded factor */
        float base[2], sum[2];
    };
    /* The blocks of the next tile. */
    DEVICE int take(int slot, uint32_t phase)
    {
        mbarrier_wait(tile_full(slot), phase);
        return __shfl_sync(~0u, (int)load_shared_4(tile_at(slot) + 24), 0);
    }

    DEVICE void scores(float (&s)[MHA_KEYS / 2], uint32_t q, int stage)
    {
        const uint32_t k = base + K_AT + (uint32_t)stage * K_BYTES;
#pragma unroll
        for (int step = 0; step < D_QK / 16; step++)
            wgmma_block<Element>(s, wgmma_lines(q + step / 4 * Q_TILE, step % 4), wgmma_lines(k + step / 4 * COLUMN_TILE, step % 4), step != 0);
    }

    template <int FROM, int TO> DEVICE void add_values(float (&o)[D_V / 2], const uint32_t (&w)[MHA_KEYS / 16][4], int stage)
    {
        const uint32_t v = base + V_AT + (uint32_t)stage * V_BYTES;
#pragma unroll
        for (int step = FROM; step < TO; step++) {
            const uint64_t b = wgmma_descriptor(v, COLUMN_TILE, (uint32_t)step * 16 * LINE_BYTES);
            if constexpr (D_V == 128)
                wgmma_128_columns<Element>(o, w[step], b, 1);
            else
                wgmma_64_columns<Element>(o, w[step], b, 1);
        }
    }

    /* 2^x for x ≤ 0 by multiply-adds: 2^-n · 2^f, |f| ≤ 1/2. */
    static DEVICE float exp2_added(float x)
    {
        x = fmaxf(x, -126.0f);
        const float big = x + 12582912.0f, f = x - (big - 12582912.0f);
        float y = fmaf(f, 0.055503570f, 0.240179544f);
        y = fmaf(y, f, 0.693147182f);
        y = fmaf(y, f, 1.0f);
        return __int_as_float(__float_as_int(y) + (__float_as_int(big) << 23));
    }

    /* Scores that a row does not see are -inf. */
    DEVICE void mask(float (&s)[MHA_KEYS / 2], const int (&seen)[2])
    {
        const int column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < MHA_KEYS / 2; i++)
            if (column + (i >> 2) * 8 + (i & 1) >= seen[i >> 1 & 1]) s[i] = -INFINITY;
    }

    /* The base of a row that is to have another one becomes its largest score; rescale is what its older sums are multiplied by. */
    DEVICE void raise(const float (&s)[MHA_KEYS / 2], Rows &r, float (&rescale)[2], const bool (&is)[2])
    {
        float top[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
        for (int i = 0; i < MHA_KEYS / 2; i++) top[i >> 1 & 1][i & 1] = fmaxf(top[i >> 1 & 1][i & 1], s[i]);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float highest = fmaxf(r.base[row], quad_max(fmaxf(top[row][0], top[row][1])));
            rescale[row] = 1.0f;
            if (is[row] && highest > r.base[row]) {
                rescale[row] = exp2_approx((r.base[row] - highest) * p.scale_log2);
                r.base[row] = highest, r.sum[row] *= rescale[row];
            }
        }
    }

    DEVICE float weight(float score, float less, int i) const
    {
        const float x = fmaf(score, p.scale_log2, -less);
        return i % 8 < POLY ? exp2_added(x) : exp2_approx(x);
    }

    DEVICE void lesses(float (&less)[2], const Rows &r) const
    {
#pragma unroll
        for (int row = 0; row < 2; row++) less[row] = r.base[row] == -INFINITY ? 0.0f : r.base[row] * p.scale_log2;
    }

    DEVICE void weigh_all(uint32_t (&w)[MHA_KEYS / 16][4], const float (&s)[MHA_KEYS / 2], Rows &r)
    {
        float less[2], sum[2] = {0, 0};
        lesses(less, r);
#pragma unroll
        for (int i = 0; i < MHA_KEYS / 2; i += 2) {
            const int row = i >> 1 & 1;
            const float a = weight(s[i], less[row], i), b = weight(s[i + 1], less[row], i + 1);
            sum[row] += a, sum[row] += b;
            w[i / 8][i / 2 % 4] = Element::pack(a, b);
        }
        r.sum[0] += sum[0], r.sum[1] += sum[1];
    }

    /* By all four lanes of a row. */
    static DEVICE bool any_of_quad(bool is)
    {
        return (__ballot_sync(~0u, is) >> (threadIdx.x & 28) & 15) != 0;
    }

    /* Values behind the last key are anything, and weigh 0: they must not be NaN. By all warpgroups. */
    DEVICE void clear_tail(int stage, int keys)
    {
        const uint32_t v = base + V_AT + (uint32_t)stage * V_BYTES;
        for (int i = (int)threadIdx.x - 128; i < (MHA_KEYS - keys) * V_TILES * 8; i += MHA_CONSUMERS) {
            const int line = keys + i / 8 % (MHA_KEYS - keys), tile = i / 8 / (MHA_KEYS - keys);
            store_zero_16(v + tile * COLUMN_TILE + line * LINE_BYTES + i % 8 * 16);
        }
        fence_async_shared();
        barrier_sync(3, MHA_CONSUMERS);
    }

    /* One thread of the warpgroup. */
    static DEVICE void arrive_if(uint32_t barrier, bool is)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"((uint32_t)is) : "memory");
    }

    DEVICE void consume(int group)
    {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int first = 64 * group + 16 * warp + lane / 4; /* row of the tile; the thread's other one is 8 behind */
        const bool speaks = threadIdx.x % 128 == 0;
        const uint32_t my_q = base + (uint32_t)group * 64 * LINE_BYTES;
        float s[MHA_KEYS / 2], o[D_V / 2], rescale[2];
        uint32_t w[MHA_KEYS / 16][4];
        int slot = 0, q = 0, stage = 0, v_stage = 0; /* of the block whose scores come next; of the values that do */
        uint32_t slot_phase = 0, q_phase = 0, phase = 0, v_phase = 0;
        Rows r = {{-INFINITY, -INFINITY}, {0, 0}}, done = r;
        int n = take(0, 0) - 1; /* the block whose weights are in s */
        if (n < -1) return;
        int keys = (int)load_shared_4(tile_at(slot) + 16), first_seen = (int)load_shared_4(tile_at(slot) + 20), done_slot = -1;
        mbarrier_wait(q_full(0), 0);
        mbarrier_wait(k_full(0), 0);
        wgmma_fence();
        scores(s, my_q, 0);
        wgmma_commit();
        wgmma_wait<0>();
        hold(s);
        arrive_if(k_empty(0), speaks);
        arrive_if(q_empty(0), speaks && n == 0);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        const bool both[2] = {true, true};
        {
            int seen[2];
#pragma unroll
            for (int row = 0; row < 2; row++) seen[row] = (p.causal ? min(keys, first_seen + first + 8 * row) : keys) - n * MHA_KEYS;
            mask(s, seen);
            raise(s, r, rescale, both);
            weigh_all(w, s, r);
        }
        mbarrier_wait(v_full(0), 0);
        if (keys - n * MHA_KEYS < MHA_KEYS) clear_tail(0, keys - n * MHA_KEYS);
#pragma unroll
        for (int j = 0; j < D_V / 2; j++) o[j] = 0.0f;
        bool pending = false; /* o is a tile's that has ended */
        for (;;) { /* w: the weights of block n, whose values are not added yet */
            const bool begun = n == 0; /* the next block is another tile's */
            const Rows ended = r;
            const int ended_slot = slot;
            trace(1);
            if (begun) {
                r = Rows{{-INFINITY, -INFINITY}, {0, 0}};
                if (++q == QS) q = 0, q_phase ^= 1;
                if (++slot == SLOTS) slot = 0, slot_phase ^= 1;
                n = take(slot, slot_phase);
                if (n < 0) {
                    r = ended;
                    break;
                }
                keys = (int)load_shared_4(tile_at(slot) + 16), first_seen = (int)load_shared_4(tile_at(slot) + 20);
                trace(2);
                mbarrier_wait(q_full(q), q_phase);
                trace(4);
            }
            n--;
            mbarrier_wait(k_full(stage), phase);
            wgmma_fence();
            scores(s, my_q + (uint32_t)q * Q_BYTES, stage);
            wgmma_commit();
            if (pending) {
                trace(9);
                write(done_slot, group, warp, done, o);
                trace(10);
            }
            if (begun) done = ended, done_slot = ended_slot;
            mbarrier_wait(v_full(v_stage), v_phase);
            hold(o);
            wgmma_fence();
            add_values<0, MHA_KEYS / 16>(o, w, v_stage);
            wgmma_commit();
            pending = begun;
            trace(5);
            wgmma_wait<1>();
            hold(s);
            trace(6);
            arrive_if(k_empty(stage), speaks);
            arrive_if(q_empty(q), speaks && n == 0);
            if (++stage == STAGES) stage = 0, phase ^= 1;
            const int v_next = v_stage + 1 == STAGES ? 0 : v_stage + 1;
            const uint32_t v_next_phase = v_next ? v_phase : v_phase ^ 1;
            const bool plain = !begun && min(keys, first_seen) >= (n + 1) * MHA_KEYS; /* all rows see all keys, and have seen some */
            bool redo = !plain;
            bool of[2] = {true, true};
            if (plain) {
                float less[2], sum[2] = {0, 0}, e[EARLY + 1];
                lesses(less, r);
#pragma unroll
                for (int i = 0; i < EARLY; i++) {
                    e[i] = weight(s[i], less[i >> 1 & 1], i);
                    sum[i >> 1 & 1] += e[i];
                }
#pragma unroll
                for (int i = 0; i < EARLY; i++) asm volatile("" : "+f"(e[i])::"memory");
                hold(sum);
                if (EARLY) mbarrier_wait(v_full(v_next), v_next_phase); /* also so that ptxas leaves what is in front of it there */
                wgmma_wait<0>();
                trace(8);
                arrive_if(v_empty(v_stage), speaks);
#pragma unroll
                for (int i = 0; i < EARLY; i += 2) w[i / 8][i / 2 % 4] = Element::pack(e[i], e[i + 1]);
#pragma unroll
                for (int i = EARLY; i < MHA_KEYS / 2; i += 2) {
                    const int row = i >> 1 & 1;
                    const float a = weight(s[i], less[row], i), b = weight(s[i + 1], less[row], i + 1);
                    sum[row] += a, sum[row] += b;
                    w[i / 8][i / 2 % 4] = Element::pack(a, b);
                }
                const bool far[2] = {!(sum[0] <= MOST) || r.base[0] == -INFINITY, !(sum[1] <= MOST) || r.base[1] == -INFINITY};
                redo = __any_sync(~0u, far[0] || far[1]);
                if (!redo) {
                    r.sum[0] += sum[0], r.sum[1] += sum[1];
                    hold(r.sum);
                } else
                    of[0] = any_of_quad(far[0]), of[1] = any_of_quad(far[1]);
            } else {
                wgmma_wait<0>();
                arrive_if(v_empty(v_stage), speaks);
            }
            hold(o);
            if (redo) {
                if (!plain) {
                    int seen[2];
#pragma unroll
                    for (int row = 0; row < 2; row++) seen[row] = (p.causal ? min(keys, first_seen + first + 8 * row) : keys) - n * MHA_KEYS;
                    mask(s, seen);
                }
                raise(s, r, rescale, of);
                weigh_all(w, s, r);
                if (!begun)
#pragma unroll
                for (int j = 0; j < D_V / 2; j++) o[j] *= rescale[j >> 1 & 1];
            }
            v_stage = v_next, v_phase = v_next_phase;
            if (keys - n * MHA_KEYS < MHA_KEYS) {
                mbarrier_wait(v_full(v_stage), v_phase);
                clear_tail(v_stage, keys - n * MHA_KEYS);
            }
        }
        if (pending) write(done_slot, group, warp, done, o); /* the last tile has one block */
        mbarrier_wait(v_full(v_stage), v_phase);
        wgmma_fence();
        hold(o);
        add_values<0, MHA_KEYS / 16>(o, w, v_stage);
        wgmma_commit();
        wgmma_wait<0>();
        hold(o);
        write((slot + SLOTS - 1) % SLOTS, group, warp, r, o);
    }

    /* ---- Results --------------------------------------------------------------------------------- */

    static DEVICE void store_global_16(void *to, const uint4 &words, bool is)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                     "r"(words.w), "r"((uint32_t)is)
                     : "memory");
    }

    /* By a warp: its 16 rows, eight at a time through shared memory, so that a row goes out in whole lines. */
    DEVICE void write(int slot, int group, int warp, const Rows &r, float (&o)[D_V / 2])
    {
        constexpr int CHUNKS = D_V / 8, AT_ONCE = 32 / CHUNKS; /* of 16 bytes, of a row; rows that the warp stores at once */
        const int lane = threadIdx.x % 32, first = 64 * group + 16 * warp;
        const uint32_t place = base + ROWS_AT + (uint32_t)(4 * group + warp) * ROWS_OF_WARP;
        const uint4 t = load_shared_16(tile_at(slot)); /* token, rows, request, head */
        uint16_t *const out = p.out + (int)t.z * p.out_stride[0] + ((int64_t)t.x + first) * p.out_stride[1] + (int)t.w * p.out_stride[2];
        float *const lse = p.lse + (int)t.z * p.lse_stride[0] + (int)t.w * p.lse_stride[1] + t.x + first;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = quad_sum(r.sum[half]), factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
            const int here = 8 * half + lane / 4;
            if (p.lse && lane % 4 == 0 && first + here < (int)t.y)
                lse[here] = sum == 0.0f ? p.lse_of_empty : ((r.base[half] == -INFINITY ? 0.0f : r.base[half]) * p.scale + LN_2 * log2_approx(sum)) * p.lse_factor;
            __syncwarp();
#pragma unroll
            for (int j = 0; j < CHUNKS; j += 4) {
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; k++) words[k] = Element::pack(o[4 * (j + k) + 2 * half] * factor, o[4 * (j + k) + 2 * half + 1] * factor);
                store_matrices(place + (lane % 8) * (D_V * 2) + ((uint32_t)(j + lane / 8) ^ (lane % 8)) * 16, words);
            }
            __syncwarp();
#pragma unroll
            for (int row = 0; row < 8; row += AT_ONCE) {
                const int at = row + lane / CHUNKS, chunk = lane % CHUNKS;
                const uint4 words = load_shared_16(place + at * (D_V * 2) + (uint32_t)(chunk ^ at) * 16);
                store_global_16(out + (8 * half + at) * p.out_stride[1] + 8 * chunk, words, first + 8 * half + at < (int)t.y);
            }
        }
        mbarrier_arrive(tile_empty(slot));
#pragma unroll
        for (int j = 0; j < D_V / 2; j++) o[j] = 0.0f;
    }

    /* By the producer: no row of the tile sees a key. */
    DEVICE void empty(const MhaTile &t)
    {
        for (int row = 0; row < min(t.rows, (int)MHA_ROWS); row++) {
            const int64_t token = (int64_t)t.token + row;
            uint16_t *out = p.out + t.request * p.out_stride[0] + token * p.out_stride[1] + t.head * p.out_stride[2];
            for (int d = 0; d < D_V; d += 8) *(uint4 *)(out + d) = make_uint4(0, 0, 0, 0);
            if (p.lse) p.lse[t.request * p.lse_stride[0] + t.head * p.lse_stride[1] + token] = p.lse_of_empty;
        }
    }

    DEVICE void begin()
    {
        if (threadIdx.x == 0) {
            for (int s = 0; s < 2; s++) mbarrier_init(q_full(s), 1), mbarrier_init(q_empty(s), CONSUMERS);
            for (int s = 0; s < SLOTS; s++) mbarrier_init(tile_full(s), 1), mbarrier_init(tile_empty(s), MHA_CONSUMERS);
            for (int s = 0; s < STAGES; s++)
                mbarrier_init(k_full(s), 1), mbarrier_init(v_full(s), 1), mbarrier_init(k_empty(s), CONSUMERS), mbarrier_init(v_empty(s), CONSUMERS);
            mbarrier_fence_init();
        }
        __syncthreads();
        const int group = (int)threadIdx.x / 128;
        if (group == 0) {
            give_registers<KEPT>();
            if (threadIdx.x < 32 && elect_one()) produce();
        } else {
            take_registers<TAKEN>();
            consume(__shfl_sync(~0u, group - 1, 0));
        }
    }
};

#define MHA_KERNEL(NAME, ELEMENT, D_QK, D_V)                                                                                  \
    extern "C" __global__ void __launch_bounds__(MHA_THREADS, 1) NAME(const __grid_constant__ struct mha_params p)          \
    {                                                                                                                        \
        extern __shared__ unsigned char memory[];                                                                            \
        const uint32_t base = ((uint32_t)__cvta_generic_to_shared(memory) + 1023u) & ~1023u;                                 \
        Mha<ELEMENT, D_QK, D_V>{p, base}.begin();                                                                            \
    }
