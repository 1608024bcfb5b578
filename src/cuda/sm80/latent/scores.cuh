/* SPDX-License-Identifier: MIT
 *
 * S = Q·Kᵀ: a warp computes the scores of 16 rows and its keys, or half the columns of 32 rows.
 */
#pragma once

#include "../../device/mma.cuh"
#include "layout.cuh"

namespace latent {

/* Returns the first column of a step for the first split; the second split has those 32 further on. */
template <typename Tile, typename Call, typename Keys>
DEVICE constexpr int Attend<Tile, Call, Keys>::step_column(int step)
{
    return COLUMN_SPLITS == 1 ? step * STEP_COLUMNS : step / 2 * LINE_ELEMENTS + step % 2 * STEP_COLUMNS;
}

/* Returns the address of a column in lines of 128 bytes per 64 columns: the swizzle changes bits 5 and 6
 * alone. The group is added last, as a constant of the load. */
template <typename Tile, typename Call, typename Keys>
DEVICE uint32_t Attend<Tile, Call, Keys>::column_at(uint32_t line, uint32_t group_bytes, int column)
{
    return (line ^ (uint32_t)(column % LINE_ELEMENTS * 2)) + (uint32_t)(column / LINE_ELEMENTS) * group_bytes;
}

/* Returns this warp's part of a line. */
template <typename Tile, typename Call, typename Keys>
DEVICE uint32_t Attend<Tile, Call, Keys>::split_at(uint32_t line) const
{
    return COLUMN_SPLITS == 1 ? line : line ^ (uint32_t)(warp % 2 * 64);
}

/* Loads 16 columns of 16 rows. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::load_q(uint32_t a[4], int row_group, int column) const
{
    const uint32_t line =
        q_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane)) +
        (uint32_t)(16 * row_group) * LINE_BYTES;
    ldmatrix_x4(a, column_at(split_at(line), Q_GROUP, column));
}

/* Loads a step of this warp's keys: each pair of words of b holds the fragments of k 0-7 and k 8-15 (the
 * next pair is of the next 16 columns, or of the next 8 keys). */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::load_k(uint32_t b[K_LOADS][4], uint32_t stage_at, int column) const
{
    const uint32_t row = KEY_TILES == 1 ? ldmatrix_row_of_8(lane) : ldmatrix_pair_row(lane);
    const uint32_t chunk = KEY_TILES == 1 ? ldmatrix_chunk_of_4(lane) : ldmatrix_pair_chunk(lane);
    const uint32_t line =
        stage_at + (uint32_t)(WARP_KEYS * (warp / ROW_GROUPS)) * LINE_BYTES + swizzle_128(row, chunk);
#pragma unroll
    for (int i = 0; i < K_LOADS; i++)
        ldmatrix_x4(b[i], column_at(split_at(line), KEY_GROUP, column) + (uint32_t)(16 * i) * LINE_BYTES);
}

/* Computes the scores. between(step) is called before the products of each step, for work that overlaps
 * with them. */
template <typename Tile, typename Call, typename Keys>
template <typename Between>
DEVICE void Attend<Tile, Call, Keys>::score(uint32_t stage_at, const QFragments &q, float s[KEY_TILES][4],
                                            Between between)
{
    const int row_group = warp % ROW_GROUPS, first_group = row_group / COLUMN_SPLITS * COLUMN_SPLITS;
    const bool all_groups = call.d_qk() == MAX_GROUPS * LINE_ELEMENTS;
    uint32_t a[BUFFERS][COLUMN_SPLITS][STEP_HALVES][4], b[BUFFERS][K_LOADS][4];
    float sums[COLUMN_SPLITS][KEY_TILES][CHAINS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS + STEPS_AHEAD; step++) {
        if (step < STEPS && (step < LAST_GROUP || all_groups)) {
            const int column = step_column(step);
            if (!Q_IN_REGISTERS)
#pragma unroll
                for (int m = 0; m < COLUMN_SPLITS; m++)
#pragma unroll
                    for (int half = 0; half < STEP_HALVES; half++)
                        load_q(a[step % BUFFERS][m][half], first_group + m, column + 16 * half);
            load_k(b[step % BUFFERS], stage_at, column);
        }
        const int done = step - STEPS_AHEAD;
        if (done < 0) continue;
        if (done == LAST_GROUP && !all_groups) break;
        between(done);
#pragma unroll
        for (int half = 0; half < STEP_HALVES; half++)
#pragma unroll
            for (int m = 0; m < COLUMN_SPLITS; m++)
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++) {
                    const uint32_t *fragment = b[done % BUFFERS][t / 2] + 2 * (KEY_TILES == 1 ? half : t % 2);
                    mma_16816<Element>(sums[m][t][(STEP_HALVES * done + half) % CHAINS],
                                       Q_IN_REGISTERS ? q.a[STEP_HALVES * done + half]
                                                      : a[done % BUFFERS][m][half],
                                       fragment[0], fragment[1]);
                }
    }
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int m = 0; m < COLUMN_SPLITS; m++)
                for (int c = 1; c < CHAINS; c++) sums[m][t][0][e] += sums[m][t][c][e];
    if (COLUMN_SPLITS == 1) {
#pragma unroll
        for (int i = 0; i < 4 * KEY_TILES; i++) s[i / 4][i % 4] = sums[0][i / 4][0][i % 4];
    } else {
        exchange(sums[0], sums[COLUMN_SPLITS - 1], s);
    }
}

