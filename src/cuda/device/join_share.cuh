/* SPDX-License-Identifier: MIT
 *
 * Joins a tile's parts in the CTAs that made them: each stores its part, waits for the others, and joins a
 * share. This saves a second kernel, whose code and parameters would have to be fetched, and the parts are
 * still in L2.
 *
 * An item is half of the columns of a row, 8 per lane. If there are few items, two, four or eight of the
 * eight warps take one together: a warp has every second, fourth or eighth part of it, and the warps pass
 * their sums through shared memory to the first of them. If there are many items and few parts, a warp takes
 * several items at a time. All loads of a warp are in flight together, by cp.async.
 *
 * A kernel defines its share: struct Share with split, output, request, parts, takers (the number of CTAs
 * that take a share: those that have the parts, or more), begin and end (items; item 2 r + h is half h of row
 * r), part_row(part, row) and place(row). Its column(half, lane) is the first of a lane's eight columns; with
 * PAIRS a lane has them only after quad_gather_eight.
 *
 * With LARGEST the maximum of a part is its largest score, in powers of two, which is stored for the row.
 */
#pragma once

#include "async_copy.cuh"
#include "cta_group_barrier.cuh"
#include "element.cuh"
#include "half_rows.cuh"
#include "part.cuh"
#include "shared.cuh"
#include "warpgroup.cuh"

enum {
    SHARE_WARPS = 8,
    SHARE_TOGETHER = 4, /* parts that are added in sequence, without a branch */
    SHARE_COPY_BYTES = 32 * (16 + 4) /* of a part of an item: values and scales */,
    SHARE_END_BYTES = 32 * 8 /* of an item */,
    SHARE_SUM_BYTES = 2 * 32 * 16 /* of a warp: 8 columns per lane */
};

/* Shared memory of the join if a warp takes `depth` parts: a warp's copies, the ends of up to depth /
 * SHARE_TOGETHER items, and the numbers that an item's warps exchange. Their sums reuse the memory of the
 * copies. */
DEVICE constexpr int share_warp_bytes(int depth)
{
    return depth * SHARE_COPY_BYTES + depth / SHARE_TOGETHER * SHARE_END_BYTES + 16;
}

DEVICE constexpr int share_bytes(int depth)
{
    return SHARE_WARPS * share_warp_bytes(depth);
}

/* Returns n / parts. The numbers are small, so that the added half exceeds the rounding error. */
DEVICE int share_up_to(int n, int parts)
{
    return (int)(((float)n + 0.5f) * reciprocal_approx((float)parts));
}

/* A warp's sums of an item, not yet divided by the sum of weights: the lane's columns, and the part_end of
 * all its parts together. */
struct ShareSums {
    float o[8];
    part_end end;
};

DEVICE uint4 as_words(const float *x)
{
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
}

/* Stores the sums for another warp. `memory`: the warp's copies, which all its lanes have read; `of_row`: 8
 * bytes. */
DEVICE void put_sums(const ShareSums &sums, uint32_t memory, uint32_t of_row, int lane)
{
    const uint32_t at = memory + 16 * (uint32_t)lane;
    store_shared_16(at, as_words(sums.o)), store_shared_16(at + SHARE_SUM_BYTES / 2, as_words(sums.o + 4));
    if (lane == 0)
        store_shared_4(of_row, __float_as_uint(sums.end.max)),
            store_shared_4(of_row + 4, __float_as_uint(sums.end.sum));
}

/* Adds the sums that another warp stored. */
DEVICE void add_sums(ShareSums &sums, uint32_t memory, uint32_t of_row, int lane)
{
    const uint32_t at = memory + 16 * (uint32_t)lane;
    const uint4 low = load_shared_16(at), high = load_shared_16(at + SHARE_SUM_BYTES / 2);
    const float its_max = __uint_as_float(load_shared_4(of_row)), max = fmaxf(sums.end.max, its_max),
                to = parts_reference(max), own = exp2_approx(sums.end.max - to),
                its = exp2_approx(its_max - to);
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) sums.o[i] = fmaf(sums.o[i], own, its * __uint_as_float(words[i]));
    sums.end.sum = fmaf(sums.end.sum, own, its * __uint_as_float(load_shared_4(of_row + 4)));
    sums.end.max = max;
}

