/* SPDX-License-Identifier: MIT
 *
 * Epilogue: divides the rows of a split by their sums, and writes them to `out` or as a part.
 */
#pragma once

#include "../../device/quad.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace latent {

/* Writes the rows to `out`, or as the split's part. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::epilogue(const RowState &state,
                                               float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
{
    const int my_row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
    float *sums = maxima;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = key_group * ROWS + my_row + 8 * i;
        const float sum = quad_sum(state.sum[i]);
        if (lane % 4 == 0) sums[at] = sum;
        if constexpr (Call::WANTS_MAXIMA) {
            const float top = quad_max(state.top[i]);
            if (lane % 4 == 0) tops[at] = top;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = my_row + 8 * i;
        if (key_group || lane % 4 || !call.has_row(row)) continue;
        float sum = 0.0f;
        for (int g = 0; g < KEY_GROUPS; g++) sum += sums[g * ROWS + row];
        const bool empty = state.reference[i] == -INFINITY && sum == 0.0f;
        factors[row] = (empty ? 0.0f : 1.0f / sum) * call.finish_row(row, {state.reference[i], sum});
        if constexpr (Call::WANTS_MAXIMA) {
            float top = -INFINITY;
            for (int g = 0; g < KEY_GROUPS; g++) top = fmaxf(top, tops[g * ROWS + row]);
            call.store_maximum(row, top * LN_2);
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * m + 8 * i + lane / 4;
            if (!call.has_row(row)) continue;
            const float factor = factors[row];
            if (call.direct()) {
                const int64_t at = call.out_at(row) + WARP_COLUMNS * warp + 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
                    store_pair<Element>(call.output(), at + 8 * n, o[m][n][2 * i] * factor,
                                        o[m][n][2 * i + 1] * factor);
            } else {
                float *to = call.part_at(row) + WARP_COLUMNS * warp + part_position_of_lane(lane);
#pragma unroll
                for (int n = 0; n < 2 * COLUMN_PAIRS; n += 2)
                    *(float4 *)(to + 8 * n) =
                        make_float4(o[m][n][2 * i] * factor, o[m][n][2 * i + 1] * factor,
                                    o[m][n + 1][2 * i] * factor, o[m][n + 1][2 * i + 1] * factor);
            }
        }
}

} // namespace latent
