/* SPDX-License-Identifier: MIT
 *
 * What a row of a piece leaves besides its values: lse, and what the sink makes of it.
 */
#pragma once

#include "../../device/fragment.h"
#include "../../device/latent.cuh"
#include "../../device/result.cuh"
#include "../../device/task.cuh"
#include "../../device/warpgroup.cuh"

/* Returns what the sink leaves of the row if it is written to `out` (`direct`), else 1; one lane of four stores lse where
 * `stores`. */
DEVICE float finish_row(const struct dense_decode_params &p, const Task &task, bool direct, float lse,
                        int tile_row, bool stores)
{
    const int row = task.first_row + tile_row;
    if (row >= p.rows) return 0.0f;
    const RowPlace place = row_place(p, row, task.kv_head);
    if (stores && direct) store_lse(p.output, task.piece.request, place, lse);
    if (stores && !direct) p.split.slot_lse[slot_row(p, task, row)] = lse;
    return direct ? result_sink_factor(p.output.rules, place.head, lse) : 1.0f;
}

/* A piece without keys; by a warpgroup. `most_rows`: of a tile. */
DEVICE void store_empty(const struct dense_decode_params &p, const Task &task, int most_rows)
{
    const int thread = (int)(fresh_thread() % WARPGROUP_THREADS);
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
    const int rows = min(most_rows, p.rows - task.first_row);
    const bool direct = task.piece.slot == DIRECT;
    if (thread < rows) finish_row(p, task, direct, -INFINITY, thread, true);
    if (!direct) return;
#pragma unroll 1
    for (int i = thread; i < rows * CHUNKS; i += WARPGROUP_THREADS) {
        const RowPlace place = row_place(p, task.first_row + i / CHUNKS, task.kv_head);
        uint16_t *to = p.output.out + out_offset(p.output, task.piece.request, place);
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}
