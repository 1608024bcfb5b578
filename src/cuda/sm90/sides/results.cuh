/* SPDX-License-Identifier: MIT
 *
 * Finished rows of one side on their way to `out`. Include after a kernel's layout.cuh.
 */
#pragma once

#include "../../device/shared.cuh"

/* Returns the thread's four elements of a row in 16 columns, multiplied by `factor`; e is the first of
 * them. */
DEVICE float4 scaled_values(const float (&o)[64], int e, float factor)
{
    return make_float4(o[e] * factor, o[e + 1] * factor, o[e + 4] * factor, o[e + 5] * factor);
}

/* Epilogue that multiplies an element of O by its row's factor. */
struct Scaled {
    const float (&factor)[2]; /* of the thread's two rows */

    /* Returns the values of row i of the thread's two in 16 columns (slot_position), from element e on.
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
