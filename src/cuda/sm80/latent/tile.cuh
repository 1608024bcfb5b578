/* SPDX-License-Identifier: MIT
 *
 * The tile of a CTA of a latent-attention kernel: sizes, and the layout in shared memory.
 */
#pragma once

#include "../../device/fragment.h"
#include "../../device/kernel.cuh"
#include "../../device/latent.cuh"
#include "shape.h"

/* Compute capability for which this code is compiled. */
#ifdef __CUDA_ARCH__
static constexpr int CODE = __CUDA_ARCH__ / 10;
#else
static constexpr int CODE = 90; /* the host's pass compiles no kernel */
#endif

template <typename Element_, int ROWS_, int KEYS_, int WARPS_, bool Q_IN_REGISTERS_> struct Tile {
    using Element = Element_;
    static constexpr int ROWS = ROWS_, KEYS = KEYS_, WARPS = WARPS_, THREADS = 32 * WARPS_;
    /* Where a warp's share of O is small, its fragments of Q also stay in registers, which frees shared
     * memory for one more stage. */
    static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;

    /* Scores: warps are divided over row groups of 16, then over keys. With two column splits a pair of warps
     * computes the scores of two row groups together, each over half the columns (a fragment of K serves
     * twice the rows), and the warps exchange their halves. */
    static constexpr int ROW_GROUPS = ROWS / 16, KEY_GROUPS = WARPS / ROW_GROUPS,
                         COLUMN_SPLITS = ROWS == 64 ? 2 : 1;
    static constexpr int WARP_KEYS = KEYS / KEY_GROUPS, KEY_TILES = WARP_KEYS / 8;
    /* P·V: warps are divided over columns. */
    static constexpr int WARP_COLUMNS = D_V / WARPS, COLUMN_PAIRS = WARP_COLUMNS / 16;

    /* Eight threads copy a row or a key. */
    static constexpr int KEYS_AT_ONCE = THREADS / 8, PASSES = KEYS / KEYS_AT_ONCE;

    /* A group is 64 columns of all rows or keys. */
    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = Q_IN_REGISTERS ? 0 : MAX_GROUPS * Q_GROUP,
                              P_BYTES = ROWS * LINE_BYTES, STAGE_BYTES = MAX_GROUPS * KEY_GROUP;

    static_assert(ROWS % 16 == 0 && WARPS % ROW_GROUPS == 0 && WARP_KEYS % 8 == 0 && KEYS <= 64, "");
    static_assert(KEY_TILES == 1 || KEY_TILES % 2 == 0, "");
    static_assert(WARP_COLUMNS % 16 == 0 && KEYS % KEYS_AT_ONCE == 0, "");
};
