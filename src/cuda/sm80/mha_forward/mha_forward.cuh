/* SPDX-License-Identifier: MIT
 *
 * Dense MHA on any NVIDIA GPU since Ampere: FlashAttention-2's way.
 *
 * A block of threads takes a tile of rows of one head through the keys that they see, KEYS at a time. A warp has 16 · ROW_TILES rows of
 * the tile for itself: their scores, their weights and their share of O stay in its registers, and no warp waits for another one's.
 * The scores S = Q Kᵀ come out of the tensor cores where P is to be for the product with V (fragment.h: two C of m16n8k16 side by
 * side are one A), so that P never touches shared memory.
 *
 *      memory ──cp.async──▶ ring of key blocks ──ldmatrix────────▶ S = Q·Kᵀ ◀── Q (shared, or registers)
 *                                                                    │ mask, reference, exp2
 *                                                                    ▼
 *             ──cp.async──▶ ring of value blocks ──ldmatrix.trans─▶ O += P·V        (P, O in registers)
 *
 * A block of keys, in time (| = barrier of the whole block of threads), where AHEAD:
 *
 *      wait for its copies | ask for a later block; S of the next block, and between its products the weights of this one; O += P·V
 *
 * mma.sync does not run beside other instructions of a warp unless these do not depend on it: with the scores one block ahead, the
 * exponentials stand among products that they do not need. Else they stand between the products, and other warps fill the gap.
 *
 * A fragment of K or V serves ROW_TILES products. With one, an m16n8k16 reads 256 bytes of shared memory, which takes 2 clocks, where
 * mma.sync could take one every 1.6 clocks; with two shared memory is no limit any more.
 *
 * Weights are relative to a reference that follows a row's largest score only when it falls behind by more than 8 (in log2): P
 * stays below 2^8, O is seldom rescaled, and the four threads that share a row compare their scores only then.
 *
 * Shared memory, in bytes, all in lines of 128 bytes (64 columns of a row), swizzled, so that ldmatrix meets no bank twice:
 *      Q (then O)  ROWS × 2 · max(D_QK, D_V) | K  STAGES × KEYS × 2 · D_QK | V  STAGES × KEYS × 2 · D_V
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/mma.cuh"
#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/shared.cuh"
#include "shape.h"
#include "tiles.cuh"

template <typename Element_, int D_QK_, int D_V_, int WARPS_, int ROW_TILES_, int KEYS_, int STAGES_,
          bool Q_IN_REGISTERS_, bool AHEAD_>
struct MhaForward {
    using Element = Element_;
    static constexpr int D_QK = D_QK_, D_V = D_V_, WARPS = WARPS_, ROW_TILES = ROW_TILES_, KEYS = KEYS_,
                         STAGES = STAGES_;
    static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_, AHEAD = AHEAD_;
    static constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS;
    static constexpr int STEPS = D_QK / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = D_V / 8;
    static constexpr int UNITS = ROW_TILES * KEY_TILES; /* of 16 rows and 8 keys */
    static constexpr int ROWS_OF_PASS = THREADS / 8; /* eight threads copy a line */

    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = (D_QK > D_V ? D_QK : D_V) / LINE_ELEMENTS * Q_GROUP,
                              K_BYTES = D_QK / LINE_ELEMENTS * KEY_GROUP,
                              V_BYTES = D_V / LINE_ELEMENTS * KEY_GROUP;
    static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) ==
                      MHA_SM80_SHARED_BYTES(D_QK, D_V, ROWS, KEYS, STAGES),
                  "the host knows how much it is");
    static_assert(KEYS % ROWS_OF_PASS == 0 && KEYS % 16 == 0 && STAGES >= 2, "");

    using Scores = float[ROW_TILES][KEY_TILES][4];
    using Weights = uint32_t[ROW_TILES][KEYS / 16][4]; /* as A of the product with V */
    using Sums = float[ROW_TILES][COLUMN_TILES][4];

    struct QFragments {
        uint32_t a[Q_IN_REGISTERS ? STEPS : 1][ROW_TILES][4];
    };

    /* Of the rows 16 m + 8 half + lane / 4 of this warp. In powers of two, of scaled scores. */
    struct State {
        float reference[ROW_TILES][2];
        float sum[ROW_TILES][2]; /* of this thread's weights */
        bool careful;            /* some row's reference is extreme */
    };

    const mha_forward_sm80_params &p;
    const MhaTile &tile; /* in shared memory: registers are dear */
    uint32_t q_at, k_at, v_at;
    uint32_t lane_at; /* in 16 lines: the chunk whose address this lane gives for ldmatrix */
    int warp, lane;

    DEVICE MhaForward(const mha_forward_sm80_params &params, unsigned char *memory, const MhaTile &its)
        : p(params), tile(its), warp((int)threadIdx.x / 32), lane((int)threadIdx.x % 32)
    {
        q_at = shared_address(memory), k_at = q_at + Q_BYTES, v_at = k_at + STAGES * K_BYTES;
        lane_at = swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
    }

    /* ---- Copies -------------------------------------------------------------------------------- */

    DEVICE static uint32_t place_of_thread()
    {
        return swizzle_128(threadIdx.x / 8, threadIdx.x % 8);
    }

    /* Block `block` of D columns. Where it has fewer keys the others become 0, for 0 × NaN is NaN; where it has none, nothing is read
     * that was there before. */
    template <int D> DEVICE void copy_block(uint32_t to, const uint16_t *from, int64_t stride, int block) const
    {
        const int row = (int)threadIdx.x / 8, left = tile.keys - block * KEYS;
        if (left <= 0) return;
        to += place_of_thread();
        from += (block * KEYS + row) * stride + threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
        for (int first = 0; first < KEYS; first += ROWS_OF_PASS) {
#pragma unroll
            for (int g = 0; g < D / LINE_ELEMENTS; g++)
                cp_async_16(to + (uint32_t)(g * KEY_GROUP + first * LINE_BYTES), from + g * LINE_ELEMENTS,
                            row + first < left);
            from += ROWS_OF_PASS * stride;
        }
    }

    DEVICE void ask_for_keys(int block, int stage) const
    {
        copy_block<D_QK>(k_at + (uint32_t)stage * K_BYTES, tile.k, p.call.k_stride[1], block);
    }

    DEVICE void ask_for_values(int block, int stage) const
    {
        copy_block<D_V>(v_at + (uint32_t)stage * V_BYTES, tile.v, p.call.v_stride[1], block);
    }

    DEVICE void ask_for_queries() const
    {
        const mha_forward_params &call = p.call;
#pragma unroll
        for (int first = 0; first < ROWS; first += ROWS_OF_PASS) {
            const int row = (int)threadIdx.x / 8 + first;
            const RowPlace place = place_of_row(p, tile, row);
            const uint16_t *from = call.q + tile.request * call.q_stride[0] +
                                   place.token * call.q_stride[1] + place.head * call.q_stride[2] +
                                   threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
            for (int g = 0; g < D_QK / LINE_ELEMENTS; g++)
                cp_async_16(q_at + place_of_thread() + (uint32_t)(g * Q_GROUP + first * LINE_BYTES),
                            from + g * LINE_ELEMENTS, row < tile.rows);
        }
    }

    /* ---- The two products ---------------------------------------------------------------------- */

    /* What this lane's chunk becomes `chunk` (even) chunks further on: the swizzle is an XOR. */
    DEVICE uint32_t lane_chunk(int chunk) const
    {
        return lane_at ^ (uint32_t)(chunk % 8 * CHUNK_BYTES);
    }

    DEVICE void load_q(uint32_t (&a)[ROW_TILES][4], int step) const
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            ldmatrix_x4(a[m], lane_chunk(2 * step) + q_at +
                                  (uint32_t)(step / 4 * Q_GROUP + (warp * WARP_ROWS + 16 * m) * LINE_BYTES));
    }

    /* s = Q Kᵀ; between(step) is done beside the products of each step of 16 columns. */
    template <typename Between>
    DEVICE void score(int stage, const QFragments &q, Scores &s, Between between) const
    {
        const uint32_t block_at = k_at + (uint32_t)stage * K_BYTES;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][t][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t a[ROW_TILES][4], b[KEY_TILES / 2][4];
            if (!Q_IN_REGISTERS) load_q(a, step);
#pragma unroll
            for (int t = 0; t < KEY_TILES; t += 2)
                ldmatrix_x4(b[t / 2], lane_chunk(2 * step) + block_at +
                                          (uint32_t)(step / 4 * KEY_GROUP + 8 * t * LINE_BYTES));
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++)
                    mma_16816<Element>(s[m][t], Q_IN_REGISTERS ? q.a[Q_IN_REGISTERS ? step : 0][m] : a[m],
                                       b[t / 2][t % 2], b[t / 2][t % 2 + 2]);
            between(step);
        }
    }

    /* o += P V */
    DEVICE void add_values(int stage, const Weights &w, Sums &o) const
    {
        const uint32_t block_at = v_at + (uint32_t)stage * V_BYTES;
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, lane_chunk(n) + block_at +
                                         (uint32_t)(n / 8 * KEY_GROUP + 16 * k * LINE_BYTES));
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma_16816<Element>(o[m][n], w[m][k], b[0], b[1]);
                    mma_16816<Element>(o[m][n + 1], w[m][k], b[2], b[3]);
                }
            }
    }

    /* ---- Softmax ------------------------------------------------------------------------------- */

    DEVICE int row_of(int m, int half) const { return warp * WARP_ROWS + 16 * m + 8 * half + lane / 4; }

    /* Keys from first_key on: those that a row does not see get the score -inf. */
    DEVICE void mask(Scores &s, int first_key) const
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int bound = keys_seen(p, tile, row_of(m, half)) - first_key - 2 * (lane % 4);
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (8 * t + e >= bound) s[m][t][2 * half + e] = -INFINITY;
            }
    }

    /* Raises the references that fell behind, and what was summed relative to them. */
    DEVICE void follow(Scores &s, State &state, Sums &o) const
    {
        const float scale = p.call.scale_log2;
        float most[ROW_TILES][2];
        bool behind = false;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                most[m][half] = -INFINITY;
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
                    most[m][half] = fmaxf(most[m][half], fmaxf(s[m][t][2 * half], s[m][t][2 * half + 1]));
                behind |= is_behind(most[m][half], state.reference[m][half]);
            }
        if (SELDOM(__any_sync(~0u, behind))) {
            bool careful = false;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float highest = quad_max(most[m][half]), before = state.reference[m][half];
                    float factor = 1.0f;
                    if (is_behind(highest, before)) {
                        state.reference[m][half] = highest * scale;
                        factor = exp2_approx(before - state.reference[m][half]);
                    }
                    careful |= !(fabsf(state.reference[m][half]) <= MOST_FUSED);
                    state.sum[m][half] *= factor;
#pragma unroll
                    for (int n = 0; n < COLUMN_TILES; n++)
                        o[m][n][2 * half] *= factor, o[m][n][2 * half + 1] *= factor;
                }
            state.careful = __any_sync(~0u, careful);
        }
    }

    DEVICE bool is_behind(float score, float reference) const
    {
        return fmaf(score, p.call.scale_log2, -reference) > REFERENCE_SLACK;
    }

    /* Beyond it the rounding error of a reference, which a fused multiply-add leaves in every exponent of the row, is no small power of
     * two any more: then products are rounded before it is subtracted, as it was. Also where a row has seen no key. */
    static constexpr float MOST_FUSED = 0x1p20f;

    /* Makes the exponents of extreme rows, and of the others that the warp has beside them. */
    DEVICE void make_exponents(Scores &s, const State &state) const
    {
        const float scale = p.call.scale_log2;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float less = state.reference[m][half];
                const bool extreme = !(fabsf(less) <= MOST_FUSED);
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++)
                        s[m][t][e] = extreme ? __fmul_rn(s[m][t][e], scale) - less
                                             : fmaf(s[m][t][e], scale, -less);
            }
    }

    /* The weights of some units of the block; exponents are scores times `scale` minus `less`. */
    DEVICE static void weigh_units(const Scores &s, int from, int to, float scale,
                                   const float (&less)[ROW_TILES][2], State &state, Weights &w)
    {
#pragma unroll
        for (int unit = from; unit < to; unit++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = unit % ROW_TILES, t = unit / ROW_TILES;
                const float low = exp2_approx(fmaf(s[m][t][2 * half], scale, -less[m][half])),
                            high = exp2_approx(fmaf(s[m][t][2 * half + 1], scale, -less[m][half]));
                state.sum[m][half] += low + high;
                w[m][t / 2][t % 2 * 2 + half] = Element::pack(low, high);
            }
    }

    /* ---- A tile -------------------------------------------------------------------------------- */

    /* Blocks of keys that rows first to last of the tile see some of. */
    DEVICE int blocks_seen(int first, int last) const
    {
        last = min(last, tile.rows - 1);
        return last < first ? 0 : (max(keys_seen(p, tile, last), 0) + KEYS - 1) / KEYS;
    }

    DEVICE void run()
    {
        const int blocks = blocks_seen(0, ROWS - 1),
                  mine = blocks_seen(warp * WARP_ROWS, (warp + 1) * WARP_ROWS - 1);
        const int seen_by_all = keys_seen(p, tile, warp * WARP_ROWS); /* of this warp's rows */
        Sums o = {};
        State state;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                state.reference[m][half] = LEAST_REFERENCE, state.sum[m][half] = 0.0f;
        state.careful = true;

        /* Group j of copies has the values of block j and the keys of block j, or where AHEAD j + 1. */
        ask_for_queries();
        if (AHEAD) {
            ask_for_keys(0, 0);
            cp_async_commit();
        }
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) {
            ask_for_keys(j + AHEAD, (j + AHEAD) % STAGES);
            ask_for_values(j, j);
            cp_async_commit();
        }
        QFragments q;
        if (AHEAD || Q_IN_REGISTERS) {
            cp_async_wait<AHEAD ? STAGES - 1 : STAGES - 2>();
            __syncthreads();
            if constexpr (Q_IN_REGISTERS)
#pragma unroll
                for (int step = 0; step < STEPS; step++) load_q(q.a[step], step);
        }
        Scores s;
        if (AHEAD && mine > 0) score(0, q, s, [](int) {});
        int stage = 0;
