/* SPDX-License-Identifier: MIT
 *
 * The join of dense MHA on Hopper: adds the parts of tiles whose keys were split, in the order of their keys. A
 * warp takes a row; a lane has D_V / 32 columns, and PARTS_AT_ONCE parts in flight. Parts are weighted as part.cuh
 * says; the weights of up to 64 parts are in the lanes' registers.
 */
#pragma once

#include "../../device/part.cuh"
#include "scheduler.cuh"

namespace mha_forward {

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
    template <typename Element> static DEVICE void store(uint16_t *to, const float4 &x, float factor)
    {
        *(uint2 *)to =
            make_uint2(Element::pack(x.x * factor, x.y * factor), Element::pack(x.z * factor, x.w * factor));
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
    template <typename Element> static DEVICE void store(uint16_t *to, const EightFloats &x, float factor)
    {
        Columns<128>::store<Element>(to, x.low, factor), Columns<128>::store<Element>(to + 4, x.high, factor);
    }
};
template <> struct Columns<64> {
    using Vector = float2;
    static DEVICE float2 load(const float *from) { return __ldcg((const float2 *)from); }
    static DEVICE void add(float2 &sum, float weight, const float2 &x)
    {
        add_weighted(sum.x, weight, x.x), add_weighted(sum.y, weight, x.y);
    }
    template <typename Element> static DEVICE void store(uint16_t *to, const float2 &x, float factor)
    {
        *(uint32_t *)to = Element::pack(x.x * factor, x.y * factor);
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

/* A warp's join of a row: the constructor loads ends and the first parts, `finish` adds them and what follows. No part is
 * behind a branch: weights past the last part are 0. */
template <typename Element, int D_V> struct RowJoin {
    using Lane = Columns<D_V>;
    using Vector = typename Lane::Vector;

    const mha_forward_sm90_params &p;
    const int splits;
    const int64_t step;
    const float *from; /* the lane's columns of the first part */
    part_end end[2];
    Vector x[PARTS_AT_ONCE];

    DEVICE static int first_column() { return D_V / 32 * ((int)threadIdx.x % 32); }

    DEVICE RowJoin(const mha_forward_sm90_params &params, const TilePart &part, int row)
        : p(params), splits(part.splits), step(part.step)
    {
        const int64_t at = part.row + row;
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

    DEVICE void finish(const TileRows &tile, int row)
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
        const RowCoord coord = coord_of_row(p, tile.token, tile.head, row);
        const struct output_params &output = p.call.output;
        const float lse = score_lse(weights.max, weights.sum);
        float factor = weights.sum == 0.0f ? 0.0f : reciprocal_approx(weights.sum);
        if (SELDOM(output.rules.attn_sink)) factor *= result_sink_factor(output.rules, coord.head, lse);
        Lane::template store<Element>(output.out + out_offset(output, tile.request, coord) + first_column(),
                                      sum, factor);
        if (threadIdx.x % 32 == 0) store_lse(output, tile.request, coord, lse);
    }
};

/* Rows are numbered by tile; a tile has tile_rows of them. */
template <typename Element, int D_QK, int D_V> DEVICE void join(const mha_forward_sm90_params &p)
{
    using Window = RequestWindow<MHA_SM90_ROWS(D_QK), MHA_SM90_KEYS(D_QK), Numbers::SPLIT_TILES>;
    __shared__ __align__(16) unsigned char windows[MHA_JOIN_WARPS][Window::BYTES + sizeof(WorkTile)];
    const int warp = (int)threadIdx.x / 32;
    const uint32_t window = (uint32_t)__cvta_generic_to_shared(windows[warp]), tile = window + Window::BYTES;
    Window requests(p, window);
    for (int64_t i = blockIdx.x * MHA_JOIN_WARPS + warp;; i += gridDim.x * MHA_JOIN_WARPS) {
        const int number = (int)(i / p.tile_rows), row = (int)(i - (int64_t)number * p.tile_rows);
        __syncwarp();
        if (requests.find(number, tile) < 0) return;
        __syncwarp();
        const TileRows rows = load_tile_rows(tile);
        wait_for_kernels_before();
        if (row < rows.rows) RowJoin<Element, D_V>(p, load_tile_part(tile), row).finish(rows, row);
    }
}

} // namespace mha_forward

#define MHA_FORWARD_JOIN(NAME, ELEMENT, D_QK, D_V)                                                           \
    DEFINE_KERNEL(NAME, mha_forward_sm90_params, (32 * MHA_JOIN_WARPS, 4),                                   \
                  mha_forward::join<ELEMENT, D_QK, D_V>(p))
