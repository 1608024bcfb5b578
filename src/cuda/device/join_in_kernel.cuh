/* SPDX-License-Identifier: MIT
 *
 * Joins a tile's parts in the CTAs that made them: each stores its part, waits for the others, and joins a
 * range. This saves a second kernel, whose code and parameters would have to be fetched, and the parts are
 * still in L2.
 *
 * An item is half of the columns of a row, 8 per lane. If there are few items, two, four or eight of the
 * eight warps take one together: a warp has every second, fourth or eighth part of it, and the warps pass
 * their sums through shared memory to the first of them. If there are many items and few parts, a warp takes
 * several items at a time. All loads of a warp are in flight together, by cp.async.
 *
 * A kernel defines its range: struct JoinRange with split, output, request, parts, joiners (the number of
 * CTAs that join a range each: those that have the parts, or more), begin and end (items; item 2 r + h is
 * half h of row r), part_row(part, row) and coord(row). Its column(half, lane) is the first of a lane's
 * eight columns; with PAIRS a lane has them only after quad_gather_eight.
 *
 * Parts are half rows (half_rows.cuh); those of fp16 results have 24 bits a value, as store_24_bit_tile puts
 * them.
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
    JOIN_RANGE_WARPS = 8,
    JOIN_RANGE_UNROLL = 4, /* parts that are added in sequence, without a branch */
    JOIN_END_BYTES = 32 * 8 /* of an item */,
    JOIN_SUM_BYTES = 2 * 32 * 16 /* of a warp: 8 columns per lane */
};

/* Copied of a part of an item: a lane's values, or their upper halves, and a scale, or their third bytes. */
template <bool IN_24> DEVICE constexpr int join_copy_bytes()
{
    return 32 * (16 + (IN_24 ? 8 : 4));
}

/* Shared memory of the join if a warp takes `depth` parts: a warp's copies, the ends of up to depth /
 * JOIN_RANGE_UNROLL items, and the numbers that an item's warps exchange. Their sums reuse the memory of the
 * copies. */
template <bool IN_24> DEVICE constexpr int join_range_warp_bytes(int depth)
{
    return depth * join_copy_bytes<IN_24>() + depth / JOIN_RANGE_UNROLL * JOIN_END_BYTES + 16;
}

template <bool IN_24 = false> DEVICE constexpr int join_range_bytes(int depth)
{
    return JOIN_RANGE_WARPS * join_range_warp_bytes<IN_24>(depth);
}

/* Returns n / parts. The numbers are small, so that the added half exceeds the rounding error. */
DEVICE int join_range_up_to(int n, int parts)
{
    return (int)(((float)n + 0.5f) * reciprocal_approx((float)parts));
}

/* A warp's sums of an item, not yet divided by the sum of weights: the lane's columns, and the part_end of
 * all its parts together. */