/* The addresses of a warp's copies of an item. */
struct ShareCopies {
    uint32_t values, scales, end; /* of the lane; end: of one part */

    DEVICE ShareCopies(uint32_t parts, uint32_t ends, int lane)
        : values(parts + 16 * (uint32_t)lane),
          scales(parts + (uint32_t)(SHARE_COPY_BYTES - 32 * 4) + 4 * (uint32_t)lane),
          end(ends + 8 * (uint32_t)lane)
    {
    }
};

/* Issues the copies of `count` parts of an item: first, first + step, …. Zeros fill up to a multiple of
 * SHARE_TOGETHER. */
template <typename Share>
DEVICE void ask_for_parts(const Share &share, int item, int first, int step, int count, const ShareCopies &to,
                          int lane)
{
    const int row = item / 2, half = item % 2;
    const int64_t part_row = share.part_row(first, row), rows = share.part_row(first + step, row) - part_row;
    const bool some = lane < count;
    cp_async_8(to.end, share.split.part_ends + (some ? part_row + rows * lane : 0), some);
    const char *from = (const char *)half_row(share.split, part_row);
    const uint32_t value_at = (uint32_t)(half * HALF_ROW_COLUMNS + 16 * lane),
                   scale_at = (uint32_t)(2 * HALF_ROW_COLUMNS + 16 * half + lane / 8 * 4);
    const int64_t row_bytes = rows * (HALF_ROW_COLUMNS * (int)sizeof(float));
#pragma unroll 1
    for (int k = 0; k < count; k += SHARE_TOGETHER)
#pragma unroll
        for (int i = 0; i < SHARE_TOGETHER; i++, from += row_bytes) {
            const bool valid = k + i < count;
            const uint32_t at = (uint32_t)((k + i) * SHARE_COPY_BYTES);
            const char *const part = valid ? from : (const char *)share.split.part_out;
            cp_async_16(to.values + at, part + value_at, valid),
                cp_async_4(to.scales + at, part + scale_at, valid);
        }
}

/* Returns the sums of parts that have arrived. A part that saw no key has weight 0; its values are also 0,
 * unless no part saw a key. */
DEVICE ShareSums sum_of_parts(int count, const ShareCopies &from, int lane)
{
    part_end mine = {-INFINITY, 0.0f};
    if (lane < count) {
        const uint2 words = load_shared_8(from.end);
        mine = {__uint_as_float(words.x), __uint_as_float(words.y)};
    }
    ShareSums sums = {};
    sums.end.max = mine.max;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        sums.end.max = fmaxf(sums.end.max, __shfl_xor_sync(~0u, sums.end.max, lanes));
    const float weight = part_weight(mine, parts_reference(sums.end.max));
    sums.end.sum = weight;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sums.end.sum += __shfl_xor_sync(~0u, sums.end.sum, lanes);
#pragma unroll 1
    for (int k = 0; k < count; k += SHARE_TOGETHER)
#pragma unroll
        for (int i = 0; i < SHARE_TOGETHER; i++) {
            const uint32_t at = (uint32_t)((k + i) * SHARE_COPY_BYTES);
            const uint4 x = load_shared_16(from.values + at);
            const float by =
                __shfl_sync(~0u, weight, k + i) * __uint_as_float(load_shared_4(from.scales + at));
            const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 8; e++)
                sums.o[e] = fmaf(by, Fp16::to_float((uint16_t)(words[e / 2] >> 16 * (e % 2))), sums.o[e]);
        }
    return sums;
}

template <typename Element, typename Share>
DEVICE void store_item(const Share &share, const ShareSums &sums, int row, int half, int lane)
{
    const RowPlace place = share.place(row);
    const float lse = score_lse(sums.end.max, sums.end.sum);
    const float by =
        result_sink_factor(share.output.rules, place.head, lse) * reciprocal_approx(sums.end.sum);
    float o[8];
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = sums.end.sum == 0.0f ? 0.0f : sums.o[i] * by;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = Element::pack(o[2 * w], o[2 * w + 1]);
    const uint4 eight =
        Share::PAIRS ? quad_gather_eight(words) : make_uint4(words[0], words[1], words[2], words[3]);
    *(uint4 *)(share.output.out + out_offset(share.output, share.request, place) +
               Share::column(half, lane)) = eight;
    if (lane == 0 && half == 0) {
        store_lse(share.output, share.request, place, lse);
        if constexpr (Share::LARGEST) share.store_largest(row, sums.end.max);
    }
}

