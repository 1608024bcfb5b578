/* SPDX-License-Identifier: MIT
 *
 * The end of a split: stores rows to `out` or to the split's part. Where the CTAs with the parts of a request
 * join them (../latent/scheduler.cuh), a part has rows of fp16, or of 24 bits for fp16 results
 * (half_rows.cuh).
 */
#pragma once

#include "../../device/half_rows.cuh"
#include "../latent/epilogue.cuh"
#include "layout.cuh"

namespace dense_decode {

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
 * through the keys' stages in shared memory: it already belongs to the next split. `lines`: the warp's
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
                            row_coord(p, min(first + lane / 4 + 8 * i, p.rows - 1), task.kv_head));
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

/* Stores 128 columns of one of the thread's rows (half 0 or 1 of the fragment) to a part. */
DEVICE void store_row(float *to, bool stores, const float (&o)[64], int half, float factor)
{
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (stores) *(float4 *)(to + 16 * k) = scaled_values(o, 8 * k + 2 * half, factor);
}

/* Stores the rows and columns of store_out to the split's part. */
DEVICE void store_part(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                       const float (&right)[64], const float (&factor)[2], int tile_row, int column)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        float *to = p.split.part_out + part_row(p, task, row) * D_V + column + part_position_of_lane(lane);
        store_row(to, row < p.rows, left, i, factor[i]);
        store_row(to + 128, row < p.rows, right, i, factor[i]);
    }
}

/* ---- Parts that CTAs join ---------------------------------------------------------------------- */

/* Stores half of the side's columns of the thread's first or second row to a part, and returns the two
 * powers of two by which they were scaled, or zeros if they have 24 bits. Chunk h of 64 columns takes the
 * pairs that the lane has of every eight columns, from column 32 h on. */
template <typename Element>
DEVICE float2 store_columns(uint16_t *to, uint8_t *bytes, const float (&o)[64], bool second, float factor,
                            bool stores)
{
    float scale[2] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float x[16];
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
        if constexpr (IN_24_BITS<Element>)
            store_24_bit_tile(to + HALF_ROW_TILE * c, bytes + HALF_ROW_TILE * c, x, factor, stores);
        else
            scale[c] = store_half_tile(to + HALF_ROW_TILE * c, x, factor, stores);
    }
    return make_float2(scale[0], scale[1]);
}

/* Stores the warp's rows and columns to the split's part. `column`: the side's first. */
template <typename Element>
DEVICE void store_part_to_join(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                               const float (&right)[64], const float (&factor)[2], int tile_row, int column)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
    /* Not unrolled: the code executes once, so one copy serves both rows. */
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        const bool stores = row < p.rows;
        const float by = i ? factor[1] : factor[0];
        const int64_t at = part_row(p, task, row);
        uint16_t *const to = half_row(p.split, at) + column + 8 * (lane % 4);
        uint8_t *const bytes = third_bytes(p.split, at) + column + 16 * (lane % 4);
        const float2 low = store_columns<Element>(to, bytes, left, i == 1, by, stores),
                     high = store_columns<Element>(to + 2 * HALF_ROW_TILE, bytes + 2 * HALF_ROW_TILE, right,
                                                   i == 1, by, stores);
        if (!IN_24_BITS<Element> && stores && lane % 4 == 0)
            *(float4 *)(half_row_scales(p.split, at) + column / HALF_ROW_TILE) =
                make_float4(low.x, low.y, high.x, high.y);
    }
}

} // namespace dense_decode
