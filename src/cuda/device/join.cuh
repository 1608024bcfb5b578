/* SPDX-License-Identifier: MIT
 *
 * Joins the partial results of requests that were split, in split order.
 *
 * A CTA takes items: some columns of a few rows of a request. With few parts per request, a warp takes a row
 * (rows_per_block = JOIN_WARPS). With many, all warps share one row (rows_per_block = 1): each takes every
 * JOIN_WARPS-th part, and they join in shared memory. A request of few parts among requests of many is always
 * added by one warp, in the same order and so with the same bits, whatever the other requests are. In both
 * cases the loads of a part do not wait for the sum of weights, and several parts are in flight together.
 * With few rows, an item is half or a quarter of the columns.
 *
 * Every CTA first lists the split requests, one partition (without a plan: one request) per thread, and then
 * takes its items in turns. There are few CTAs, and without split requests they have nothing to do. On Hopper
 * the listing runs before the kernel that makes the parts has ended. Requests split once may have been joined
 * by then (src/cuda/sm90/dense_decode/second_part.cuh); they are removed from the list afterwards. All of
 * this is done once and in little code, because at the end of a call the latency of fetching instructions
 * counts, too.
 */
#pragma once

#include "element.cuh"
#include "fragment.h"
#include "latent.cuh"
#include "part.cuh"
#include "splits.cuh"
#include "warpgroup.cuh"

static constexpr int VECTOR_COLUMNS = 32 * 4 /* of one vector per lane of a warp */;

/* The indices of a request's parts among all: first, second, second + step, … */
struct Parts {
    int request;
    int count; /* 0: nothing to join */
    int64_t first, second;
    int step;
    const uint32_t *ready_flags; /* [tiles][READY_FLAGS_OF_TILE]: may be joined already; NULL: is not */

    DEVICE int64_t index(int part) const { return part == 0 ? first : second + (int64_t)(part - 1) * step; }
};

/* Returns the parts of the request that is split for the first time at the end of partition `index`. */
__device__ static Parts parts_of_partition(const struct join_params &p, int index)
{
    Parts parts = {};
    const Partition partition = partition_of(p.split, index, p.b);
    if (!plan_fits(p.split, p.b)) return parts;
    const bool begins_here = partition.last > partition.first || !partition.continued;
    if (!partition.goes_on || partition.last < partition.first || !begins_here) return parts;
    const int32_t *splits = p.split.num_splits + partition.last;
    const int64_t planned = partition.ends_split_once ? 2 : (int64_t)splits[1] - splits[0];
    parts.count = (int)min(max(planned, (int64_t)1), (int64_t)p.split.num_partitions - index);
    parts.request = partition.last;
    parts.first = 2 * (int64_t)index + (partition.last == partition.first ? 0 : 1);
    parts.second = 2 * (int64_t)(index + 1);
    parts.step = 2;
    if (p.split.ready_flags && partition.ends_split_once)
        parts.ready_flags = ready_flags_of(p.split, index + 1);
    return parts;
}

__device__ static Parts parts_of_request(const struct join_params &p, int request)
{
    Parts parts = {};
    const int even_splits = even_splits_of(p, request_length(p, request));
    parts.request = request;
    parts.count = even_splits > 1 ? even_splits : 0;
    parts.first = (int64_t)request * p.split.even_splits;
    parts.second = parts.first + 1;
    parts.step = 1;
    return parts;
}

DEVICE bool tile_is_joined(const uint32_t *ready_flags, int tile)
{
    return __ldg(ready_flags + READY_FLAGS_OF_TILE * tile) == PART_JOINED;
}

DEVICE bool all_joined(const struct join_params &p, const Parts &parts)
{
    bool joined = true;
#pragma unroll 1
    for (int tile = 0; tile < p.split.tiles; tile++) joined &= tile_is_joined(parts.ready_flags, tile);
    return joined;
}

/* Returns the row, among those of all parts, of row `row` of a request in a part. */
DEVICE int64_t part_row_of(const struct join_params &p, const Parts &parts, int part, int row)
{
    return parts.index(part) * (p.h_q * p.s_q) + row;
}

/* A lane's share of a few parts of a row: 4 columns in each of VECTORS vectors. Parts are in the order of
 * part_position. */
template <int VECTORS_> struct PartsOfLane {
    static constexpr int VECTORS = VECTORS_;
    static constexpr bool IN_HALVES = false;
    static constexpr int BLOCKS_OF_SM = VECTORS == 4 ? 2 : 3;
    static constexpr int MANY = MANY_PARTS;
    /* Parts at a time; with one more ptxas spills. */
    static constexpr int QUARTERS = __CUDA_ARCH__ >= 1000                          ? 6
                                    : __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 ? 8
                                                                                   : 7,
                         HALVES = __CUDA_ARCH__ >= 1000 ? 3 : 4;
    static constexpr int COUNT = VECTORS == 1 ? QUARTERS : VECTORS == 2 ? HALVES : 3;
    part_end end[COUNT];
    float4 values[COUNT][VECTORS];

    DEVICE void load_values(const struct join_params &p, int i, int64_t part_row, int position)
    {
        const float4 *from = (const float4 *)(p.split.part_out + part_row * D_V + position);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) values[i][v] = __ldg(from + VECTOR_COLUMNS / 4 * v);
    }

    DEVICE float4 value(int i, int v) const
    {
        return values[i][v];
    }
    DEVICE float scale(int, int) const
    {
        return 1.0f;
    }
};

