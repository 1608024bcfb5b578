/* SPDX-License-Identifier: MIT
 *
 * Finished rows: their lse or part_end and the factor of their values, and one side's values on their way to
 * `out`.
 */
#pragma once

#include "../../device/fragment.h"
#include "../../device/latent.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "../../device/task.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"

namespace latent {

/* Stores the lse of a row that goes to `out` (`direct`), or the part_end of one that goes to a part, if
 * `stores`. Returns the factor of the row's values: the sink factor if the row goes to `out`, 1 if it goes to
 * a part, 0 past the last row. */
DEVICE float finish_row(const struct dense_decode_params &p, const Task &task, bool direct,
                        const part_end &end, int tile_row, bool stores)
{
    const int row = task.first_row + tile_row;
    if (row >= p.rows) return 0.0f;
    if (!direct) {
        if (stores) p.split.part_ends[part_row(p, task, row)] = end;
        return 1.0f;
    }
    const RowCoord coord = row_coord(p, row, task.kv_head);
    const float lse = score_lse(end.max, end.sum);
    if (stores) store_lse(p.output, task.split.request, coord, lse);
    return result_sink_factor(p.output.rules, coord.head, lse);
}

/* Stores the result of a split without keys; called by a warpgroup. `most_rows`: rows of a tile. */
DEVICE void store_empty(const struct dense_decode_params &p, const Task &task, int most_rows)
{
    const int thread = (int)(fresh_thread() % WARPGROUP_THREADS);
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
    const int rows = min(most_rows, p.rows - task.first_row);
    const bool direct = task.split.part == DIRECT;
    if (thread < rows) finish_row(p, task, direct, {-INFINITY, 0.0f}, thread, true);
    if (!direct) return;
#pragma unroll 1
    for (int i = thread; i < rows * CHUNKS; i += WARPGROUP_THREADS) {
        const RowCoord coord = row_coord(p, task.first_row + i / CHUNKS, task.kv_head);
        uint16_t *to = p.output.out + out_offset(p.output, task.split.request, coord);
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}

/* Returns the thread's four elements of a row in 16 columns, multiplied by `factor`; e is the first of
 * them. */
DEVICE float4 scaled_values(const float (&o)[64], int e, float factor)
{
    return make_float4(o[e] * factor, o[e + 1] * factor, o[e + 4] * factor, o[e + 5] * factor);
}

/* Epilogue that multiplies an element of O by its row's factor. */
struct Scaled {
    const float (&factor)[2]; /* of the thread's two rows */

    /* Returns the values of row i of the thread's two in 16 columns (part_position), from element e on.
     * FIRST: first element of the group of 64 columns. The last argument is the group's first column in
     * the side's. */
    template <int FIRST> DEVICE float4 values(const float (&o)[64], int e, int i, int) const
    {
        return scaled_values(o, e, factor[i]);
    }
};

/* Stores 64 columns of the warp's 16 rows to 16 lines of shared memory. */
template <typename Element, int FIRST, typename Finish>
DEVICE void stage_group(const float (&o)[64], const Finish &finish, int column, uint32_t lines, uint32_t lane)
{
    const uint32_t line = lines + ldmatrix_tile_row((int)lane) * LINE_BYTES;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 four = finish.template values<FIRST>(o, FIRST + 8 * k + 2 * i, i, column);
            words[i] = Element::pack(four.x, four.y), words[i + 2] = Element::pack(four.z, four.w);
        }
        store_matrices(line + (((2 * (uint32_t)k + lane / 16) ^ (lane % 8)) * CHUNK_BYTES), words);
    }
}

} // namespace latent
