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
#ifndef TURNS /* warpgroup 1 issues its products while 2 does its softmax, and the other way round */
#define TURNS 0
#endif

#ifndef DYNAMIC
#define DYNAMIC 1
#endif
#ifndef SKIP_RESCALE
#define SKIP_RESCALE 0
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
    float scale, scale_log2, lse_of_empty, lse_factor;
    int causal;
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

/* A tile of rows: where it is, and the keys that its last row sees. */
struct MhaTile {
    int request, head, first_row, rows; /* rows: of the request from first_row on, which may be more than the tile */
    int first_token, first_key, keys, tokens, blocks;
};

template <typename Element, int D_QK, int D_V> struct Mha {
    static constexpr int QK_TILES = D_QK / 64, V_TILES = D_V / 64;
    static constexpr uint32_t Q_BYTES = MHA_ROWS * D_QK * 2, K_BYTES = MHA_KEYS * D_QK * 2, V_BYTES = MHA_KEYS * D_V * 2;
    static constexpr uint32_t K_AT = Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;
    static constexpr uint32_t TILE_AT = BARRIERS_AT + (4 + 4 * STAGES) * 8;
    static constexpr uint32_t SHARED_BYTES = TILE_AT + 16 + 1024; /* the base is moved up to 1024 */

    const mha_params &p;
    const uint32_t base;

    DEVICE uint32_t barrier(int i) const { return base + BARRIERS_AT + 8u * (uint32_t)i; }
    DEVICE uint32_t q_full() const { return barrier(0); }
    DEVICE uint32_t q_empty() const { return barrier(1); }
    DEVICE uint32_t k_full(int s) const { return barrier(2 + s); }
    DEVICE uint32_t k_empty(int s) const { return barrier(2 + STAGES + s); }
    DEVICE uint32_t v_full(int s) const { return barrier(2 + 2 * STAGES + s); }
    DEVICE uint32_t v_empty(int s) const { return barrier(2 + 3 * STAGES + s); }
    DEVICE uint32_t tile_full() const { return barrier(2 + 4 * STAGES); }
    DEVICE uint32_t tile_empty() const { return barrier(3 + 4 * STAGES); }

    DEVICE int tiles() const { return p.b * p.h_q * p.tiles_of_request; }

    /* The tiles with the most keys come first: of a causal call those of the last rows. Heads that read the same keys follow each other. */
    DEVICE MhaTile tile_at(int i) const
    {
        const int all = p.b * p.h_q, group = i / (p.heads_at_once * p.tiles_of_request), before = group * p.heads_at_once;
        const int heads = min(p.heads_at_once, all - before), within = i - before * p.tiles_of_request;
        const int order = within / heads, of = before + within % heads;
        MhaTile t;
        t.request = of / p.h_q, t.head = of % p.h_q;
        t.first_row = (p.causal ? p.tiles_of_request - 1 - order : order) * MHA_ROWS;
        t.first_token = 0, t.first_key = 0, t.tokens = p.s_q, t.keys = p.s_k;
        if (p.cu_q) {
            const int q0 = min(max(p.cu_q[t.request], 0), p.tokens_q), q1 = min(max(p.cu_q[t.request + 1], q0), p.tokens_q);
            const int k0 = min(max(p.cu_k[t.request], 0), p.tokens_k), k1 = min(max(p.cu_k[t.request + 1], k0), p.tokens_k);
            t.first_token = q0, t.tokens = q1 - q0, t.first_key = k0, t.keys = k1 - k0;
        }
        t.rows = t.tokens - t.first_row;
        int seen = t.keys;
        if (p.causal) seen = min(seen, t.keys - t.tokens + t.first_row + MHA_ROWS);
        t.blocks = t.rows <= 0 || seen <= 0 ? 0 : (seen + MHA_KEYS - 1) / MHA_KEYS;
        return t;
    }

    /* ---- Producer: one thread ------------------------------------------------------------------ */

    DEVICE void produce()
    {
        int stage = 0;
        uint32_t phase = 0, q_phase = 0, tile_phase = 0;
        for (int i = blockIdx.x, next;; i = next) {
            if (DYNAMIC) {
                mbarrier_wait_thread(tile_empty(), tile_phase ^ 1), tile_phase ^= 1;
                store_shared_4(base + TILE_AT, (uint32_t)i);
                mbarrier_arrive(tile_full());
            }
            if (i >= tiles()) break;
            next = DYNAMIC ? (int)gridDim.x + atomicAdd(p.counters, 1) : i + (int)gridDim.x;
            const MhaTile t = tile_at(i);
            if (!t.blocks) continue;
            const int key_head = t.head / p.group, request = p.cu_q ? 0 : t.request;
            for (int n = t.blocks - 1; n >= 0; n--) {
                const int key = t.first_key + n * MHA_KEYS;
                mbarrier_wait_thread(k_empty(stage), phase ^ 1);
                mbarrier_arrive_expect(k_full(stage), K_BYTES);
                tma_load(base + K_AT + stage * K_BYTES, &p.k, k_full(stage), {0, key, key_head, 0, request});
                if (n == t.blocks - 1) {
                    mbarrier_wait_thread(q_empty(), q_phase ^ 1);
                    mbarrier_arrive_expect(q_full(), Q_BYTES);
                    tma_load(base, &p.q, q_full(), {0, t.first_token + t.first_row, t.head, 0, request});
                    q_phase ^= 1;
                }
                mbarrier_wait_thread(v_empty(stage), phase ^ 1);
                mbarrier_arrive_expect(v_full(stage), V_BYTES);
                tma_load(base + V_AT + stage * V_BYTES, &p.v, v_full(stage), {0, key, key_head, 0, request});
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        if (DYNAMIC && atomicAdd(p.counters + 1, 1) == (int)gridDim.x - 1) p.counters[0] = 0, p.counters[1] = 0;
    }

    /* The next tile, by all consumers. */
    DEVICE int take(uint32_t &tile_phase)
    {
        mbarrier_wait(tile_full(), tile_phase), tile_phase ^= 1;
        const int i = (int)load_shared_4(base + TILE_AT);
        mbarrier_arrive(tile_empty());
        return __shfl_sync(~0u, i, 0);
    }

    /* ---- Consumer: a warpgroup, 64 rows ---------------------------------------------------------- */

    struct Rows { /* a thread's two rows of the fragments */
        float max[2], sum[2];
        int limit[2]; /* keys that they see */
    };

    DEVICE void scores(float (&s)[MHA_KEYS / 2], int group, int stage)
    {
        const uint32_t q = base + (uint32_t)group * 64 * LINE_BYTES, k = base + K_AT + (uint32_t)stage * K_BYTES;
#pragma unroll
        for (int step = 0; step < D_QK / 16; step++)
            wgmma_block<Element>(s, wgmma_lines(q + step / 4 * Q_TILE, step % 4), wgmma_lines(k + step / 4 * COLUMN_TILE, step % 4), step != 0);
    }

    DEVICE void add_values(float (&o)[D_V / 2], const uint32_t (&w)[MHA_KEYS / 16][4], int stage)
    {
        const uint32_t v = base + V_AT + (uint32_t)stage * V_BYTES;
#pragma unroll
        for (int step = 0; step < MHA_KEYS / 16; step++) {
            const uint64_t b = wgmma_descriptor(v, COLUMN_TILE, (uint32_t)step * 16 * LINE_BYTES);
            if constexpr (D_V == 128)
                wgmma_128_columns<Element>(o, w[step], b, 1);
            else
                wgmma_64_columns<Element>(o, w[step], b, 1);
        }
    }

    /* Scores of keys from `key` on become weights; rescale is what older sums are multiplied by. */
    template <bool MASKED> DEVICE void softmax(float (&s)[MHA_KEYS / 2], Rows &r, float (&rescale)[2], int key)
    {
        const int column = key + 2 * (threadIdx.x % 4);
        float top[2] = {r.max[0], r.max[1]};
#pragma unroll
        for (int i = 0; i < MHA_KEYS / 2; i++) {
            const int row = i >> 1 & 1;
            if (MASKED && column + (i >> 2) * 8 + (i & 1) >= r.limit[row]) s[i] = -INFINITY;
            top[row] = fmaxf(top[row], s[i]);
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            top[row] = quad_max(top[row]);
            const float less = (top[row] == -INFINITY ? 0.0f : top[row]) * p.scale_log2;
            rescale[row] = exp2_approx(r.max[row] * p.scale_log2 - less);
            r.sum[row] *= rescale[row], r.max[row] = top[row], top[row] = less;
        }
#pragma unroll
        for (int i = 0; i < MHA_KEYS / 2; i++) {
            const int row = i >> 1 & 1;
            s[i] = exp2_approx(fmaf(s[i], p.scale_log2, -top[row]));
            r.sum[row] += s[i];
        }
    }

    DEVICE void weights(uint32_t (&w)[MHA_KEYS / 16][4], const float (&s)[MHA_KEYS / 2])
    {
#pragma unroll
        for (int step = 0; step < MHA_KEYS / 16; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) w[step][i] = Element::pack(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }

    /* Values behind the last key are anything, and weigh 0: they must not be NaN. By both warpgroups. */
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

    DEVICE void my_turn(int group)
    {
        if (TURNS) barrier_sync(1 + group, 256);
    }

    DEVICE void your_turn(int group)
    {
        if (TURNS) barrier_arrive(2 - group, 256);
    }

    DEVICE void consume(int group)
    {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        int stage = 0;
        uint32_t phase = 0, q_phase = 0, tile_phase = 0;
        if (group == 1) your_turn(group); /* the first turn is warpgroup 0's */
        for (int i = DYNAMIC ? take(tile_phase) : (int)blockIdx.x; i < tiles(); i = DYNAMIC ? take(tile_phase) : i + (int)gridDim.x) {
            const MhaTile t = tile_at(i);
            const int first = 64 * group + 16 * warp + lane / 4; /* row of the tile; the other one is 8 behind */
            if (!t.blocks) {
                empty(t, group);
                continue;
            }
            Rows r = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
#pragma unroll
            for (int row = 0; row < 2; row++) {
                r.limit[row] = t.keys;
                if (p.causal) r.limit[row] = min(t.keys, t.keys - t.tokens + t.first_row + first + 8 * row + 1);
            }
            /* Blocks below `whole` are seen whole by the first row of the tile. */
            const int whole = (p.causal ? max(0, min(t.keys, t.keys - t.tokens + t.first_row + 1)) : t.keys) / MHA_KEYS;
            float s[MHA_KEYS / 2], o[D_V / 2], rescale[2];
            uint32_t w[MHA_KEYS / 16][4];
#pragma unroll
            for (int j = 0; j < D_V / 2; j++) o[j] = 0.0f;

            int n = t.blocks - 1;
            mbarrier_wait(q_full(), q_phase), q_phase ^= 1;
            mbarrier_wait(k_full(stage), phase);
            my_turn(group);
            wgmma_fence();
            scores(s, group, stage);
            wgmma_commit();
            wgmma_wait<0>();
            hold(s);
            your_turn(group);
            if (threadIdx.x % 128 == 0) mbarrier_arrive(k_empty(stage));
            if (n < whole)
                softmax<false>(s, r, rescale, n * MHA_KEYS);
            else
                softmax<true>(s, r, rescale, n * MHA_KEYS);
            weights(w, s);
            if (t.keys - n * MHA_KEYS < MHA_KEYS) {
                mbarrier_wait(v_full(stage), phase);
                clear_tail(stage, t.keys - n * MHA_KEYS);
            }
            for (n--; n >= 0; n--) {
                const int now = stage;
                const uint32_t now_phase = phase;
                if (++stage == STAGES) stage = 0, phase ^= 1;
                mbarrier_wait(k_full(stage), phase);
                my_turn(group);
                wgmma_fence();
                hold(o);
                scores(s, group, stage);
                wgmma_commit();
                mbarrier_wait(v_full(now), now_phase);
                add_values(o, w, now);
                wgmma_commit();
                your_turn(group);
                wgmma_wait<1>();
                hold(s);
                if (threadIdx.x % 128 == 0) {
                    mbarrier_arrive(k_empty(stage));
                    if (n == 0) mbarrier_arrive(q_empty());
                }
                if (n < whole)
                    softmax<false>(s, r, rescale, n * MHA_KEYS);
                else
                    softmax<true>(s, r, rescale, n * MHA_KEYS);
                wgmma_wait<0>();
                hold(o);
                if (threadIdx.x % 128 == 0) mbarrier_arrive(v_empty(now));
                if (!SKIP_RESCALE || __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                    for (int j = 0; j < D_V / 2; j++) o[j] *= rescale[j >> 1 & 1];
                }
                weights(w, s);
            }
            if (threadIdx.x % 128 == 0 && t.blocks == 1) mbarrier_arrive(q_empty());
            mbarrier_wait(v_full(stage), phase);
            wgmma_fence();
            hold(o);
            add_values(o, w, stage);
            wgmma_commit();
            wgmma_wait<0>();
            hold(o);
            if (threadIdx.x % 128 == 0) mbarrier_arrive(v_empty(stage));
            if (++stage == STAGES) stage = 0, phase ^= 1;
            write(t, first, r, o);
        }
        if (group == 0 && TURNS) barrier_sync(1, 256); /* the turn that the other one gave last */
    }

    /* ---- Results --------------------------------------------------------------------------------- */

    DEVICE void write(const MhaTile &t, int first, const Rows &r, const float (&o)[D_V / 2])
    {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int at = first + 8 * row;
            const float sum = quad_sum(r.sum[row]), factor = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int64_t token = t.first_token + t.first_row + at;
            uint16_t *out = p.out + (p.cu_q ? 0 : t.request * p.out_stride[0]) + token * p.out_stride[1] + t.head * p.out_stride[2];
            const bool there = at < t.rows;
#pragma unroll
            for (int j = 0; j < D_V / 32; j++) { /* 32 columns: a lane has a pair in each eight */
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; k++) words[k] = Element::pack(o[16 * j + 4 * k + 2 * row] * factor, o[16 * j + 4 * k + 2 * row + 1] * factor);
                const uint4 eight = quad_gather_eight(words);
                if (there) *(uint4 *)(out + 32 * j + 8 * (threadIdx.x % 4)) = eight;
            }
            if (there && p.lse && threadIdx.x % 4 == 0)
                p.lse[(p.cu_q ? 0 : t.request * p.lse_stride[0]) + t.head * p.lse_stride[1] + token] =
                    sum == 0.0f ? p.lse_of_empty : ((r.max[row] == -INFINITY ? 0.0f : r.max[row]) * p.scale + logf(sum)) * p.lse_factor;
        }
    }

    DEVICE void empty(const MhaTile &t, int group)
    {
        for (int row = (int)threadIdx.x % 128 / 2 + 64 * group; row < min(t.rows, 64 * group + 64); row += 64) {
            const int64_t token = t.first_token + t.first_row + row;
            uint16_t *out = p.out + (p.cu_q ? 0 : t.request * p.out_stride[0]) + token * p.out_stride[1] + t.head * p.out_stride[2];
            for (int d = 8 * (threadIdx.x % 2); d < D_V; d += 16) *(uint4 *)(out + d) = make_uint4(0, 0, 0, 0);
            if (p.lse && threadIdx.x % 2 == 0)
                p.lse[(p.cu_q ? 0 : t.request * p.lse_stride[0]) + t.head * p.lse_stride[1] + token] = p.lse_of_empty;
        }
    }

    DEVICE void begin()
    {
        if (threadIdx.x == 0) {
            mbarrier_init(q_full(), 1), mbarrier_init(q_empty(), CONSUMERS), mbarrier_init(tile_full(), 1), mbarrier_init(tile_empty(), MHA_CONSUMERS);
            for (int s = 0; s < STAGES; s++)
                mbarrier_init(k_full(s), 1), mbarrier_init(v_full(s), 1), mbarrier_init(k_empty(s), CONSUMERS), mbarrier_init(v_empty(s), CONSUMERS);
            mbarrier_fence_init();
        }
        __syncthreads();
        const int group = (int)threadIdx.x / 128;
        if (group == 0) {
            give_registers<CONSUMERS == 3 ? 32 : 24>();
            if (threadIdx.x < 32 && elect_one()) produce();
        } else {
            take_registers<CONSUMERS == 3 ? 160 : 240>();
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
