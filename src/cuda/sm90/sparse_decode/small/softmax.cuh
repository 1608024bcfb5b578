/* SPDX-License-Identifier: MIT
 *
 * Softmax of a block: a warp has two heads, and a lane four keys of one of them.
 */
#pragma once

#include "layout.cuh"

#include "../../../device/reference.cuh"

namespace sparse_decode::small {

struct SmallSoftmax : SmallPhase {
    using SmallPhase::SmallPhase;
    float sum,
        below; /* sum: of the lane's keys; below: minus the head's reference, to which weights are relative */

    static DEVICE int head() { return 2 * warp() + lane() / 16; }
    static DEVICE int column() { return lane() % 16; }

    DEVICE void begin() { sum = 0.0f, below = -LEAST_REFERENCE; }

    DEVICE void block(uint32_t smem, bool bf16)
    {
        const float4 a = *(const float4 *)&shared.s[0][head()][4 * column()],
                     b = *(const float4 *)&shared.s[1][head()][4 * column()];
        const float x[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        float most = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) * p.scale_log2;
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        const float to = fminf(-most, below), factor = exp2_approx(to - below);
        below = to;
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = exp2_approx(fmaf(x[i], p.scale_log2, to));
        sum = fmaf(sum, factor, (w[0] + w[1]) + (w[2] + w[3]));
        if (column() == 0) shared.factor[head()] = factor;
        const uint2 words = bf16 ? make_uint2(Bf16::pack(w[0], w[1]), Bf16::pack(w[2], w[3]))
                                 : make_uint2(Fp16::pack(w[0], w[1]), Fp16::pack(w[2], w[3]));
        const uint32_t to_p = SHARED_AT(smem, p) + swizzle_128((uint32_t)head(), (uint32_t)column() / 2) +
                              8 * ((uint32_t)column() % 2);
        store_shared_4(to_p, words.x), store_shared_4(to_p + 4, words.y);
    }

    /* Stores the head's lse or part_end, and the final factor of O; called after the last block. */
    DEVICE void end()
    {
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const CtaCoord cta(p);
        const int row = cta.tile * SMALL_HEADS + head();
        if (column() != 0 || row >= p.h_q) return;
        float factor = 1.0f / sum;
        if (shared.split.part == DIRECT) {
            const float lse = score_lse(-below, sum);
            store_lse(p.output, shared.split.request, {cta.token, row}, lse);
            factor *= result_sink_factor(p.output.rules, row, lse);
        } else {
            const int64_t part_row =
                shared.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + row;
            p.split.part_ends[part_row] = {-below, sum};
        }
        shared.last_factor[head()] = sum == 0.0f ? -1.0f : factor;
    }
};

} // namespace sparse_decode::small
