/* SPDX-License-Identifier: MIT
 *
 * Epilogue: divides rows by the sums of their weights, and writes them and their lse.
 */
#pragma once

#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace mha_forward {

/* Writes the warp's rows of a split to its part, as fp32, with an end each (device/part.cuh): fragments as they are,
 * pairs of columns. */
template <typename Layout>
DEVICE void MhaForward<Layout>::store_part(int part_row, const RowState &state, const Sums &o) const
{
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int lane = lane_of_warp(), row = first_row() + 16 * m + 8 * half + lane / 4;
            const float sum = quad_sum(state.sum[m][half]),
                        factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
            if (row >= tile.rows) continue;
            float2 *to = (float2 *)(p.part_out + (int64_t)(part_row + row) * D_V) + lane % 4;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
                to[4 * n] = make_float2(o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor);
            if (lane % 4 == 0) p.part_ends[part_row + row] = {state.reference[m][half], sum};
        }
}

/* Epilogue: writes rows to `out` through the lines of Q, which this warp alone has read, or those of a split to its
 * part. */
template <typename Layout> DEVICE void MhaForward<Layout>::epilogue(const RowState &state, Sums &o) const
{
    if constexpr (SPLITS) {
        const int part_row = shared->part_row;
        /* SELDOM: with this code before the rest ptxas spills at 128/128 on 8.x. */
        if (SELDOM(part_row >= 0)) return store_part(part_row, state, o);
    }
    const int lane = lane_of_warp(), first = first_row();
    const uint32_t lines = q_at + (uint32_t)(first * LINE_BYTES);
    const result_params &rules = p.call.output.rules;
    float sum[ROW_TILES][2];
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[m][half] = quad_sum(state.sum[m][half]);
            float factor = sum[m][half] == 0.0f ? 0.0f : reciprocal_approx(sum[m][half]);
            if (SELDOM(rules.attn_sink)) {
                const int row = first + 16 * m + 8 * half + lane / 4;
                factor *= result_sink_factor(rules, coord_of_row(p, tile, row).head,
                                             score_lse(state.reference[m][half], sum[m][half]));
            }
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
                store_shared_4(lines + (uint32_t)(n / 8 * Q_GROUP) +
                                   swizzle_128((uint32_t)(16 * m + 8 * half + lane / 4), (uint32_t)(n % 8)) +
                                   (uint32_t)(lane % 4) * 4,
                               Element::pack(o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor));
        }
    write_lse(state.reference, sum);
    __syncwarp();
    write_lines(lines);
}

/* Writes the lse of each row in one of the four threads that share it. */
template <typename Layout>
DEVICE void MhaForward<Layout>::write_lse(const float (&reference)[ROW_TILES][2],
                                          const float (&sum)[ROW_TILES][2]) const
{
    const int lane = lane_of_warp(), own = lane % 4, row = first_row() + 8 * own + lane / 4;
    float own_reference = reference[0][0], own_sum = sum[0][0];
#pragma unroll
    for (int i = 1; i < 2 * ROW_TILES; i++)
        if (own == i) own_reference = reference[i / 2][i % 2], own_sum = sum[i / 2][i % 2];
    if (own < 2 * ROW_TILES && row < tile.rows)
        store_lse(p.call.output, tile.request, coord_of_row(p, tile, row), score_lse(own_reference, own_sum));
}

/* Writes the warp's rows from shared memory to `out`. */
template <typename Layout> DEVICE void MhaForward<Layout>::write_lines(uint32_t lines) const
{
    const output_params &output = p.call.output;
    const int lane = lane_of_warp(), first = first_row();
#pragma unroll 1
    for (int i = 0; i < WARP_ROWS; i += 4) {
        const int local = i + lane / 8, row = first + local;
        if (row >= tile.rows) continue;
        uint16_t *to = output.out + out_offset(output, tile.request, coord_of_row(p, tile, row)) +
                       lane % 8 * CHUNK_ELEMENTS;
#pragma unroll
        for (int g = 0; g < V_LINES; g++) {
            const uint4 words = load_shared_16(lines + (uint32_t)(g * Q_GROUP) +
                                               swizzle_128((uint32_t)local, (uint32_t)(lane % 8)));
            if (p.out_aligned)
                *(uint4 *)(to + g * LINE_ELEMENTS) = words;
            else
                store_elements(to + g * LINE_ELEMENTS, words);
        }
    }
}

template <typename Layout> DEVICE void MhaForward<Layout>::store_elements(uint16_t *to, const uint4 &words)
{
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS; i++) to[i] = (uint16_t)(word[i / 2] >> i % 2 * 16);
}

} // namespace mha_forward