#pragma unroll 1
        for (int block = 0; block < blocks; block++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads(); /* everyone's copies are there, and everyone is done with the block before */
            const int free = stage ? stage - 1 : STAGES - 1, next = stage + 1 == STAGES ? 0 : stage + 1;
            ask_for_keys(block + STAGES - 1 + AHEAD, AHEAD ? stage : free);
            ask_for_values(block + STAGES - 1, free);
            cp_async_commit();
            if (block < mine) attend(block, block + 1 < mine, stage, next, q, s, seen_by_all, state, o);
            stage = next;
        }
        finish(state, o);
    }

    /* Block `block`, whose scores are there where AHEAD; `goes_on`: there is another one. */
    DEVICE void attend(int block, bool goes_on, int stage, int next, const QFragments &q, Scores &s,
                       int seen_by_all, State &state, Sums &o) const
    {
        if (!AHEAD) score(stage, q, s, [](int) {});
        if (seen_by_all - block * KEYS < KEYS) mask(s, block * KEYS);
        follow(s, state, o);
        Weights w;
        if (AHEAD && goes_on && !SELDOM(state.careful)) {
            Scores ahead;
            score(next, q, ahead, [&](int step) {
                weigh_units(s, step * UNITS / STEPS, (step + 1) * UNITS / STEPS, p.call.scale_log2,
                            state.reference, state, w);
            });
            add_values(stage, w, o);
#pragma unroll
            for (int i = 0; i < UNITS; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[i % ROW_TILES][i / ROW_TILES][e] = ahead[i % ROW_TILES][i / ROW_TILES][e];
        } else {
            if (SELDOM(state.careful)) {
                const float less[ROW_TILES][2] = {};
                make_exponents(s, state);
                weigh_units(s, 0, UNITS, 1.0f, less, state, w);
            } else {
                weigh_units(s, 0, UNITS, p.call.scale_log2, state.reference, state, w);
            }
            add_values(stage, w, o);
            if (AHEAD && goes_on) score(next, q, s, [](int) {});
        }
    }

    /* ---- Results ------------------------------------------------------------------------------- */

    /* Rows go to `out` through the lines of Q that this warp alone has read. */
    DEVICE void finish(const State &state, Sums &o) const
    {
        const output_params &output = p.call.output;
        const uint32_t lines = q_at + (uint32_t)(warp * WARP_ROWS * LINE_BYTES);
        __syncwarp();
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = row_of(m, half), local = 16 * m + 8 * half + lane / 4;
                const float sum = quad_sum(state.sum[m][half]);
                const float factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
                if (lane % 4 == 0 && row < tile.rows)
                    store_lse(output, tile.request, place_of_row(p, tile, row),
                              score_lse(state.reference[m][half], sum));
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++)
                    store_shared_4(lines + (uint32_t)(n / 8 * Q_GROUP) +
                                       swizzle_128((uint32_t)local, (uint32_t)(n % 8)) +
                                       (uint32_t)(lane % 4) * 4,
                                   Element::pack(o[m][n][2 * half] * factor,
                                                 o[m][n][2 * half + 1] * factor));
            }
        __syncwarp();
