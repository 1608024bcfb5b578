/* SPDX-License-Identifier: MIT
 *
 * The end of a split: a warp stores its 64 columns of 16 rows to `out`, or to the split's part.
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "layout.cuh"

namespace sparse_decode::small {

/* Stores the sums that SmallSums, which is derived from it, has made. */
template <bool ONE_SPLIT> struct SmallEpilogue : SmallPhase {
    using SmallPhase::SmallPhase;
    using Sums = float[8][4]; /* of 8 columns each: C of mma */

    /* Stores row i of the lane's two, from the warp's first column on. `scale`: of the part's row; unused
     * otherwise. */
    template <typename Stored, bool TO_PART>
    static DEVICE void store_row(const Sums &o, uint16_t *to, float *scale, int i, float factor, bool valid)
    {
        float by = factor;
        if (TO_PART) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(fabsf(o[j][2 * i]), fabsf(o[j][2 * i + 1])));
            const HalfScale of_row(quad_max(most) * factor);
            by *= of_row.up;
            if (valid && lane() % 4 == 0) *scale = of_row.down;
        }
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                words[e] = factor < 0.0f ? 0 : Stored::pack(o[j + e][2 * i] * by, o[j + e][2 * i + 1] * by);
            const uint4 eight = quad_gather_eight(words);
            if (valid) *(uint4 *)(to + 8 * (j + lane() % 4)) = eight;
        }
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(const Sums &o, int i) const
    {
        const CtaCoord cta(p);
        const int row = lane() / 4 + 8 * i, asked = cta.tile * SMALL_HEADS + row,
                  head = min(asked, p.h_q - 1);
        const int column = LINE_ELEMENTS * warp();
        const bool valid = asked < p.h_q;
        const float factor = shared.last_factor[row];
        if (!ONE_SPLIT && __any_sync(~0u, shared.split.part == DIRECT)) {
            store_row<Bf16, false>(
                o, p.output.out + out_offset(p.output, shared.split.request, {cta.token, head}) + column,
                NULL, i, factor, valid);
        } else {
            const int64_t part_row =
                shared.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + head;
            store_row<Fp16, true>(o, half_row(p.split, part_row) + column,
                                  half_row_scales(p.split, part_row) + warp(), i, factor, valid);
        }
    }

    DEVICE void end(const Sums &o) const
    {
        end_row(o, 0), end_row(o, 1);
    }
};

} // namespace sparse_decode::small
