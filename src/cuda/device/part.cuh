/* SPDX-License-Identifier: MIT
 *
 * Every kernel joins the rows of a request's splits in the same way. Part i has a sum of weights s_i relative
 * to 2^max_i (struct part_end), and values o_i, which have been divided by s_i:
 *
 *      max = the largest max_i,   w_i = 2^(max_i - max) s_i,   out = (sum of w_i o_i) / (sum of w_i)
 *
 * The CPU joins its splits in the same way, but stores ln s_i (join_slots in src/cpu/attention.c).
 */
#pragma once

#include "reference.cuh"
#include "result.cuh"
#include "warpgroup.cuh"

/* With LAUNCH_OVERLAP the join may arrive here before the kernel that makes the parts has ended. A plan and its lengths
 * are there already: that kernel waited for them before it let this one start. */
DEVICE void wait_for_parts()
{
#if __CUDA_ARCH__ >= 900
    wait_for_kernels_before();
#endif
}

DEVICE part_end load_part_end(const struct split_params &split, int64_t part_row)
{
    const float2 end = __ldg((const float2 *)split.part_ends + part_row);
    return {end.x, end.y};
}

/* Loads an end past L1: another CTA of this launch may have stored it. */
DEVICE part_end load_fresh_part_end(const part_end *from)
{
    const float2 end = __ldcg((const float2 *)from);
    return {end.x, end.y};
}

/* Returns the reference of the whole row. It is finite even if all maxima are -inf. */
DEVICE float parts_reference(float max)
{
    return fmaxf(max, LEAST_REFERENCE);
}

/* Returns w_i; 0 for a part that saw no key. The product is never fused into a sum of weights, so that
 * join.cuh and second_part.cuh get the same sum of two. */
DEVICE float part_weight(const part_end &end, float reference)
{
    return __fmul_rn(exp2_approx(end.max - reference), end.sum);
}

/* Returns the same end relative to 2^largest, so that the join finds the largest score of the whole row.
 * `largest`, the largest score of the part's row, is at or slightly above the end's maximum. */
DEVICE part_end end_above(const part_end &end, float largest)
{
    return {largest, end.sum == 0.0f ? 0.0f : part_weight(end, largest)};
}
