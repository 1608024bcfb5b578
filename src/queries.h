/* SPDX-License-Identifier: MIT
 *
 * Queries of FP8 products (docs/semantics.md, "FP8 products"), spelled once for C and CUDA: the scale of a row, the code of a value,
 * and what a code is worth. The oracle, the CPU and the GPU have the same bits by it, of a NaN only that it is one.
 */
#ifndef FMLA_QUERIES_H
#define FMLA_QUERIES_H

#include "kvformat.h"
#include "num_fast.h"

/* The bits of a magnitude, which are in the order of magnitudes; those of a NaN come behind all others. */
NUM_FN int32_t query_magnitude(float x)
{
    return (int32_t)(num_bits(x) & 0x7fffffffu);
}

/* The scale of a row whose largest magnitude has these bits. It is infinite or NaN where that is, and every code is then worth NaN. */
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

/* How many values of a query are quantised: those against which a key has codes. */
NUM_FN int32_t query_quantised(enum kv_format format)
{
    return kv_layout_of(format, 0).nope;
}

/* A row of `width` bf16 values, of which the first `quantised` become what their codes are worth. */
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

/* A row of codes, as the caller gives them. */
static inline void query_of_codes(uint16_t *to, const uint8_t *codes, float scale, int32_t width)
{
    for (int32_t i = 0; i < width; i++) to[i] = query_value(codes[i], scale);
}

#endif
