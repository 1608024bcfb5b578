/* SPDX-License-Identifier: MIT
 *
 * Transforms of a row of the lightning indexer, a key or one head of a query, before it is quantised
 * (indexformat.h), defined once for the oracle, CPU and CUDA: LayerNorm or RMS norm, RoPE of the first or
 * last 64 values, Hadamard transform. A row has d values, 128 or 64; they are bf16 numbers before and after
 * each transform. Every step is rounded separately, as in new_token.h, so a file that includes this must be
 * compiled without contraction to multiply-adds. A NaN that a transform gives is positive and has all its
 * other bits set.
 */
#ifndef FMLA_INDEX_ROW_H
#define FMLA_INDEX_ROW_H

#include "new_token.h"

enum { INDEX_ROW_MOST = 128 };

NUM_FN float row_rounded(float x)
{
    return num_from_bf16(num_to_bf16(x));
}

/* ---- LayerNorm ------------------------------------------------------------------------------- */

/* Returns the sum of x[0] to x[3], added in this order. */
NUM_FN double layer_norm_of_four(const float *x)
{
    double sum = (double)x[0];
    sum += (double)x[1];
    sum += (double)x[2];
    return sum + (double)x[3];
}

/* Returns the square of x's deviation from the mean. It is not exact, so it must not be fused with a sum. */
NUM_FN double layer_norm_square(float x, double mean)
{
    const double deviation = (double)x - mean;
#if defined(__CUDA_ARCH__)
    return __dmul_rn(deviation, deviation);
#else
    return deviation * deviation;
#endif
}

/* Returns the sum of the squared deviations of x[0] to x[3], added in this order. */
NUM_FN double layer_norm_squares_of_four(const float *x, double mean)
{
    double sum = layer_norm_square(x[0], mean);
    sum += layer_norm_square(x[1], mean);
    sum += layer_norm_square(x[2], mean);
    return sum + layer_norm_square(x[3], mean);
}

/* Return the sums of the row, in the order of norm_sum_of_squares. */
NUM_FN double layer_norm_sum(const float *x, int d)
{
    double sum[INDEX_ROW_MOST / 8];
    for (int i = 0; i < d / 8; i++)
        sum[i] = layer_norm_of_four(x + 8 * i) + layer_norm_of_four(x + 8 * i + 4);
    return norm_fold(sum, d / 8);
}

NUM_FN double layer_norm_sum_of_squares(const float *x, int d, double mean)
{
    double sum[INDEX_ROW_MOST / 8];
    for (int i = 0; i < d / 8; i++)
        sum[i] =
            layer_norm_squares_of_four(x + 8 * i, mean) + layer_norm_squares_of_four(x + 8 * i + 4, mean);
    return norm_fold(sum, d / 8);
}

/* Returns the normed value before it is rounded to bf16. */
NUM_FN float layer_norm_value(float x, float mean, float factor, float weight, float bias)
{
    return token_number(token_sum(token_product(token_product(token_sum(x, -mean), factor), weight), bias));
}

/* The mean and the variance, the mean of the squared deviations from it, are in double. The factor is that
 * of RMS norm, with the variance for the mean square; the mean is rounded to fp32 for the values. */
NUM_FN void row_layer_norm(float *x, int d, const float *weight, const float *bias, float eps)
{
    const double mean = layer_norm_sum(x, d) / d;
    const float factor = norm_factor_of(layer_norm_sum_of_squares(x, d, mean), d, eps);
    for (int i = 0; i < d; i++)
        x[i] = row_rounded(layer_norm_value(x[i], (float)mean, factor, weight[i], bias[i]));
}

/* ---- RMS norm -------------------------------------------------------------------------------- */

NUM_FN void row_rms_norm(float *x, int d, const float *weight, float eps)
{
    const float factor = norm_factor_of(norm_sum_of_squares_of(x, d), d, eps);
    for (int i = 0; i < d; i++) x[i] = row_rounded(norm_value(x[i], factor, weight[i]));
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* Rotates the 64 values that begin at x, by a row of the table: 32 cosines, then 32 sines. Pairs are halves
 * (i and 32 + i) or interleaved (2 i and 2 i + 1). */
NUM_FN void row_rope(float *x, const float *table, int halves)
{
    const int step = halves ? 1 : 2, apart = halves ? ROPE_PAIRS : 1;
    for (int i = 0; i < ROPE_PAIRS; i++) {
        const float a = x[step * i], b = x[step * i + apart];
        const float cosine = table[i], sine = table[ROPE_PAIRS + i];
        x[step * i] = row_rounded(rope_value(a, b, cosine, -sine));
        x[step * i + apart] = row_rounded(rope_value(b, a, cosine, sine));
    }
}

/* ---- Hadamard -------------------------------------------------------------------------------- */

/* Returns fp32(1 / √d). */
NUM_FN float hadamard_factor(int d)
{
    return d == 64 ? 0.125f : 0x1.6a09e6p-4f;
}

/* Butterflies of strides 1, 2, … d/2 in fp32: values a and b, a stride apart, become a + b and a - b. */
NUM_FN void row_hadamard(float *x, int d)
{
    for (int stride = 1; stride < d; stride *= 2)
        for (int i = 0; i < d; i += 2 * stride)
            for (int k = i; k < i + stride; k++) {
                const float a = x[k], b = x[k + stride];
                x[k] = token_sum(a, b);
                x[k + stride] = token_sum(a, -b);
            }
    for (int i = 0; i < d; i++) x[i] = row_rounded(token_number(token_product(x[i], hadamard_factor(d))));
}

/* ---- Weights of heads ------------------------------------------------------------------------ */

/* Returns the weight of a query's head: (w · scale) · factor, where scale is that of its FP8 codes, or 1 if
 * they are FP4. */
NUM_FN float index_weight(float w, float scale, float factor)
{
    return token_number(token_product(token_product(w, scale), factor));
}

#endif
