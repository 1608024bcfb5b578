/* SPDX-License-Identifier: MIT
 *
 * Rows of partial results in 16 bits (Hopper's sparse decode; sparse prefill has slots of its own): half of what fp32 moves, to
 * the slots and from there to the join. 64 columns of a row are fp16 times a power of two, chosen so that the largest of them is in [2^14, 2^15): values down to
 * 2^-28 of it have all 11 bits, and lose an eighth of what bf16 results lose when they are rounded in the end; what is below
 * 2^-40 of it becomes 0.
 *
 * A row has the memory of one in fp32: 512 fp16 values, columns in order; then 8 powers of two, fp32.
 */
#pragma once

#include "../params.h"
#include "kernel.cuh"

#include <stdint.h>

enum { HALF_ROW_COLUMNS = 512, HALF_ROW_TILE = 64 /* columns of a power of two */ };

struct HalfScale {
    float up, down; /* a value · up is what is stored; · down is the value again */

    /* most: the largest magnitude of the 64. */
    DEVICE explicit HalfScale(float most)
    {
        constexpr uint32_t BIAS = 127, LARGEST = 14 /* 2^14 */, FRACTION_BITS = 23;
        const uint32_t exponent = max(__float_as_uint(most) >> FRACTION_BITS, LARGEST + 1);
        up = __uint_as_float((2 * BIAS + LARGEST - exponent) << FRACTION_BITS);
        down = __uint_as_float((exponent - LARGEST) << FRACTION_BITS);
    }
};

DEVICE uint16_t *half_row(const struct split_params &split, int64_t slot_row)
{
    return (uint16_t *)(split.slot_out + slot_row * HALF_ROW_COLUMNS);
}

DEVICE float *half_row_scales(const struct split_params &split, int64_t slot_row)
{
    return split.slot_out + slot_row * HALF_ROW_COLUMNS + HALF_ROW_COLUMNS / 2;
}
