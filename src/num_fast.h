/* SPDX-License-Identifier: MIT
 *
 * The conversions of num.h without branches, for vector units and GPUs. They return the same bits for every
 * input, NaN included, as tests/unit/test_num_fast.c shows; num.h is the definition. They rely on rounding to
 * nearest even, the default mode. Flushing subnormals to zero does not change a result: what it loses is
 * below half of the result's resolution.
 */
#ifndef FMLA_NUM_FAST_H
#define FMLA_NUM_FAST_H

#include "num.h"

#include <math.h>

NUM_FN uint16_t fast_to_bf16(float x)
{
    const uint32_t u = num_bits(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
    return (uint16_t)((int32_t)(u & 0x7fffffffu) > 0x7f800000 ? nan : rounded);
}

/* Subnormal results are rounded by an addition: the last bit of the addend is worth the least subnormal. */
NUM_FN uint16_t fast_to_fp16(float x)
{
    const uint32_t u = num_bits(x);
    const int32_t a = (int32_t)(u & 0x7fffffffu);
    const int32_t normal = (a - ((127 - 15) << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    const int32_t subnormal = (int32_t)num_bits(num_float((uint32_t)a) + 0.5f) - 0x3f000000;
    const int32_t nan = 0x7e00 | ((a >> 13) & 0x3ff);
    int32_t v = a < 0x38800000 ? subnormal : normal;
    v = a >= 0x477ff000 ? 0x7c00 : v;
    v = a > 0x7f800000 ? nan : v;
    return (uint16_t)((uint32_t)v | ((u >> 16) & 0x8000u));
}

NUM_FN uint8_t fast_to_e4m3(float x)
{
    const uint32_t u = num_bits(x);
    const int32_t a = (int32_t)(u & 0x7fffffffu);
    const int32_t normal = (a - ((127 - 7) << 23) + 0x7ffff + ((a >> 20) & 1)) >> 20;
    const int32_t subnormal = (int32_t)num_bits(num_float((uint32_t)a) + 0x1p14f) - 0x46800000;
    int32_t v = a < 0x3c800000 ? subnormal : normal;
    v = a >= 0x43e00000 ? 0x7e : v;
    v = a > 0x7f800000 ? 0x7f : v;
    return (uint8_t)((uint32_t)v | ((u >> 24) & 0x80u));
}

NUM_FN uint8_t fast_to_e2m1(float x)
{
    const uint32_t u = num_bits(x);
    const int32_t a = (int32_t)(u & 0x7fffffffu);
    const int32_t normal = (a - ((127 - 1) << 23) + 0x1fffff + ((a >> 22) & 1)) >> 22;
    const int32_t below_1 = (a > 0x3e800000) + (a >= 0x3f400000);
    int32_t v = a < 0x3f800000 ? below_1 : normal;
    v = a >= 0x40c00000 ? 7 : v;
    return (uint8_t)(a > 0x7f800000 ? 0u : (uint32_t)v | (u >> 28 & 8u));
}

/* Takes the bits of amax, which is not NaN and not negative. 448 is 1.75 · 2^8, so the logarithm of the
 * quotient is the difference of exponents, plus one if the mantissa is above 1.75. 114 is 2^-13, the first
 * power of two above 1e-4. */
NUM_FN uint8_t fast_ue8m0_scale(uint32_t amax)
{
    const int32_t exponent = (int32_t)((amax + 0x1fffffu) >> 23) - 8;
    const int32_t finite = exponent > 114 ? exponent : 114;
    return (uint8_t)(amax >= 0x7f800000u ? 254 : finite);
}

/* Returns 1 / scale for a code from fast_ue8m0_scale. The code is at most 254, whose inverse is the subnormal
 * 2^-127. Multiplying by the inverse gives the exact quotient because both are the same power of two. */
NUM_FN float fast_ue8m0_inverse(int32_t code)
{
    const int32_t bits = (254 - code) << 23;
    return num_float((uint32_t)(bits > 0x00400000 ? bits : 0x00400000));
}

/* Returns a factor for x and the scale of a quotient, so that fast_quotient neither over- nor underflows in a
 * way that e4m3 could distinguish from 0 or from its largest value. The factor is a power of two, so the
 * quotient is unchanged. */
NUM_FN float fast_prescale(float scale)
{
    return scale < 0x1p-80f ? 0x1p80f : scale > 0x1p80f ? 0x1p-64f : 1.0f;
}

/* Returns x / scale as precisely as conversion to e4m3 needs it, except for the sign of a NaN. Both are
 * prescaled, and inverse = 1.0f / scale. One correction step makes the product the correctly rounded quotient
 * (Markstein), unless it is far outside the range of e4m3. */
NUM_FN float fast_quotient(float x, float scale, float inverse)
{
    const float q = x * inverse;
    const float corrected = fmaf(fmaf(-q, scale, x), inverse, q);
    return (q < 0.0f ? -q : q) < 1024.0f ? corrected : q;
}

#endif
