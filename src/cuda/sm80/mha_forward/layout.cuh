/* SPDX-License-Identifier: MIT
 *
 * The sizes and the shared memory of portable dense MHA forward, and the state of its threads.
 *
 * Shared memory, in bytes, in lines of 128 bytes (64 columns of a row), swizzled, so that ldmatrix has no
 * bank conflicts; a row of 96 columns has two lines, and the second half of the second is not read:
 *      Q, later the output   ROWS × 2 · D_QK | K  STAGES × KEYS × 2 · D_QK | V  STAGES × KEYS × 2 · D_V | 128
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/shared.cuh"
#include "../../device/warpgroup.cuh"
#include "scheduler.cuh"
#include "shape.h"

namespace mha_forward {

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
struct MhaLayout {
    using Element = Element_;
    static constexpr int D_QK = D_QK_, D_V = D_V_, ROW_TILES = ROW_TILES_, WARPS = WARPS_,
                         STAGES = MHA_SM80_STAGES, KEYS = keys_of_block<ROW_TILES_>(KEYS_);
    static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_,
                          SPLITS = false; /* the keys of some tiles are split */
    static constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS;
    static constexpr int STEPS = D_QK / 16, KEY_TILES = KEYS / 8, COLUMN_TILES = D_V / 8;
    static constexpr int QK_LINES = MHA_SM80_LINES(D_QK), V_LINES = MHA_SM80_LINES(D_V);
    /* Eight threads copy a line. A pass copies a line of ROWS_OF_PASS rows; of a block of 16 or 48 keys, where it
     * has 32 lines, two lines of 16 keys. */
    static constexpr int ROWS_OF_PASS = THREADS / 8, KEYS_OF_PASS = KEYS % ROWS_OF_PASS ? 16 : ROWS_OF_PASS,
                         LINES_OF_PASS = ROWS_OF_PASS / KEYS_OF_PASS;

    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = QK_LINES * Q_GROUP, K_BYTES = QK_LINES * KEY_GROUP,
                              V_BYTES = V_LINES * KEY_GROUP;
    static_assert(ROWS == MHA_SM80_ROWS && D_V <= D_QK && D_V % LINE_ELEMENTS == 0, "");
    static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) + MHA_SM80_TILE_BYTES <=
                      MHA_SM80_BYTES(D_QK, D_V, KEYS_),
                  "the host knows how much it is");
    static_assert(ROWS % ROWS_OF_PASS == 0 && KEYS % KEYS_OF_PASS == 0 && KEYS % 16 == 0, "");
    static_assert(LINES_OF_PASS == 1 || (D_QK % (LINES_OF_PASS * LINE_ELEMENTS) == 0 &&
                                         D_V % (LINES_OF_PASS * LINE_ELEMENTS) == 0),
                  "a pass copies whole lines");
};

template <typename Layout> struct WithSplits : Layout {
    static constexpr bool SPLITS = true;
};

