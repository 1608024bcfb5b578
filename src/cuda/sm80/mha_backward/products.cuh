/* SPDX-License-Identifier: MIT
 *
 * The five products of the portable dense MHA backward, each a warp's part. Fragments of a step are loaded
 * while the tensor cores process the previous step.
 */
#pragma once

#include "../../device/mma.cuh"
#include "../../device/warpgroup.cuh"
#include "layout.cuh"

namespace mha_backward {

/* The products of a warp. */
template <typename Element, typename Tiles> struct WarpProducts {
    static constexpr int KEY_TILES = Tiles::WARP_KEYS / 16, ROW_TILES = Tiles::WARP_ROWS / 8,
                         ROW_STEPS = Tiles::WARP_ROWS / 16;
    /* A warp has half the columns of dK and dV, 32 of every 64; of dQ it has 32 or 16 of every 64. Of the last
     * 32 of 96 columns it has 16. */
    static constexpr int QK_TILES = Tiles::D_QK / 16, V_TILES = Tiles::D_V / 16;
    static constexpr int DQ_ROW_TILES = Tiles::WARP_ROWS / 16,
                         DQ_PAIRS = 4 / Tiles::KEY_GROUPS, /* pairs of 8-column tiles, per 64 columns */
        DQ_TILES = 2 * DQ_PAIRS * Tiles::D_QK / LINE_ELEMENTS;

    using Scores = float[KEY_TILES][ROW_TILES][4]; /* keys are rows */
    using Words = uint32_t[KEY_TILES][ROW_STEPS][4];
    using KeySums = float[KEY_TILES][QK_TILES][4];
    using ValueSums = float[KEY_TILES][V_TILES][4];
    using QuerySums = float[DQ_ROW_TILES][DQ_TILES][4];

    /* With KEEPS_V, the last 64 columns of V of the warp's keys, as A: P and dS take their place. */
    static constexpr int KEPT_STEPS = Tiles::KEEPS_V ? LINE_ELEMENTS / 16 : 0;
    struct KeptValues {
        uint32_t a[KEPT_STEPS ? KEPT_STEPS : 1][KEY_TILES][4];
    };

    const uint32_t smem;

    DEVICE explicit WarpProducts(uint32_t shared) : smem(shared) {}

    /* Warp and lane indices. They are recomputed in every step, so that neither they nor values derived from
     * them occupy registers across tiles. */
    struct Lane {
        int lane, key_group, row_group;

        DEVICE Lane()
        {
            const int thread = (int)fresh_thread();
            lane = thread % 32, key_group = thread / 32 / Tiles::ROW_GROUPS,
            row_group = thread / 32 % Tiles::ROW_GROUPS;
        }
        /* The lane's offset within a tile for ldmatrix (fragment.h). */
        DEVICE uint32_t tile() const
        {
            return swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
        }
        DEVICE uint32_t pair() const
        {
            return swizzle_128((uint32_t)ldmatrix_pair_row(lane), (uint32_t)ldmatrix_pair_chunk(lane));
        }
        /* The same within P or dS. */
        DEVICE uint32_t p_tile() const
        {
            return Tiles::p_chunk((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
        }
        DEVICE uint32_t p_pair() const
        {
            return Tiles::p_chunk((uint32_t)ldmatrix_pair_row(lane), (uint32_t)ldmatrix_pair_chunk(lane));
        }
        /* What an address in a whole line, of which the second of two warps has the second half, is XORed with
         * in half a line. */
        static DEVICE uint32_t half_line(int second) { return (uint32_t)(second * (4 ^ 2) * CHUNK_BYTES); }
    };

    DEVICE uint32_t q() const { return smem + Tiles::Q_AT; }
    DEVICE uint32_t dout() const { return smem + Tiles::DOUT_AT; }
    DEVICE uint32_t stats() const { return smem + Tiles::STATS_AT; }

    /* Returns the lane's address for ldmatrix of the warp's keys, in the first tile of K or V. */
    DEVICE uint32_t keys_of_warp(const Lane &l, uint32_t keys) const
    {
        return keys + (uint32_t)(l.key_group * Tiles::WARP_KEYS) * LINE_BYTES + l.tile();
    }

    DEVICE void keep_values(KeptValues &kept) const
    {
        const Lane l;
        const uint32_t keys_at = keys_of_warp(l, smem + Tiles::P_AT);
#pragma unroll
        for (int step = 0; step < KEPT_STEPS; step++)
#pragma unroll
            for (int m = 0; m < KEY_TILES; m++)
                ldmatrix_x4(kept.a[step][m],
                            (keys_at ^ (uint32_t)(step * 2 * CHUNK_BYTES)) + (uint32_t)(m * 16) * LINE_BYTES);
    }

    /* Computes K Qᵀ, or V dOᵀ, for the warp's keys and the rows of its group, of the tiles at `keys` and
     * `rows`. The last KEPT steps have their keys in `kept`. */
    template <int COLUMNS, int KEPT>
    DEVICE void scores(Scores &s, uint32_t keys, uint32_t rows, const KeptValues &kept) const
    {
        const Lane l;
        constexpr int STEPS = COLUMNS / 16;
        const uint32_t keys_at = keys_of_warp(l, keys),
                       rows_at = rows + (uint32_t)(l.row_group * Tiles::WARP_ROWS) * LINE_BYTES + l.pair();
        uint32_t a[2][KEY_TILES][4], b[2][ROW_TILES / 2][4];
#pragma unroll
        for (int i = 0; i < KEY_TILES * ROW_TILES * 4; i++)
            s[i / 4 / ROW_TILES][i / 4 % ROW_TILES][i % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step <= STEPS; step++) {
            const uint32_t in_line = (uint32_t)(step % 4 * 2 * CHUNK_BYTES);
            if (step < STEPS) {
#pragma unroll
                for (int m = 0; m < KEY_TILES && step < STEPS - KEPT; m++)
                    ldmatrix_x4(a[step % 2][m], (keys_at ^ in_line) + (uint32_t)(step / 4) * Tiles::KEY_TILE +
                                                    (uint32_t)(m * 16) * LINE_BYTES);
#pragma unroll
                for (int n = 0; n < ROW_TILES / 2; n++)
                    ldmatrix_x4(b[step % 2][n], (rows_at ^ in_line) + (uint32_t)(step / 4) * Tiles::ROW_TILE +
                                                    (uint32_t)(n * 16) * LINE_BYTES);
            }
            if (step == 0) continue;
            const int now = (step - 1) % 2, of_kept = step - 1 - (STEPS - KEPT);
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
                for (int m = 0; m < KEY_TILES; m++)
                    mma_16816<Element>(s[m][n],
                                       of_kept < 0 ? a[now][m] : kept.a[of_kept < 0 ? 0 : of_kept][m],
                                       b[now][n / 2][n % 2 * 2], b[now][n / 2][n % 2 * 2 + 1]);
        }
    }

    /* Adds Pᵀ dO, or dSᵀ Q, to the warp's half of the columns, over the rows of the warp's group or, if
     * `other`, of the other group; `w` is Pᵀ or dSᵀ of these rows. */
    template <int TILES>
    DEVICE void add_rows(float (&sums)[KEY_TILES][TILES][4], const Words &w, uint32_t rows, bool other) const
    {
        const Lane l;
        constexpr int PAIRS = TILES / 2, STEPS = ROW_STEPS * PAIRS;
        const uint32_t rows_at =
            (rows + (uint32_t)((l.row_group ^ (int)other) * Tiles::WARP_ROWS) * LINE_BYTES + l.tile()) ^
            (uint32_t)(l.row_group * 4 * CHUNK_BYTES);
        uint32_t b[2][4];
#pragma unroll
        for (int step = 0; step <= STEPS; step++) {
            if (step < STEPS) {
                const int k = step / PAIRS, pair = step % PAIRS;
                const uint32_t at = pair == PAIRS / 2 * 2 ? rows_at ^ Lane::half_line(l.row_group) : rows_at;
                ldmatrix_x4_trans(b[step % 2], (at ^ (uint32_t)(pair % 2 * 2 * CHUNK_BYTES)) +
                                                   (uint32_t)(pair / 2) * Tiles::ROW_TILE +
                                                   (uint32_t)(k * 16) * LINE_BYTES);
            }
            if (step == 0) continue;
            const int k = (step - 1) / PAIRS, pair = (step - 1) % PAIRS, now = (step - 1) % 2;
#pragma unroll
            for (int m = 0; m < KEY_TILES; m++) {
                mma_16816<Element>(sums[m][2 * pair], w[m][k], b[now][0], b[now][1]);
                mma_16816<Element>(sums[m][2 * pair + 1], w[m][k], b[now][2], b[now][3]);
            }
        }
    }

    /* Computes dS K for the rows of the warp's group, over all keys. */
    DEVICE void queries(QuerySums &dq) const
    {
        const Lane l;
        constexpr int PAIRS = DQ_TILES / 2, STEPS = Tiles::KEYS / 16 * PAIRS;
        const uint32_t ds_at = (smem + Tiles::DS_AT + l.p_pair()) ^
                               (uint32_t)(l.row_group * Tiles::WARP_ROWS / CHUNK_ELEMENTS * CHUNK_BYTES),
                       k_at = (smem + l.tile()) ^ (uint32_t)(l.key_group * 2 * DQ_PAIRS * CHUNK_BYTES);
        uint32_t a[2][DQ_ROW_TILES][4], b[2][4];
#pragma unroll
        for (int i = 0; i < DQ_ROW_TILES * DQ_TILES * 4; i++)
            dq[i / 4 / DQ_TILES][i / 4 % DQ_TILES][i % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step <= STEPS; step++) {
            if (step < STEPS) {
                const int k = step / PAIRS, pair = step % PAIRS;
                if (pair == 0)
#pragma unroll
                    for (int m = 0; m < DQ_ROW_TILES; m++)
                        ldmatrix_x4_trans(a[k % 2][m], (ds_at ^ (uint32_t)(m * 2 * CHUNK_BYTES)) +
                                                           (uint32_t)(k * 16) * Tiles::P_LINE);
                const bool half_line = pair / DQ_PAIRS == Tiles::D_QK / LINE_ELEMENTS;
                const uint32_t at = half_line ? k_at ^ Lane::half_line(l.key_group) : k_at;
                ldmatrix_x4_trans(b[step % 2], (at ^ (uint32_t)(pair % DQ_PAIRS * 2 * CHUNK_BYTES)) +
                                                   (uint32_t)(pair / DQ_PAIRS) * Tiles::KEY_TILE +
                                                   (uint32_t)(k * 16) * LINE_BYTES);
            }
            if (step == 0) continue;
            const int k = (step - 1) / PAIRS, pair = (step - 1) % PAIRS, now = (step - 1) % 2;
#pragma unroll
            for (int m = 0; m < DQ_ROW_TILES; m++) {
                mma_16816<Element>(dq[m][2 * pair], a[k % 2][m], b[now][0], b[now][1]);
                mma_16816<Element>(dq[m][2 * pair + 1], a[k % 2][m], b[now][2], b[now][3]);
            }
        }
    }

    /* Returns the address of the lane's first word of Pᵀ or dSᵀ. */
    DEVICE uint32_t words_at(uint32_t matrix) const
    {
        const Lane l;
        return matrix + (uint32_t)(l.key_group * Tiles::WARP_KEYS) * Tiles::P_LINE +
               Tiles::p_chunk((uint32_t)l.lane / 4,
                              (uint32_t)(l.row_group * Tiles::WARP_ROWS / CHUNK_ELEMENTS)) +
               (uint32_t)l.lane % 4 * 4;
    }

    /* Returns the address of word r of fragment (m, k). */
    static DEVICE uint32_t word_at(uint32_t first, int m, int k, int r)
    {
        return (first ^ (uint32_t)((2 * k + r / 2) * CHUNK_BYTES)) +
               (uint32_t)(m * 16 + r % 2 * 8) * Tiles::P_LINE;
    }

    /* Stores the warp's part of Pᵀ or dSᵀ, one line per key. */
    DEVICE void store_words(const Words &w, uint32_t to) const
    {
        const uint32_t at = words_at(to);
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int k = 0; k < ROW_STEPS; k++)
#pragma unroll
                for (int r = 0; r < 4; r++) store_shared_4(word_at(at, m, k, r), w[m][k][r]);
    }

    /* Loads Pᵀ or dSᵀ of the warp's keys; if `other`, the part that the other warp of these keys has
     * stored. */
    DEVICE void load_words(Words &w, uint32_t from, bool other) const
    {
        const Lane l;
        const uint32_t at =
            (from + (uint32_t)(l.key_group * Tiles::WARP_KEYS) * Tiles::P_LINE + l.p_tile()) ^
            (uint32_t)((l.row_group ^ (int)other) * Tiles::WARP_ROWS / CHUNK_ELEMENTS * CHUNK_BYTES);
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int k = 0; k < ROW_STEPS; k++)
                ldmatrix_x4(w[m][k],
                            (at ^ (uint32_t)(2 * k * CHUNK_BYTES)) + (uint32_t)(m * 16) * Tiles::P_LINE);
    }

    /* Returns lse (which = 0) or delta (1) of the rows that a lane has in step k: two of each group of
     * eight. */
    DEVICE float4 load_stats(int which, int k) const
    {
        const Lane l;
        const uint4 four = load_shared_16(
            stats() +
            (uint32_t)((which * Tiles::ROWS + l.row_group * Tiles::WARP_ROWS + 16 * k + l.lane % 4 * 4) * 4));
        return make_float4(__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                           __uint_as_float(four.w));
    }
};

} // namespace mha_backward
