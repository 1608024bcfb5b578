/* SPDX-License-Identifier: MIT
 *
 * Rows of partial results in 16 bits, for Hopper's sparse decode and its dense decode of few requests (sparse
 * prefill has its own parts). They halve the fp32 traffic to the parts and from there to the join. Each 64
 * columns of a row are stored as fp16 with a power-of-two scale, chosen so that the largest magnitude is in
 * [2^14, 2^15). Values down to 2^-28 of it keep all 11 bits, with an eighth of the final bf16 rounding error;
 * values below 2^-40 of it become 0.
 *
 * A row takes the memory of an fp32 row: 512 fp16 values, columns in order or as store_half_tile puts them,
 * followed by 8 powers of two in fp32.
 */
#pragma once

#include "../params.h"
#include "element.cuh"
#include "kernel.cuh"
#include "quad.cuh"
#include "result.cuh"

#include <stdint.h>

enum { HALF_ROW_COLUMNS = 512, HALF_ROW_TILE = 64 /* columns per scale */ };

struct HalfScale {
    float up, down; /* stored value = value · up; value = stored value · down */

    /* most: the largest magnitude of the 64 columns. */
    DEVICE explicit HalfScale(float most)
    {
        constexpr uint32_t BIAS = 127, LARGEST = 14 /* 2^14 */, FRACTION_BITS = 23;
        const uint32_t exponent = max(__float_as_uint(most) >> FRACTION_BITS, LARGEST + 1);
        up = __uint_as_float((2 * BIAS + LARGEST - exponent) << FRACTION_BITS);
        down = __uint_as_float((exponent - LARGEST) << FRACTION_BITS);
    }
};

DEVICE uint16_t *half_row(const struct split_params &split, int64_t part_row)
{
    return (uint16_t *)(split.part_out + part_row * HALF_ROW_COLUMNS);
}

DEVICE float *half_row_scales(const struct split_params &split, int64_t part_row)
{
    return split.part_out + part_row * HALF_ROW_COLUMNS + HALF_ROW_COLUMNS / 2;
}

/* Stores 64 columns of a row from four lanes with 16 columns each, in register order: a lane stores eight of
 * every 32 values in memory. The reader restores the column order (join_in_kernel.cuh). `to` is the address
 * of the lane's first value. Returns the scale `down`. */
DEVICE float store_half_tile(uint16_t *to, const float (&x)[16], float factor, bool stores)
{
    float most[4] = {0.0f, 0.0f, 0.0f, 0.0f}; /* four, for short dependency chains */
#pragma unroll
    for (int e = 0; e < 16; e++) most[e % 4] = fmaxf(most[e % 4], fabsf(x[e]));
    const HalfScale scale(quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))) * factor);
    const float by = factor * scale.up;
    uint32_t words[8];
#pragma unroll
    for (int w = 0; w < 8; w++) words[w] = Fp16::pack(x[2 * w] * by, x[2 * w + 1] * by);
    store_global_16(to, make_uint4(words[0], words[1], words[2], words[3]), stores);
    store_global_16(to + HALF_ROW_TILE / 2, make_uint4(words[4], words[5], words[6], words[7]), stores);
    return scale.down;
}
