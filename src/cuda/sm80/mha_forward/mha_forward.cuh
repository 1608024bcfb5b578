/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on any NVIDIA GPU since Ampere, as in FlashAttention-2 (docs/kernels/mha.md has the
 * measurements).
 *
 * A CTA takes a tile of 128 rows of one head (a row is one query token of one query head) through the keys
 * that they see, KEYS at a time. A warp owns 16 · ROW_TILES rows of the tile: their scores, their weights and
 * their share of O stay in its registers, and warps exchange no values. The scores S = Q Kᵀ are in the
 * registers in which the product with V needs P: two C of m16n8k16 side by side are one A (fragment.h), so
 * that P never touches shared memory.
 *
 *      memory ──cp.async──▶ ring of key blocks ────ldmatrix──────▶ S = Q·Kᵀ ◀──ldmatrix── Q (shared)
 *                                                                    │ mask, reference, exp2
 *                                                                    ▼
 *             ──cp.async──▶ ring of value blocks ──ldmatrix.trans─▶ O += P·V        (S, P and O in registers)
 *
 * Timeline of a block of keys (| = barrier of the CTA):
 *
 *      wait for its copies | copy the next block; S; P; are weights large? O += P·V
 *
 * Between S and O += P·V a warp has no products in flight; the warp of the other CTA on its scheduler has.
 * Therefore two CTAs share an SM, each with half of the registers: at 128/128, 128 of 255 registers hold O
 * and 80 hold S.
 *
 * A warp has 32 rows because of the bandwidth of shared memory. A fragment of K or V serves ROW_TILES
 * products: with one row tile an m16n8k16 takes 256 bytes, which are 2 clocks, where mma.sync could take one
 * every 1.6 clocks; with two it takes 128. The fragments of Q are read once per block of keys, so that more
 * keys per block cost less.
 *
 * Weights are relative to a reference: the largest score of the first block in which the row sees a key. The
 * maximum of later blocks is not computed. If a thread's weights of a row sum up to more than 2^12, the row's
 * reference is raised by their log2, O is rescaled, and the warp recomputes the scores and the weights of the
 * block. 16 bits hold large weights as precisely as small ones, and the recomputation is rare. A row's bits
 * depend on the row alone: recomputation for another row gives the same bits.
 *
 * Work that is done once per tile is compact code, in loops that are not unrolled: code that runs once takes
 * several clocks per instruction.
 *
 * Shared memory, in bytes, in lines of 128 bytes (64 columns of a row), swizzled, so that ldmatrix has no
 * bank conflicts:
 *      Q, later the results  ROWS × 2 · D_QK | K  STAGES × KEYS × 2 · D_QK | V  STAGES × KEYS × 2 · D_V | 128
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/mma.cuh"
#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/shared.cuh"
#include "../../device/warpgroup.cuh"
#include "shape.h"
#include "tiles.cuh"

/* Returns the keys per block: those of the shape, but fewer on Blackwell, where ptxas has no registers for so
 * many beside 32 rows. */
template <int ROW_TILES> DEVICE constexpr int keys_of_block(int keys)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    return ROW_TILES == 1 ? keys : (keys / 2 + 15) / 16 * 16;
#else
    return keys;
#endif
}

