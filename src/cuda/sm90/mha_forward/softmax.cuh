/* SPDX-License-Identifier: MIT
 *
 * Softmax. A row's weights are relative to its reference, one of its earlier scores. No maximum is computed
 * as long as the weights stay small, so in most blocks nothing stands between scores and exponentials. If the
 * weights of a block come out huge, the scores are still in registers: the reference moves to the row's
 * maximum, and the weights are recomputed.
 *
 * A weight other than 1 is rounded to 16 bits in P, and where it outweighs the rest of its row, so is the result. So if a
 * block's weights come out large, more than all before them, what rounding adds to their sum is added to the sum that O is
 * divided by, and cancels. lse comes of the exact sum. All decisions depend on the row alone, so its bits do not depend on
 * the other rows.
 */
#pragma once

#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "../../device/warpgroup.cuh"

namespace mha_forward {

/* Softmax state of a thread's two rows. */
struct RowState {
    float reference[2]; /* -inf: the row has seen no key yet */
    float sum[2];       /* of this thread's weights */
    float others[2]; /* what the sums of the row's other threads were when its last large block was added */
    float rounding
        [2]; /* of this thread's weights in large blocks: what they summed to in 16 bits, less their sum */
    bool has_unseen; /* some row of the warp has seen no key yet */
};

DEVICE RowState initial_row_state()
{
    return {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}, true};
}

/* Sets scores at columns >= the row's bound to -inf. */
template <int N> DEVICE void mask_scores(float (&s)[N], const int (&bound)[2])
{
    const int column = 2 * ((int)fresh_thread() % 4);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (column + (i >> 2) * 8 + (i & 1) >= bound[i >> 1 & 1]) s[i] = -INFINITY;
}

/* Moves the reference of the rows for which `moves` is true to their maximum score, where that is larger.
 * `rescale` receives the factor of earlier sums. */
template <int N>
DEVICE void move_reference(const float (&s)[N], float scale_log2, const bool (&moves)[2], RowState &r,
                           float (&rescale)[2])
{
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < N; i++) most[i >> 1 & 1][i & 1] = fmaxf(most[i >> 1 & 1][i & 1], s[i]);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float highest = quad_max(fmaxf(most[row][0], most[row][1]));
        rescale[row] = 1.0f;
        if (moves[row] && highest > r.reference[row]) {
            rescale[row] = exp2_approx((r.reference[row] - highest) * scale_log2);
            r.reference[row] = highest, r.sum[row] *= rescale[row];
            r.others[row] *= rescale[row], r.rounding[row] *= rescale[row];
        }
    }
}

/* Returns what is subtracted from score · scale_log2: the scaled reference, or 0 if the row has seen no
 * key. */
DEVICE float scaled_reference(const RowState &r, int row, float scale_log2)
{
    return r.reference[row] == -INFINITY ? 0.0f : r.reference[row] * scale_log2;
}

/* Computes the weights of elements FROM to TO - 1 and adds them to `sum`. */
template <int FROM, int TO, int N>
DEVICE void exponentials(const float (&s)[N], float scale_log2, const float (&reference)[2], float *weight,
                         float (&sum)[2])
{
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        weight[i - FROM] = exp2_approx(fmaf(s[i], scale_log2, -reference[i >> 1 & 1]));
        sum[i >> 1 & 1] += weight[i - FROM];
    }
}

/* Makes exponents of scores. In an extreme row the product is rounded before the rounded reference is
 * subtracted. */
template <int N>
DEVICE void exponents_with_care(float (&s)[N], float scale_log2, const float (&references)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float reference = references[i >> 1 & 1];
        s[i] = is_extreme(reference) ? __fsub_rn(__fmul_rn(s[i], scale_log2), reference)
                                     : fmaf(s[i], scale_log2, -reference);
    }
}

/* Computes the weights from FROM on as fragments of A: accumulators already have the layout of A. */
template <typename Element, int FROM, int N>
DEVICE void packed_exponentials(const float (&s)[N], float scale_log2, const float (&reference)[2],
                                uint32_t (&w)[N / 8][4], float (&sum)[2])
{
#pragma unroll
    for (int i = FROM; i < N; i += 2) {
        float pair[2];
        pair[0] = exp2_approx(fmaf(s[i], scale_log2, -reference[i >> 1 & 1]));
        pair[1] = exp2_approx(fmaf(s[i + 1], scale_log2, -reference[i >> 1 & 1]));
        sum[i >> 1 & 1] += pair[0], sum[i >> 1 & 1] += pair[1];
        w[i / 8][i / 2 % 4] = Element::pack(pair[0], pair[1]);
    }
}

/* Returns in `sum` what the 16-bit weights of a block sum to. */
template <typename Element, int STEPS>
DEVICE void sum_of_rounded(const uint32_t (&w)[STEPS][4], float (&sum)[2])
{
    float low[2] = {0.0f, 0.0f}, high[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++)
        low[i & 1] += Element::low(w[i / 4][i % 4]), high[i & 1] += Element::high(w[i / 4][i % 4]);
    sum[0] = low[0] + high[0], sum[1] = low[1] + high[1];
}

/* Returns whether `mine` is true in any of the four lanes of a row. */
DEVICE bool any_of_quad(bool mine)
{
    return __ballot_sync(~0u, mine) >> (threadIdx.x & 28) & 15;
}

} // namespace mha_forward
