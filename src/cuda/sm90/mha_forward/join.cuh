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

enum { PARTS_AT_ONCE = 8, PARTS_AT_ONCE_IN_KERNEL = 16 /* there are more registers */ };

/* The columns of a lane. */
template <int D_V> struct Columns;
template <> struct Columns<128> {
    using Vector = float4;
    static DEVICE float4 load(const float *from) { return __ldcg((const float4 *)from); }
    static DEVICE void add(float4 &sum, float weight, const float4 &x)
    {
        sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
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
        sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
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

    DEVICE PartWeights(const part_end *ends, int64_t step, int count)
    {
        const int lane = (int)threadIdx.x % 32;
        part_end end[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            end[i] = {-INFINITY, 0.0f};
            if (lane + 32 * i < count) {
                end[i] = load_fresh_part_end(ends + (lane + 32 * i) * step);
            }
        }
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

template <typename Element, int D_V, int PARTS_AT_ONCE>
DEVICE void join_row(const mha_forward_sm90_params &p, const TileRows &tile, const TilePart &part, int row)
{
    using Lane = Columns<D_V>;
    using Vector = typename Lane::Vector;
    const int lane = (int)threadIdx.x % 32, first_column = D_V / 32 * lane;
    const int64_t at = part.row + row, step = part.step;
    const float *from = p.part_out + at * D_V + first_column;
    Vector sum = {}, x[PARTS_AT_ONCE];
    const auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++)
            if (begin + i < part.splits) x[i] = Lane::load(from + (begin + i) * step * D_V);
    };
    load(0); /* the values do not wait for the weights */
    const PartWeights weights(p.part_ends + at, step, part.splits);
#pragma unroll 1
    for (int begin = 0; begin < part.splits; begin += PARTS_AT_ONCE) {
        if (begin) load(begin);
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            const float weight = weights.of_part(min(begin + i, part.splits - 1));
            if (begin + i < part.splits && weight != 0.0f) Lane::add(sum, weight, x[i]);
        }
    }
    const RowCoord coord = coord_of_row(p, tile.token, tile.head, row);
    const struct output_params &output = p.call.output;
    Lane::template store<Element>(output.out + out_offset(output, tile.request, coord) + first_column, sum,
                                  weights.sum == 0.0f ? 0.0f : 1.0f / weights.sum);
    if (lane == 0) store_lse(output, tile.request, coord, score_lse(weights.max, weights.sum));
}

/* Shared memory of a warp of join_all. */
static constexpr int JOIN_MEMORY =
    RequestWindow<128, 128, Numbers::SPLIT_TILES>::BYTES + (int)sizeof(WorkTile); /* of any size */

/* Joins the rows of all split tiles: warp `warp` of `warps` of a CTA. Rows are numbered by tile; a tile has tile_rows of
 * them. */
template <typename Element, int D_QK, int D_V>
DEVICE void join_all(const mha_forward_sm90_params &p, uint32_t memory, int warps, int warp)
{
    using Window = RequestWindow<MHA_SM90_ROWS(D_QK), MHA_SM90_KEYS(D_QK), Numbers::SPLIT_TILES>;
    static_assert(Window::BYTES + sizeof(WorkTile) == JOIN_MEMORY && JOIN_MEMORY % 16 == 0, "");
    const uint32_t tile = memory + Window::BYTES;
    Window requests(p, memory);
    wait_for_kernels_before();
    for (int64_t i = (int64_t)blockIdx.x * warps + warp;; i += (int64_t)gridDim.x * warps) {
        const int number = (int)(i / p.tile_rows), row = (int)(i - (int64_t)number * p.tile_rows);
        __syncwarp();
        if (requests.find(number, tile) < 0) return;
        __syncwarp();
        const TileRows rows = load_tile_rows(tile);
        if (row < rows.rows) join_row<Element, D_V, PARTS_AT_ONCE>(p, rows, load_tile_part(tile), row);
    }
}

/* The join as a kernel. */
template <typename Element, int D_QK, int D_V> DEVICE void join(const mha_forward_sm90_params &p)
{
    __shared__ __align__(16) unsigned char memory[MHA_JOIN_WARPS][JOIN_MEMORY];
    const int warp = (int)threadIdx.x / 32;
    join_all<Element, D_QK, D_V>(p, (uint32_t)__cvta_generic_to_shared(memory[warp]), MHA_JOIN_WARPS, warp);
}

} // namespace mha_forward

#define MHA_FORWARD_JOIN(NAME, ELEMENT, D_QK, D_V)                                                           \
    DEFINE_KERNEL(NAME, mha_forward_sm90_params, (32 * MHA_JOIN_WARPS, 4),                                   \
                  mha_forward::join<ELEMENT, D_QK, D_V>(p))
