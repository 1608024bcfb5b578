/* SPDX-License-Identifier: MIT
 *
 * Softmax: P from the scores and lse, and dS from P, dP and delta.
 */
#pragma once

#include "../../device/backward_rows.cuh"
#include "../../device/result.cuh"
#include "gradient.cuh"

namespace mha_backward {

/* Sets masked scores to -inf, and those of keys past the request's last one: these keys are zeros, but
 * their P might be infinite. Row i of the tile sees key t of the block if t + diagonal <= i. */
template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::mask(Scores &s, int diagonal, int left) const
{
    const Lane l;
    const int key = l.key_group * Tiles::WARP_KEYS + l.lane / 4,
              row = l.row_group * Tiles::WARP_ROWS + l.lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int t = key + 16 * m + e / 2 * 8, i = row + 8 * n + e % 2;
                if (t + diagonal > i || t >= left) s[m][n][e] = -INFINITY;
            }
}

/* Computes P in place of S; lse includes the factor P_SCALE. */
template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::make_p(Scores &s, Words &w) const
{
#pragma unroll
    for (int k = 0; k < ROW_STEPS; k++) {
        const float4 lse = this->load_stats(0, k);
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float *pair = &s[m][2 * k + r / 2][r % 2 * 2];
                pair[0] = exp2_approx(fmaf(pair[0], p.call.scale_log2, -(r / 2 ? lse.z : lse.x)));
                pair[1] = exp2_approx(fmaf(pair[1], p.call.scale_log2, -(r / 2 ? lse.w : lse.y)));
                w[m][k][r] = Element::pack(pair[0], pair[1]);
            }
    }
}

/* With PARKS_P there are no registers for an fp32 P until dP is complete. It waits as fp16: where the lane
 * later stores dSᵀ, which nobody reads before; fp16 calls have stored it as Pᵀ. */
template <typename Element, typename Tiles> DEVICE uint32_t Backward<Element, Tiles>::parking() const
{
    return smem + (Element::IS_BF16 ? Tiles::DS_AT : Tiles::P_AT);
}

template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::park_p(const Scores &s) const
{
    const uint32_t parked = this->words_at(parking());
#pragma unroll
    for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
        for (int k = 0; k < ROW_STEPS; k++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float *pair = &s[m][2 * k + r / 2][r % 2 * 2];
                store_shared_4(this->word_at(parked, m, k, r), Fp16::pack(pair[0], pair[1]));
            }
}

/* Computes dS from P in fp32, or parked fp16: keys of equal weight would share the same rounding error of
 * a bf16 P, which would remain in the sum dQ. */
template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::make_ds(const Scores &s, const Scores &dp, Words &w) const
{
    constexpr float SCALE = DS_SCALE<Element>;
    const uint32_t parked = Tiles::PARKS_P ? this->words_at(parking()) : 0;
#pragma unroll
    for (int k = 0; k < ROW_STEPS; k++) {
        const float4 delta = this->load_stats(1, k);
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float *pair = &s[m][2 * k + r / 2][r % 2 * 2], *d = &dp[m][2 * k + r / 2][r % 2 * 2];
                const uint32_t pair_of_p = Tiles::PARKS_P ? load_shared_4(this->word_at(parked, m, k, r)) : 0;
                const float low = Tiles::PARKS_P ? Fp16::to_float((uint16_t)pair_of_p) : pair[0],
                            high = Tiles::PARKS_P ? Fp16::to_float((uint16_t)(pair_of_p >> 16)) : pair[1];
                w[m][k][r] = Element::pack(low * fmaf(d[0], SCALE, -(r / 2 ? delta.z : delta.x)),
                                           high * fmaf(d[1], SCALE, -(r / 2 ? delta.w : delta.y)));
            }
    }
}

} // namespace mha_backward