/* Loads parts begin, begin + stride, … */
template <typename Some>
DEVICE void load_parts(Some &some, const struct join_params &p, const Parts &parts, int row, int begin,
                       int stride, int position)
{
#pragma unroll
    for (int i = 0; i < Some::COUNT; i++) {
        const int part = begin + i * stride;
        some.end[i] = {-INFINITY, 0.0f};
        if (part >= parts.count) continue;
        const int64_t part_row = part_row_of(p, parts, part, row);
        some.end[i] = load_part_end(p.split, part_row);
        some.load_values(p, i, part_row, position);
    }
}

/* Adds the parts in their order. */
template <typename Some, int VECTORS>
DEVICE void add_parts(const Some &some, float4 (&sum)[VECTORS], const part_end &whole)
{
    const float reference = parts_reference(whole.max), inverse = reciprocal_approx(whole.sum);
#pragma unroll
    for (int i = 0; i < Some::COUNT; i++) {
        if (some.end[i].sum == 0.0f) continue; /* saw no key, or is no part: the values are undefined */
        const float of_part = part_weight(some.end[i], reference) * inverse;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const float weight = of_part * some.scale(i, v);
            const float4 x = some.value(i, v);
            sum[v].x = fmaf(weight, x.x, sum[v].x);
            sum[v].y = fmaf(weight, x.y, sum[v].y);
            sum[v].z = fmaf(weight, x.z, sum[v].z);
            sum[v].w = fmaf(weight, x.w, sum[v].w);
        }
    }
}

/* Returns the largest maximum and the sum of weights over all parts of a row; every warp gets the same. */
DEVICE part_end whole_of(const struct join_params &p, const Parts &parts, int row)
{
    const int lane = (int)threadIdx.x % 32;
    part_end whole = {-INFINITY, 0.0f};
#pragma unroll 1
    for (int part = lane; part < parts.count; part += 32)
        whole.max = fmaxf(whole.max, load_part_end(p.split, part_row_of(p, parts, part, row)).max);
    for (int lanes = 16; lanes; lanes /= 2)
        whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, lanes));
#pragma unroll 1
    for (int part = lane; part < parts.count; part += 32)
        whole.sum +=
            part_weight(load_part_end(p.split, part_row_of(p, parts, part, row)), parts_reference(whole.max));
    for (int lanes = 16; lanes; lanes /= 2) whole.sum += __shfl_xor_sync(~0u, whole.sum, lanes);
    return whole;
}

/* `position` is the lane's first. A lane has two pairs of columns, 8 apart, or four columns in a row. */
template <typename Element, bool IN_HALVES, int VECTORS>
DEVICE void write_row(const struct join_params &p, int request, RowCoord coord, int position,
                      const part_end &whole, const float4 (&sum)[VECTORS])
{
    const float lse = score_lse(whole.max, whole.sum);
    const float factor = result_sink_factor(p.output.rules, coord.head, lse);
    const int column = IN_HALVES ? position : part_column(position), second = IN_HALVES ? 2 : 8;
    const int64_t at = out_offset(p.output, request, coord) + column;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        store_pair<Element>(p.output, at + VECTOR_COLUMNS * v, sum[v].x * factor, sum[v].y * factor);
        store_pair<Element>(p.output, at + VECTOR_COLUMNS * v + second, sum[v].z * factor, sum[v].w * factor);
    }
    if (column == 0) store_lse(p.output, request, coord, lse);
}

/* Compacts the threads' parts with count > 0 into a list, in thread order, and returns its length. All
 * threads of the CTA must call. */
DEVICE int list_parts(const Parts &mine, Parts list[32 * JOIN_WARPS], int counts[JOIN_WARPS])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const uint32_t votes = __ballot_sync(~0u, mine.count > 0);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < JOIN_WARPS; w++) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    if (mine.count) list[before + __popc(votes & ((1u << lane) - 1u))] = mine;
    __syncthreads();
    return all;
}

