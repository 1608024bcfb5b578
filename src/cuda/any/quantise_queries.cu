/* SPDX-License-Identifier: MIT
 *
 * Converts the queries of FP8 products for kernels that multiply bf16: each row becomes the bf16 values of
 * its codes (src/queries.h). A warp takes a row of 576 values; a CTA has QUANTISE_WARPS warps.
 *
 *   nine words of two values per lane   independent loads
 *   largest magnitude of the warp       one instruction, on bits; those of a NaN are the largest
 *   nine words per lane                 to the workspace, where rows have no gaps
 *
 * Registers only. Limit: memory, with 1152 bytes read and written per row.
 */
#include "../device/kernel.cuh"
#include "../params.h"

#include "../../queries.h"

enum { WIDTH = 576, VALUES_OF_ROUND = 64, ROUNDS = WIDTH / VALUES_OF_ROUND };

DEVICE uint32_t word_of(uint16_t low, uint16_t high)
{
    return low | (uint32_t)high << 16;
}

/* Returns the offset of a row, from its number. */
DEVICE int64_t row_at(const struct quantise_params &p, int64_t row)
{
    const int64_t token = row / p.h_q, head = row - token * p.h_q, request = token / p.s_q;
    return request * p.q_stride[0] + (token - request * p.s_q) * p.q_stride[1] + head * p.q_stride[2];
}

DEVICE void take_codes(const struct quantise_params &p, const uint8_t *from, uint32_t *to, int lane)
{
    const float scale = p.scale ? __ldg(p.scale) : 1.0f;
    uint16_t codes[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = 2 * lane + VALUES_OF_ROUND * r;
        codes[r] = p.pairs_aligned ? __ldg((const uint16_t *)(from + first))
                                   : (uint16_t)(__ldg(from + first) | __ldg(from + first + 1) << 8);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        to[lane + 32 * r] = word_of(query_value((uint8_t)codes[r], scale), query_value(codes[r] >> 8, scale));
}

DEVICE uint16_t quantised(uint16_t x, float scale)
{
    return query_value(query_code(num_from_bf16(x), scale), scale);
}

DEVICE void take_values(const struct quantise_params &p, const uint16_t *from, uint32_t *to, int lane)
{
    const int rounds = p.quantised / VALUES_OF_ROUND;
    uint32_t words[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = 2 * lane + VALUES_OF_ROUND * r;
        words[r] = p.pairs_aligned ? __ldg((const uint32_t *)(from + first))
                                   : word_of(__ldg(from + first), __ldg(from + first + 1));
    }
    int32_t most = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int32_t low = query_magnitude(num_from_bf16((uint16_t)words[r])),
                      high = query_magnitude(num_from_bf16((uint16_t)(words[r] >> 16)));
        most = r < rounds ? max(most, max(low, high)) : most;
    }
    const float scale = query_scale(__reduce_max_sync(~0u, most));
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        if (r < rounds)
            words[r] =
                word_of(quantised((uint16_t)words[r], scale), quantised((uint16_t)(words[r] >> 16), scale));
        to[lane + 32 * r] = words[r];
    }
}

DEVICE void quantise(const struct quantise_params &p)
{
    const int lane = threadIdx.x & 31;
    const int64_t step = (int64_t)gridDim.x * QUANTISE_WARPS;
    for (int64_t row = (int64_t)blockIdx.x * QUANTISE_WARPS + threadIdx.x / 32; row < p.rows; row += step) {
        const int64_t at = row_at(p, row);
        uint32_t *const to = (uint32_t *)(p.to + row * WIDTH);
        if (p.codes)
            take_codes(p, p.codes + at, to, lane);
        else
            take_values(p, p.q + at, to, lane);
    }
}

DEFINE_KERNEL(quantise_queries, quantise_params, (32 * QUANTISE_WARPS), quantise(p))
