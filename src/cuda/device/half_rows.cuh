/* SPDX-License-Identifier: MIT
 *
 * Rows of partial results in 16 or 24 bits, for Hopper's sparse decode and its dense decode of few requests
 * (sparse prefill has its own parts). They have half or three quarters of the fp32 traffic to the parts and from
 * there to the join, and take the memory of an fp32 row.
 *
 * Of bf16 results, each 64 columns of a row are stored as fp16 with a power-of-two scale, chosen so that the
 * largest magnitude is in [2^14, 2^15). Values down to 2^-28 of it keep all 11 bits, with an eighth of the final
 * rounding error; values below 2^-40 of it become 0. A row is 512 fp16 values, columns in order or as
 * store_half_tile puts them, followed by 8 powers of two in fp32.
 *
 * Of fp16 results, whose final rounding error is no larger than that of fp16 parts, values have 24 bits: fp32
 * without its last byte. A row is 512 upper halves, columns in order or as store_24_bit_tile puts them, and then
 * 512 third bytes (third_byte_position of fragment.h). The reader takes the third byte for the fourth as well: 0, infinities and NaN
 * stay what they are, and values become neither larger nor smaller on average. The error is a twentieth of the
 * final one.
 */
#pragma once

#include "../params.h"
#include "element.cuh"
#include "fragment.h"
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

/* Whether parts of results of this type have 24 bits a value. */
template <typename Element> constexpr bool IN_24_BITS = !Element::IS_BF16;

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

/* ---- 24 bits --------------------------------------------------------------------------------------- */

enum { THIRD_BYTES_AT = HALF_ROW_COLUMNS * 2 /* bytes of a row */ };

DEVICE uint8_t *third_bytes(const struct split_params &split, int64_t part_row)
{
    return (uint8_t *)half_row(split, part_row) + THIRD_BYTES_AT;
}

DEVICE uint32_t upper_halves_of(float first, float second)
{
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

/* The lower half of the result has the third bytes of two values. */
DEVICE uint32_t two_third_bytes_of(float first, float second)
{
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x51);
}

/* Returns value e of those whose upper halves and third bytes are in these words. */
DEVICE float value_of_24_bits(uint32_t two_halves, uint32_t four_bytes, int e)
{
    const uint32_t selector = (e % 2 ? 0x3200u : 0x1000u) | 0x11u * (4 + (uint32_t)e % 4);
    return __uint_as_float(__byte_perm(two_halves, four_bytes, selector));
}

/* Stores 64 columns in the order of store_half_tile. `to`, `bytes`: the addresses of the lane's first upper half
 * and third byte. */
DEVICE void store_24_bit_tile(uint16_t *to, uint8_t *bytes, const float (&x)[16], float factor, bool stores)
{
    uint32_t halves[8], thirds[4];
#pragma unroll
    for (int f = 0; f < 4; f++) {
        const float a = x[4 * f] * factor, b = x[4 * f + 1] * factor, c = x[4 * f + 2] * factor,
                    d = x[4 * f + 3] * factor;
        halves[2 * f] = upper_halves_of(a, b), halves[2 * f + 1] = upper_halves_of(c, d);
        thirds[f] = __byte_perm(two_third_bytes_of(a, b), two_third_bytes_of(c, d), 0x5410);
    }
    store_global_16(to, make_uint4(halves[0], halves[1], halves[2], halves[3]), stores);
    store_global_16(to + HALF_ROW_TILE / 2, make_uint4(halves[4], halves[5], halves[6], halves[7]), stores);
    store_global_16(bytes, make_uint4(thirds[0], thirds[1], thirds[2], thirds[3]), stores);
}
