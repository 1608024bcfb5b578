/* SPDX-License-Identifier: MIT
 *
 * The number formats, defined once: bf16, fp16, e4m3 (OCP "fn"), e2m1 and ue8m0 against fp32. Plain C that
 * CUDA also compiles; no state, no tables. Conversions to a narrower type round to nearest, ties to even, and
 * are exact for signed zeros, subnormals, infinities and NaN. No function depends on the flush-to-zero mode
 * of the calling thread: subnormals are built from integers.
 */
#ifndef FMLA_NUM_H
#define FMLA_NUM_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define NUM_FN static __host__ __device__ __forceinline__
#else
#define NUM_FN static inline
#endif

NUM_FN uint32_t num_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

NUM_FN float num_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Returns x / 2^shift, rounded to nearest, ties to even; shift in [1, 31]. */
NUM_FN uint32_t num_shift_right(uint32_t x, uint32_t shift)
{
    const uint32_t kept = x >> shift;
    const uint32_t rest = x & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u);
}

/* Returns the bits of the largest magnitude, ignoring NaN. Magnitudes are compared as integers, whose maximum
 * may be taken in any order. */
NUM_FN uint32_t num_amax(const float *values, int64_t count)
{
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t a = (int32_t)(num_bits(values[i]) & 0x7fffffffu);
        const int32_t counted = a > 0x7f800000 ? 0 : a;
        most = counted > most ? counted : most;
    }
    return (uint32_t)most;
}

/* ---- bf16: the upper half of an fp32 -------------------------------------------------------- */

NUM_FN float num_from_bf16(uint16_t v)
{
    return num_float((uint32_t)v << 16);
}

NUM_FN uint16_t num_to_bf16(float x)
{
    const uint32_t u = num_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u); /* NaN: made quiet, never rounded to inf */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* ---- fp16: 1 sign, 5 exponent (bias 15), 10 mantissa bits ----------------------------------- */

NUM_FN float num_from_fp16(uint16_t v)
{
    const uint32_t sign = (uint32_t)(v & 0x8000u) << 16;
    const uint32_t magnitude = v & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    const uint32_t subnormal = num_bits((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t u = magnitude >= 0x7c00u ? special : magnitude >= 0x0400u ? normal : subnormal;
    return num_float(u | sign);
}

NUM_FN uint16_t num_to_fp16(float x)
{
    const uint32_t u = num_bits(x);
    const uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above, inf included */
    if (a >= 0x38800000u)                                    /* 2^-14 and above: normal */
        return (uint16_t)(sign | ((a - ((127u - 15u) << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13));
    if (a < 0x33000000u) return sign; /* below half of the least subnormal 2^-24 */
    const uint32_t mantissa = (a & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - (a >> 23); /* 14 … 24: leaves a multiple of 2^-24 */
    return (uint16_t)(sign | num_shift_right(mantissa, shift));
}

/* ---- e4m3 ("fn"): 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN = S.1111.111, max 448  */

NUM_FN float num_from_e4m3(uint8_t v)
{
    const uint32_t sign = (uint32_t)(v & 0x80u) << 24;
    const uint32_t magnitude = v & 0x7fu;
    const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
    const uint32_t subnormal = num_bits((float)(int32_t)magnitude * 0x1p-9f);
    const uint32_t u = magnitude == 0x7fu ? 0x7fc00000u : magnitude >= 8u ? normal : subnormal;
    return num_float(u | sign);
}

/* Saturates: everything beyond 448, infinities included, becomes ±448; NaN stays NaN. */
NUM_FN uint8_t num_to_e4m3(float x)
{
    const uint32_t u = num_bits(x);
    const uint8_t sign = (uint8_t)((u >> 24) & 0x80u);
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (a >= 0x43e00000u) return (uint8_t)(sign | 0x7eu); /* 448 and above */
    if (a >= 0x3c800000u)                                 /* 2^-6 and above: normal */
        return (uint8_t)(sign | ((a - ((127u - 7u) << 23) + 0x7ffffu + ((a >> 20) & 1u)) >> 20));
    if (a < 0x3a800000u) return sign; /* below half of the least subnormal 2^-9 */
    const uint32_t mantissa = (a & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 141u - (a >> 23); /* 21 … 24: leaves a multiple of 2^-9 */
    return (uint8_t)(sign | num_shift_right(mantissa, shift));
}

/* ---- ue8m0: an exponent alone, 2^(v - 127); 255 = NaN --------------------------------------- */

NUM_FN float num_from_ue8m0(uint8_t v)
{
    return num_float(v == 255u ? 0x7fc00000u
                     : v == 0u ? 0x00400000u /* 2^-127, subnormal */
                               : (uint32_t)v << 23);
}

/* Returns the least power of two that is not below x, as ue8m0: 2^ceil(log2 x). x is normal and positive, or
 * infinite; the largest finite scale is the most. */
NUM_FN uint8_t num_ue8m0_ceil(float x)
{
    const uint32_t u = num_bits(x);
    const uint32_t exponent = (u >> 23) + ((u & 0x7fffffu) ? 1u : 0u);
    return (uint8_t)(exponent < 254u ? exponent : 254u);
}

/* Returns the scale that cache writers choose for a group whose largest magnitude is amax:
 * 2^ceil(log2(max(amax / 448, 1e-4))), as ue8m0 (docs/semantics.md, "Cache formats"). An infinite amax gives
 * the largest finite scale; a NaN counts as 0. */
NUM_FN uint8_t num_ue8m0_scale(float amax)
{
    const float quotient = amax / 448.0f; /* correctly rounded in CUDA too, unless -use_fast_math */
    return num_ue8m0_ceil(quotient > 1e-4f ? quotient : 1e-4f);
}

/* ---- e2m1: 1 sign, 2 exponent bits (bias 1), 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 ------ */

NUM_FN float num_from_e2m1(uint8_t v)
{
    const uint32_t sign = (uint32_t)(v & 8u) << 28;
    const uint32_t magnitude = v & 7u;
    const uint32_t normal = (magnitude << 22) + ((127u - 1u) << 23);
    return num_float((magnitude >= 2u ? normal : magnitude ? 0x3f000000u : 0u) | sign);
}

/* Saturates: everything beyond 6, infinities included, becomes ±6. NaN has no code and becomes 0. */
NUM_FN uint8_t num_to_e2m1(float x)
{
    const uint32_t u = num_bits(x);
    const uint8_t sign = (uint8_t)((u >> 28) & 8u);
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return 0;
    if (a >= 0x40c00000u) return (uint8_t)(sign | 7u); /* 6 and above */
    if (a >= 0x3f800000u)                              /* 1 and above: normal */
        return (uint8_t)(sign | ((a - ((127u - 1u) << 23) + 0x1fffffu + ((a >> 22) & 1u)) >> 22));
    const uint32_t magnitude = (a > 0x3e800000u) + (a >= 0x3f400000u); /* above 0.25; 0.75 and above */
    return (uint8_t)(sign | magnitude);
}

/* Returns the scale of a group of FP4 values whose largest magnitude is amax: e4m3(clamp(amax / 6, 2^-9,
 * 448)). */
NUM_FN uint8_t num_e4m3_scale(float amax)
{
    const float quotient = amax / 6.0f; /* correctly rounded in CUDA too, unless -use_fast_math */
    return num_to_e4m3(quotient > 0x1p-9f ? quotient : 0x1p-9f);
}

#endif