#pragma unroll
        for (int first = 0; first < WARP_ROWS; first += 4) {
            const int local = first + lane / 8, row = warp * WARP_ROWS + local;
            if (row >= tile.rows) continue;
            uint16_t *to = output.out + out_offset(output, tile.request, place_of_row(p, tile, row)) +
                           lane % 8 * CHUNK_ELEMENTS;
#pragma unroll
            for (int g = 0; g < D_V / LINE_ELEMENTS; g++) {
                const uint4 words = load_shared_16(lines + (uint32_t)(g * Q_GROUP) +
                                                   swizzle_128((uint32_t)local, (uint32_t)(lane % 8)));
                if (p.out_aligned)
                    *(uint4 *)(to + g * LINE_ELEMENTS) = words;
                else
                    store_elements(to + g * LINE_ELEMENTS, words);
            }
        }
    }

    DEVICE static void store_elements(uint16_t *to, const uint4 &words)
    {
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < CHUNK_ELEMENTS; i++) to[i] = (uint16_t)(word[i / 2] >> i % 2 * 16);
    }
};

template <typename Kernel> DEVICE void mha_forward(const mha_forward_sm80_params &p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ MhaTile tile;
    MhaTile found;
    if (!find_tile(p, (int)blockIdx.x, found)) return;
    if (threadIdx.x == 0) tile = found;
    __syncthreads();
    Kernel kernel(p, memory, tile);
    kernel.run();
}
