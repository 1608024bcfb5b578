/* SPDX-License-Identifier: MIT
 *
 * Finished rows: divided by the sums of their weights, and written eight at a time through shared memory, a row in whole lines.
 */
#pragma once

#include "softmax.cuh"
#include "tiles.cuh"

/* By a warp of a consumer: rows 16 · warp … of the tile in the slot. What it computes from the thread's number is not kept around. */
template <typename Element, typename Layout>
DEVICE void write_rows(const mha_forward_sm90_params &p, const Layout &l, int slot, const Rows &r,
                       float (&o)[Layout::D_V / 2])
{
    constexpr int CHUNKS = Layout::D_V / 8,
                  AT_ONCE = 32 / CHUNKS; /* of 16 bytes, of a row; rows that a warp stores together */
    const struct output_params &output = p.call.output;
    const int thread = (int)fresh_thread() - WARPGROUP_THREADS, lane = thread % 32, warp = thread / 32;
    const uint32_t place = l.results(warp);
    const uint4 tile = load_shared_16(l.tile(slot)); /* token, rows, request, head */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int first = 16 * warp + 8 * half;
        const float sum = quad_sum(r.sum[half]), factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
        if (lane % 4 == 0 && first + lane / 4 < (int)tile.y) {
            const float base = r.base[half] == -INFINITY ? 0.0f : r.base[half];
            store_lse(output, tile.z, place_of(p, tile.x, tile.w, first + lane / 4),
                      sum == 0.0f ? -INFINITY : base * p.call.scale + LN_2 * log2_approx(sum));
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] =
                    Element::pack(o[4 * (j + i) + 2 * half] * factor, o[4 * (j + i) + 2 * half + 1] * factor);
            store_matrices(place + (uint32_t)(lane % 8 * CHUNKS + ((j + lane / 8) ^ lane % 8)) * 16, words);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i += AT_ONCE) {
            const int row = i + lane / CHUNKS, chunk = lane % CHUNKS;
            const RowPlace at = place_of(p, tile.x, tile.w, first + row);
            store_global_16(output.out + out_offset(output, tile.z, at) + 8 * chunk,
                            load_shared_16(place + (uint32_t)(row * CHUNKS + (chunk ^ row)) * 16),
                            first + row < (int)tile.y);
        }
    }
    mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, slot));
#pragma unroll
    for (int i = 0; i < Layout::D_V / 2; i++) o[i] = 0.0f;
}
