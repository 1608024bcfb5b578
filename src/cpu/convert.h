/* SPDX-License-Identifier: MIT
 *
 * Converts keys from their cache format to fp32: bf16, fp16, and the formats of FP8 and FP4. It is compiled
 * with the flags of the instruction set that includes it.
 *
 * FP8: an e4m3 code shifted left by 7 bits is an fp16 of its value times 2^-8, subnormals included, which one
 * instruction (F16C) converts to fp32; the scale absorbs the 2^8. Without F16C, e4m3 becomes fp32 by bit
 * operations. Groups with a NaN, or with a scale that is not well inside the normal numbers, are converted
 * value by value by num.h. A scale that is a power of two needs no rounding; with any other scale the product
 * is rounded to bf16, as the format requires.
 */
#ifndef FMLA_CPU_CONVERT_H
#define FMLA_CPU_CONVERT_H

#include "cpu.h"

#include <math.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

/* Converts `count` bf16 or fp16 values. */
static inline void convert(float *to, const uint16_t *from, int64_t count, bool is_bf16)
{
    int64_t i = 0;
    if (is_bf16) {
        for (; i < count; i++) to[i] = num_from_bf16(from[i]);
        return;
    }
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + i))));
#endif
    for (; i < count; i++) to[i] = num_from_fp16(from[i]);
}

/* Returns whether any of `count` e4m3 codes is a NaN; count is a multiple of 8. */
static inline bool convert_any_nan(const uint8_t *from, int32_t count)
{
    uint64_t found = 0;
    for (int32_t i = 0; i < count; i += 8) {
        uint64_t v;
        memcpy(&v, from + i, sizeof v);
        found |= (v & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
    }
    return found & 0x8080808080808080u;
}

/* Converts `count` finite e4m3 codes, times a finite scale; count is a multiple of 16. */
static inline void convert_e4m3(float *to, const uint8_t *from, int32_t count, float scale)
{
    int32_t i = 0;
#if defined(__AVX512F__) && defined(__AVX2__)
    const __m512 by16 = _mm512_set1_ps(scale * 256.0f);
    for (; i + 16 <= count; i += 16) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(from + i)));
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
        _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_cvtph_ps(half), by16));
    }
#elif defined(__F16C__) && defined(__AVX2__)
    const __m256 by8 = _mm256_set1_ps(scale * 256.0f);
    for (; i + 8 <= count; i += 8) {
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(from + i)));
        const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(half), by8));
    }
#endif
    for (; i < count; i++) { /* branch-free, so that the compiler vectorizes it */
        const uint32_t magnitude = from[i] & 0x7fu, sign = (uint32_t)(from[i] & 0x80u) << 24;
        /* A subnormal gets the exponent of the smallest normal, which is then subtracted. */
        const uint32_t subnormal = magnitude < 8u;
        const float least = num_float(subnormal ? (127u - 6u) << 23 : 0u);
        const float x = num_float((magnitude << 20) + ((120u + subnormal) << 23)) - least;
        to[i] = num_float(num_bits(x) | sign) * scale;
    }
}

/* Rounds to bf16; no value may be NaN. */
static inline void convert_round(float *x, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const uint32_t u = num_bits(x[i]);
        x[i] = num_float((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    }
}

/* Converts the FP8 values of a key. Checks all of them for NaN first, since groups are short. */
static inline void convert_fp8(float *to, const struct kv_layout *layout, const struct cpu_key *key)
{
    const int32_t span = layout->group ? layout->group : layout->nope;
    const bool any_nan = convert_any_nan(key->token, layout->nope);
    for (int32_t group = 0, i = 0; i < layout->nope; group++, i += span) {
        float scale;
        if (layout->scale == KV_SCALE_UE8M0)
            scale = num_from_ue8m0(key->scales[group]);
        else
            memcpy(&scale, key->scales + 4 * group, sizeof scale);
        const uint32_t bits = num_bits(scale), exponent = bits >> 23 & 0xffu;
        const uint8_t *from = key->token + i;
        if (exponent < 32u || exponent > 222u || (any_nan && convert_any_nan(from, span))) {
            for (int32_t k = 0; k < span; k++)
                to[i + k] = num_from_bf16(num_to_bf16(num_from_e4m3(from[k]) * scale));
            continue;
        }
        convert_e4m3(to + i, from, span, scale);
        if (bits & 0x7fffffu) convert_round(to + i, span);
    }
}

/* Converts 64 FP4 values, in 32 bytes, times the scales of their groups of 16. The lanes of a vector are
 * shifted by multiples of four bits, so that each lane has its code in its lowest bits, which index a table
 * of magnitudes, or of values, in a register. */
static inline void convert_e2m1(float *to, const uint8_t *from, const float *scales)
{
#if defined(__AVX512F__)
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                  shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512 worth = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                        -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)from));
    for (int i = 0; i < 4; i++) {
        const __m512i place = _mm512_add_epi32(places, _mm512_set1_epi32(2 * i));
        const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(place, all), shifts);
        _mm512_storeu_ps(to + 16 * i,
                         _mm512_mul_ps(_mm512_permutexvar_ps(codes, worth), _mm512_set1_ps(scales[i])));
    }
#elif defined(__AVX2__)
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256 worth = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    for (int i = 0; i < 8; i++) {
        int32_t eight;
        memcpy(&eight, from + 4 * i, sizeof eight);
        const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
        const __m256 magnitude = _mm256_permutevar8x32_ps(worth, codes);
        _mm256_storeu_ps(to + 8 * i, _mm256_mul_ps(_mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign)),
                                                   _mm256_set1_ps(scales[i / 2])));
    }
#else
    static const float worth[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    for (int i = 0; i < 32; i++) {
        const float scale = scales[i / 8];
        to[2 * i] = worth[from[i] & 15] * scale, to[2 * i + 1] = worth[from[i] >> 4] * scale;
    }
#endif
}

/* Converts the FP4 values of a key. Their products with a scale are exact in bf16. A NaN scale must give NaN;
 * convert_e4m3 would convert it to 480. */
static inline void convert_fp4(float *to, const struct cpu_key *key)
{
    enum { VALUES = 512, GROUP = 16, SCALES = VALUES / GROUP };
    _Alignas(64) float scales[SCALES] = {0}; /* all are written; clang-tidy does not see it */
    convert_e4m3(scales, key->scales, SCALES, 1.0f);
    if (convert_any_nan(key->scales, SCALES))
        for (int32_t i = 0; i < SCALES; i++) scales[i] = num_from_e4m3(key->scales[i]);
    for (int32_t i = 0; i < VALUES; i += 64) convert_e2m1(to + i, key->token + i / 2, scales + i / GROUP);
}

/* Converts a key to fp32. */
static inline void convert_key(float *to, const struct cpu_key *key)
{
    const struct kv_layout *layout = key->layout;
    if (layout->element == KV_ELEMENT_E2M1) {
        convert_fp4(to, key);
        return;
    }
    if (layout->element != KV_ELEMENT_E4M3) {
        convert(to, (const uint16_t *)(const void *)key->token, layout->nope,
                layout->element == KV_ELEMENT_BF16);
        return;
    }
    convert_fp8(to, layout, key);
    convert(to + layout->nope, (const uint16_t *)(const void *)(key->token + layout->rope_offset),
            layout->rope, true);
}

#endif
