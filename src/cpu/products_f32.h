/* SPDX-License-Identifier: MIT
 *
 * The products of the fp32 kernels, for any vector unit: the compiler's vector arithmetic. A file that includes it says how wide a
 * vector is and how many sums its registers hold, and is compiled with the flags of its instruction set.
 *
 *   LANES              floats of a vector
 *   VECTORS            vectors of rows at a time; a group is LANES · VECTORS = 16 rows
 *   AT_ONCE            keys (in S = K Q) or values (in O += Vᵀ P) at a time: AT_ONCE · VECTORS sums stay in registers
 *   LARGER(x, top)     the instruction for x > top ? x : top, where there is one; a NaN in x is then not taken
 *   SMALLER(x, top)    … and for x < top ? x : top
 *
 *   lanes = rows: the rows of a group stand side by side, so that the softmax has no horizontal step and a cached
 *   value, once loaded, meets all of them by broadcast.
 */
#ifndef FMLA_CPU_PRODUCTS_F32_H
#define FMLA_CPU_PRODUCTS_F32_H

#include "convert.h"
#include "tile.h"

#include <string.h>

enum { GROUP_ROWS = LANES * VECTORS, BLOCK = PLAN_BLOCK };
enum { FEW = AT_ONCE < 4 ? AT_ONCE : 4 /* what is left of AT_ONCE: lone sums wait for each other */ };
_Static_assert(GROUP_ROWS == 16, "a group is 16 rows");

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef int32_t vector_int __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef uint32_t vector_uint __attribute__((vector_size(LANES * sizeof(float)), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vector select(vector_int mask, vector yes, vector no)
{
    return (vector)(((vector_int)yes & mask) | ((vector_int)no & ~mask));
}

#ifndef LARGER
#define LARGER(x, top)  select((vector_int)((x) > (top)), x, top)
#define SMALLER(x, top) select((vector_int)((x) < (top)), x, top)
#endif

/* ---- The two products ----------------------------------------------------------------------- */

/* Vectors of a group that are computed where `rows` rows are left for it: those with a row, but four for three, which are
 * not worth one more copy of the products. The bits of a row do not hang on it. */
static inline int vectors_of(int32_t rows)
{
    /* NOLINTNEXTLINE(bugprone-branch-clone): where VECTORS is 2 */
    const int needed = rows <= LANES ? 1 : rows <= 2 * LANES ? 2 : VECTORS;
    return needed < VECTORS ? needed : VECTORS;
}

/* sum[u][v] += Σ_i a[i · step + u · apart] · x[i][v]: `count` numbers meet `vectors` vectors of a group of rows (both
 * compile-time). Both products are this: scores have step 1 and the keys d_qk apart; values step d_qk and lie side by side. */
INLINE void multiply_add(vector sum[][VECTORS], const float *a, int64_t step, int64_t apart, const float *x,
                         int64_t length, const int count, const int vectors)
{
    for (int64_t i = 0; i < length; i++) {
        const float *const numbers = a + i * step, *const rows = x + i * GROUP_ROWS;
        vector row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = *(const vector *)(rows + v * LANES);
#pragma GCC unroll 16
        for (int u = 0; u < count; u++) {
            /* Once: in the product of a scalar and a vector a sanitizer would check the access for every lane. */
            const float number = numbers[u * apart];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[u][v] += number * row[v];
        }
    }
}

INLINE void score_tile(float *s, float *top, const float *keys, const float *q, int64_t d_qk, const int count,
                       const int vectors)
{
    vector sum[AT_ONCE][VECTORS];
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[u][v] = (vector){0};
    multiply_add(sum, keys, 1, d_qk, q, d_qk, count, vectors);
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(vector *)(s + u * GROUP_ROWS + v * LANES) = sum[u][v];
#pragma GCC unroll 4
    for (int v = 0; v < vectors && top; v++) {
        vector largest = *(const vector *)(top + v * LANES);
#pragma GCC unroll 16
        for (int u = 0; u < count; u++) largest = LARGER(sum[u][v], largest);
        *(vector *)(top + v * LANES) = largest;
    }
}

INLINE void scores_by(const int vectors, float *s, float *top, const float *keys, const float *q,
                      int32_t count, int64_t d_qk)
{
    int32_t t = 0;
    for (; t + AT_ONCE <= count; t += AT_ONCE)
        score_tile(s + t * GROUP_ROWS, top, keys + t * d_qk, q, d_qk, AT_ONCE, vectors);
    for (; t + FEW <= count; t += FEW)
        score_tile(s + t * GROUP_ROWS, top, keys + t * d_qk, q, d_qk, FEW, vectors);
    for (; t + 2 <= count; t += 2) score_tile(s + t * GROUP_ROWS, top, keys + t * d_qk, q, d_qk, 2, vectors);
    for (; t < count; t++) score_tile(s + t * GROUP_ROWS, top, keys + t * d_qk, q, d_qk, 1, vectors);
}

/* s[t][row] = Σ_d keys[t][d] · q[d][row], and where `top` is not NULL, top[row] becomes the largest of them and of itself; a NaN does not. */
static void scores(int vectors, float *s, float *top, const float *keys, const float *q, int32_t count,
                   int64_t d_qk)
{
    /* NOLINTBEGIN(bugprone-branch-clone): branches are the same where VECTORS is 1 or 2 */
    if (VECTORS > 1 && vectors == 1)
        scores_by(1, s, top, keys, q, count, d_qk);
    else if (VECTORS > 2 && vectors == 2)
        scores_by(2, s, top, keys, q, count, d_qk);
    else
        scores_by(VECTORS, s, top, keys, q, count, d_qk);
    /* NOLINTEND(bugprone-branch-clone) */
}

INLINE void value_tile(float *o, const float *values, const float *s, int32_t keys_seen, int64_t step,
                       const float rescale[GROUP_ROWS], const int count, const int vectors)
{
    vector sum[AT_ONCE][VECTORS];
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[u][v] =
                *(const vector *)(o + u * GROUP_ROWS + v * LANES) * *(const vector *)(rescale + v * LANES);
    multiply_add(sum, values, step, 1, s, keys_seen, count, vectors);
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(vector *)(o + u * GROUP_ROWS + v * LANES) = sum[u][v];
}

INLINE void add_values_by(const int vectors, float *o, const float *values, int64_t step, int64_t width,
                          const float *s, int32_t count, const float rescale[GROUP_ROWS],
                          struct tile_ahead *ahead)
{
    int64_t d = 0;
    for (; d + AT_ONCE <= width; d += AT_ONCE) {
        tile_bring(ahead, AT_ONCE);
        value_tile(o + d * GROUP_ROWS, values + d, s, count, step, rescale, AT_ONCE, vectors);
    }
    for (; d + FEW <= width; d += FEW)
        value_tile(o + d * GROUP_ROWS, values + d, s, count, step, rescale, FEW, vectors);
    for (; d < width; d++) value_tile(o + d * GROUP_ROWS, values + d, s, count, step, rescale, 1, vectors);
}

/* o[d][row] = o[d][row] · rescale[row] + Σ_t values[t · step + d] · s[t][row] for `width` numbers d, over keys that every row may
 * meet. */
static void add_values(int vectors, float *o, const float *values, int64_t step, int64_t width,
                       const float *s, int32_t count, const float rescale[GROUP_ROWS],
                       struct tile_ahead *ahead)
{
    /* NOLINTBEGIN(bugprone-branch-clone): as in scores */
    if (VECTORS > 1 && vectors == 1)
        add_values_by(1, o, values, step, width, s, count, rescale, ahead);
    else if (VECTORS > 2 && vectors == 2)
        add_values_by(2, o, values, step, width, s, count, rescale, ahead);
    else
        add_values_by(VECTORS, o, values, step, width, s, count, rescale, ahead);
    /* NOLINTEND(bugprone-branch-clone) */
}

/* Is every one of `width` numbers of vectors [from, to) finite? */
static bool are_finite(const float *values, int64_t step, int32_t from, int32_t to, int64_t width)
{
    uint32_t infinite = 0;
    for (int32_t t = from; t < to; t++)
        for (int64_t d = 0; d < width; d++) {
            const uint32_t exponent = num_bits(values[t * step + d]) << 1 >> 24;
            infinite |= exponent == 255u;
        }
    return !infinite;
}

/* One key that only some rows see and that holds NaN or infinity: the others must not meet it. */
static void add_value_where_seen(float *o, const float *value, const float *s, int64_t width,
                                 const bool sees[GROUP_ROWS], int lanes)
{
    for (int64_t d = 0; d < width; d++)
        for (int l = 0; l < lanes; l++)
            if (sees[l]) o[d * GROUP_ROWS + l] += value[d] * s[l];
}

/* ---- Softmax -------------------------------------------------------------------------------- */

/* 2^x for x below 128; below 2^-126 it is 0, or from -126.5 on as exact as subnormals are, and NaN stays NaN. x = n + f with |f| ≤ 1/2: 2^f by the
 * polynomial of degree 5 that is 1 at 0 and whose largest relative error, 2^-23.4, is least, and 2^n by its exponent bits, which are 0 for
 * the least n. */
INLINE vector exp2_of(vector x)
{
    const vector least = (vector){0} - 127.0f;
    /* Adding it leaves the nearest integer, and the bias of exponents, in the lowest bits. */
    const vector shifter = (vector){0} + (0x1.8p23f + 127.0f);
    x = LARGER(least, x);
    const vector shifted = x + shifter;
    const vector f = x - (shifted - shifter);
    vector y = f * 1.326472734e-3f + 9.671512772e-3f;
    y = y * f + 5.550733744e-2f;
    y = y * f + 2.402224208e-1f;
    y = y * f + 6.931469776e-1f;
    y = y * f + 1.0f;
    return y * (vector)((vector_uint)shifted << 23);
}

#endif
