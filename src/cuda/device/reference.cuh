/* SPDX-License-Identifier: MIT
 *
 * References: what weights of a row are relative to. In powers of two, of scaled scores.
 */
#pragma once

#include "kernel.cuh"

/* A reference follows a row's maximum only when it falls behind by more than this: P then stays below 2^8, which 16 bits hold
 * as precisely as 1, and O is seldom rescaled. */
static constexpr float REFERENCE_SLACK = 8.0f;

/* Of a row that saw no key yet: half of what is finite, so that no difference of two references overflows. */
static constexpr float LEAST_REFERENCE = -1.7e38f;

/* References beyond this lose so much when they are rounded that weights would show it, were the scores relative to them not
 * rounded likewise. */
static constexpr float CAREFUL_REFERENCE = 0x1p27f;

/* Scores times the scale, rounded: never part of a fused multiply-add. */
DEVICE void scale_scores(float (&s)[32], float scale)
{
#pragma unroll
    for (int e = 0; e < 32; e++) s[e] = __fmul_rn(s[e], scale);
}
