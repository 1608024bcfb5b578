/* SPDX-License-Identifier: MIT
 *
 * Softmax of a side: masks, references, weights.
 */
#pragma once

#include "../latent/softmax.cuh"
#include "layout.cuh"

#include <float.h>

namespace dense_decode {

/* Reference of a row without a visible key so far, in units of unscaled scores: LEAST_REFERENCE would
 * overflow. */
static constexpr float LEAST_SCORE = -1e30f;

/* A thread's state of its two rows. */
struct RowState {
    float reference[2]; /* in units of unscaled scores */
    float sum[2];       /* over this thread's share of the side's blocks */
    float limit[2];     /* a score above it moves the references of the warp's rows */

    DEVICE void set_limits(float scale_log2)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            limit[i] = fmaf(slack_of(sum[i]), reciprocal_approx(scale_log2), reference[i]);
    }
};

/* Moves the reference and rescales the sums and O. */
DEVICE void move_reference(RowState &state, const float (&to)[2], float (&left)[64], float (&right)[64],
                           float scale_log2)
{
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        factor[i] = exp2_approx((state.reference[i] - to[i]) * scale_log2);
        state.reference[i] = to[i], state.sum[i] *= factor[i];
    }
    rescale(left, factor), rescale(right, factor);
}

/* Masks the scores of keys that are not visible to a row. */
DEVICE void mask_scores(float (&s)[32], const struct dense_decode_params &p, const Task &task, int first_key,
                        int row)
{
    int limit[2];
#pragma unroll
    for (int i = 0; i < 2; i++) limit[i] = min(task.end, visible_end(p, task, row + 8 * i)) - first_key;
#pragma unroll
    for (int e = 0; e < 32; e++)
        if (wgmma_d_column((int)threadIdx.x % 32, e) >= limit[e / 2 % 2]) s[e] = -INFINITY;
}

/* P = exp2((S - reference) · scale): kept as A fragments, and written to shared memory for the other side. */
template <typename Element>
DEVICE void exponentials(const float (&s)[32], uint32_t (&a)[4][4], uint32_t p_line, float scale_log2,
                         RowState &state)
{
    /* Clamped to stay finite however large the scale: for a row without a visible key so far, -inf + inf
     * would be NaN. */
    const float shift[2] = {fminf(-state.reference[0] * scale_log2, FLT_MAX),
                            fminf(-state.reference[1] * scale_log2, FLT_MAX)};
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int e = 8 * k + 2 * j;
            const float low = exp2_approx(fmaf(s[e], scale_log2, shift[j % 2])),
                        high = exp2_approx(fmaf(s[e + 1], scale_log2, shift[j % 2]));
            state.sum[j % 2] += low + high;
            a[k][j] = Element::pack(low, high);
        }
        store_weights(p_line, k, lane, a[k]);
    }
}

} // namespace dense_decode
