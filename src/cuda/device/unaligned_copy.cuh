/* SPDX-License-Identifier: MIT
 *
 * What cp.async cannot copy: rows at any even address.
 */
#pragma once

#include "async_copy.cuh"
#include "fragment.h"

/* Copies a thread's chunks of a row of `columns`, zeros past the first `valid_columns`, from any even address through
 * registers. */
static DEVICE void copy_row_unaligned(uint32_t to, uint32_t group_bytes, const uint16_t *from,
                                      int valid_columns, int columns)
{
#pragma unroll 1
    for (int i = 0; i < columns / LINE_ELEMENTS * CHUNK_ELEMENTS; i++) {
        const int column = i / CHUNK_ELEMENTS * LINE_ELEMENTS + i % CHUNK_ELEMENTS;
        store_shared_2(to + (uint32_t)(i / CHUNK_ELEMENTS) * group_bytes + (uint32_t)(i % CHUNK_ELEMENTS) * 2,
                       column < valid_columns ? from[column] : (uint16_t)0);
    }
}
