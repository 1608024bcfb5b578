/* SPDX-License-Identifier: MIT
 *
 * O of 16 heads and 64 columns per warp, += P V; stores rows to `out`, or to the split's slot.
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "layout.cuh"

template <bool ONE_SPLIT> struct SmallSums : SmallPhase {
    using SmallPhase::SmallPhase;
    float o[8][4]; /* of 8 columns each: C of mma */

    DEVICE void begin()
    {
#pragma unroll
        for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
    }

    DEVICE void shrink()
    {
        const float factor[2] = {shared.factor[lane() / 4], shared.factor[lane() / 4 + 8]};
#pragma unroll
        for (int i = 0; i < 32; i++) o[i / 4][i % 4] *= factor[i % 4 / 2];
    }

    template <typename Element> DEVICE void multiply(uint32_t base)
    {
        const uint32_t line = (uint32_t)ldmatrix_tile_row(lane()),
                       chunk = (uint32_t)ldmatrix_tile_chunk(lane());
        uint32_t v = SHARED_AT(base, v) + (uint32_t)warp() * V_TILE_BYTES + swizzle_128(line, chunk);
        const uint32_t weights = SHARED_AT(base, p) + swizzle_128(line, chunk);
#pragma unroll 1
        for (uint32_t k = 0; __any_sync(~0u, k < KEYS / 16); k++) {
            uint32_t a[4];
            ldmatrix_x4(a, weights ^ (2 * CHUNK_BYTES * k));
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v ^ (2 * CHUNK_BYTES * j));
                mma_16816<Element>(o[2 * j], a, b[0], b[1]);
                mma_16816<Element>(o[2 * j + 1], a, b[2], b[3]);
            }
            v += 16 * LINE_BYTES;
        }
    }

    /* Stores row i of the lane's two, from the warp's first column on. `scale`: of the slot's row; unused
     * otherwise. */
    template <typename Stored, bool SLOT>
    DEVICE void store_row(uint16_t *to, float *scale, int i, float factor, bool there) const
    {
        float by = factor;
        if (SLOT) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(fabsf(o[j][2 * i]), fabsf(o[j][2 * i + 1])));
            const HalfScale of_row(quad_max(most) * factor);
            by *= of_row.up;
            if (there && lane() % 4 == 0) *scale = of_row.down;
        }
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                words[e] = factor < 0.0f ? 0 : Stored::pack(o[j + e][2 * i] * by, o[j + e][2 * i + 1] * by);
            const uint4 eight = quad_gather_eight(words);
            if (there) *(uint4 *)(to + 8 * (j + lane() % 4)) = eight;
        }
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(int i) const
    {
        const Place place(p);
        const int row = lane() / 4 + 8 * i, asked = place.tile * SMALL_HEADS + row,
                  head = min(asked, p.h_q - 1);
        const int column = LINE_ELEMENTS * warp();
        const bool there = asked < p.h_q;
        const float factor = shared.last_factor[row];
        if (!ONE_SPLIT && __any_sync(~0u, shared.split.slot == DIRECT)) {
            store_row<Bf16, false>(
                p.output.out + out_offset(p.output, shared.split.request, {place.token, head}) + column, NULL,
                i, factor, there);
        } else {
            const int64_t slot_row =
                shared.split.slot * ((int64_t)p.h_q * p.s_q) + (int64_t)place.token * p.h_q + head;
            store_row<Fp16, true>(half_row(p.split, slot_row) + column,
                                  half_row_scales(p.split, slot_row) + warp(), i, factor, there);
        }
    }

    DEVICE void end() const
    {
        end_row(0), end_row(1);
    }
};
