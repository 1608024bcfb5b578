/* SPDX-License-Identifier: MIT
 *
 * Softmax. A row's weights are relative to its reference, one of its earlier scores. In most blocks no maximum is
 * computed, so nothing stands between scores and exponentials. Where the weights of a block outgrow a row, the scores
 * are still in registers: the reference moves to their maximum if need be, and the weights are computed again.
 *
 * Need be, because a weight that is not 1 is rounded to 16 bits in P; where it outweighs the rest of its row, so is the
 * result. All decisions depend on the row alone, so its bits do not depend on the other rows.
 */
#pragma once

#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "../../device/warpgroup.cuh"

namespace mha_forward {

/* A block outgrows a row if a thread's weights of it sum to more than MOST_WEIGHT, or than this times all before. */
static constexpr float MOST_GROWTH = 1.5f;

/* A weight larger than this moves the reference of a row that is outgrown, whatever came before: where a thread's sum
 * exceeds MOST_WEIGHT, one of its 32 weights is larger. */
static constexpr float MOST_LAGGING_WEIGHT = MOST_WEIGHT / 64;

/* Softmax state of a thread's two rows. */
struct RowState {
    float reference[2]; /* -inf: the row has seen no key yet */
    float sum[2];       /* of this thread's weights */
    float others[2];    /* what the row's other threads had summed when a block last outgrew the row */
    bool has_unseen;    /* some row of the warp has seen no key yet */
};

DEVICE RowState initial_row_state()
{
    return {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, true};
}

/* Sets scores at columns >= the row's bound to -inf. */
template <int N> DEVICE void mask_scores(float (&s)[N], const int (&bound)[2])
{
    const int column = 2 * ((int)fresh_thread() % 4);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (column + (i >> 2) * 8 + (i & 1) >= bound[i >> 1 & 1]) s[i] = -INFINITY;
}

/* Returns in `highest` the largest score of the thread's rows. */
template <int N> DEVICE void row_maxima(const float (&s)[N], float (&highest)[2])
{
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < N; i++) most[i >> 1 & 1][i & 1] = fmaxf(most[i >> 1 & 1][i & 1], s[i]);
#pragma unroll
    for (int row = 0; row < 2; row++) highest[row] = quad_max(fmaxf(most[row][0], most[row][1]));
}

/* Moves the reference of the rows for which `moves` is true up to `highest`. `rescale` receives the factor of earlier
 * sums. */
DEVICE void move_reference(const float (&highest)[2], float scale_log2, const bool (&moves)[2], RowState &r,
                           float (&rescale)[2])
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        rescale[row] = 1.0f;
        if (moves[row]) {
            rescale[row] = exp2_approx((r.reference[row] - highest[row]) * scale_log2);
            r.reference[row] = highest[row], r.sum[row] *= rescale[row];
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

/* Returns whether `mine` is true in any of the four lanes of a row. */
DEVICE bool any_of_quad(bool mine)
{
    return __ballot_sync(~0u, mine) >> (threadIdx.x & 28) & 15;
}

} // namespace mha_forward
