/* SPDX-License-Identifier: MIT
 *
 * Copies of K and V, and of tiles of Q and dO, from global to shared memory.
 */
#pragma once

#include "tiles.cuh"

#include "../../device/warpgroup.cuh"

/* Copies ROWS rows of COLUMNS columns. The first `rows` rows exist; the others become zeros. */
template <int ROWS, int COLUMNS, int THREADS>
DEVICE void copy_rows(uint32_t to, const uint16_t *from, int64_t stride, int rows)
{
    constexpr int CHUNKS = LINE_BYTES / CHUNK_BYTES, AT_A_TIME = THREADS / CHUNKS;
    static_assert(ROWS % AT_A_TIME == 0 && AT_A_TIME % 8 == 0, "each thread copies the same chunk of rows");
    const int thread = (int)fresh_thread(), chunk = thread % CHUNKS, row = thread / CHUNKS;
    const uint32_t at = to + swizzle_128((uint32_t)row, (uint32_t)chunk);
    from += row * stride + chunk * CHUNK_ELEMENTS;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_A_TIME, from += AT_A_TIME * stride)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += LINE_ELEMENTS)
            cp_async_16(at + (uint32_t)(c / LINE_ELEMENTS * ROWS + i) * LINE_BYTES, from + c, row + i < rows);
}
