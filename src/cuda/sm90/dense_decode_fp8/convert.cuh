/* SPDX-License-Identifier: MIT
 *
 * From codes of keys to numbers that the tensor cores multiply.
 *
 * The scales of FP8_656 become fp16. fp16 holds every code and, if the scales of a block are in its range,
 * codes times scales with three bits more than bf16. Values and weights of such a block are fp16, and a scale
 * costs one multiplication for two values. Blocks with other scales are multiplied in bf16. Keys that no row
 * sees decide nothing: their scales count as 0.
 *
 * NaN and infinite values of keys that some row does not see must not reach the products of P and V: the
 * warpgroup with the scores clears them.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include <float.h>

namespace dense_decode_fp8 {

/* ---- Codes ------------------------------------------------------------------------------------- */

/* Converts four codes to fp16, two per word. Naming the halves makes ptxas take the upper one without a
 * shift. */
DEVICE void fp16_of_e4m3(uint32_t &low, uint32_t &high, uint32_t codes)
{
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

/* Returns the products of two pairs of fp16. */
DEVICE uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* Converts four codes, each times a scale, to bf16. */
DEVICE void bf16_of_e4m3(uint32_t &low, uint32_t &high, uint32_t codes, float2 of_low, float2 of_high)
{
    uint32_t a, b;
    fp16_of_e4m3(a, b, codes);
    low = Bf16::pack(Fp16::to_float((uint16_t)a) * of_low.x, Fp16::to_float((uint16_t)(a >> 16)) * of_low.y);
    high =
        Bf16::pack(Fp16::to_float((uint16_t)b) * of_high.x, Fp16::to_float((uint16_t)(b >> 16)) * of_high.y);
}

/* ---- Scales of FP8_656 ------------------------------------------------------------------------- */

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
DEVICE uint32_t half_scale_offset(int key, int line)
{
    return (uint32_t)(line * HALF_LINE_BYTES + key / 2 % 4 * 32 + key / 8 * 4);
}

/* Converts the scales of a block to fp16: a warp of the scores' warpgroup has 16 keys, a lane one line of
 * two of them. `half_scales`: where they go. `visible`: how many keys of the block some row sees. Returns to
 * all lanes whether the warp's scales fit. */
DEVICE bool halve_scales(uint32_t keys, uint32_t half_scales, int visible)
{
    const int lane = (int)(fresh_thread() % 32), line = lane % SCALES_OF_KEY,
              key = (int)(fresh_thread() / 32 % 4) * 16 + lane / SCALES_OF_KEY * 2;
    const uint32_t from = keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY + 4 * line);
    uint32_t low = load_shared_4(from), high = load_shared_4(from + SCALES_BYTES_OF_KEY);
    if (key >= visible) low = 0;
    if (key + 1 >= visible) high = 0;
    store_shared_4(half_scales + half_scale_offset(key, line),
                   Fp16::pack(__uint_as_float(low), __uint_as_float(high)));
    const bool fits = __all_sync(~0u, fits_half(low) && fits_half(high));
    if (SELDOM(!fits)) {
        if (key < visible) mark_infinite(keys, key, line);
        if (key + 1 < visible) mark_infinite(keys, key + 1, line);
        fence_async_shared();
    }
    __syncwarp();
    return fits;
}

/* ---- Clearing ---------------------------------------------------------------------------------- */

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

/* Sets scales of FP8_656 to 0 in keys from … 63 of a block: those of keys from `end` on, which no row sees,
 * and those that are NaN or infinite (mark_infinite makes a scale infinite if a value of its line is). A row
 * that sees such a key has a NaN score. */
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

} // namespace dense_decode_fp8