struct JoinSums {
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
DEVICE void put_sums(const JoinSums &sums, uint32_t memory, uint32_t of_row, int lane)
{
    const uint32_t at = memory + 16 * (uint32_t)lane;
    store_shared_16(at, as_words(sums.o)), store_shared_16(at + JOIN_SUM_BYTES / 2, as_words(sums.o + 4));
    if (lane == 0)
        store_shared_4(of_row, __float_as_uint(sums.end.max)),
            store_shared_4(of_row + 4, __float_as_uint(sums.end.sum));
}

/* Adds the sums that another warp stored. */
DEVICE void add_sums(JoinSums &sums, uint32_t memory, uint32_t of_row, int lane)
{
    const uint32_t at = memory + 16 * (uint32_t)lane;
    const uint4 low = load_shared_16(at), high = load_shared_16(at + JOIN_SUM_BYTES / 2);
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
template <bool IN_24> struct JoinCopies {
    uint32_t values, others, end; /* of the lane; others: its scale or third bytes; end: of one part */

    DEVICE JoinCopies(uint32_t parts, uint32_t ends, int lane)
        : values(parts + 16 * (uint32_t)lane), others(parts + 32 * 16 + (IN_24 ? 8 : 4) * (uint32_t)lane),
          end(ends + 8 * (uint32_t)lane)
    {
    }
};

/* Issues the copies of `count` parts of an item: first, first + step, …. Zeros fill up to a multiple of
 * JOIN_RANGE_UNROLL. */
template <bool IN_24, typename Range>
DEVICE void ask_for_parts(const Range &range, int item, int first, int step, int count,
                          const JoinCopies<IN_24> &to, int lane)
{
    const int row = item / 2, half = item % 2;
    const int64_t part_row = range.part_row(first, row), rows = range.part_row(first + step, row) - part_row;
    const bool some = lane < count;
    cp_async_8(to.end, range.split.part_ends + (some ? part_row + rows * lane : 0), some);
    const char *from = (const char *)half_row(range.split, part_row);
    const uint32_t value_at = (uint32_t)(half * HALF_ROW_COLUMNS + 16 * lane),
                   scale_at = (uint32_t)(2 * HALF_ROW_COLUMNS + 16 * half + lane / 8 * 4);
    const uint32_t bytes_at =
        (uint32_t)(THIRD_BYTES_AT + third_byte_position(half * (HALF_ROW_COLUMNS / 2) + 8 * lane));
    const int64_t row_bytes = rows * (HALF_ROW_COLUMNS * (int)sizeof(float));
#pragma unroll 1
    for (int k = 0; k < count; k += JOIN_RANGE_UNROLL)
#pragma unroll
        for (int i = 0; i < JOIN_RANGE_UNROLL; i++, from += row_bytes) {
            const bool valid = k + i < count;
            const uint32_t at = (uint32_t)((k + i) * join_copy_bytes<IN_24>());
            const char *const part = valid ? from : (const char *)range.split.part_out;
            cp_async_16(to.values + at, part + value_at, valid);
            if constexpr (IN_24)
                cp_async_8(to.others + at, part + bytes_at, valid);
            else
                cp_async_4(to.others + at, part + scale_at, valid);
        }
}

/* Adds to a lane's sums its values of part `part`, which has arrived, times the part's weight: lane `part` has
 * it. */
template <bool IN_24>
DEVICE void add_part(float (&sum)[8], const JoinCopies<IN_24> &from, int part, float weights)
{
    const uint32_t at = (uint32_t)(part * join_copy_bytes<IN_24>());
    const uint4 x = load_shared_16(from.values + at);
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
    if constexpr (IN_24) {
        const uint2 bytes = load_shared_8(from.others + at);
        const float weight = __shfl_sync(~0u, weights, part);
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum[e] = fmaf(weight, value_of_24_bits(words[e / 2], e < 4 ? bytes.x : bytes.y, e), sum[e]);
    } else {
        const float by = __shfl_sync(~0u, weights, part) * __uint_as_float(load_shared_4(from.others + at));
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum[e] = fmaf(by, Fp16::to_float((uint16_t)(words[e / 2] >> 16 * (e % 2))), sum[e]);
    }
}

/* Returns the sums of parts that have arrived. A part that saw no key has weight 0; its values are also 0,
 * unless no part saw a key. */
template <bool IN_24> DEVICE JoinSums sum_of_parts(int count, const JoinCopies<IN_24> &from, int lane)
{
    part_end mine = {-INFINITY, 0.0f};
    if (lane < count) {
        const uint2 words = load_shared_8(from.end);
        mine = {__uint_as_float(words.x), __uint_as_float(words.y)};
    }
    JoinSums sums = {};
    sums.end.max = mine.max;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        sums.end.max = fmaxf(sums.end.max, __shfl_xor_sync(~0u, sums.end.max, lanes));
    const float weight = part_weight(mine, parts_reference(sums.end.max));
    sums.end.sum = weight;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sums.end.sum += __shfl_xor_sync(~0u, sums.end.sum, lanes);
#pragma unroll 1
    for (int k = 0; k < count; k += JOIN_RANGE_UNROLL)
#pragma unroll
        for (int i = 0; i < JOIN_RANGE_UNROLL; i++) add_part(sums.o, from, k + i, weight);
    return sums;
}

template <typename Element, typename Range>
DEVICE void store_item(const Range &range, const JoinSums &sums, int row, int half, int lane)
{
    const RowCoord coord = range.coord(row);
    const float lse = score_lse(sums.end.max, sums.end.sum);
    const float by =
        result_sink_factor(range.output.rules, coord.head, lse) * reciprocal_approx(sums.end.sum);
    float o[8];
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = sums.end.sum == 0.0f ? 0.0f : sums.o[i] * by;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = Element::pack(o[2 * w], o[2 * w + 1]);
    const uint4 eight =
        Range::PAIRS ? quad_gather_eight(words) : make_uint4(words[0], words[1], words[2], words[3]);
    *(uint4 *)(range.output.out + out_offset(range.output, range.request, coord) +
               Range::column(half, lane)) = eight;
    if (lane == 0 && half == 0) {
        store_lse(range.output, range.request, coord, lse);
        if constexpr (Range::LARGEST) range.store_largest(row, sums.end.max);
    }
}

/* The assignment of a tile's items to warps: 1 << shift warps per item, so that a warp has at most DEPTH
 * parts, and all warps have work if there are few items; or each warp takes `at_once` items at a time, whose
 * loads are in flight together. */
struct WarpsOfItems {
    int shift, at_once;

    template <int DEPTH> static DEVICE WarpsOfItems of(int items, int parts)
    {
        WarpsOfItems warps_of = {0, 1};
#pragma unroll
        for (int i = 1; i <= 3; i++)
            warps_of.shift += (parts > DEPTH << (i - 1)) | (items << i <= (int)JOIN_RANGE_WARPS);
#pragma unroll
        for (int room = DEPTH / 2; room >= (int)JOIN_RANGE_UNROLL; room /= 2)
            if (warps_of.shift == 0 && parts <= room) warps_of.at_once *= 2;
        return warps_of;
    }
};

/* Called by the JOIN_RANGE_WARPS warps, from thread `first_thread` on, that have stored the part, if there
 * is one. They own barrier `id`. A warp takes at most DEPTH parts; `memory` has
 * join_range_bytes<IN_24_BITS<Element>>(DEPTH). */
template <typename Element, int DEPTH, typename Range>
DEVICE void join_range(const Range &range, uint64_t *barrier, uint32_t memory, unsigned first_thread, int id)
{
    barrier_sync(id, 32 * JOIN_RANGE_WARPS);
    if (fresh_thread() == first_thread) cta_group_barrier_arrive_and_wait(barrier, (uint32_t)range.joiners);
    barrier_sync(id, 32 * JOIN_RANGE_WARPS);
    constexpr bool IN_24 = IN_24_BITS<Element>;
    constexpr int WARP_BYTES = join_range_warp_bytes<IN_24>(DEPTH),
                  COPIES_BYTES = DEPTH * join_copy_bytes<IN_24>();
    const int warp = (int)(fresh_thread() - first_thread) / 32, lane = (int)fresh_thread() % 32;
    const WarpsOfItems warps_of = WarpsOfItems::of<DEPTH>(range.end - range.begin, range.parts);
    const int step = 1 << warps_of.shift, own = warp & (step - 1),
              stride = JOIN_RANGE_WARPS >> warps_of.shift;
    const int count =
        max((range.parts - own + step - 1) >> warps_of.shift, 0); /* the warp's parts of an item */
    const uint32_t parts = memory + (uint32_t)(warp * WARP_BYTES), ends = parts + (uint32_t)COPIES_BYTES,
                   of_row = parts + (uint32_t)(WARP_BYTES - 16);
    const uint32_t item_bytes = (uint32_t)COPIES_BYTES / (uint32_t)warps_of.at_once;
#pragma unroll 1
    for (int first = range.begin + (warp >> warps_of.shift);
         __any_sync(~0u, first - (warp >> warps_of.shift) < range.end); first += warps_of.at_once * stride) {
#pragma unroll 1
        for (int i = 0; i < warps_of.at_once; i++)
            if (__any_sync(~0u, first + i * stride < range.end))
                ask_for_parts(range, first + i * stride, own, step, count,
                              JoinCopies<IN_24>(parts + (uint32_t)i * item_bytes,
                                                ends + (uint32_t)(i * JOIN_END_BYTES), lane),
                              lane);
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 1
        for (int i = 0; i < warps_of.at_once; i++) {
            const int item = first + i * stride;
            const bool there = __any_sync(~0u, item < range.end);
            JoinSums sums = sum_of_parts(there ? count : 0,
                                         JoinCopies<IN_24>(parts + (uint32_t)i * item_bytes,
                                                           ends + (uint32_t)(i * JOIN_END_BYTES), lane),
                                         lane);
            if (__any_sync(~0u, warps_of.shift > 0)) {
                __syncwarp();
                put_sums(sums, parts, of_row, lane);
                barrier_sync(id, 32 * JOIN_RANGE_WARPS);
                if (own == 0)
#pragma unroll 1
                    for (uint32_t other = 1; other < (uint32_t)step; other++)
                        add_sums(sums, parts + other * (uint32_t)WARP_BYTES,
                                 of_row + other * (uint32_t)WARP_BYTES, lane);
                barrier_sync(id, 32 * JOIN_RANGE_WARPS);
            }
            if (there && own == 0) store_item<Element>(range, sums, item / 2, item % 2, lane);
        }
    }
}
