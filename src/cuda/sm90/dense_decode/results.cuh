/* SPDX-License-Identifier: MIT
 *
 * The end of a piece: rows to `out`, or to the piece's slot.
 */
#pragma once

#include "softmax.cuh"

/* 128 columns of the thread's two rows, straight from registers: shared memory belongs to the next piece already. */
template <typename Element>
__device__ __forceinline__ void store_columns(const struct dense_decode_params &p, const Task &task,
                                              const float (&o)[64], const float (&factor)[2], int tile_row,
                                              int column)
{
    const int lane = fresh_thread() % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = task.first_row + tile_row + 8 * i;
        const bool some = row < p.rows;
        if (__any_sync(~0u, task.piece.slot == DIRECT)) {
            uint16_t *to =
                p.output.out +
                out_offset(p.output, task.piece.request, row_place(some ? row : 0, task.kv_head, p.group)) +
                column + 8 * lane;
#pragma unroll
            for (int g = 0; g < 16; g += 4) {
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    words[k] = Element::pack(o[4 * (g + k) + 2 * i] * factor[i],
                                             o[4 * (g + k) + 2 * i + 1] * factor[i]);
                quad_transpose(words); /* 16 bytes a lane */
                if (some) *(uint4 *)(to + 8 * g) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        } else if (some) {
            float *to = p.split.slot_out + slot_row(p, task, row) * D_V + column + 2 * lane;
#pragma unroll
            for (int g = 0; g < 16; g++)
                *(float2 *)(to + 8 * g) =
                    make_float2(o[4 * g + 2 * i] * factor[i], o[4 * g + 2 * i + 1] * factor[i]);
        }
    }
}

/* What a row's O is to be multiplied by, given the sum of its weights; one lane of four stores lse where `stores`. */
__device__ __forceinline__ float finish_row(const struct dense_decode_params &p, const Task &task,
                                            float reference, float sum, int tile_row, bool stores)
{
    const int row = task.first_row + tile_row;
    if (row >= p.rows) return 0.0f;
    const bool empty = sum == 0.0f; /* the largest weight of a row that sees a key is 2^-8 at least */
    const float lse = empty ? -INFINITY : fmaf(reference, p.scale_log2, log2f(sum)) * LN_2;
    const RowPlace place = row_place(row, task.kv_head, p.group);
    const bool direct = task.piece.slot == DIRECT;
    if (stores && direct) store_lse(p.output, task.piece.request, place, lse);
    if (stores && !direct) p.split.slot_lse[slot_row(p, task, row)] = lse;
    const float factor = empty ? 0.0f : 1.0f / sum;
    return direct ? factor * result_sink_factor(p.output.rules, place.head, lse) : factor;
}

/* A piece without keys; by the 128 threads of one side. */
__device__ __forceinline__ void store_empty(const struct dense_decode_params &p, const Task &task)
{
    const int thread = fresh_thread() % WARPGROUP_THREADS;
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
    const int rows = min(ROWS, p.rows - task.first_row);
    if (thread < rows) finish_row(p, task, 0.0f, 0.0f, thread, true);
    if (task.piece.slot != DIRECT) return;
#pragma unroll 1
    for (int i = thread; i < rows * CHUNKS; i += WARPGROUP_THREADS) {
        const RowPlace place = row_place(task.first_row + i / CHUNKS, task.kv_head, p.group);
        uint16_t *to = p.output.out + out_offset(p.output, task.piece.request, place);
        ((uint4 *)to)[i % CHUNKS] = make_uint4(0, 0, 0, 0);
    }
}
