/* SPDX-License-Identifier: MIT
 *
 * Transforms of a new token's values before cache append quantises them (docs/semantics.md, "Cache append"),
 * defined once for the oracle, CPU and CUDA: RMS norm of the first 512 values, then RoPE of the last 64.
 * Every step is rounded separately and the order of the sum is fixed, so all three compute the same bits. No
 * product may be fused into a multiply-add, except squares, which are exact in double.
 */
#ifndef FMLA_NEW_TOKEN_H
#define FMLA_NEW_TOKEN_H

#include "num.h"

#include <math.h>

enum { NORM_WIDTH = 512, ROPE_WIDTH = 64, ROPE_PAIRS = 32 };

/* Processors differ in the NaN that they generate and in the one that they propagate. On the CPU this
 * replaces every NaN by NVIDIA's: positive, with all other bits set, also after rounding to 16 bits. */
NUM_FN float token_number(float x)
{
#if defined(__CUDA_ARCH__)
    return x;
#else
    return x == x ? x : num_float(0x7fffffffu);
#endif
}

NUM_FN float token_product(float a, float b)
{
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

NUM_FN float token_sum(float a, float b)
{
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

/* ---- RMS norm -------------------------------------------------------------------------------- */

/* Returns the sum of the squares of x[0] to x[3], added in this order. */
NUM_FN double norm_of_four(const float *x)
{
    double sum = (double)x[0] * (double)x[0];
    sum += (double)x[1] * (double)x[1];
    sum += (double)x[2] * (double)x[2];
    return sum + (double)x[3] * (double)x[3];
}

/* Returns the sum of the `count` sums, a power of two: the upper half is added to the lower half until one is
 * left. Changes them. */
NUM_FN double norm_fold(double *sum, int count)
{
    for (int half = count / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* Returns the sum of all squares; `width` is a power of two from 8 to NORM_WIDTH. Every eight neighbours are
 * added as two sums of four, and these sums are folded. A warp's lane holds eight neighbours in a 16-byte
 * register and adds them before lanes exchange sums. */
NUM_FN double norm_sum_of_squares_of(const float *x, int width)
{
    double sum[NORM_WIDTH / 8];
    for (int i = 0; i < width / 8; i++) sum[i] = norm_of_four(x + 8 * i) + norm_of_four(x + 8 * i + 4);
    return norm_fold(sum, width / 8);
}

NUM_FN double norm_sum_of_squares(const float *x)
{
    return norm_sum_of_squares_of(x, NORM_WIDTH);
}

/* Returns the factor of the norm. The quotient by the width, a power of two, is exact. */
NUM_FN float norm_factor_of(double sum_of_squares, int width, float eps)
{
    return (float)(1.0 / sqrt(sum_of_squares / width + (double)eps));
}

NUM_FN float norm_factor(double sum_of_squares, float eps)
{
    return norm_factor_of(sum_of_squares, NORM_WIDTH, eps);
}

/* Returns the normed value before it is rounded to the vectors' type. */
NUM_FN float norm_value(float x, float factor, float weight)
{
    return token_number(token_product(token_product(x, factor), weight));
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* Returns x · cosine + other · sine, before it is rounded to the vectors' type. This is the second value of a
 * pair, where `other` is the first; the first value takes -sine. */
NUM_FN float rope_value(float x, float other, float cosine, float sine)
{
    return token_number(token_sum(token_product(x, cosine), token_product(other, sine)));
}

#endif
