/* SPDX-License-Identifier: MIT
 *
 * What cache append does to a new token's values before it quantises them (docs/semantics.md, "Cache append"), spelled once for
 * the oracle, CPU and CUDA: RMS norm of the first 512 values, then RoPE of the last 64. Every step is rounded by itself, and the
 * order of the sum is fixed, so that all of them find the same bits; no product may become part of a fused multiply-add, but for
 * squares, which are exact in double.
 */
#ifndef FMLA_NEW_TOKEN_H
#define FMLA_NEW_TOKEN_H

#include "num.h"

#include <math.h>

enum { NORM_WIDTH = 512, ROPE_WIDTH = 64, ROPE_PAIRS = 32 };

/* Every processor has a NaN of its own for what has no value, and passes on another. Here all are the one that NVIDIA's give:
 * positive, with every other bit set, also once it is rounded to 16 bits. */
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

/* The squares of four neighbours, from the first on. */
NUM_FN double norm_of_four(const float *x)
{
    double sum = (double)x[0] * (double)x[0];
    sum += (double)x[1] * (double)x[1];
    sum += (double)x[2] * (double)x[2];
    return sum + (double)x[3] * (double)x[3];
}

/* The sum of all squares: of eight neighbours as two sums of four, and of those 64 sums the upper half onto the lower one until one
 * is left. A lane of a warp has eight neighbours in a register of 16 bytes, and adds what it has before lanes meet. */
NUM_FN double norm_sum_of_squares(const float *x)
{
    double sum[NORM_WIDTH / 8];
    for (int i = 0; i < NORM_WIDTH / 8; i++) sum[i] = norm_of_four(x + 8 * i) + norm_of_four(x + 8 * i + 4);
    for (int half = NORM_WIDTH / 16; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* What values are multiplied by; the quotient by 512 is exact. */
NUM_FN float norm_factor(double sum_of_squares, float eps)
{
    return (float)(1.0 / sqrt(sum_of_squares / NORM_WIDTH + (double)eps));
}

/* Before it is rounded to the vectors' type. */
NUM_FN float norm_value(float x, float factor, float weight)
{
    return token_number(token_product(token_product(x, factor), weight));
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* x · cosine + other · sine, before it is rounded to the vectors' type. Of the second value of a pair (`other` is the first);
 * of the first one with -sine. */
NUM_FN float rope_value(float x, float other, float cosine, float sine)
{
    return token_number(token_sum(token_product(x, cosine), token_product(other, sine)));
}

#endif
