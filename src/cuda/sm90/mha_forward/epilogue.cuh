/* SPDX-License-Identifier: MIT
 *
 * Epilogue: divides finished rows by the sums of their weights and writes them through shared memory, so that
 * a row goes out in whole lines. A warp writes OUT_ROWS rows at a time.
 */
#pragma once

#include "scheduler.cuh"
#include "softmax.cuh"

namespace mha_forward {

/* Returns the first row of a tile's part; < 0: the tile is not split. The shuffle tells ptxas that it is uniform in a warp:
 * otherwise no address of a product after a branch on it stays in a uniform register. */
DEVICE int part_of(uint32_t tile)
{
    return __shfl_sync(~0u, load_tile_part(tile).row, 0);
}

/* Returns the natural lse of a row by its reference and the sum of its weights; -inf: it saw no key. */
DEVICE float lse_of(const mha_forward_sm90_params &p, float reference, float sum)
{
    return sum == 0.0f
               ? -INFINITY
               : fmaf(reference == -INFINITY ? 0.0f : reference, p.call.scale, LN_2 * log2_approx(sum));
}

/* Writes the lse, or of a split the ends, of the finished rows of the tile in `stage`, and returns in `factor` the factor that
 * normalizes O, with the sink's. */
template <typename Layout>
DEVICE void finish_rows(const mha_forward_sm90_params &p, const Layout &l, int stage, const RowState &r,
                        float (&factor)[2])
{
    const int thread = (int)fresh_thread() - WARPGROUP_THREADS;
    const TileRows tile = load_tile_rows(l.tile(stage));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = thread / 32 * 16 + 8 * half + thread % 32 / 4;
        const float sum = quad_sum(r.sum[half]);
        factor[half] = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
        if constexpr (Layout::SPLITS) {
            const int first = part_of(l.tile(stage));
            if (first >= 0) {
                store_global_8((float *)(p.part_ends + first + row),
                               scaled_reference(r, half, p.call.scale_log2), sum,
                               thread % 4 == 0 && row < tile.rows);
                continue;
            }
        }
        if (thread % 4 == 0 && row < tile.rows)
            store_lse(p.call.output, tile.request, coord_of_row(p, tile.token, tile.head, row),
                      lse_of(p, r.reference[half], sum));
        if (Layout::HAS_SINKS && SELDOM(p.call.output.rules.attn_sink)) /* all four lanes of the row */
            factor[half] *=
                result_sink_factor(p.call.output.rules, coord_of_row(p, tile.token, tile.head, row).head,
                                   lse_of(p, r.reference[half], sum));
    }
}

/* Writes rows 16 · warp … of a split to its part: fragments as they are, pairs of columns. */
template <typename Layout>
DEVICE void store_part(const mha_forward_sm90_params &p, int first, int rows, int thread,
                       const float (&factor)[2], const float (&o)[Layout::D_V / 2])
{
    const int row = thread / 32 * 16 + thread % 32 / 4;
    float *to = p.part_out + (int64_t)(first + row) * Layout::D_V + thread % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool stores = row + 8 * half < rows;
#pragma unroll
        for (int j = 0; j < Layout::D_V / 8; j++)
            store_global_8(to + half * 8 * Layout::D_V + 8 * j, o[4 * j + 2 * half] * factor[half],
                           o[4 * j + 2 * half + 1] * factor[half], stores);
    }
}

/* Writes rows 16 · warp … of a tile to `out` through shared memory: whole lines, OUT_ROWS rows at a time. */
template <typename Element, typename Layout>
DEVICE void store_lines(const mha_forward_sm90_params &p, const Layout &l, const TileRows &tile, int warp,
                        int lane, const float (&factor)[2], const float (&o)[Layout::D_V / 2])
{
    constexpr int CHUNKS = Layout::D_V / 8, /* of 16 bytes, per row */
        ROWS = Layout::OUT_ROWS, STORES = ROWS * CHUNKS / 32;
    const struct output_params &output = p.call.output;
    const uint32_t staging = l.out(warp);
#pragma unroll
    for (int first = 0; first < 16; first += ROWS) {
        __syncwarp();
#pragma unroll
        for (int half = first / 8; half < (first + ROWS) / 8; half++)
#pragma unroll
            for (int j = 0; j < CHUNKS; j += 4) {
                const int row = 8 * half - first + lane % 8;
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = Element::pack(o[4 * (j + i) + 2 * half] * factor[half],
                                             o[4 * (j + i) + 2 * half + 1] * factor[half]);
                store_matrices(staging + (uint32_t)(row * CHUNKS + ((j + lane / 8) ^ lane % 8)) * 16, words);
            }
        __syncwarp();
        uint4 words[STORES];
#pragma unroll
        for (int i = 0; i < STORES; i++) {
            const int row = (32 * i + lane) / CHUNKS, chunk = lane % CHUNKS;
            words[i] = load_shared_16(staging + (uint32_t)(row * CHUNKS + (chunk ^ row % 8)) * 16);
        }
#pragma unroll
        for (int i = 0; i < STORES; i++) {
            const int row = 16 * warp + first + (32 * i + lane) / CHUNKS, chunk = lane % CHUNKS;
            const RowCoord coord = coord_of_row(p, tile.token, tile.head, row);
            store_global_16(output.out + out_offset(output, tile.request, coord) + 8 * chunk, words[i],
                            row < tile.rows);
        }
    }
}

/* The same without shared memory: the four lanes of a row write 64 bytes of it at a time. */
template <typename Element, typename Layout>
DEVICE void store_eights(const mha_forward_sm90_params &p, const TileRows &tile, int thread,
                         const float (&factor)[2], const float (&o)[Layout::D_V / 2])
{
    const struct output_params &output = p.call.output;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        const RowCoord coord = coord_of_row(p, tile.token, tile.head, row);
        uint16_t *to = output.out + out_offset(output, tile.request, coord) + thread % 4 * 8;
#pragma unroll
        for (int j = 0; j < Layout::D_V / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = Element::pack(o[4 * (j + i) + 2 * half] * factor[half],
                                         o[4 * (j + i) + 2 * half + 1] * factor[half]);
            store_global_16(to + 8 * j, quad_gather_eight(words), row < tile.rows);
        }
    }
}

/* Writes rows 16 · warp … of the tile in `stage` to `out`, or to the part of a split; releases the stage and clears
 * O; called by each warp of a consumer. fresh_thread() prevents ptxas from keeping values derived from the thread
 * index in registers between calls. */
template <typename Element, typename Layout>
DEVICE void store_rows(const mha_forward_sm90_params &p, const Layout &l, int stage, const float (&factor)[2],
                       float (&o)[Layout::D_V / 2])
{
    const int thread = (int)fresh_thread() - WARPGROUP_THREADS, lane = thread % 32, warp = thread / 32;
    const TileRows tile = load_tile_rows(l.tile(stage));
    const int part = Layout::SPLITS ? part_of(l.tile(stage)) : -1;
    if (part >= 0)
        store_part<Layout>(p, part, tile.rows, thread, factor, o);
    else if constexpr (Layout::STAGES_OUT)
        store_lines<Element>(p, l, tile, warp, lane, factor, o);
    else
        store_eights<Element, Layout>(p, tile, thread, factor, o);
    mbarrier_arrive_if(lane == 0, l.barrier(Layout::TILE_EMPTY, stage));
#pragma unroll
    for (int i = 0; i < Layout::D_V / 2; i++) o[i] = 0.0f;
}

} // namespace mha_forward
