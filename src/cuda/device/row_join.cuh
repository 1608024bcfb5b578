/* SPDX-License-Identifier: MIT
 *
 * The join of a row of dense MHA whose keys were split: adds its parts in the order of their keys. A warp takes a row;
 * a lane has D_V / 32 columns, and PARTS_AT_ONCE parts in flight. Parts are weighted as part.cuh says; the weights
 * of up to 64 parts are in the lanes' registers.
 */
#pragma once

#include "part.cuh"
#include "warp.cuh"

enum { PARTS_AT_ONCE = 8 };

/* Adds weight · x; of weight 0 nothing, whatever x is. */
DEVICE void add_weighted(float &sum, float weight, float x)
{
    sum = fmaf(weight, weight == 0.0f ? 0.0f : x, sum);
}

/* The columns of a lane. */
template <int D_V> struct Columns;
template <> struct Columns<128> {
    using Vector = float4;
    static DEVICE float4 load(const float *from) { return __ldcg((const float4 *)from); }
    static DEVICE void add(float4 &sum, float weight, const float4 &x)
    {
        add_weighted(sum.x, weight, x.x), add_weighted(sum.y, weight, x.y);
        add_weighted(sum.z, weight, x.z), add_weighted(sum.w, weight, x.w);
    }
    template <typename Element>
    static DEVICE void store(uint16_t *to, bool aligned, const float4 &x, float factor)
    {
        if (aligned) {
            *(uint2 *)to = make_uint2(Element::pack(x.x * factor, x.y * factor),
                                      Element::pack(x.z * factor, x.w * factor));
        } else {
            store_pair<Element>(to, false, x.x * factor, x.y * factor);
            store_pair<Element>(to + 2, false, x.z * factor, x.w * factor);
        }
    }
};
struct EightFloats {
    float4 low, high;
};
template <> struct Columns<256> {
    using Vector = EightFloats;
    static DEVICE EightFloats load(const float *from)
    {
        return {Columns<128>::load(from), Columns<128>::load(from + 4)};
    }
    static DEVICE void add(EightFloats &sum, float weight, const EightFloats &x)
    {
        Columns<128>::add(sum.low, weight, x.low), Columns<128>::add(sum.high, weight, x.high);
    }
    template <typename Element>
    static DEVICE void store(uint16_t *to, bool aligned, const EightFloats &x, float factor)
    {
        Columns<128>::store<Element>(to, aligned, x.low, factor);
        Columns<128>::store<Element>(to + 4, aligned, x.high, factor);
    }
};
template <> struct Columns<64> {
    using Vector = float2;
    static DEVICE float2 load(const float *from) { return __ldcg((const float2 *)from); }
    static DEVICE void add(float2 &sum, float weight, const float2 &x)
    {
        add_weighted(sum.x, weight, x.x), add_weighted(sum.y, weight, x.y);
    }
    template <typename Element>
    static DEVICE void store(uint16_t *to, bool aligned, const float2 &x, float factor)
    {
        store_pair<Element>(to, aligned, x.x * factor, x.y * factor);
    }
};

/* The weights of a row's parts: lane i has those of parts i and 32 + i; 0: the part saw no key, and its values are
 * undefined. */
struct PartWeights {
    float weight[2];
    float max, sum; /* of the whole row */

    DEVICE PartWeights(const part_end (&end)[2])
    {
        max = parts_reference(warp_max(fmaxf(end[0].max, end[1].max)));
#pragma unroll
        for (int i = 0; i < 2; i++) weight[i] = end[i].sum == 0.0f ? 0.0f : part_weight(end[i], max);
        sum = warp_sum(weight[0] + weight[1]);
    }

    DEVICE float of_part(int part) const
    {
        return __shfl_sync(~0u, part < 32 ? weight[0] : weight[1], part % 32);
    }
};

/* A warp's join of a row: the constructor loads ends and the first parts, `finish` adds them and what follows. No part
 * is behind a branch: weights past the last part are 0. */
template <typename Element, int D_V, typename Params> struct RowJoin {
    using Lane = Columns<D_V>;
    using Vector = typename Lane::Vector;

    const Params &p; /* of the kernel: call.output, part_out, part_ends */
    const int splits;
    const int64_t step;
    const float *from; /* the lane's columns of the first part */
    part_end end[2];
    Vector x[PARTS_AT_ONCE];

    DEVICE static int first_column() { return D_V / 32 * ((int)threadIdx.x % 32); }

    /* `at`: the row of the first part; the row of the next part is `step` further on. */
    DEVICE RowJoin(const Params &params, int64_t at, int64_t step_, int splits_)
        : p(params), splits(splits_), step(step_)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int of_lane = (int)threadIdx.x % 32 + 32 * i;
            end[i] = {-INFINITY, 0.0f};
            if (of_lane < splits) end[i] = load_fresh_part_end(p.part_ends + at + of_lane * step);
        }
        from = p.part_out + at * D_V + first_column();
        load(0);
    }

    DEVICE void load(int begin)
    {
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++)
            x[i] = Lane::load(from + min(begin + i, splits - 1) * step * D_V);
    }

    /* Tile: has the row's `request`, and coord_of_row says its token and head. `aligned`: rows of out are 8-byte
     * aligned. */
    template <typename Tile> DEVICE void finish(const Tile &tile, int row, bool aligned)
    {
        const PartWeights weights(end);
        Vector sum = {};
#pragma unroll 1
        for (int begin = 0; begin < splits; begin += PARTS_AT_ONCE) {
            if (begin) load(begin);
#pragma unroll
            for (int i = 0; i < PARTS_AT_ONCE; i++) {
                const float weight = weights.of_part(min(begin + i, splits - 1));
                Lane::add(sum, begin + i < splits ? weight : 0.0f, x[i]);
            }
        }
        const RowCoord coord = coord_of_row(p, tile, row);
        const struct output_params &output = p.call.output;
        const float lse = score_lse(weights.max, weights.sum);
        float factor = weights.sum == 0.0f ? 0.0f : reciprocal_approx(weights.sum);
        if (SELDOM(output.rules.attn_sink)) factor *= result_sink_factor(output.rules, coord.head, lse);
        Lane::template store<Element>(output.out + out_offset(output, tile.request, coord) + first_column(),
                                      aligned, sum, factor);
        if (threadIdx.x % 32 == 0) store_lse(output, tile.request, coord, lse);
    }
};
