/* SPDX-License-Identifier: MIT
 *
 * Writes sums that a warpgroup holds: dK and dV of an item, dq of a tile.
 */
#pragma once

#include "layout.cuh"

/* Writes 64 rows of a consumer times `factor`, 16 bytes per store. `rows`: those that belong to the
 * request. */
template <typename Element, int N>
DEVICE void write_keys(uint16_t *to, int64_t stride, int rows, float factor, const float (&d)[N])
{
    const int thread = (int)fresh_thread() % WARPGROUP_THREADS, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < N; i += 16) { /* 32 columns */
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                words[j] =
                    Element::pack(d[i + 4 * j + 2 * half] * factor, d[i + 4 * j + 2 * half + 1] * factor);
            const uint4 eight = quad_gather_eight(words);
            store_global_16(to + (row + 8 * half) * stride + i * 2 + thread % 4 * 8, eight,
                            row + 8 * half < rows);
        }
}