/* Returns where this lane's float4 of an exchanged tile is: among the probabilities that the warp `of`
 * writes later. */
template <typename Tile, typename Call, typename Keys>
DEVICE float4 *Attend<Tile, Call, Keys>::exchange_at(int of, int tile) const
{
    const int row = 16 * (of % ROW_GROUPS) + lane % 16,
              chunk = KEY_TILES * (of / ROW_GROUPS) + 2 * tile + lane / 16;
    return (float4 *)(shared + (p_at - smem) + swizzle_128((uint32_t)row, (uint32_t)chunk));
}

/* Adds the halves of the two warps of a pair: each keeps its own row group and gives the other away. They
 * exchange through the space of P, which holds half of the tiles at a time: each warp reads where only it
 * will write probabilities, so that it need not wait for other warps. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::exchange(const float lower[KEY_TILES][CHAINS][4],
                                               const float upper[KEY_TILES][CHAINS][4], float s[KEY_TILES][4])
{
    constexpr int TILES_AT_ONCE = KEY_TILES / 2;
    const bool is_upper = warp % 2;
    const int pair = warp / 2;
#pragma unroll
    for (int round = 0; round < 2; round++) {
        if (round) pair_barrier(pair);
#pragma unroll
        for (int i = 0; i < TILES_AT_ONCE; i++) {
            const int t = round * TILES_AT_ONCE + i;
            float4 values;
            values.x = is_upper ? lower[t][0][0] : upper[t][0][0],
            values.y = is_upper ? lower[t][0][1] : upper[t][0][1];
            values.z = is_upper ? lower[t][0][2] : upper[t][0][2],
            values.w = is_upper ? lower[t][0][3] : upper[t][0][3];
            *exchange_at(warp ^ 1, i) = values;
        }
        pair_barrier(pair);
#pragma unroll
        for (int i = 0; i < TILES_AT_ONCE; i++) {
            const int t = round * TILES_AT_ONCE + i;
            const float4 values = *exchange_at(warp, i);
            s[t][0] = (is_upper ? upper[t][0][0] : lower[t][0][0]) + values.x;
            s[t][1] = (is_upper ? upper[t][0][1] : lower[t][0][1]) + values.y;
            s[t][2] = (is_upper ? upper[t][0][2] : lower[t][0][2]) + values.z;
            s[t][3] = (is_upper ? upper[t][0][3] : lower[t][0][3]) + values.w;
        }
    }
    __syncwarp(); /* all lanes have read */
}

/* Synchronizes two neighbouring warps. Barrier 0 is __syncthreads. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::pair_barrier(int pair)
{
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

} // namespace latent
