/* SPDX-License-Identifier: MIT
 *
 * The end of a split: the warpgroups of the sums store rows to `out`, or to the split's part.
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "layout.cuh"

namespace sparse_decode::plain {

/* Stores the sums `o` that Mainloop, which is derived from it, has made. */
template <typename R> struct Epilogue {
    using Shared = typename R::Shared;
    using Element = typename R::Element;
    enum { PARTS = 2 /* of a side's columns: multiplied, freed and requested one after the other */ };
    enum { PART_TILES = HALF_TILES / PARTS };
    using Sums = float[PARTS][64];

    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;

    DEVICE Epilogue(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
    }

    /* Takes 64 columns of one of the thread's two rows: two of every eight. */
    static DEVICE void take_row(float (&x)[16], const Sums &o, int tile, bool second)
    {
        const float *from = o[tile / PART_TILES] + tile % PART_TILES * (LINE_ELEMENTS / 2);
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 4 * (e / 2) + e % 2;
            x[e] = second ? from[at + 2] : from[at];
        }
    }

    static DEVICE uint32_t pack(bool to_part, float low, float high)
    {
        return to_part ? Fp16::pack(low, high) : Element::pack(low, high);
    }

    /* Stores a row to `out`, or, scaled, to a part, from the side's first column on. One copy of the code
     * serves both, and both rows, since a call executes it once. `scales`: of a part's row; NULL
     * otherwise. `empty`: the row saw no key, and is 0 whatever weights of 0 made of V. */
    static DEVICE void store_row(const Sums &o, uint16_t *to, bool to_part, float *scales, bool second,
                                 float factor, bool empty, bool valid)
    {
        float tile_scale = 0.0f; /* scale of the lane's tile of four */
#pragma unroll
        for (int tile = 0; tile < HALF_TILES; tile++) {
            float x[16], by = factor;
            take_row(x, o, tile, second);
            if (__any_sync(~0u, to_part)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                by *= scale.up;
                if (lane() % 4 == tile) tile_scale = scale.down;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t words[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *pair = x + 8 * half + 2 * e;
                    words[e] = empty ? 0u : pack(to_part, pair[0] * by, pair[1] * by);
                }
                const uint4 eight = quad_gather_eight(words);
                if (valid) *(uint4 *)(to + tile * LINE_ELEMENTS + 32 * half + 8 * (lane() % 4)) = eight;
            }
        }
        if (scales && valid) scales[lane() % 4] = tile_scale;
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(const Sums &o, int i, float sum, float below) const
    {
        const CtaCoord cta(p);
        const int asked = cta.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int column = side() * (D_V / 2), warp = (int)fresh_thread() / 32 - 4;
        const int request = shared.split[warp].request;
        const int64_t part = shared.split[warp].part;
        const bool valid = asked < p.h_q, stores_end = valid && side() == 0 && lane() % 4 == 0;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const RowCoord coord = {cta.token, head};
        const bool direct = __any_sync(~0u, part == DIRECT);
        float *scales = NULL;
        uint16_t *to;
        if (direct) {
            const float lse = score_lse(-below, sum);
            if (stores_end) store_lse(p.output, request, coord, lse);
            to = p.output.out + out_offset(p.output, request, coord);
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t part_row = part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + head;
            if (stores_end) p.split.part_ends[part_row] = {-below, sum};
            to = half_row(p.split, part_row);
            scales = half_row_scales(p.split, part_row) + column / HALF_ROW_TILE;
        }
        store_row(o, to + column, !direct, scales, i == 1, factor, sum == 0.0f, valid);
    }

    DEVICE void end_split(const Sums &o, uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(smem, sum_full), parity);
        float sum[2], below[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = row() + 8 * i;
            sum[i] = shared.sum[0][head] + shared.sum[1][head] + shared.sum[2][head] + shared.sum[3][head];
            below[i] = shared.below[head];
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, sum_empty));
#pragma unroll 1
        for (int i = 0; i < 2; i++) end_row(o, i, i ? sum[1] : sum[0], i ? below[1] : below[0]);
        __syncwarp();
    }
};

} // namespace sparse_decode::plain
