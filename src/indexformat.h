/* SPDX-License-Identifier: MIT
 *
 * The key formats of the lightning indexer, byte by byte, defined once for C and CUDA. A key has D values,
 * 128 or 64. A page is a run of bytes; all offsets count from its start.
 *
 *   INDEX_FP8_132        page_size × D e4m3, then page_size × one f32 scale, which may be any
 *   INDEX_FP8_132_UE8M0  the same, but the scale is a power of two, kept as four equal ue8m0 bytes
 *   INDEX_FP4_68         page_size × D/2 bytes of e2m1, value 2 i in the low half of byte i, then
 *                        page_size × 4 ue8m0 scales, one per 32 values; with D 64 two scales and two bytes of 0
 *
 * A key is D or D/2 bytes of codes and four bytes of scale, in every format. Functions take the two apart,
 * because gathered keys and queries are not in pages. Both may be at any address.
 *
 * The value of an element is code × scale, the fp32 product, without a rounding to bf16: scores multiply codes,
 * and the scale multiplies their sum. Writers:
 *
 *   FP8   scale = max(amax, floor) / 448 in fp32, at least 2^-126; with `scale_pow2`, and always in the format
 *         of ue8m0, the least power of two that is not below it. code = e4m3(x / scale), the fp32 quotient
 *         rounded to nearest even and saturated.
 *   FP4   scale = the least power of two that is not below max(amax, 6 · 2^-126) / 6 in fp32, at most 2^127;
 *         code = e2m1(x / scale), rounded to nearest even and saturated. No floor, no `scale_pow2`.
 *
 * NaN and infinities are treated as in cache append. An infinite amax gives the scale 2^127, with and without
 * `scale_pow2`; infinities become ±448 or ±6. In FP8 a NaN does not count in amax, and its code is the NaN of
 * its sign. A block of FP4 with a NaN has a NaN scale (255) and codes of 0. The least scale is a normal number,
 * so a row of zeros with a floor of 0 has codes of 0.
 *
 * Codes and scales depend neither on the device nor on the flush-to-zero mode of the thread. Values below
 * 2^-126 and those with the scale 2^-127 depend on that mode, and so does a key that is quantised again from
 * them.
 */
#ifndef FMLA_INDEXFORMAT_H
#define FMLA_INDEXFORMAT_H

#include "num.h"

#include <stddef.h>

enum index_format { INDEX_FP8_132, INDEX_FP8_132_UE8M0, INDEX_FP4_68, INDEX_FORMATS };

enum { INDEX_MOST = 128 /* values of a key */, INDEX_SCALE_BYTES = 4 /* of a key */, INDEX_BLOCK = 32 };

/* How FP8 scales are chosen. */
struct index_scaling {
    float floor; /* the least amax that counts; finite and at least 0 */
    int32_t scale_pow2;
};

/* ---- Places ---------------------------------------------------------------------------------- */

/* Returns the bytes of a key's codes. */
NUM_FN size_t index_code_bytes(enum index_format format, int32_t d)
{
    return (size_t)(format == INDEX_FP4_68 ? d / 2 : d);
}

/* Returns the bytes of a page; a page stride may be more. */
NUM_FN size_t index_page_bytes(enum index_format format, int32_t d, int64_t page_size)
{
    return (size_t)page_size * (index_code_bytes(format, d) + INDEX_SCALE_BYTES);
}

/* Return the offset of a slot's codes in its page, and of its scale. */
NUM_FN size_t index_codes_at(enum index_format format, int32_t d, int64_t slot)
{
    return (size_t)slot * index_code_bytes(format, d);
}