/* The attention of a tile by its CTA. Each function is defined in the file of its role. */
template <typename Layout> struct MhaForward : Layout {
    using Layout::COLUMN_TILES, Layout::D_QK, Layout::D_V, Layout::K_BYTES, Layout::KEY_GROUP,
        Layout::KEY_TILES, Layout::KEYS, Layout::KEYS_OF_PASS, Layout::LINES_OF_PASS, Layout::Q_BYTES,
        Layout::Q_GROUP, Layout::Q_IN_REGISTERS, Layout::QK_LINES, Layout::ROW_TILES, Layout::ROWS,
        Layout::ROWS_OF_PASS, Layout::SPLITS, Layout::STAGES, Layout::STEPS, Layout::V_BYTES, Layout::V_LINES,
        Layout::WARP_ROWS, Layout::WARPS;
    using typename Layout::Element;

    using Scores = float[ROW_TILES][KEY_TILES][4];
    using Weights = uint32_t[ROW_TILES][KEYS / 16][4]; /* as A of P·V */
    using Sums = float[ROW_TILES][COLUMN_TILES][4];

    struct QFragments {
        uint32_t a[Q_IN_REGISTERS ? STEPS : 1][ROW_TILES][4];
    };

    /* Softmax state of the rows 16 m + 8 half + lane / 4 of this warp, in base 2, of scaled scores. */
    struct RowState {
        float reference[ROW_TILES][2];
        float sum[ROW_TILES][2]; /* of this thread's weights */
        bool careful;            /* some row's reference is extreme */
    };

    using RowSums = float[ROW_TILES][2]; /* of this thread's weights of a block */

    /* How many keys are visible to a warp's rows. */
    struct VisibleKeys {
        int to_some; /* to at least one row; 0 or less: none */
        int to_all;
    };

    /* The tile, and the keys visible to each warp's rows; in shared memory to save registers. */
    struct Shared {
        WorkTile tile;
        VisibleKeys visible[WARPS];
        int part_row; /* of a split, the first row of its part; < 0: the tile is not split. Unused without splits. */
    };
    static_assert(sizeof(Shared) <= MHA_SM80_TILE_BYTES, "");

    const mha_forward_sm80_params &p;
    Shared *shared;       /* in shared memory */
    const WorkTile &tile; /* in shared memory */
    uint32_t q_at, k_at, v_at;
    uint32_t lane_at; /* offset in 16 lines of the chunk that this lane addresses for ldmatrix */

    DEVICE MhaForward(const mha_forward_sm80_params &params, unsigned char *memory)
        : p(params), shared((Shared *)(memory + Q_BYTES + STAGES * (K_BYTES + V_BYTES))), tile(shared->tile)
    {
        const uint32_t lane = threadIdx.x % 32;
        q_at = shared_address(memory), k_at = q_at + Q_BYTES, v_at = k_at + STAGES * K_BYTES;
        lane_at =
            swizzle_128((uint32_t)ldmatrix_tile_row((int)lane), (uint32_t)ldmatrix_tile_chunk((int)lane));
    }

    /* Both are recomputed at each use, which saves registers. */
    DEVICE static int lane_of_warp() { return (int)(fresh_thread() % 32); }
    DEVICE static int first_row() { return (int)(fresh_thread() / 32) * WARP_ROWS; }

    /* ---- producer.cuh ---- */

    DEVICE static uint32_t chunk_of_thread();
    template <int D> DEVICE static bool has_chunk(int line);
    template <int D>
    DEVICE void copy_block(uint32_t to, const uint16_t *from, int64_t stride, unsigned first_key) const;
    DEVICE void load_block(unsigned first_key, int stage) const;
    DEVICE void load_queries() const;

    /* ---- softmax.cuh ---- */

    DEVICE void mask(Scores &s, int first_key) const;
    DEVICE static void rescale(RowState &state, Sums &o, int m, int half, float factor);
    DEVICE static void find_careful(RowState &state);
    DEVICE void move_references_to_scores(const Scores &s, RowState &state, Sums &o) const;
    DEVICE static void move_references_by_weights(const RowSums &sum, RowState &state, Sums &o);
    DEVICE static bool needs_rescale(const RowSums &sum);
    DEVICE void make_exponents(Scores &s, const RowState &state) const;
    DEVICE static void softmax_block(const Scores &s, float scale, const float (&reference)[ROW_TILES][2],
                                     RowSums &sum, Weights &w);

    /* ---- epilogue.cuh ---- */

    DEVICE void epilogue(const RowState &state, Sums &o) const;
    DEVICE void store_part(int part_row, const RowState &state, const Sums &o) const;
    DEVICE void write_lse(const float (&reference)[ROW_TILES][2], const float (&sum)[ROW_TILES][2]) const;
    DEVICE void write_lines(uint32_t lines) const;
    DEVICE static void store_elements(uint16_t *to, const uint4 &words);

    /* ---- mainloop.cuh ---- */

    DEVICE uint32_t lane_chunk(int chunk) const;
    DEVICE void load_q(uint32_t (&a)[ROW_TILES][4], int step) const;
    DEVICE void score(int stage, const QFragments &q, Scores &s) const;
    DEVICE void add_values(int stage, const Weights &w, Sums &o) const;
    DEVICE VisibleKeys keys_visible_to_warp() const;
    DEVICE void run();
    DEVICE void mainloop(unsigned keys, RowState &state, Sums &o) const;
    DEVICE void process_block(int first_key, int stage, bool masked, const QFragments &q, RowState &state,
                              Sums &o) const;
};

} // namespace mha_forward
