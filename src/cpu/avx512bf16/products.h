/* SPDX-License-Identifier: MIT
 *
 * The products of the AVX-512 BF16 kernels, by vdpbf16ps, which multiplies pairs of bf16 and adds both
 * products to an fp32 lane.
 *
 *   scores   S[t][rows] += (q[2i], q[2i+1])[rows] · (k[t][2i], k[t][2i+1])   pairs along d, as in a key
 *   values   O[d][rows] += (p[2j], p[2j+1])[rows] · (v[2j][d], v[2j+1][d])   pairs along t: interleaved
 */
#ifndef FMLA_CPU_AVX512BF16_PRODUCTS_H
#define FMLA_CPU_AVX512BF16_PRODUCTS_H

#include "../tile.h"

#include <immintrin.h>
#include <string.h>

enum { VECTOR = 16, VECTORS = PLAN_ROW_TILE / VECTOR };
enum { BLOCK = 64, PAIRS = BLOCK / 2, GROUP = 32 };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t pair_at(const uint16_t *at)
{
    uint32_t pair;
    memcpy(&pair, at, sizeof pair);
    return pair;
}

INLINE __m512bh load_pairs(const uint32_t *at)
{
    return (__m512bh)_mm512_load_si512(at);
}

/* ---- Causal masks ---------------------------------------------------------------------------- */

/* The keys in [0, edge[VECTORS]) that each of VECTORS vectors of rows takes under a causal mask: keys
 * [edge[n], edge[n + 1]) go to the vectors from n on or, with `from_below`, to vectors 0 … n. Edges below the
 * last are multiples of STEP. */
enum { STEP = 4 };

struct stairs {
    bool from_below;
    int32_t edge[VECTORS + 1];
};

INLINE int stairs_first(bool from_below, int n)
{
    return from_below ? 0 : n;
}

INLINE int stairs_after(bool from_below, int n)
{
    return from_below ? n + 1 : VECTORS;
}

/* Returns the keys [begin, end) that vector `v` takes. */
static inline void stairs_of_vector(const struct stairs *stairs, int v, int32_t *begin, int32_t *end)
{
    *begin = stairs->from_below ? stairs->edge[v] : 0;
    *end = stairs->from_below ? stairs->edge[VECTORS] : stairs->edge[v + 1];
}

/* ---- Scores --------------------------------------------------------------------------------- */

/* Computes the scores of `count` keys for vectors first … after - 1 of `vectors` vectors of rows; these four
 * are compile-time constants. */
INLINE void score_tile(float *s, __m512 *top, const uint16_t *const *keys, const uint32_t *q, int64_t pairs,
                       const int first, const int after, const int vectors, const int count)
{
    __m512 sum[12][VECTORS];
#pragma GCC unroll 12
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int v = first; v < after; v++) sum[t][v] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh x[VECTORS];
#pragma GCC unroll 4
        for (int v = first; v < after; v++) x[v] = load_pairs(q + (i * vectors + v) * VECTOR);
#pragma GCC unroll 12
        for (int t = 0; t < count; t++) {
            const __m512bh k = (__m512bh)_mm512_set1_epi32((int)pair_at(keys[t] + 2 * i));
#pragma GCC unroll 4
            for (int v = first; v < after; v++) sum[t][v] = _mm512_dpbf16_ps(sum[t][v], x[v], k);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int v = first; v < after; v++) {
            _mm512_store_ps(s + (t * vectors + v) * VECTOR, sum[t][v]);
            if (top) top[v] = _mm512_max_ps(sum[t][v], top[v]);
        }
}

/* Computes s[t][row] for `count` keys and, where `top` is not NULL (compile-time), their maximum per row,
 * ignoring NaN. */
INLINE void scores(float *s, __m512 *top, const uint16_t *const *keys, const uint32_t *q, int32_t count,
                   int64_t pairs, const int vectors, const int at_once)
{
    int32_t t = 0;
    for (int v = 0; top && v < vectors; v++) top[v] = _mm512_set1_ps(-INFINITY);
    for (; t + at_once <= count; t += at_once)
        score_tile(s + (int64_t)t * vectors * VECTOR, top, keys + t, q, pairs, 0, vectors, vectors, at_once);
    for (; t < count; t++)
        score_tile(s + (int64_t)t * vectors * VECTOR, top, keys + t, q, pairs, 0, vectors, vectors, 1);
}

