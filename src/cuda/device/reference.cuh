/* SPDX-License-Identifier: MIT
 *
 * References of rows: a weight is 2^(score - reference). Scores are scaled and in base 2.
 *
 *      kernel                                   references rise when                        of
 *      Hopper: dense decode                     a score of the warp is above by slack_of    the warp's rows
 *      Hopper: sparse prefill over bf16         the same                                    the warp's rows
 *      Hopper: sparse decode, prefill of FP8    a score of the CTA is above by the slack    all rows
 *      Hopper: sparse decode of 16 heads        a score is above                            its row
 *      Hopper: dense decode over FP8            a weight would leave the range of fp16      the warp's rows
 *      portable latent attention                a score of the CTA is above by the slack    rows it is above
 *      MHA                                      weights sum to more than MOST_WEIGHT        their row
 *      Hopper: MHA                              also if one outweighs all before            its row
 */
#pragma once

#include "kernel.cuh"
#include "result.cuh"

/* Latent attention: a reference is raised only when it falls behind the row's maximum by more than this. P
 * then stays below 2^8, which 16 bits hold as precisely as 1, and O is rarely rescaled. FP8 dense decode on
 * Hopper has limits of its own, because its P is fp16. */
static constexpr float REFERENCE_SLACK = 8.0f;

/* Hopper's dense decode and sparse prefill have less slack as long as a weight below it could outweigh its row: P rounds
 * every weight but 1, and then the result too. UNKNOWN_SLACK: in a row's first block of a side. */
static constexpr float LEAST_SLACK = 1.0f, UNKNOWN_SLACK = 4.0f;

/* Returns the slack of a row whose weights so far sum to four times `sum`, the sum of one of its four threads. */
DEVICE float slack_of(float sum)
{
    return sum == 0.0f ? UNKNOWN_SLACK : fminf(fmaxf(log2_approx(4.0f * sum), LEAST_SLACK), REFERENCE_SLACK);
}

/* The reference of a row that has seen no key: half of the finite range, so that no difference of two
 * references overflows. */
static constexpr float LEAST_REFERENCE = -1.7e38f;

/* References beyond this lose so much in rounding that the weights would show it, unless the scores relative
 * to them are rounded alike. */
static constexpr float CAREFUL_REFERENCE = 0x1p27f;

/* MHA moves references by the weights instead: when a thread's weights of a row in one block sum to more than
 * this, far below the fp16 maximum. */
static constexpr float MOST_WEIGHT = 0x1p12f;

/* MHA: beyond this the rounding error of a reference, which a fused multiply-add leaves in every exponent of
 * the row, is no longer a small power of two. The products are then rounded, as the reference was, before it
 * is subtracted. */
static constexpr float MOST_FUSED = 0x1p20f;

/* Also true of NaN, -inf and LEAST_REFERENCE. */
DEVICE bool is_extreme(float reference)
{
    return !(fabsf(reference) <= MOST_FUSED);
}

/* Multiplies scores by the scale and rounds; the product is never fused into a multiply-add. */
DEVICE void scale_scores(float (&s)[32], float scale)
{
#pragma unroll
    for (int e = 0; e < 32; e++) s[e] = __fmul_rn(s[e], scale);
}