/* The assignment of a tile's items to warps: 1 << shift warps per item, so that a warp has at most DEPTH
 * parts, and all warps have work if there are few items; or each warp takes `at_once` items at a time, whose
 * loads are in flight together. */
struct ShareWay {
    int shift, at_once;

    template <int DEPTH> static DEVICE ShareWay of(int items, int parts)
    {
        ShareWay way = {0, 1};
#pragma unroll
        for (int i = 1; i <= 3; i++)
            way.shift += (parts > DEPTH << (i - 1)) | (items << i <= (int)SHARE_WARPS);
#pragma unroll
        for (int room = DEPTH / 2; room >= (int)SHARE_TOGETHER; room /= 2)
            if (way.shift == 0 && parts <= room) way.at_once *= 2;
        return way;
    }
};

/* Called by the SHARE_WARPS warps, from thread `first_thread` on, that have stored the part, if there is one.
 * They own barrier `id`. A warp takes at most DEPTH parts; `memory` has share_bytes(DEPTH). */
template <typename Element, int DEPTH, typename Share>
DEVICE void join_together(const Share &share, uint64_t *barrier, uint32_t memory, unsigned first_thread,
                          int id)
{
    barrier_sync(id, 32 * SHARE_WARPS);
    if (fresh_thread() == first_thread) cta_group_barrier_arrive_and_wait(barrier, (uint32_t)share.takers);
    barrier_sync(id, 32 * SHARE_WARPS);
    constexpr int WARP_BYTES = share_warp_bytes(DEPTH);
    const int warp = (int)(fresh_thread() - first_thread) / 32, lane = (int)fresh_thread() % 32;
    const ShareWay way = ShareWay::of<DEPTH>(share.end - share.begin, share.parts);
    const int step = 1 << way.shift, own = warp & (step - 1), turn = SHARE_WARPS >> way.shift;
    const int count = max((share.parts - own + step - 1) >> way.shift, 0); /* the warp's parts of an item */
    const uint32_t parts = memory + (uint32_t)(warp * WARP_BYTES),
                   ends = parts + (uint32_t)(DEPTH * SHARE_COPY_BYTES),
                   of_row = parts + (uint32_t)(WARP_BYTES - 16);
    const uint32_t item_bytes = (uint32_t)(DEPTH * SHARE_COPY_BYTES) / (uint32_t)way.at_once;
#pragma unroll 1
    for (int first = share.begin + (warp >> way.shift);
         __any_sync(~0u, first - (warp >> way.shift) < share.end); first += way.at_once * turn) {
#pragma unroll 1
        for (int i = 0; i < way.at_once; i++)
            if (__any_sync(~0u, first + i * turn < share.end))
                ask_for_parts(share, first + i * turn, own, step, count,
                              ShareCopies(parts + (uint32_t)i * item_bytes,
                                          ends + (uint32_t)(i * SHARE_END_BYTES), lane),
                              lane);
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 1
        for (int i = 0; i < way.at_once; i++) {
            const int item = first + i * turn;
            const bool there = __any_sync(~0u, item < share.end);
            ShareSums sums = sum_of_parts(
                there ? count : 0,
                ShareCopies(parts + (uint32_t)i * item_bytes, ends + (uint32_t)(i * SHARE_END_BYTES), lane),
                lane);
            if (__any_sync(~0u, way.shift > 0)) {
                __syncwarp();
                put_sums(sums, parts, of_row, lane);
                barrier_sync(id, 32 * SHARE_WARPS);
                if (own == 0)
#pragma unroll 1
                    for (uint32_t other = 1; other < (uint32_t)step; other++)
                        add_sums(sums, parts + other * (uint32_t)WARP_BYTES,
                                 of_row + other * (uint32_t)WARP_BYTES, lane);
                barrier_sync(id, 32 * SHARE_WARPS);
            }
            if (there && own == 0) store_item<Element>(share, sums, item / 2, item % 2, lane);
        }
    }
}