/* Joins an item of a request, rows from `row` on. All threads of the CTA must call. */
template <typename Element, typename Some>
DEVICE void join_rows(const struct join_params &p, const Parts &parts, int row, int first_column,
                      int rows_per_block, float4 shared[JOIN_WARPS][D_V / 4])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const bool one_row = rows_per_block == 1, shares = one_row && parts.count > Some::MANY;
    if (one_row && !shares && warp) return;
    row += one_row ? 0 : warp;
    if ((unsigned)row >= (unsigned)(p.h_q * p.s_q))
        return; /* never with a shared row, so all threads reach the barriers */
    const int kv_head = row / p.rows, row_of_head = row - kv_head * p.rows;
    if (parts.ready_flags &&
        tile_is_joined(parts.ready_flags, kv_head * p.split.tiles_of_head + row_of_head / ROWS_OF_READY_TILE))
        return;
    const int first = shares ? warp : 0, stride = shares ? JOIN_WARPS : 1, position = first_column + 4 * lane;
    constexpr int VECTORS = Some::VECTORS;
    Some some;
    float4 sum[VECTORS] = {};
    part_end whole = {};
#pragma unroll 1
    for (int part = first; part < parts.count; part += Some::COUNT * stride) {
        load_parts(some, p, parts, row, part, stride, position);
        if (part == first) whole = whole_of(p, parts, row);
        add_parts(some, sum, whole);
    }
    if (shares) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) shared[warp][lane + 32 * v] = sum[v];
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                for (int w = 1; w < JOIN_WARPS; w++) {
                    const float4 other = shared[w][lane + 32 * v];
                    sum[v].x += other.x, sum[v].y += other.y, sum[v].z += other.z, sum[v].w += other.w;
                }
        }
        __syncthreads();
        if (warp) return;
    }
    write_row<Element, Some::IN_HALVES>(p, parts.request, row_coord(p, row_of_head, kv_head), position, whole,
                                        sum);
}

/* CTAs are numbered by request, lane of row blocks, and columns, so that no item number is divided in the
 * loops. Without a plan, if each request has CTAs of its own, there is no list. */
template <typename Element, template <int> class Some, int VECTORS>
DEVICE void join_splits(const struct join_params &p, int rows_per_block, int row_lanes)
{
    __shared__ float4 shared[JOIN_WARPS][D_V / 4];
    __shared__ Parts list[32 * JOIN_WARPS];
    __shared__ int counts[JOIN_WARPS];
    constexpr int COLUMN_SHARES = D_V / VECTOR_COLUMNS / VECTORS;
    const int column = (int)blockIdx.x % COLUMN_SHARES * VECTORS * VECTOR_COLUMNS;
    const int row_lane = (int)blockIdx.x / COLUMN_SHARES % row_lanes,
              request_lane = (int)blockIdx.x / COLUMN_SHARES / row_lanes,
              request_lanes = (int)gridDim.x / COLUMN_SHARES / row_lanes;
    const int64_t rows = (int64_t)p.h_q * p.s_q, row_step = (int64_t)row_lanes * rows_per_block;
    const bool evenly = !p.split.partitions, alone = evenly && p.b == request_lanes;
    const int units = alone ? 1 : evenly ? p.b : p.split.num_partitions;
#pragma unroll 1
    for (int first = 0; first < units; first += 32 * JOIN_WARPS) {
        const int unit = alone ? request_lane : first + (int)threadIdx.x;
        Parts mine = {};
        if (unit < (alone ? p.b : units))
            mine = evenly ? parts_of_request(p, unit) : parts_of_partition(p, unit);
        int listed;
        if (alone) {
            if (threadIdx.x == 0) list[0] = mine;
            listed = mine.count > 0;
            __syncthreads();
            wait_for_parts();
        } else {
            const bool perhaps = __syncthreads_or(mine.ready_flags != NULL);
            listed = list_parts(mine, list, counts);
            if (first == 0) wait_for_parts();
            if (perhaps) {
                if (mine.ready_flags && all_joined(p, mine)) mine.count = 0;
                listed = list_parts(mine, list, counts);
            }
        }
        if (listed == 0) continue;
#pragma unroll 1
        for (int i = alone ? 0 : request_lane; i < listed; i += request_lanes)
#pragma unroll 1
            for (int64_t row = row_lane * rows_per_block; row < rows; row += row_step)
                join_rows<Element, Some<VECTORS>>(p, list[i], (int)row, column, rows_per_block, shared);
        __syncthreads(); /* the list has been read */
    }
}

#define JOIN_KERNEL(NAME, ELEMENT, SOME, VECTORS)                                                            \
    extern "C" __global__ void __launch_bounds__(32 * JOIN_WARPS, SOME<VECTORS>::BLOCKS_OF_SM)               \
        NAME(const __grid_constant__ struct join_params p, int32_t rows_per_block, int32_t row_lanes)        \
    {                                                                                                        \
        join_splits<ELEMENT, SOME, VECTORS>(p, rows_per_block, row_lanes);                                   \
    }

#define JOIN_KERNELS(NAME, ELEMENT, SOME)                                                                    \
    JOIN_KERNEL(NAME, ELEMENT, SOME, 4)                                                                      \
    JOIN_KERNEL(NAME##_halves, ELEMENT, SOME, 2)                                                             \
    JOIN_KERNEL(NAME##_quarters, ELEMENT, SOME, 1)