INLINE void scores_between(float *s, const uint16_t *const *keys, const uint32_t *q, int32_t from, int32_t to,
                           int64_t pairs, const int first, const int after)
{
    int32_t t = from;
    for (; t + STEP <= to; t += STEP)
        score_tile(s + t * VECTORS * VECTOR, NULL, keys + t, q, pairs, first, after, VECTORS, STEP);
    for (; t < to; t++)
        score_tile(s + t * VECTORS * VECTOR, NULL, keys + t, q, pairs, first, after, VECTORS, 1);
}

/* Computes s[t][row] for the vectors of rows and keys that `stairs` combines. */
static inline void scores_of_stairs(float *s, const uint16_t *const *keys, const uint32_t *q,
                                    const struct stairs *stairs, int64_t pairs)
{
    if (stairs->from_below) {
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++)
            scores_between(s, keys, q, stairs->edge[n], stairs->edge[n + 1], pairs, stairs_first(true, n),
                           stairs_after(true, n));
    } else {
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++)
            scores_between(s, keys, q, stairs->edge[n], stairs->edge[n + 1], pairs, stairs_first(false, n),
                           stairs_after(false, n));
    }
}

/* ---- Values --------------------------------------------------------------------------------- */

/* Interleave 32 numbers of two keys: the first function returns the pairs of the first 16, the second those
 * of the others. */
INLINE __m512i pair_first(__m512i x, __m512i y)
{
    static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_permutex2var_epi16(x, _mm512_loadu_si512(order), y);
}

