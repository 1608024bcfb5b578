/* SPDX-License-Identifier: MIT
 *
 * The softmax of the AVX-512 kernels: vertical, a vector of 16 rows at a time, in base 2.
 */
#ifndef FMLA_CPU_AVX512_SOFTMAX_H
#define FMLA_CPU_AVX512_SOFTMAX_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

/* 2^x, relative error below 2^-22; 2^-inf = 0, NaN stays NaN. x = n + f with |f| ≤ 1/2; 2^f by the polynomial of degree 5 that
 * is 1 at 0 and whose largest relative error, 2^-23.4, is least. */
static inline __m512 softmax_exp2(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); /* in this order a NaN in x comes through */
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.326472734e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.671512772e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550733744e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402224208e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931469776e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* One step of the online softmax over s[0 … count)[vectors][16]: turns scores into probabilities against the new
 * maximum (kept in base 2, scaled) and gives what older sums must be multiplied by. Below `fewest` every row sees
 * the key. */
static inline void softmax_step(float *s, int32_t count, int32_t fewest, const int32_t *visible, float scale,
                                int vectors, float *max, float *sum, float *rescale)
{
    const __m512 factor = _mm512_set1_ps(scale), nothing = _mm512_set1_ps(-INFINITY);
    for (int v = 0; v < vectors; v++) {
        float *at = s + v * 16;
        const int64_t stride = (int64_t)vectors * 16;
        const __m512i sees = _mm512_loadu_si512(visible + v * 16);
        const __m512 old = _mm512_load_ps(max + v * 16);
        __m512 top = old;
        for (int32_t t = 0; t < count; t++) {
            __m512 x = _mm512_mul_ps(_mm512_load_ps(at + t * stride), factor);
            if (t >= fewest)
                x = _mm512_mask_mov_ps(nothing, _mm512_cmpgt_epi32_mask(sees, _mm512_set1_epi32(t)), x);
            _mm512_store_ps(at + t * stride, x);
            top = _mm512_max_ps(
                x, top); /* in this order a NaN does not become the maximum; it reaches the sum */
        }
        const __mmask16 none = _mm512_cmp_ps_mask(top, nothing, _CMP_EQ_OQ); /* keeps 2^(-inf - base) at 0 */
        const __m512 base = _mm512_mask_mov_ps(top, none, _mm512_setzero_ps());
        __m512 total = _mm512_setzero_ps();
        for (int32_t t = 0; t < count; t++) {
            const __m512 e = softmax_exp2(_mm512_sub_ps(_mm512_load_ps(at + t * stride), base));
            _mm512_store_ps(at + t * stride, e);
            total = _mm512_add_ps(total, e);
        }
        const __m512 older = softmax_exp2(_mm512_sub_ps(old, base));
        _mm512_store_ps(rescale + v * 16, older);
        _mm512_store_ps(max + v * 16, top);
        _mm512_store_ps(sum + v * 16, _mm512_fmadd_ps(_mm512_load_ps(sum + v * 16), older, total));
    }
}

/* p[j][row] = (s[2j][row], s[2j + 1][row]) as bf16, for `count` keys; a last key without a partner gets 0. */
static inline void softmax_to_bf16(uint32_t *p, const float *s, int32_t count, int vectors)
{
    static const uint16_t side_by_side[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const int64_t stride = (int64_t)vectors * 16;
    const __m512i order = _mm512_loadu_si512(side_by_side);
    for (int32_t t = 0; t < count; t += 2)
        for (int v = 0; v < vectors; v++) {
            const float *at = s + t * stride + v * 16;
            const __m512 second = t + 1 < count ? _mm512_load_ps(at + stride) : _mm512_setzero_ps();
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, _mm512_load_ps(at));
            _mm512_store_si512(p + (t / 2 * stride + v * 16), _mm512_permutexvar_epi16(order, both));
        }
}

#endif