template <typename Element_, int D_QK_, int D_V_, int ROW_TILES_, int WARPS_, int KEYS_, bool Q_IN_REGISTERS_>
struct MhaForward {
    using Element = Element_;
    static constexpr int D_QK = D_QK_, D_V = D_V_, ROW_TILES = ROW_TILES_, WARPS = WARPS_,
                         STAGES = MHA_SM80_STAGES, KEYS = keys_of_block<ROW_TILES_>(KEYS_);
    static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;
    static constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS;
    static constexpr int STEPS = D_QK / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = D_V / 8;
    static constexpr int ROWS_OF_PASS = THREADS / 8; /* eight threads copy a line */

    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = D_QK / LINE_ELEMENTS * Q_GROUP,
                              K_BYTES = D_QK / LINE_ELEMENTS * KEY_GROUP,
                              V_BYTES = D_V / LINE_ELEMENTS * KEY_GROUP;
    static_assert(ROWS == MHA_SM80_ROWS && D_V <= D_QK, "");
    static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) + MHA_SM80_TILE_BYTES <=
                      MHA_SM80_BYTES(D_QK, D_V, KEYS_),
                  "the host knows how much it is");
    static_assert(ROWS % ROWS_OF_PASS == 0 && KEYS % ROWS_OF_PASS == 0 && KEYS % 16 == 0, "");

    using Scores = float[ROW_TILES][KEY_TILES][4];
    using Weights = uint32_t[ROW_TILES][KEYS / 16][4]; /* as A of P·V */
    using Sums = float[ROW_TILES][COLUMN_TILES][4];

    struct QFragments {
        uint32_t a[Q_IN_REGISTERS ? STEPS : 1][ROW_TILES][4];
    };

    /* Softmax state of the rows 16 m + 8 half + lane / 4 of this warp, in base 2, of scaled scores. */
    struct State {
        float reference[ROW_TILES][2];
        float sum[ROW_TILES][2]; /* of this thread's weights */
        bool careful;            /* some row's reference is extreme */
    };

    using RowSums = float[ROW_TILES][2]; /* of this thread's weights of a block */

    /* Keys visible to a warp's rows. */
    struct Sight {
        int keys;   /* visible to at least one row; 0 or less: none */
        int by_all; /* visible to all rows */
    };

    /* The tile, and the keys visible to each warp's rows; in shared memory to save registers. */
    struct Known {
        MhaTile tile;
        Sight sights[WARPS];
    };
    static_assert(sizeof(Known) <= MHA_SM80_TILE_BYTES, "");

    const mha_forward_sm80_params &p;
    Known *known;        /* in shared memory */
    const MhaTile &tile; /* in shared memory */
    uint32_t q_at, k_at, v_at;
    uint32_t lane_at; /* offset in 16 lines of the chunk that this lane addresses for ldmatrix */

    DEVICE MhaForward(const mha_forward_sm80_params &params, unsigned char *memory)
        : p(params), known((Known *)(memory + Q_BYTES + STAGES * (K_BYTES + V_BYTES))), tile(known->tile)
    {
        const uint32_t lane = threadIdx.x % 32;
        q_at = shared_address(memory), k_at = q_at + Q_BYTES, v_at = k_at + STAGES * K_BYTES;
        lane_at =
            swizzle_128((uint32_t)ldmatrix_tile_row((int)lane), (uint32_t)ldmatrix_tile_chunk((int)lane));
    }

    /* Both are recomputed at each use, which saves registers. */
    DEVICE static int lane_of_warp() { return (int)(fresh_thread() % 32); }
    DEVICE static int first_row() { return (int)(fresh_thread() / 32) * WARP_ROWS; }

    /* ---- Copies -------------------------------------------------------------------------------- */

    DEVICE static uint32_t place_of_thread() { return swizzle_128(threadIdx.x / 8, threadIdx.x % 8); }

    /* Copies the block from first_key on, of D columns. Rows past the request's last key become 0, because 0
     * × NaN is NaN. */
    template <int D>
    DEVICE void copy_block(uint32_t to, const uint16_t *from, int64_t stride, unsigned first_key) const
    {
        const int row = (int)threadIdx.x / 8, left = (int)((unsigned)tile.keys - first_key);
        to += place_of_thread();
        from += (int64_t)(first_key + row) * stride + threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
        for (int first = 0; first < KEYS; first += ROWS_OF_PASS) {
#pragma unroll
            for (int g = 0; g < D / LINE_ELEMENTS; g++)
                cp_async_16(to + (uint32_t)(g * KEY_GROUP + first * LINE_BYTES), from + g * LINE_ELEMENTS,
                            row + first < left);
            from += ROWS_OF_PASS * stride;
        }
    }

    DEVICE void ask_for_block(unsigned first_key, int stage) const
    {
        copy_block<D_QK>(k_at + (uint32_t)stage * K_BYTES, tile.k, p.call.k_stride[1], first_key);
        copy_block<D_V>(v_at + (uint32_t)stage * V_BYTES, tile.v, p.call.v_stride[1], first_key);
        cp_async_commit();
    }

    DEVICE void ask_for_queries() const
    {
        const mha_forward_params &call = p.call;
        const uint32_t to = q_at + place_of_thread();
#pragma unroll 1
        for (int first = 0; first < ROWS; first += ROWS_OF_PASS) {
            const int row = (int)threadIdx.x / 8 + first;
            const RowPlace place = place_of_row(p, tile, row);
            const uint16_t *from = call.q + tile.request * call.q_stride[0] + place.token * call.q_stride[1] +
                                   place.head * call.q_stride[2] + threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
            for (int g = 0; g < D_QK / LINE_ELEMENTS; g++)
                cp_async_16(to + (uint32_t)(g * Q_GROUP + first * LINE_BYTES), from + g * LINE_ELEMENTS,
                            row < tile.rows);
        }
    }

    /* ---- The two products ---------------------------------------------------------------------- */

    /* Returns the offset of this lane's chunk `chunk` (even) chunks further on: the swizzle is an XOR. */
    DEVICE uint32_t lane_chunk(int chunk) const
    {
        return lane_at ^ (uint32_t)(chunk % 8 * CHUNK_BYTES);
    }

    DEVICE void load_q(uint32_t (&a)[ROW_TILES][4], int step) const
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            ldmatrix_x4(a[m], lane_chunk(2 * step) + q_at + threadIdx.x / 32 * (WARP_ROWS * LINE_BYTES) +
                                  (uint32_t)(step / 4 * Q_GROUP + 16 * m * LINE_BYTES));
    }

    /* s = Q Kᵀ */
    DEVICE void score(int stage, const QFragments &q, Scores &s) const
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

    /* Sets the scores of keys that a row does not see to -inf; the block begins at first_key. */
    DEVICE void mask(Scores &s, int first_key) const
    {
        const int lane = lane_of_warp(), row = first_row() + lane / 4;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int bound = keys_seen(p, tile, row + 16 * m + 8 * half) - first_key - 2 * (lane % 4);
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (8 * t + e >= bound) s[m][t][2 * half + e] = -INFINITY;
            }
    }

    /* Multiplies the sums of a row by `factor`. */
    DEVICE static void rescale(State &state, Sums &o, int m, int half, float factor)
    {
        state.sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) o[m][n][2 * half] *= factor, o[m][n][2 * half + 1] *= factor;
    }

    DEVICE static void find_careful(State &state)
    {
        bool careful = false;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            careful |= is_extreme(state.reference[m][0]) || is_extreme(state.reference[m][1]);
        state.careful = __any_sync(~0u, careful);
    }

    /* Raises extreme references to the largest scores. */
    DEVICE void follow_scores(const Scores &s, State &state, Sums &o) const
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = -INFINITY;
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
                    most = fmaxf(most, fmaxf(s[m][t][2 * half], s[m][t][2 * half + 1]));
                const float highest = __fmul_rn(quad_max(most), p.call.scale_log2),
                            before = state.reference[m][half];
                if (!is_extreme(before) || !(highest > before)) continue;
                state.reference[m][half] = highest;
                if (before > LEAST_REFERENCE) rescale(state, o, m, half, exp2_approx(before - highest));
            }
        find_careful(state);
    }

    /* Raises references relative to which weights are large, by the log2 of the weights. Beside infinite
     * weights all earlier sums are negligible: such a row starts over. */
    DEVICE static void follow_weights(const RowSums &sum, State &state, Sums &o)
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float most = quad_max(sum[m][half]), before = state.reference[m][half];
                if (!(most > MOST_WEIGHT)) continue;
                const bool begins = most == INFINITY;
                const float after = begins ? LEAST_REFERENCE : before + log2_approx(most);
                state.reference[m][half] = after;
                rescale(state, o, m, half, begins ? 0.0f : exp2_approx(before - after));
            }
        find_careful(state);
    }

    DEVICE static bool are_large(const RowSums &sum)
    {
        bool large = false;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) large |= fmaxf(sum[m][0], sum[m][1]) > MOST_WEIGHT;
        return __any_sync(~0u, large);
    }

    /* Computes exponents, with separate rounding in extreme rows and fused in the other rows of the warp. */
    DEVICE void make_exponents(Scores &s, const State &state) const
    {
        const float scale = p.call.scale_log2;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float less = state.reference[m][half];
                const bool extreme = is_extreme(less);
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++)
                        s[m][t][e] =
                            extreme ? __fmul_rn(s[m][t][e], scale) - less : fmaf(s[m][t][e], scale, -less);
            }
    }

    /* Computes the weights of the block; exponents are scores times `scale` minus `less`. */
    DEVICE static void weigh(const Scores &s, float scale, const float (&less)[ROW_TILES][2], RowSums &sum,
                             Weights &w)
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float low = exp2_approx(fmaf(s[m][t][2 * half], scale, -less[m][half])),
                                high = exp2_approx(fmaf(s[m][t][2 * half + 1], scale, -less[m][half]));
                    sum[m][half] += low + high;
                    w[m][t / 2][t % 2 * 2 + half] = Element::pack(low, high);
                }
    }

    /* ---- A tile -------------------------------------------------------------------------------- */

    DEVICE Sight sight_of_warp() const
    {
        const int first = first_row(), last = min(first + WARP_ROWS, tile.rows) - 1;
        return {first <= last ? keys_seen(p, tile, last) : 0, keys_seen(p, tile, first)};
    }

    DEVICE void run()
    {
        Sums o = {};
        State state;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                state.reference[m][half] = LEAST_REFERENCE, state.sum[m][half] = 0.0f;
        state.careful = true;
        const int keys = keys_seen(p, tile, tile.rows - 1); /* visible to some row of the tile */
        if (keys > 0) attend_to_all((unsigned)keys, state, o);
        finish(state, o);
    }

    /* Processes all blocks of keys. Key numbers are unsigned, because the number behind the last block may
     * pass 2^31. */
    DEVICE void attend_to_all(unsigned keys, State &state, Sums &o) const
    {
        static_assert(STAGES == 2, "a block is asked for when the one before it is begun");
        if (threadIdx.x % 32 == 0) known->sights[threadIdx.x / 32] = sight_of_warp();
        __syncwarp();
        ask_for_queries(); /* in the same cp.async group as the first block */
        QFragments q;
        int stage = 0;
#pragma unroll 1
        for (unsigned next = 0;; next += KEYS, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads(); /* all copies have arrived, and all warps are done with the previous block */
            if (next < keys) ask_for_block(next, stage);
            if (Q_IN_REGISTERS && next == KEYS)
#pragma unroll
                for (int step = 0; step < STEPS; step++) load_q(q.a[Q_IN_REGISTERS ? step : 0], step);
            const Sight sight = known->sights[fresh_thread() / 32];
            const int first_key = (int)(next - KEYS);
            if (next && first_key < sight.keys)
                attend(first_key, stage ^ 1, sight.by_all - first_key < KEYS, q, state, o);
            if (next >= keys) break;
        }
    }

    /* Processes the block whose first key is first_key; `masked`: some row does not see all of it. */
    DEVICE void attend(int first_key, int stage, bool masked, const QFragments &q, State &state,
                       Sums &o) const
    {
        Weights w;
        RowSums sum;
#pragma unroll 1
        for (;;) {
            Scores s;
            score(stage, q, s);
            if (masked) mask(s, first_key);
            if (SELDOM(state.careful)) follow_scores(s, state, o);
            if (SELDOM(state.careful)) {
                const float less[ROW_TILES][2] = {};
                make_exponents(s, state);
                weigh(s, 1.0f, less, sum, w);
            } else {
                weigh(s, p.call.scale_log2, state.reference, sum, w);
            }
            if (!SELDOM(are_large(sum))) break;
            follow_weights(sum, state, o);
        }
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) state.sum[m][half] += sum[m][half];
        add_values(stage, w, o);
    }

    /* ---- Results ------------------------------------------------------------------------------- */

    /* Epilogue: writes rows to `out` through the lines of Q, which this warp alone has read. */
    DEVICE void finish(const State &state, Sums &o) const
    {
        const int lane = lane_of_warp(), first = first_row();
        const uint32_t lines = q_at + (uint32_t)(first * LINE_BYTES);
        float sum[ROW_TILES][2];
        __syncwarp();
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                sum[m][half] = quad_sum(state.sum[m][half]);
                const float factor = sum[m][half] == 0.0f ? 0.0f : reciprocal_approx(sum[m][half]);
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++)
                    store_shared_4(
                        lines + (uint32_t)(n / 8 * Q_GROUP) +
                            swizzle_128((uint32_t)(16 * m + 8 * half + lane / 4), (uint32_t)(n % 8)) +
                            (uint32_t)(lane % 4) * 4,
                        Element::pack(o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor));
            }
        write_lse(state.reference, sum);
        __syncwarp();
        write_lines(lines);
    }

    /* Writes the lse of each row in one of the four threads that share it. */
    DEVICE void write_lse(const float (&reference)[ROW_TILES][2], const float (&sum)[ROW_TILES][2]) const
    {
        const int lane = lane_of_warp(), own = lane % 4, row = first_row() + 8 * own + lane / 4;
        float own_reference = reference[0][0], own_sum = sum[0][0];
#pragma unroll
        for (int i = 1; i < 2 * ROW_TILES; i++)
            if (own == i) own_reference = reference[i / 2][i % 2], own_sum = sum[i / 2][i % 2];
        if (own < 2 * ROW_TILES && row < tile.rows)
            store_lse(p.call.output, tile.request, place_of_row(p, tile, row),
                      score_lse(own_reference, own_sum));
    }

    /* Writes the warp's rows from shared memory to `out`. */
    DEVICE void write_lines(uint32_t lines) const
    {
        const output_params &output = p.call.output;
        const int lane = lane_of_warp(), first = first_row();
#pragma unroll 1
        for (int i = 0; i < WARP_ROWS; i += 4) {
            const int local = i + lane / 8, row = first + local;
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
    MhaTile tile;
    if (!find_tile(p, (int)blockIdx.x, tile)) return;
    Kernel kernel(p, memory);
    if (threadIdx.x == 0) kernel.known->tile = tile;
    __syncthreads();
    kernel.run();
}

#define MHA_FORWARD_KERNEL(NAME, ELEMENT, D_QK, D_V, ROW_TILES, WARPS, KEYS, Q_IN_REGISTERS, CTAS)           \
    DEFINE_KERNEL(NAME, mha_forward_sm80_params, (32 * (WARPS), CTAS),                                       \
                  mha_forward<MhaForward<ELEMENT, D_QK, D_V, ROW_TILES, WARPS, KEYS, Q_IN_REGISTERS>>(p))
