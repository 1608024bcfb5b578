/* SPDX-License-Identifier: MIT
 *
 * Converts the scales of FP8_656 to fp16. fp16 holds every code and, if the scales of a block are in its
 * range, codes times scales with three bits more than bf16. Values and weights of such a block are fp16, and
 * a scale costs one multiplication for two values. Blocks with other scales are multiplied in bf16. Keys
 * that no row sees decide nothing: their scales count as 0.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include <float.h>

/* Returns whether codes times a scale of these bits are finite in fp16, and the scale keeps all its bits
 * there. */
DEVICE bool fits_half(uint32_t scale)
{
    constexpr uint32_t LEAST = 0x38800000 /* 2^-14 */, BEYOND = 0x43000000 /* 2^7 */;
    const uint32_t magnitude = scale & 0x7fffffffu;
    return magnitude == 0 || magnitude - LEAST < BEYOND - LEAST;
}

/* Returns whether some code of a key's line, times its scale, is infinite in bf16. `line`: 128 codes in
 * shared memory. */
DEVICE bool some_infinite(uint32_t line, float scale)
{
    constexpr float LIMIT = 0x1.ffp127f; /* values from here on round to infinity */
    uint32_t most = 0;
#pragma unroll 1
    for (uint32_t at = line; at < line + LINE_BYTES; at += 4)
        most = __vmaxu4(most, load_shared_4(at) & 0x7f7f7f7fu);
    const float2 low = from_e4m3_2(most), high = from_e4m3_2(most >> 16);
    const float value = fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y));
    return !(value * fabsf(scale) < LIMIT);
}

/* Makes a scale infinite if a value of its line is. Scores are computed from codes without their scales,
 * so that an infinite value must show in the scale. */
DEVICE void mark_infinite(uint32_t keys, int key, int line)
{
    constexpr float LARGE = 0x1p118f; /* still finite times 448 */
    const uint32_t at = keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY + 4 * line);
    const float scale = __uint_as_float(load_shared_4(at));
    if (fabsf(scale) >= LARGE &&
        some_infinite(keys + (uint32_t)(line * KEY_TILE_BYTES + key * LINE_BYTES), scale))
        store_shared_4(at, __float_as_uint(INFINITY));
}

/* Returns the factor of a key's sum over a line: its scale, or NaN if that is infinite. (Products of the
 * infinite values, which are of both signs, would be NaN too.) */
DEVICE float scale_of_line(uint32_t keys, int key, int line)
{
    const float scale =
        __uint_as_float(load_shared_4(keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY + 4 * line)));
    return fmaf(0.0f, scale, scale);
}

/* Returns the offset of the word that holds the fp16 scale of a key for a line. Pairs of keys 8 k + 2 c
 * and 8 k + 2 c + 1 are in the order of c, then of k, so that lane c of the four that convert values reads
 * its own with two 16-byte loads. */
DEVICE uint32_t half_scale_place(int key, int line)
{
    return (uint32_t)(line * HALF_LINE_BYTES + key / 2 % 4 * 32 + key / 8 * 4);
}

/* Converts the scales of a block to fp16: a warp of the scores' warpgroup has 16 keys, a lane one line of
 * two of them. `half_scales`: where they go. `seen`: how many keys of the block some row sees. Returns to
 * all lanes whether the warp's scales fit. */
DEVICE bool halve_scales(uint32_t keys, uint32_t half_scales, int seen)
{
    const int lane = (int)(fresh_thread() % 32), line = lane % SCALES_OF_KEY,
              key = (int)(fresh_thread() / 32 % 4) * 16 + lane / SCALES_OF_KEY * 2;
    const uint32_t from = keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY + 4 * line);
    uint32_t low = load_shared_4(from), high = load_shared_4(from + SCALES_BYTES_OF_KEY);
    if (key >= seen) low = 0;
    if (key + 1 >= seen) high = 0;
    store_shared_4(half_scales + half_scale_place(key, line),
                   Fp16::pack(__uint_as_float(low), __uint_as_float(high)));
    const bool fits = __all_sync(~0u, fits_half(low) && fits_half(high));
    if (SELDOM(!fits)) {
        if (key < seen) mark_infinite(keys, key, line);
        if (key + 1 < seen) mark_infinite(keys, key + 1, line);
        fence_async_shared();
    }
    __syncwarp();
    return fits;
}
