/* SPDX-License-Identifier: MIT
 *
 * The softmax of the AVX-512 BF16 and AMX kernels: vertical, a vector of 16 rows at a time, in base 2.
 */
#ifndef FMLA_CPU_AVX512BF16_SOFTMAX_H
#define FMLA_CPU_AVX512BF16_SOFTMAX_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Returns 2^x with a relative error below 2^-22; 2^-inf = 0, NaN stays NaN. x = n + f with 0 ≤ f ≤ 1. 2^f is
 * the polynomial of degree 5 that is 1 at 0 and whose largest relative error, 2^-23.5, is smallest; scalef
 * takes n from x itself. */
static inline __m512 softmax_exp2(__m512 x)
{
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_set1_ps(1.867130166e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.017029777e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.579991266e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.401644439e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931512952e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

/* Updates max and sum of a vector of rows by one more block, in base 2, and writes the factors for older sums
 * of O to `rescale`: `top` is the largest score now, and the weights of the block, relative to `base`, add up
 * to `total`. */
static inline void softmax_sum_up(float *max, float *sum, float *rescale, __m512 top, __m512 base,
                                  __m512 total)
{
    const __m512 older = softmax_exp2(_mm512_sub_ps(_mm512_load_ps(max), base));
    _mm512_store_ps(rescale, older);
    _mm512_store_ps(max, top);
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), older, total));
}

/* Returns the reference of weights: the largest score, or 0 where that is -inf, which keeps 2^(-inf - base)
 * at 0. */
static inline __m512 softmax_base(__m512 top)
{
    const __mmask16 none = _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(top, none, _mm512_setzero_ps());
}

/* Returns two vectors of rows as pairs of bf16, the first vector in the lower halves. */
static inline __m512i softmax_pairs(__m512 first, __m512 second)
{
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* One step of the online softmax over s[0 … count)[vectors][16]: turns scores into probabilities relative to
 * the new maximum (in base 2, scaled) and writes to `rescale` the factors for older sums. Every row sees the
 * keys below `fewest`; vector v has counts[v] scores. */
static inline void softmax_step(float *s, const int32_t *counts, int32_t fewest, const int32_t *visible,
                                float scale, int vectors, float *max, float *sum, float *rescale)
{
    const __m512 factor = _mm512_set1_ps(scale), nothing = _mm512_set1_ps(-INFINITY);
    for (int v = 0; v < vectors; v++) {
        float *at = s + v * 16;
        const int64_t stride = (int64_t)vectors * 16;
        const int32_t count = counts[v];
        const __m512i sees = _mm512_loadu_si512(visible + v * 16);
        __m512 top = _mm512_load_ps(max + v * 16);
        for (int32_t t = 0; t < count; t++) {
            __m512 x = _mm512_mul_ps(_mm512_load_ps(at + t * stride), factor);
            if (t >= fewest)
                x = _mm512_mask_mov_ps(nothing, _mm512_cmpgt_epi32_mask(sees, _mm512_set1_epi32(t)), x);
            _mm512_store_ps(at + t * stride, x);
            top = _mm512_max_ps(
                x, top); /* in this order a NaN does not become the maximum; it reaches the sum */
        }
        const __m512 base = softmax_base(top);
        __m512 total = _mm512_setzero_ps();
        for (int32_t t = 0; t < count; t++) {
            const __m512 e = softmax_exp2(_mm512_sub_ps(_mm512_load_ps(at + t * stride), base));
            _mm512_store_ps(at + t * stride, e);
            total = _mm512_add_ps(total, e);
        }
        softmax_sum_up(max + v * 16, sum + v * 16, rescale + v * 16, top, base, total);
    }
}

/* p[j][row] = (s[2j][row], s[2j + 1][row]) as bf16, for `count` keys; a last key without a partner is paired
 * with 0. */
static inline void softmax_to_bf16(uint32_t *p, const float *s, int32_t count, int vectors)
{
    const int64_t stride = (int64_t)vectors * 16;
    for (int32_t t = 0; t < count; t += 2)
        for (int v = 0; v < vectors; v++) {
            const float *at = s + t * stride + v * 16;
            const __m512 second = t + 1 < count ? _mm512_load_ps(at + stride) : _mm512_setzero_ps();
            _mm512_store_si512(p + (t / 2 * stride + v * 16), softmax_pairs(_mm512_load_ps(at), second));
        }
}

/* The same step for an even number of keys that every row sees, with the probabilities as pairs of bf16;
 * neither scaled scores nor fp32 probabilities go through memory. `largest` holds the largest scores per row,
 * and p may alias s. The products are not rounded before the base is subtracted, so the largest may exceed it
 * by half a unit in the last place; this path therefore takes only small bases. Returns false, with nothing
 * done, where a base is large, `scale` is not positive (the largest score is then not the largest product) or
 * `count` is odd. */
static inline bool softmax_step_to_bf16(uint32_t *p, const float *s, const __m512 *largest, int32_t count,
                                        float scale, int vectors, float *max, float *sum, float *rescale)
{
    const __m512 factor = _mm512_set1_ps(scale), most = _mm512_set1_ps(8192.0f);
    const int64_t stride = (int64_t)vectors * 16;
    __m512 tops[4];
    __mmask16 large = 0;
    if (!(scale > 0.0f) || count % 2) return false;
    for (int v = 0; v < vectors; v++) {
        tops[v] = _mm512_max_ps(_mm512_mul_ps(largest[v], factor), _mm512_load_ps(max + v * 16));
        large |= _mm512_cmp_ps_mask(_mm512_abs_ps(softmax_base(tops[v])), most, _CMP_NLE_UQ);
    }
    if (large) return false;
    for (int v = 0; v < vectors; v++) {
        const float *at = s + v * 16;
        const __m512 base = softmax_base(tops[v]);
        __m512 total = _mm512_setzero_ps();
        for (int32_t t = 0; t < count; t += 2) {
            const __m512 a = softmax_exp2(_mm512_fmsub_ps(_mm512_load_ps(at + t * stride), factor, base));
            const __m512 b =
                softmax_exp2(_mm512_fmsub_ps(_mm512_load_ps(at + (t + 1) * stride), factor, base));
            _mm512_store_si512(p + (t / 2 * stride + v * 16), softmax_pairs(a, b));
            total = _mm512_add_ps(total, _mm512_add_ps(a, b));
        }
        softmax_sum_up(max + v * 16, sum + v * 16, rescale + v * 16, tops[v], base, total);
    }
    return true;
}

#endif
