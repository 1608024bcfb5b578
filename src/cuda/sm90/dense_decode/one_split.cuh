/* SPDX-License-Identifier: MIT
 *
 * Stores one part of a request whose parts are joined by the CTAs that made them (shares.cuh): rows of fp16
 * (half_rows.cuh).
 */
#pragma once

#include "results.cuh"
#include "shares.cuh"

/* Stores half of the side's columns of the thread's first or second row to a slot, and returns the two
 * powers of two by which they were scaled. Chunk h of 64 columns takes the pairs that the lane has of
 * every eight columns, from column 32 h on. */
DEVICE float2 store_halves(uint16_t *to, const float (&o)[64], bool second, float factor, bool stores)
{
    float down[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float x[16];
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
        down[c] = store_half_tile(to + HALF_ROW_TILE * c, x, factor, stores);
    }
    return make_float2(down[0], down[1]);
}

/* Stores the warp's rows and columns to the split's slot. `column`: the side's first. */
DEVICE void store_halves(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                         const float (&right)[64], const float (&factor)[2], int tile_row, int column)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
    /* Not unrolled: the code executes once, so one copy serves both rows. */
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        const bool stores = row < p.rows;
        const float by = i ? factor[1] : factor[0];
        const int64_t at = slot_row(p, task, row);
        uint16_t *const to = half_row(p.split, at) + column + 8 * (lane % 4);
        const float2 low = store_halves(to, left, i == 1, by, stores),
                     high = store_halves(to + 2 * HALF_ROW_TILE, right, i == 1, by, stores);
        if (stores && lane % 4 == 0)
            *(float4 *)(half_row_scales(p.split, at) + column / HALF_ROW_TILE) =
                make_float4(low.x, low.y, high.x, high.y);
    }
}
