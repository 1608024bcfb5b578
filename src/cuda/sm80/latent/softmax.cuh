/* SPDX-License-Identifier: MIT
 *
 * Softmax: scales and masks scores, and makes P relative to the rows' references.
 *
 * The reference that is subtracted before the exponential follows the row's maximum only when it falls behind
 * by more than 8 (in log2): P then stays below 2^8, which 16 bits hold as precisely as 1, and O is seldom
 * rescaled.
 */
#pragma once

#include "../../device/mma.cuh"
#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace latent {

/* Scales the scores; scores of keys that are not visible to a row, or that no index names, become -inf. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::scale(float s[KEY_TILES][4], int stage, int first_key)
{
    const int row = 16 * (warp % ROW_GROUPS), key = WARP_KEYS * (warp / ROW_GROUPS);
    const float scale = call.scale_log2();
#pragma unroll
    for (int i = 0; i < 4 * KEY_TILES; i++) s[i / 4][i % 4] *= scale;
    if constexpr (Keys::LISTED) {
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++) {
            const uint32_t named = keys.flags.pair(stage, key + 8 * t + mma_c_column(lane, 0));
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!(named >> 8 * (e % 2) & 1)) s[t][e] = -INFINITY;
        }
    }
    if constexpr (Call::CAUSAL) {
        if (!call.masks(first_key, KEYS)) return;
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 8 * t + mma_c_column(lane, e) >=
                    call.visible_end(row + mma_c_row(lane, e)) - first_key)
                    s[t][e] = -INFINITY;
    }
}

/* Returns this thread's largest score of each row. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::largest(const float s[KEY_TILES][4], float most[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = -INFINITY;
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++) most[i] = fmaxf(most[i], fmaxf(s[t][2 * i], s[t][2 * i + 1]));
    }
}

/* Finds the maximum of each row over the warps that share it; moves the references that a maximum
 * exceeds by more than the slack, and writes the factors by which O and the sums shrink. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::move_references(const float s[KEY_TILES][4], RowState &state)
{
    const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
    float most[2];
    largest(s, most);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = quad_max(most[i]);
        if (KEY_GROUPS > 1 && lane % 4 == 0) maxima[key_group * ROWS + row + 8 * i] = most[i];
    }
    if (KEY_GROUPS > 1) __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (KEY_GROUPS > 1)
#pragma unroll
            for (int g = 0; g < KEY_GROUPS; g++) most[i] = fmaxf(most[i], maxima[g * ROWS + row + 8 * i]);
        const bool moves = most[i] > state.reference[i] + REFERENCE_SLACK;
        const float factor = moves ? exp2_approx(state.reference[i] - most[i]) : 1.0f;
        if (moves) state.reference[i] = most[i];
        state.sum[i] *= factor;
        if (key_group == 0 && lane % 4 == 0) factors[row + 8 * i] = factor;
    }
}

/* Writes the probabilities of scores (scaled, base 2) to shared memory; returns the rows' sums. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::write_probabilities(const float s[KEY_TILES][4], const RowState &state,
                                                          float sum[2])
{
    const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float reference = state.reference[i] == -INFINITY ? 0.0f : state.reference[i];
        sum[i] = state.sum[i];
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++) {
            const float low = exp2_approx(s[t][2 * i] - reference),
                        high = exp2_approx(s[t][2 * i + 1] - reference);
            sum[i] += low + high;
            const uint32_t at =
                p_at - smem +
                swizzle_128((uint32_t)(row + 8 * i), (uint32_t)(WARP_KEYS / 8 * key_group + t)) +
                (uint32_t)(lane % 4) * 4;
            *(uint32_t *)(shared + at) = Element::pack(low, high);
        }
    }
}

/* Makes probabilities of scores, and makes O relative to the same references. All threads vote on
 * whether a score exceeds its reference by more than the slack, in the barrier behind the probabilities.
 * Only then maxima are taken across threads, and the probabilities are written again. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::softmax(const float s[KEY_TILES][4], RowState &state,
                                              float o[ROW_GROUPS][2 * COLUMN_PAIRS][4], int free_stage)
{
    float most[2], sum[2];
    largest(s, most);
    bool needs_rescale = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (Call::WANTS_MAXIMA) state.top[i] = fmaxf(state.top[i], most[i]);
        needs_rescale |= most[i] > state.reference[i] + REFERENCE_SLACK;
    }
    write_probabilities(s, state, sum);
    keys.before_values(free_stage);
    if (__any_sync(~0u, __syncthreads_or(needs_rescale))) {
        move_references(s, state);
        write_probabilities(s, state, sum);
        __syncthreads(); /* P and the factors are complete */
        rescale(o);
    }
    for (int i = 0; i < 2; i++) state.sum[i] = sum[i];
}

template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::rescale(float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
{
    float factor[ROW_GROUPS][2];
#pragma unroll
    for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) factor[m][i] = factors[16 * m + 8 * i + lane / 4];
#pragma unroll
    for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
        for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[m][n][e] *= factor[m][e / 2];
}

} // namespace latent
