/* SPDX-License-Identifier: MIT
 *
 * Joins the splits of sparse prefill's split tiles. A warp takes a row: each lane holds the end of one split,
 * then 16 columns of all splits, which it adds in their order.
 */
#pragma once

#include "epilogue.cuh"

namespace sparse_prefill {

static_assert(MOST_PREFILL_SPLITS == 32, "a lane a split");
enum { JOIN_CHUNKS = D_V / CHUNK_ELEMENTS / 32 /* of eight columns, per lane */, SPLITS_AT_ONCE = 4 };

/* State of a lane: the weight of its split, and the end of the whole row. */
struct JoinedRow {
    float weight;
    part_end whole;

    DEVICE JoinedRow(const Part *parts, int splits, int row, int lane)
    {
        part_end end = {-INFINITY, 0.0f};
        if (lane < splits) end = load_fresh_part_end(&parts[lane].end[row]);
        whole.max = end.max;
        for (int lanes = 16; lanes; lanes /= 2)
            whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, lanes));
        weight = part_weight(end, parts_reference(whole.max));
        whole.sum = weight;
        for (int lanes = 16; lanes; lanes /= 2) whole.sum += __shfl_xor_sync(~0u, whole.sum, lanes);
    }
};

/* A lane's columns of SPLITS_AT_ONCE splits of a row. */
struct SplitsOfLane {
    uint4 halves[SPLITS_AT_ONCE][JOIN_CHUNKS];
    float scale[SPLITS_AT_ONCE][JOIN_CHUNKS];

    DEVICE SplitsOfLane(const Part *parts, int splits, int first, int row, int lane)
    {
#pragma unroll
        for (int i = 0; i < SPLITS_AT_ONCE; i++)
#pragma unroll
            for (int c = 0; c < JOIN_CHUNKS; c++) {
                const Part &part = parts[min(first + i, splits - 1)];
                const int chunk = lane + 32 * c, group = chunk / 8;
                const unsigned char *tile = part.units[0] + group * TILE_BYTES;
                halves[i][c] =
                    __ldcg((const uint4 *)(tile + swizzle_128((uint32_t)row, (uint32_t)chunk % 8)));
                scale[i][c] = __ldcg(&part.scale[row][group]);
            }
    }
};

DEVICE void add_halves(float (&sum)[8], const uint4 &halves, float by)
{
    const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(by, Fp16::to_float((uint16_t)words[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(by, Fp16::to_float((uint16_t)(words[i] >> 16)), sum[2 * i + 1]);
    }
}

/* Joins and writes row `row` of a split tile; `parts` are those of its splits. */
DEVICE void join_row(const struct sparse_prefill_sm90_params &p, const TileCoord &coord, const Part *parts,
                     int row)
{
    const int lane = (int)threadIdx.x % 32, head = coord.head_tile * ROWS + row;
    const struct sparse_prefill_params &call = p.call;
    SplitsOfLane some(parts, p.splits.of_tile, 0, row, lane); /* in flight while weights are computed */
    const JoinedRow joined(parts, p.splits.of_tile, row, lane);
    float sum[JOIN_CHUNKS][8] = {};
#pragma unroll 1
    for (int first = 0; first < p.splits.of_tile; first += SPLITS_AT_ONCE) {
        if (first) some = SplitsOfLane(parts, p.splits.of_tile, first, row, lane);
#pragma unroll
        for (int i = 0; i < SPLITS_AT_ONCE; i++) {
            const float weight = __shfl_sync(~0u, joined.weight, first + i);
            if (weight == 0.0f) continue; /* also of a split without keys, and past the last */
#pragma unroll
            for (int c = 0; c < JOIN_CHUNKS; c++)
                add_halves(sum[c], some.halves[i][c], weight * some.scale[i][c]);
        }
    }
    const float lse = row_lse(joined.whole.max, joined.whole.sum);
    const float factor = row_factor(call, head, lse, joined.whole.sum);
    uint16_t *out = call.out + coord.token * call.out_stride[0] + head * call.out_stride[1];
#pragma unroll
    for (int c = 0; c < JOIN_CHUNKS; c++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = Bf16::pack(sum[c][2 * i] * factor, sum[c][2 * i + 1] * factor);
        ((uint4 *)out)[lane + 32 * c] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (lane) return;
    store_lse(call, coord.token, head, lse);
    store_largest(call, coord.token, head, joined.whole.max);
}

/* Joins the rows of the split tiles, PREFILL_JOIN_WARPS rows per CTA. */
DEVICE void join_splits(const struct sparse_prefill_sm90_params &p)
{
    const int row = (int)(blockIdx.x * PREFILL_JOIN_WARPS + threadIdx.x / 32), split_tile = row / ROWS;
    const TileCoord coord(p.call, p.splits.whole + split_tile);
    wait_for_kernels_before();
    if (coord.head_tile * ROWS + row % ROWS < p.call.h_q)
        join_row(p, coord, (const Part *)p.splits.parts + split_tile * p.splits.of_tile, row % ROWS);
}

} // namespace sparse_prefill
