/* SPDX-License-Identifier: MIT
 *
 * Clears what must not reach the products of P and V: NaN and infinite values of keys that some row does not
 * see. The warpgroup with the scores calls these functions.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include <float.h>

/* Replaces NaN codes in the columns of V by 0, in keys from … 63 of a block; called by the warpgroup. A
 * row that sees such a key has a NaN score anyway; rows that do not see it multiply its values by 0. */
DEVICE void clear_codes(uint32_t keys, int from)
{
    constexpr int CHUNKS = D_V / CHUNK_BYTES, CHUNKS_OF_LINE = LINE_BYTES / CHUNK_BYTES;
#pragma unroll 1
    for (int i = (int)(fresh_thread() % WARPGROUP_THREADS); i < (KEYS - from) * CHUNKS;
         i += WARPGROUP_THREADS) {
        const int chunk = i % CHUNKS;
        const uint32_t at =
            keys + (uint32_t)(chunk / CHUNKS_OF_LINE * KEY_TILE_BYTES + (from + i / CHUNKS) * LINE_BYTES +
                              chunk % CHUNKS_OF_LINE * CHUNK_BYTES);
        const uint4 codes = load_shared_16(at);
        uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w}, nan = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint32_t is = __vcmpeq4(words[w] & 0x7f7f7f7fu, 0x7f7f7f7fu);
            words[w] &= ~is, nan |= is;
        }
        if (nan) store_shared_16(at, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

/* Sets scales of FP8_656 to 0 in keys from … 63 of a block: those of keys from `end` on, which no row
 * sees, and those that are NaN or infinite (half_scales.cuh makes a scale infinite if a value of its line
 * is). A row that sees such a key has a NaN score. */
DEVICE void clear_values(uint32_t keys, int from, int end)
{
    const uint32_t scales = keys + SCALES_AT;
#pragma unroll 1
    for (int i = from * SCALES_OF_KEY + (int)(fresh_thread() % WARPGROUP_THREADS); i < KEYS * SCALES_OF_KEY;
         i += WARPGROUP_THREADS) {
        const float scale = __uint_as_float(load_shared_4(scales + 4 * (uint32_t)i));
        if (i / SCALES_OF_KEY >= end || !(fabsf(scale) <= FLT_MAX))
            store_shared_4(scales + 4 * (uint32_t)i, 0);
    }
}
