/* SPDX-License-Identifier: MIT
 *
 * References, relative to which the weights of a row are computed: powers of two, on the scale of scaled
 * scores.
 */
#pragma once

#include "kernel.cuh"

/* A reference is raised only when it falls behind the row's maximum by more than this. P then stays below
 * 2^8, which 16 bits hold as precisely as 1, and O is rarely rescaled. */
static constexpr float REFERENCE_SLACK = 8.0f;

/* The reference of a row that has seen no key: half of the finite range, so that no difference of two
 * references overflows. */
static constexpr float LEAST_REFERENCE = -1.7e38f;

/* References beyond this lose so much in rounding that the weights would show it, unless the scores relative
 * to them are rounded alike. */
static constexpr float CAREFUL_REFERENCE = 0x1p27f;

/* Multiplies scores by the scale and rounds; the product is never fused into a multiply-add. */
DEVICE void scale_scores(float (&s)[32], float scale)
{
#pragma unroll
    for (int e = 0; e < 32; e++) s[e] = __fmul_rn(s[e], scale);
}