NUM_FN size_t index_scale_at(enum index_format format, int32_t d, int64_t page_size, int64_t slot)
{
    return (size_t)page_size * index_code_bytes(format, d) + (size_t)slot * INDEX_SCALE_BYTES;
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* Returns the scale of value i of a key: of the four equal bytes of ue8m0, the first. */
NUM_FN float index_scale_of(enum index_format format, const uint8_t *scale, int32_t i)
{
    float f32;
    if (format == INDEX_FP4_68) return num_from_ue8m0(scale[i / INDEX_BLOCK]);
    if (format == INDEX_FP8_132_UE8M0) return num_from_ue8m0(scale[0]);
    memcpy(&f32, scale, sizeof f32);
    return f32;
}

/* Returns the value of code i of a key, without its scale. */
NUM_FN float index_code_value(enum index_format format, const uint8_t *codes, int32_t i)
{
    if (format == INDEX_FP4_68) return num_from_e2m1((uint8_t)(codes[i / 2] >> 4 * (i % 2) & 15));
    return num_from_e4m3(codes[i]);
}

/* Returns value i of a key. */
NUM_FN float index_value(enum index_format format, const uint8_t *codes, const uint8_t *scale, int32_t i)
{
    return index_code_value(format, codes, i) * index_scale_of(format, scale, i);
}

/* ---- Quantising ------------------------------------------------------------------------------ */

/* Returns the FP8 scale of a row whose largest magnitude has these bits (num_amax). */
NUM_FN float index_fp8_scale(uint32_t amax, struct index_scaling scaling)
{
    const uint32_t floor = num_bits(scaling.floor) & 0x7fffffffu; /* of -0 as well */
    if (amax >= 0x7f800000u) return 0x1p127f;
    const float quotient =
        num_float(amax > floor ? amax : floor) / 448.0f; /* correctly rounded in CUDA too */
    const float scale = quotient > 0x1p-126f ? quotient : 0x1p-126f;
    return scaling.scale_pow2 ? num_from_ue8m0(num_ue8m0_ceil(scale)) : scale;
}

/* Returns the scale of 32 values of FP4 whose largest magnitude has these bits, as ue8m0. */
NUM_FN uint8_t index_fp4_scale(uint32_t amax)
{
    const float quotient = num_float(amax) / 6.0f; /* correctly rounded in CUDA too */
    return num_ue8m0_ceil(quotient > 0x1p-126f ? quotient : 0x1p-126f);
}

/* Returns x / scale as conversion to e4m3 and e2m1 needs it, with the sign of a NaN. The scale is normal and
 * positive, or a NaN. A subnormal x is an integer times 2^-149; then both are divided by that. */
NUM_FN float index_quotient(float x, float scale)
{
    const uint32_t u = num_bits(x), magnitude = u & 0x7fffffffu;
    const float above = num_float(magnitude) / scale;
    const float below = (float)(int32_t)magnitude / (scale * 0x1p75f * 0x1p74f);
    const uint32_t quotient = num_bits(magnitude >= 0x00800000u ? above : below);
    return num_float(quotient | (u & 0x80000000u));
}

NUM_FN uint8_t index_fp8_code(float x, float scale)
{
    return num_to_e4m3(index_quotient(x, scale));
}

NUM_FN uint8_t index_fp4_code(float x, uint8_t scale)
{
    return num_to_e2m1(index_quotient(x, num_from_ue8m0(scale))); /* 0 if the scale is a NaN */
}

/* Writes 32 values as FP4: 16 bytes of codes and a scale. */
NUM_FN void index_store_fp4(uint8_t *codes, uint8_t *scale, const float *values)
{
    int32_t nan = 0;
    for (int32_t i = 0; i < INDEX_BLOCK; i++) nan |= values[i] != values[i];
    *scale = nan ? (uint8_t)255 : index_fp4_scale(num_amax(values, INDEX_BLOCK));
    for (int32_t i = 0; i < INDEX_BLOCK; i += 2)
        codes[i / 2] =
            (uint8_t)(index_fp4_code(values[i], *scale) | index_fp4_code(values[i + 1], *scale) << 4);
}

/* Writes an FP8 scale, which is a power of two from 2^-126 to 2^127 in the format of ue8m0. */
NUM_FN void index_store_scale(enum index_format format, uint8_t *at, float scale)
{
    if (format == INDEX_FP8_132_UE8M0)
        memset(at, (int)num_ue8m0_ceil(scale), INDEX_SCALE_BYTES);
    else
        memcpy(at, &scale, sizeof scale);
}

/* Writes the d values of a key. */
NUM_FN void index_store(enum index_format format, int32_t d, struct index_scaling scaling,
                        const float *values, uint8_t *codes, uint8_t *scale)
{
    if (format == INDEX_FP4_68) {
        memset(scale, 0, INDEX_SCALE_BYTES);
        for (int32_t first = 0; first < d; first += INDEX_BLOCK)
            index_store_fp4(codes + first / 2, scale + first / INDEX_BLOCK, values + first);
        return;
    }
    scaling.scale_pow2 |= format == INDEX_FP8_132_UE8M0;
    const float by = index_fp8_scale(num_amax(values, d), scaling);
    index_store_scale(format, scale, by);
    for (int32_t i = 0; i < d; i++) codes[i] = index_fp8_code(values[i], by);
}

/* ---- Converting ------------------------------------------------------------------------------ */

/* Returns whether FP8 codes with this scale are copied into a format: the scale is a power of two that the format
 * has. ue8m0 begins with 2^-127. */
NUM_FN int index_keeps_scale(enum index_format to, float scale)
{
    const uint32_t u = num_bits(scale);
    const uint32_t rest = u >= 0x00800000u ? u & 0x7fffffu : u & (u - 1u); /* 0 for powers of two */
    if (u == 0u || u >= 0x7f800000u) return 0;                             /* 0, infinity, NaN, negative */
    return rest == 0u && (to == INDEX_FP8_132 || u >= 0x00400000u);
}

/* Writes a key of one format in another. FP8 codes that keep their scale are copied, and so is FP4 to FP4.
 * Else the key is quantised again from its values, where a NaN is positive. The keys do not overlap. */
NUM_FN void index_convert(enum index_format from, const uint8_t *codes, const uint8_t *scale,
                          enum index_format to, int32_t d, struct index_scaling scaling, uint8_t *to_codes,
                          uint8_t *to_scale)
{
    const float by = index_scale_of(from, scale, 0);
    float values[INDEX_MOST];
    if (from == INDEX_FP4_68 && to == INDEX_FP4_68) {
        memcpy(to_codes, codes, index_code_bytes(to, d));
        memset(to_scale, 0, INDEX_SCALE_BYTES);
        memcpy(to_scale, scale, (size_t)(d / INDEX_BLOCK));
        return;
    }
    if (from != INDEX_FP4_68 && to != INDEX_FP4_68 && index_keeps_scale(to, by)) {
        memcpy(to_codes, codes, index_code_bytes(to, d));
        if (to == INDEX_FP8_132_UE8M0 && num_bits(by) == 0x00400000u)
            memset(to_scale, 0, INDEX_SCALE_BYTES);
        else
            index_store_scale(to, to_scale, by);
        return;
    }
    for (int32_t i = 0; i < d; i++) {
        values[i] = index_value(from, codes, scale, i);
        if (values[i] != values[i]) values[i] = num_float(0x7fffffffu);
    }
    index_store(to, d, scaling, values, to_codes, to_scale);
}

#endif
