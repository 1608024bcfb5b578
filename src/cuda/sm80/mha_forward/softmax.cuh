/* SPDX-License-Identifier: MIT
 *
 * Softmax: masks, references and weights of a block, in the registers of a warp.
 *
 * Weights are relative to a reference: the largest score of the first block with a key that is visible to the
 * row. The maximum of later blocks is not computed. If a thread's weights of a row sum up to more than 2^12,
 * the row's reference moves up by their log2, O is rescaled, and the warp recomputes the scores and the
 * weights of the block. 16 bits hold large weights as precisely as small ones, and the recomputation is rare.
 * A row's bits depend on the row alone: recomputation for another row gives the same bits.
 */
#pragma once

#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace mha_forward {

/* Sets the scores of keys that are not visible to a row to -inf; the block begins at first_key. */
template <typename Layout> DEVICE void MhaForward<Layout>::mask(Scores &s, int first_key) const
{
    const int lane = lane_of_warp(), row = first_row() + lane / 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int bound = visible_keys(p, tile, row + 16 * m + 8 * half) - first_key - 2 * (lane % 4);
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * t + e >= bound) s[m][t][2 * half + e] = -INFINITY;
        }
}

/* Multiplies the sums of a row by `factor`. */
template <typename Layout>
DEVICE void MhaForward<Layout>::rescale(RowState &state, Sums &o, int m, int half, float factor)
{
    state.sum[m][half] *= factor;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) o[m][n][2 * half] *= factor, o[m][n][2 * half + 1] *= factor;
}

template <typename Layout> DEVICE void MhaForward<Layout>::find_careful(RowState &state)
{
    bool careful = false;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        careful |= is_extreme(state.reference[m][0]) || is_extreme(state.reference[m][1]);
    state.careful = __any_sync(~0u, careful);
}

/* Moves extreme references up to the largest scores. */
template <typename Layout>
DEVICE void MhaForward<Layout>::move_references_to_scores(const Scores &s, RowState &state, Sums &o) const
{
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INFINITY;
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
                most = fmaxf(most, fmaxf(s[m][t][2 * half], s[m][t][2 * half + 1]));
            const float highest = __fmul_rn(quad_max(most), p.call.scale_log2),
                        before = state.reference[m][half];
            if (!is_extreme(before) || !(highest > before)) continue;
            state.reference[m][half] = highest;
            if (before > LEAST_REFERENCE) rescale(state, o, m, half, exp2_approx(before - highest));
        }
    find_careful(state);
}

/* Moves references relative to which weights are large, up by the log2 of the weights. Beside infinite
 * weights all earlier sums are negligible: such a row starts over. */
template <typename Layout>
DEVICE void MhaForward<Layout>::move_references_by_weights(const RowSums &sum, RowState &state, Sums &o)
{
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float most = quad_max(sum[m][half]), before = state.reference[m][half];
            if (!(most > MOST_WEIGHT)) continue;
            const bool starts_over = most == INFINITY;
            const float after = starts_over ? LEAST_REFERENCE : before + log2_approx(most);
            state.reference[m][half] = after;
            rescale(state, o, m, half, starts_over ? 0.0f : exp2_approx(before - after));
        }
    find_careful(state);
}

template <typename Layout> DEVICE bool MhaForward<Layout>::needs_rescale(const RowSums &sum)
{
    bool large = false;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) large |= fmaxf(sum[m][0], sum[m][1]) > MOST_WEIGHT;
    return __any_sync(~0u, large);
}

/* Computes exponents, with separate rounding in extreme rows and fused in the other rows of the warp. */
template <typename Layout>
DEVICE void MhaForward<Layout>::make_exponents(Scores &s, const RowState &state) const
{
    const float scale = p.call.scale_log2;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float reference = state.reference[m][half];
            const bool extreme = is_extreme(reference);
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    s[m][t][e] = extreme ? __fmul_rn(s[m][t][e], scale) - reference
                                         : fmaf(s[m][t][e], scale, -reference);
        }
}

/* Computes the weights of the block; exponents are scores times `scale` minus `reference`. */
template <typename Layout>
DEVICE void MhaForward<Layout>::softmax_block(const Scores &s, float scale,
                                              const float (&reference)[ROW_TILES][2], RowSums &sum,
                                              Weights &w)
{
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float low = exp2_approx(fmaf(s[m][t][2 * half], scale, -reference[m][half])),
                            high = exp2_approx(fmaf(s[m][t][2 * half + 1], scale, -reference[m][half]));
                sum[m][half] += low + high;
                w[m][t / 2][t % 2 * 2 + half] = Element::pack(low, high);
            }
}

} // namespace mha_forward
