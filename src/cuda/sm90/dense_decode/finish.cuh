/* SPDX-License-Identifier: MIT
 *
 * Finishes a row of a split apart from its values: stores its lse or part_end, and returns the factor of its
 * values.
 */
#pragma once

#include "../../device/fragment.h"
#include "../../device/latent.cuh"
#include "../../device/result.cuh"
#include "../../device/task.cuh"
#include "../../device/warpgroup.cuh"

/* Stores the lse of a row that goes to `out` (`direct`), or the part_end of one that goes to a slot, if
 * `stores`. Returns the factor of the row's values: the sink factor if the row goes to `out`, 1 if it goes to
 * a slot, 0 past the last row. */
DEVICE float finish_row(const struct dense_decode_params &p, const Task &task, bool direct,
                        const part_end &end, int tile_row, bool stores)
{
    const int row = task.first_row + tile_row;
    if (row >= p.rows) return 0.0f;
    if (!direct) {
        if (stores) p.split.slot_end[slot_row(p, task, row)] = end;
        return 1.0f;
    }
    const RowPlace place = row_place(p, row, task.kv_head);
    const float lse = score_lse(end.max, end.sum);
    if (stores) store_lse(p.output, task.split.request, place, lse);
    return result_sink_factor(p.output.rules, place.head, lse);
}

/* Stores the result of a split without keys; called by a warpgroup. `most_rows`: rows of a tile. */
DEVICE void store_empty(const struct dense_decode_params &p, const Task &task, int most_rows)
{
    const int thread = (int)(fresh_thread() % WARPGROUP_THREADS);
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
    const int rows = min(most_rows, p.rows - task.first_row);
    const bool direct = task.split.slot == DIRECT;
    if (thread < rows) finish_row(p, task, direct, {-INFINITY, 0.0f}, thread, true);
    if (!direct) return;
#pragma unroll 1
    for (int i = thread; i < rows * CHUNKS; i += WARPGROUP_THREADS) {
        const RowPlace place = row_place(p, task.first_row + i / CHUNKS, task.kv_head);
        uint16_t *to = p.output.out + out_offset(p.output, task.split.request, place);
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}
