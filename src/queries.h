/* SPDX-License-Identifier: MIT
 *
 * Queries of FP8 products (docs/semantics.md, "FP8 products"), defined once for C and CUDA: the scale of a
 * row, the code of a value, and the value of a code. The oracle, the CPU and the GPU thereby compute the
 * same bits, except those of a NaN.
 */
#ifndef FMLA_QUERIES_H
#define FMLA_QUERIES_H

#include "kvformat.h"
#include "num_fast.h"

/* Returns the bits of abs(x), whose order is that of magnitudes; a NaN is above all others. */
NUM_FN int32_t query_magnitude(float x)
{
    return (int32_t)(num_bits(x) & 0x7fffffffu);
}

/* Returns the scale of a row whose largest magnitude has the bits `amax`. If amax is infinite or NaN, so is
 * the scale, and every code then decodes to NaN. */
NUM_FN float query_scale(int32_t amax)
{
    const float scale = num_float((uint32_t)amax) / 448.0f;
    return scale == 0.0f ? 1.0f : scale;
}

NUM_FN uint8_t query_code(float x, float scale)
{
    return fast_to_e4m3(x / scale);
}

NUM_FN uint16_t query_value(uint8_t code, float scale)
{
    return fast_to_bf16(num_from_e4m3(code) * scale);
}

/* Returns how many values of a query are quantised: those that are multiplied with codes of a key. */
NUM_FN int32_t query_quantised(enum kv_format format)
{
    return kv_layout_of(format, 0).nope;
}

/* Writes a row of `width` bf16 values and replaces the first `quantised` by the decoded values of their
 * codes. */
static inline void query_quantise(uint16_t *to, const uint16_t *q, int32_t quantised, int32_t width)
{
    int32_t amax = 0;
    for (int32_t i = 0; i < quantised; i++) {
        const int32_t magnitude = query_magnitude(num_from_bf16(q[i]));
        amax = magnitude > amax ? magnitude : amax;
    }
    const float scale = query_scale(amax);
    for (int32_t i = 0; i < quantised; i++)
        to[i] = query_value(query_code(num_from_bf16(q[i]), scale), scale);
    memcpy(to + quantised, q + quantised, (size_t)(width - quantised) * sizeof *to);
}

/* Decodes a row of the caller's codes. */
static inline void query_of_codes(uint16_t *to, const uint8_t *codes, float scale, int32_t width)
{
    for (int32_t i = 0; i < width; i++) to[i] = query_value(codes[i], scale);
}

#endif