INLINE __m512i pair_second(__m512i x, __m512i y)
{
    static const uint16_t order[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(x, _mm512_loadu_si512(order), y);
}

/* Interleaves the values of two keys each: values[group][pair][d in group] = (v[2 pair][d], v[2 pair +
 * 1][d]). A last key without a partner is paired with zeros. */
static inline void interleave(uint32_t *values, const uint16_t *const *from, int32_t count, int64_t d_v)
{
    for (int32_t j = 0; 2 * j < count; j++) {
        const uint16_t *a = from[2 * j], *b = 2 * j + 1 < count ? from[2 * j + 1] : NULL;
        for (int64_t d = 0; d < d_v; d += GROUP) {
            const __m512i x = _mm512_loadu_si512(a + d),
                          y = b ? _mm512_loadu_si512(b + d) : _mm512_setzero_si512();
            uint32_t *to = values + (d / GROUP * PAIRS + j) * GROUP;
            _mm512_store_si512(to, pair_first(x, y));
            _mm512_store_si512(to + VECTOR, pair_second(x, y));
        }
    }
}

INLINE void load_values(__m512 sum[16][VECTORS], const float *o, const float *rescale, const int vectors,
                        const int count)
{
#pragma GCC unroll 16
    for (int d = 0; d < count; d++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[d][v] = _mm512_mul_ps(_mm512_load_ps(o + (d * vectors + v) * VECTOR),
                                      _mm512_load_ps(rescale + v * VECTOR));
}

INLINE void store_values(float *o, __m512 sum[16][VECTORS], const int vectors, const int count)
{
#pragma GCC unroll 16
    for (int d = 0; d < count; d++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) _mm512_store_ps(o + (d * vectors + v) * VECTOR, sum[d][v]);
}

/* Adds the products of pairs [from, to) to `count` values of vectors first … after - 1. */
INLINE void add_pairs(__m512 sum[16][VECTORS], const uint32_t *values, const uint32_t *p, int32_t from,
                      int32_t to, const int first, const int after, const int vectors, const int count)
{
#pragma GCC unroll 4
    for (int32_t j = from; j < to; j++) {
        __m512bh x[VECTORS];
#pragma GCC unroll 4
        for (int v = first; v < after; v++) x[v] = load_pairs(p + (j * vectors + v) * VECTOR);
#pragma GCC unroll 16
        for (int d = 0; d < count; d++) {
            const __m512bh y = (__m512bh)_mm512_set1_epi32((int)values[j * GROUP + d]);
#pragma GCC unroll 4
            for (int v = first; v < after; v++) sum[d][v] = _mm512_dpbf16_ps(sum[d][v], x[v], y);
        }
    }
}

/* o[d][row] = o[d][row] · rescale[row] + Σ_t v[t][d] · p[t][row], for `width` numbers d, over `pairs` pairs
 * of keys that every row sees. */
INLINE void add_values(float *o, const uint32_t *values, int64_t width, const uint32_t *p,
                       const float *rescale, int32_t pairs, struct tile_ahead *ahead, const int vectors,
                       const int at_once)
{
    for (int64_t d = 0; d < width; d += at_once) {
        tile_bring(ahead, at_once);
        __m512 sum[16][VECTORS];
        load_values(sum, o + d * vectors * VECTOR, rescale, vectors, at_once);
        add_pairs(sum, values + d / GROUP * PAIRS * GROUP + d % GROUP, p, 0, pairs, 0, vectors, vectors,
                  at_once);
        store_values(o + d * vectors * VECTOR, sum, vectors, at_once);
    }
}

INLINE void add_values_of_stairs_by(const bool from_below, float *o, const uint32_t *values, int64_t width,
                                    const uint32_t *p, const float *rescale, const int32_t *edge,
                                    struct tile_ahead *ahead)
{
    for (int64_t d = 0; d < width; d += STEP) {
        tile_bring(ahead, STEP);
        __m512 sum[16][VECTORS];
        load_values(sum, o + d * VECTORS * VECTOR, rescale, VECTORS, STEP);
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++)
            add_pairs(sum, values + d / GROUP * PAIRS * GROUP + d % GROUP, p, (edge[n] + 1) / 2,
                      (edge[n + 1] + 1) / 2, stairs_first(from_below, n), stairs_after(from_below, n),
                      VECTORS, STEP);
        store_values(o + d * VECTORS * VECTOR, sum, VECTORS, STEP);
    }
}

/* The same for the vectors of rows and keys that `stairs` combines. */
static inline void add_values_of_stairs(float *o, const uint32_t *values, int64_t width, const uint32_t *p,
                                        const float *rescale, const struct stairs *stairs,
                                        struct tile_ahead *ahead)
{
    if (stairs->from_below)
        add_values_of_stairs_by(true, o, values, width, p, rescale, stairs->edge, ahead);
    else
        add_values_of_stairs_by(false, o, values, width, p, rescale, stairs->edge, ahead);
}

/* Returns whether every value of keys [from, to) is finite. */
static inline bool are_finite(const uint16_t *const *values, int32_t from, int32_t to, int64_t d_v)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 infinite = 0;
    for (int32_t t = from; t < to; t++)
        for (int64_t d = 0; d < d_v; d += 32) {
            const __m512i x = _mm512_and_si512(_mm512_loadu_si512(values[t] + d), exponent);
            infinite |= _mm512_cmpeq_epi16_mask(x, exponent);
        }
    return !infinite;
}

/* Adds the value of one key to the rows that see it. The value holds NaN or infinity, so a weight of 0 would
 * not protect the other rows. */
static inline void add_value_where_seen(float *o, const uint16_t *value, const float *s, int64_t d_v,
                                        const __mmask16 *seen, int vectors)
{
    for (int v = 0; v < vectors; v++) {
        const __mmask16 sees = seen[v];
        const __m512 p = _mm512_load_ps(s + v * VECTOR);
        for (int64_t d = 0; d < d_v; d++) {
            float *to = o + (d * vectors + v) * VECTOR;
            const __m512 y = _mm512_set1_ps(num_from_bf16(value[d]));
            _mm512_store_ps(to, _mm512_mask3_fmadd_ps(p, y, _mm512_load_ps(to), sees));
        }
    }
}

#endif
