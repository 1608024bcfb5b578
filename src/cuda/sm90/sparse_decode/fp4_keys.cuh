/* SPDX-License-Identifier: MIT
 *
 * Conversion of raw FP4 keys to e4m3 codes, stored where the scores' threads take the codes of FP8. The
 * sums' warps convert, since they wait most of the time.
 *
 * The scores' threads copy 16 bytes of a key per pair of chunks, 32 codes: four lanes have the 128 columns
 * of a pair. The copies land in the even chunk's place; the codes go from there to both chunks' places, 16
 * to each of two lanes.
 *
 *      landed[pair], by the scores' threads    the pair's copies are there, and the earlier contents of both
 *                                              places have been taken
 *      converted[pair], by the sums' warps     e4m3 codes are there
 *
 * All blocks pass through both barriers, also FP8 blocks and the block that is requested after the last one,
 * so that the phase is the count of blocks.
 */
#pragma once

#include "convert.cuh"
#include "layout.cuh"

/* The warps of the first half of the columns convert: those of the second half would convert late, behind
 * a product that waits for scores. */
enum { CONVERTING_WARPS = 4 };
static_assert(CONVERTING_WARPS == 4 || CONVERTING_WARPS == 8, "");

/* Converts the keys of block `count`. The sums' warps call it before they wait for P of the previous
 * block: the scores of block `count`, which the second warpgroup's product waits for (Sums::add_block),
 * need these codes. */
template <typename F> DEVICE void convert_fp4(Shared &shared, uint32_t base, uint32_t count)
{
    constexpr uint32_t SLOTS = 2 * WARPGROUP_THREADS, /* of 16 bytes, per chunk */
        AT_ONCE = CONVERTING_WARPS * 32, CHUNK = SLOTS * 16;
    const uint32_t slot = fresh_thread() - WARPGROUP_THREADS, unit = slot % 4, parity = count & 1;
    if (__any_sync(~0u, slot >= AT_ONCE)) return;
    /* Which half of its 16 bytes a lane takes first, so that eight lanes store to all banks. */
    const uint32_t half = (slot / 2 ^ slot / 8) % 2, raw = SHARED_AT(base, raw);
    const uint32_t from = raw + 16 * slot + 8 * half;
    const uint32_t to = raw + unit / 2 * CHUNK + 16 * (slot - unit) + 32 * (unit % 2) + 16 * half;
#pragma unroll 1
    for (uint32_t pair = 0; pair < PAIRS; pair++) {
        mbarrier_wait(SHARED_AT(base, landed) + 8 * pair, parity);
        if (F::FP4 == ALL_BLOCKS || __any_sync(~0u, load_shared_4(SHARED_AT(base, fp4) + 4 * parity)))
#pragma unroll
            for (uint32_t at = 2 * pair * CHUNK; at < 2 * pair * CHUNK + 16 * SLOTS; at += 16 * AT_ONCE) {
                const uint2 x = load_shared_8(from + at), y = load_shared_8((from ^ 8) + at);
                __syncwarp(); /* all lanes have read what they overwrite */
                const uint2 x0 = e4m3_of_e2m1(x.x), x1 = e4m3_of_e2m1(x.y);
                store_shared_16(to + at, make_uint4(x0.x, x0.y, x1.x, x1.y));
                const uint2 y0 = e4m3_of_e2m1(y.x), y1 = e4m3_of_e2m1(y.y);
                store_shared_16((to ^ 16) + at, make_uint4(y0.x, y0.y, y1.x, y1.y));
            }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, converted) + 8 * pair);
    }
}
