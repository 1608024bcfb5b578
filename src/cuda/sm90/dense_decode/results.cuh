/* SPDX-License-Identifier: MIT
 *
 * The end of a split: stores rows to `out`, or to the split's slot.
 */
#pragma once

#include "finish.cuh"
#include "softmax.cuh"

#include "../sides/results.cuh"

/* Stores 64 columns of the warp's 16 rows to `out`. They pass through the warp's lines of P in shared
 * memory, which nobody reads between two splits, so that eight lanes write 128 bytes of a row. `offset`,
 * `stores`: of rows lane / 8 + 4 i. */
template <typename Element, int FIRST, typename Finish>
DEVICE void store_group(uint16_t *to, const int64_t (&offset)[4], const bool (&stores)[4],
                        const float (&o)[64], const Finish &finish, int column, uint32_t lines)
{
    const uint32_t lane = fresh_thread() % 32;
    stage_group<Element, FIRST>(o, finish, column, lines, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 chunk = load_shared_16(lines + swizzle_128(lane / 8 + 4 * (uint32_t)i, lane % 8));
        store_global_16(to + offset[i] + 8 * (lane % 8), chunk, stores[i]);
    }
    __syncwarp();
}

/* Stores the warp's 16 rows from `tile_row` on, 256 columns from `column` on, to `out`. They cannot pass
 * through the keys' place in shared memory: it already belongs to the next split. `lines`: the warp's
 * lines of its side's P. */
template <typename Element, typename Finish>
DEVICE void store_out(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                      const float (&right)[64], const Finish &finish, int tile_row, int column,
                      uint32_t lines)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
    int64_t own[2], offset[4]; /* of the rows whose sums this lane has; of those that it stores */
    bool stores[4];
#pragma unroll
    for (int i = 0; i < 2; i++)
        own[i] = out_offset(p.output, task.split.request,
                            row_place(p, min(first + lane / 4 + 8 * i, p.rows - 1), task.kv_head));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        offset[i] = __shfl_sync(~0u, own[i / 2], 4 * (i % 2 * 4 + lane / 8));
        stores[i] = first + lane / 8 + 4 * i < p.rows;
    }
    uint16_t *to = p.output.out + column;
    store_group<Element, 0>(to, offset, stores, left, finish, 0, lines);
    store_group<Element, 32>(to + 64, offset, stores, left, finish, 64, lines);
    store_group<Element, 0>(to + 128, offset, stores, right, finish, 128, lines);
    store_group<Element, 32>(to + 192, offset, stores, right, finish, 192, lines);
}

/* Stores 128 columns of one of the thread's rows (half 0 or 1 of the fragment) to a slot. */
DEVICE void store_row(float *to, bool stores, const float (&o)[64], int half, float factor)
{
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (stores) *(float4 *)(to + 16 * k) = scaled_values(o, 8 * k + 2 * half, factor);
}

/* Stores the rows and columns of store_out to the split's slot. */
DEVICE void store_slot(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                       const float (&right)[64], const float (&factor)[2], int tile_row, int column)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        float *to = p.split.slot_out + slot_row(p, task, row) * D_V + column + slot_position_of_lane(lane);
        store_row(to, row < p.rows, left, i, factor[i]);
        store_row(to + 128, row < p.rows, right, i, factor[i]);
    }
}
