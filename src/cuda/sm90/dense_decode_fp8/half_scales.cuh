/* SPDX-License-Identifier: MIT
 *
 * Scales of FP8_656 in fp16, by an idle warp of the producer's. fp16 holds every code, and codes times scales with three bits more than
 * bf16 has, where the scales of a block are in its range; then values and weights of the block are fp16, and a scale costs a product for
 * two values. A block with other scales is multiplied in bf16. Keys that no row sees decide nothing: their scales count as 0.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include <float.h>

/* Codes times a scale of these bits are finite in fp16, and the scale has all of its bits there. */
DEVICE bool fits_half(uint32_t scale)
{
    constexpr uint32_t LEAST = 0x38800000 /* 2^-14 */, BEYOND = 0x43000000 /* 2^7 */;
    const uint32_t magnitude = scale & 0x7fffffffu;
    return magnitude == 0 || magnitude - LEAST < BEYOND - LEAST;
}

/* Is a code of a key's line, times its scale, infinite in bf16? `line`: 128 codes in shared memory. */
DEVICE bool some_infinite(uint32_t line, float scale)
{
    constexpr float LIMIT = 0x1.ffp127f; /* what rounds to infinity, and above */
    uint32_t most = 0;
#pragma unroll 1
    for (uint32_t at = line; at < line + LINE_BYTES; at += 4)
        most = __vmaxu4(most, load_shared_4(at) & 0x7f7f7f7fu);
    const float2 low = from_e4m3_2(most), high = from_e4m3_2(most >> 16);
    const float value = fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y));
    return !(value * fabsf(scale) < LIMIT);
}

/* Scores are made of codes without their scales, so that an infinite value must be seen from the scale: it becomes infinite. */
DEVICE void mark_infinite(uint32_t keys, int key, int line)
{
    constexpr float LARGE = 0x1p118f; /* times 448 a number still */
    const uint32_t at = keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY + 4 * line);
    const float scale = __uint_as_float(load_shared_4(at));
    if (fabsf(scale) >= LARGE &&
        some_infinite(keys + (uint32_t)(line * KEY_TILE_BYTES + key * LINE_BYTES), scale))
        store_shared_4(at, __float_as_uint(INFINITY));
}

/* One warp runs this; a lane has two keys. Pairs of keys 8 k + 2 c and 8 k + 2 c + 1 of a line are stored in the order of c, then of k, so
 * that lane c of the four that convert values reads its own with two loads of 16 bytes. */
template <typename V>
DEVICE void halve_scales(const struct dense_decode_fp8_params &p, SharedOf<V> &shared, uint32_t base)
{
    using Shared = SharedOf<V>;
    const int lane = (int)(fresh_thread() % 32), key = 2 * lane;
    Turn<V::BUFFERS> turn;
    for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step) {
        const Work work = work_of<V>(p.dense, shared, i, Place(p.dense));
        int seen = work.task.end - work.task.piece.begin - key; /* from the lane's first key on */
#pragma unroll 1
        for (int left = work.blocks; __all_sync(~0u, left > 0); left--, seen -= KEYS) {
            const uint32_t keys = SHARED_AT(base, keys) + (uint32_t)(turn.index * V::KEYS_BYTES),
                           from = keys + (uint32_t)(SCALES_AT + key * SCALES_BYTES_OF_KEY),
                           to = SHARED_AT(base, half_scales) +
                                (uint32_t)(turn.index * HALF_SCALES_BYTES + lane % 4 * 32 + lane / 4 * 4);
            mbarrier_wait(barrier_at(SHARED_AT(base, keys_full), turn.index), turn.parity);
            bool fits = true;
#pragma unroll
            for (int line = 0; line < SCALES_OF_KEY; line += 2) {
                uint2 low = load_shared_8(from + (uint32_t)(4 * line)),
                      high = load_shared_8(from + (uint32_t)(4 * line + SCALES_BYTES_OF_KEY));
                if (seen < 1) low.x = low.y = 0;
                if (seen < 2) high.x = high.y = 0;
                fits &= fits_half(low.x) && fits_half(low.y) && fits_half(high.x) && fits_half(high.y);
                store_shared_4(to + (uint32_t)(line * HALF_LINE_BYTES),
                               Fp16::pack(__uint_as_float(low.x), __uint_as_float(high.x)));
                store_shared_4(to + (uint32_t)((line + 1) * HALF_LINE_BYTES),
                               Fp16::pack(__uint_as_float(low.y), __uint_as_float(high.y)));
            }
            fits = __all_sync(~0u, fits);
            if (SELDOM(!fits)) {
#pragma unroll 1
                for (int n = 0; n < 2 * SCALES_OF_KEY; n++)
                    if (n / SCALES_OF_KEY < seen)
                        mark_infinite(keys, key + n / SCALES_OF_KEY, n % SCALES_OF_KEY);
                fence_async_shared();
            }
            if (lane == 0) shared.fits[turn.index] = fits;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, scales_full), turn.index));
            turn.next();
        }
    }
}
