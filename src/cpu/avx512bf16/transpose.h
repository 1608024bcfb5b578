/* SPDX-License-Identifier: MIT
 *
 * Converts between rows as they lie in memory and lanes: transposes 16 rows of 16 numbers of 32 bits in
 * registers.
 */
#ifndef FMLA_CPU_AVX512BF16_TRANSPOSE_H
#define FMLA_CPU_AVX512BF16_TRANSPOSE_H

#include "products.h"

/* Transposes: r[i][j] becomes r[j][i]. */
INLINE void transpose(__m512i r[16])
{
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { /* interleave pairs of rows */
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4;
         i++) { /* fours: r[4 i + n] holds numbers n, 4 + n, 8 + n and 12 + n of rows 4 i … 4 i + 3 */
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) { /* quarters of the four registers with numbers n, 4 + n, 8 + n, 12 + n */
        const __m512i low = _mm512_shuffle_i32x4(r[n], r[4 + n], 0x88),
                      high = _mm512_shuffle_i32x4(r[n], r[4 + n], 0xdd),
                      low2 = _mm512_shuffle_i32x4(r[8 + n], r[12 + n], 0x88),
                      high2 = _mm512_shuffle_i32x4(r[8 + n], r[12 + n], 0xdd);
        t[n] = _mm512_shuffle_i32x4(low, low2, 0x88);
        t[8 + n] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        t[4 + n] = _mm512_shuffle_i32x4(high, high2, 0x88);
        t[12 + n] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* Packs `count` vectors of bf16, up to 16, side by side as pairs: to[i · lanes + l] = (from[l][2 i],
 * from[l][2 i + 1]). Lanes without a vector get zeros. `width` is a multiple of 32. */
static inline void pack_pairs(uint32_t *to, const uint16_t *const *from, int32_t count, int64_t width,
                              int64_t lanes)
{
    for (int64_t d = 0; d < width; d += 2 * VECTOR) {
        __m512i r[VECTOR];
#pragma GCC unroll 16
        for (int l = 0; l < VECTOR; l++)
            r[l] = l < count ? _mm512_loadu_si512(from[l] + d) : _mm512_setzero_si512();
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < VECTOR; i++) _mm512_store_si512(to + (d / 2 + i) * lanes, r[i]);
    }
}

/* Unpacks the first `count` lanes of a vector into rows: to[l · width + d] = from[d · lanes + l] · factor[l],
 * and 0 for lanes outside of the mask `some`. `width` is a multiple of 16. */
static inline void unpack_rows(float *to, const float *from, int32_t count, int64_t width, int64_t lanes,
                               __m512 factor, __mmask16 some)
{
    for (int64_t d = 0; d < width; d += VECTOR) {
        __m512i r[VECTOR];
#pragma GCC unroll 16
        for (int i = 0; i < VECTOR; i++)
            r[i] = (__m512i)_mm512_maskz_mul_ps(some, _mm512_load_ps(from + (d + i) * lanes), factor);
        transpose(r);
#pragma GCC unroll 16
        for (int l = 0; l < VECTOR; l++)
            if (l < count) _mm512_storeu_si512(to + l * width + d, r[l]);
    }
}

#endif
