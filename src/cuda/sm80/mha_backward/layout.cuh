/* SPDX-License-Identifier: MIT
 *
 * Shared memory of the portable dense MHA backward, per head size.
 *
 *   Q, dO     tiles of 64 columns; a row is a line of 128 bytes (swizzle_128); of 96 columns the second
 *             half of the second line is not read
 *   K, V      the same, a line per key
 *   P, dS     a line per key, of all rows of a tile: 64, or 32 (swizzle_64)
 *   stats     lse and delta of the tile's rows, in the order of stat_at
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/kernel.cuh"
#include "../../device/shared.cuh"
#include "shape.h"

namespace mha_backward {

/* Returns the position of a row's lse or delta. Within 16 rows, the four that a thread has of two groups of
 * eight are adjacent. */
DEVICE int stat_at(int row)
{
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

/* Sums of dQ are stored per 16 rows × 8 columns in the accumulator layout (mma_c_row, mma_c_column). Since
 * Hopper a lane adds its four values with one instruction; before, a warp adds the same value of each lane
 * with one. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
static constexpr bool ADDS_FOUR = false;
#else
static constexpr bool ADDS_FOUR = true;
#endif
static constexpr int SUMS_OF_TILE = 16 * 8;

/* A block of keys of a key head, and the tiles of rows that see it. It is kept in shared memory to save
 * registers. */
struct KeyBlock {
    int request;                 /* 0 where requests are ragged */
    int token, tokens, row_tile; /* of the request: first token, tokens, number of its first tile */
    int key, keys;               /* the first key of the block; keys of the request from it on */
    int shift;                   /* row i of the request sees its key t if t <= i + shift */
    int head, number;            /* the key head; the block's number within the request */
    int first_tile, end_tile;    /* tiles of the request that see the block */
    int start_tile; /* start of the walk; staggered, so that CTAs of a head add to different tiles */
};
static_assert(sizeof(KeyBlock) <= KEY_BLOCK_BYTES, "shared memory has room for it");

template <int D_QK_, int D_V_, int KEYS_, int WARP_KEYS_, int ROWS_, bool EARLY_DV_> struct BackwardTiles {
    static constexpr int D_QK = D_QK_, D_V = D_V_, WARP_KEYS = WARP_KEYS_;
    static constexpr bool EARLY_DV = EARLY_DV_, PARKS_P = KEYS_ == MHA_BACKWARD_WIDE,
                          KEEPS_V = ROWS_ == MHA_BACKWARD_HALF_ROWS;
    static constexpr int ROWS = ROWS_, ROW_GROUPS = MHA_BACKWARD_ROW_GROUPS, WARP_ROWS = ROWS / ROW_GROUPS;
    /* Tiles per tile of the row kernels, by which the workspace is laid out. */
    static constexpr int OF_ROW_TILE = MHA_BACKWARD_ROWS / ROWS;
    static constexpr int KEYS = KEYS_, KEY_GROUPS = KEYS / WARP_KEYS,
                         THREADS = MHA_BACKWARD_THREADS(KEYS, WARP_KEYS);
    /* Bytes of 64 columns of all rows; of all keys. */
    static constexpr uint32_t ROW_TILE = ROWS * LINE_BYTES, KEY_TILE = KEYS * LINE_BYTES;
    static constexpr int QK_LINES = MHA_BACKWARD_LINES(D_QK), V_LINES = MHA_BACKWARD_LINES(D_V);
    static constexpr uint32_t P_LINE = 2 * ROWS, P_BYTES = KEYS * P_LINE;
    static constexpr uint32_t V_AT = KEY_TILE * QK_LINES, Q_AT = V_AT + KEY_TILE * V_LINES,
                              DOUT_AT = Q_AT + ROW_TILE * QK_LINES, ROWS_END = DOUT_AT + ROW_TILE * V_LINES,
                              P_AT = KEEPS_V ? Q_AT - KEY_TILE : ROWS_END, DS_AT = P_AT + P_BYTES,
                              STATS_AT = KEEPS_V ? ROWS_END : DS_AT + P_BYTES,
                              STATS_BYTES = MHA_BACKWARD_STATS * ROWS * 4, BLOCK_AT = STATS_AT + STATS_BYTES,
                              BYTES = BLOCK_AT + KEY_BLOCK_BYTES;
    static_assert(BYTES == MHA_BACKWARD_BYTES(D_QK, D_V, KEYS, ROWS), "the host gives as much");
    static_assert(!KEEPS_V || 2 * P_BYTES == KEY_TILE, "P and dS fill the place of 64 columns of V");
    static_assert(KEY_GROUPS == 2 || KEY_GROUPS == 4, "warps share dQ's columns");
    static_assert(D_QK % LINE_ELEMENTS == 0 || (D_QK % LINE_ELEMENTS == 32 && KEY_GROUPS == 2),
                  "two warps share half a line, 16 columns each");
    static_assert(D_V % LINE_ELEMENTS == 0, "");

    /* Returns the offset of a chunk of a line of P or dS. */
    static DEVICE uint32_t p_chunk(uint32_t key, uint32_t chunk)
    {
        return ROWS == LINE_ELEMENTS ? swizzle_128(key, chunk) : swizzle_64(key, chunk);
    }
};

} // namespace mha_backward
