/* SPDX-License-Identifier: MIT
 *
 * Scores become weights. A row's weights are relative to its base, a score that it had once: a larger one is not looked for as long as
 * the weights stay small, so that in most blocks nothing stands between the scores and their exponentials. Where the weights of a block
 * come out large, the scores are still there: the base becomes the row's largest score, and they are made anew. That hangs on the row
 * alone, whose bits are the same whatever stands beside it.
 */
#pragma once

#include "layout.cuh"

#include "../../device/quad.cuh"

/* The most that a thread's weights of a row in a block may be together: far from what fp16 holds. */
static constexpr float MOST_WEIGHT = 4096.0f;

/* What a thread knows of its two rows. */
struct Rows {
    float base[2]; /* -inf: no key has been seen */
    float sum[2];  /* of this thread's weights */
};

DEVICE Rows fresh_rows()
{
    return {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
}

/* A row sees the columns of a block that are below its bound; its other scores become -inf. */
template <int N> DEVICE void mask(float (&s)[N], const int (&bound)[2])
{
    const int column = 2 * ((int)fresh_thread() % 4);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (column + (i >> 2) * 8 + (i & 1) >= bound[i >> 1 & 1]) s[i] = -INFINITY;
}

/* Gives rows that are to have one a higher base, if they have a higher score; `rescale` is what is multiplied that was summed before. */
template <int N>
DEVICE void raise(const float (&s)[N], float scale_log2, const bool (&is)[2], Rows &r, float (&rescale)[2])
{
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < N; i++) most[i >> 1 & 1][i & 1] = fmaxf(most[i >> 1 & 1][i & 1], s[i]);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float highest = quad_max(fmaxf(most[row][0], most[row][1]));
        rescale[row] = 1.0f;
        if (is[row] && highest > r.base[row]) {
            rescale[row] = exp2_approx((r.base[row] - highest) * scale_log2);
            r.base[row] = highest, r.sum[row] *= rescale[row];
        }
    }
}

/* What scores, times scale_log2, are less than: nothing while no key has been seen. */
DEVICE float exponent_of(const Rows &r, int row, float scale_log2)
{
    return r.base[row] == -INFINITY ? 0.0f : r.base[row] * scale_log2;
}

/* Beyond it the rounding error of the base's exponent, which a fused multiply-add leaves in every exponent of the row, is no small
 * power of two any more. */
DEVICE bool is_extreme(float exponent)
{
    return !(fabsf(exponent) <= 0x1p20f);
}

/* Makes the weights of elements FROM to TO - 1, and adds them to `sum`. */
template <int FROM, int TO, int N>
DEVICE void exponentials(const float (&s)[N], float scale_log2, const float (&less)[2], float *weight,
                         float (&sum)[2])
{
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        weight[i - FROM] = exp2_approx(fmaf(s[i], scale_log2, -less[i >> 1 & 1]));
        sum[i >> 1 & 1] += weight[i - FROM];
    }
}

/* Makes exponents of scores. In an extreme row each product is rounded before the base's, which was rounded too, is subtracted. */
template <int N> DEVICE void exponents_with_care(float (&s)[N], float scale_log2, const float (&less)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float base = less[i >> 1 & 1];
        s[i] =
            is_extreme(base) ? __fsub_rn(__fmul_rn(s[i], scale_log2), base) : fmaf(s[i], scale_log2, -base);
    }
}

/* Makes the weights from FROM on, as fragments of A: accumulators are where these want them. */
template <typename Element, int FROM, int N>
DEVICE void weigh(const float (&s)[N], float scale_log2, const float (&less)[2], uint32_t (&w)[N / 8][4],
                  float (&sum)[2])
{
#pragma unroll
    for (int i = FROM; i < N; i += 2) {
        float pair[2];
        pair[0] = exp2_approx(fmaf(s[i], scale_log2, -less[i >> 1 & 1]));
        pair[1] = exp2_approx(fmaf(s[i + 1], scale_log2, -less[i >> 1 & 1]));
        sum[i >> 1 & 1] += pair[0], sum[i >> 1 & 1] += pair[1];
        w[i / 8][i / 2 % 4] = Element::pack(pair[0], pair[1]);
    }
}

/* Is it so in one of the four lanes of a row? */
DEVICE bool any_of_quad(bool is)
{
    return __ballot_sync(~0u, is) >> (threadIdx.x & 28) & 15;
}
