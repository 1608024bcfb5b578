/* SPDX-License-Identifier: MIT
 *
 * Finished rows on their way to `out`, as one side has them. After a kernel's layout.cuh.
 */
#pragma once

#include "../../device/shared.cuh"

/* A row's elements of 16 columns, of which e is the first, multiplied. */
DEVICE float4 scaled_values(const float (&o)[64], int e, float factor)
{
    return make_float4(o[e] * factor, o[e + 1] * factor, o[e + 4] * factor, o[e + 5] * factor);
}

/* What becomes of an element of O on its way to `out`: it is multiplied by its row's factor. */
struct Scaled {
    const float (&factor)[2]; /* of the thread's two rows */

    /* Of row i of the thread's two what it holds of 16 columns (slot_position): from element e on, in the group of 64 columns
     * that begins at element FIRST, and at `column` of the side's. */
    template <int FIRST> DEVICE float4 values(const float (&o)[64], int e, int i, int) const
    {
        return scaled_values(o, e, factor[i]);
    }
};

/* 64 columns of the warp's 16 rows to 16 lines of shared memory. */
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
