/* SPDX-License-Identifier: MIT
 *
 * Shared by both planners. Lay the requests end to end on a line, each as long as its cost (blocks +
 * PLAN_OVERHEAD), the first at 0; start[r] is where request r begins. A partition that begins at X has room
 * up to Y = X + payload: it finishes every request that ends at or before Y. It takes the request e that
 * contains Y up to Y - PLAN_OVERHEAD, which leaves room for the overhead, unless that is nothing. So the next
 * partition begins at
 *
 *      X' = max(Y - PLAN_OVERHEAD, start[e])          and e is split if the first is larger
 *
 * (a point inside request e stands for "start + blocks done").
 */
#pragma once

#include "../device/warp.cuh"
#include "../params.h"

static constexpr int TILE = PLAN_THREADS, WARPS = PLAN_THREADS / 32;
static_assert(TILE == PLAN_FEW, "the host planner looks at costs where plan_jumps.cuh does");
static_assert(WARPS == 32 && TILE == 32 * 32, "a tile is searched in two looks of a warp");

/* Returns the blocks of a request; `request` < b. */
DEVICE int32_t blocks_of(const struct plan_params &p, int64_t request)
{
    if (!p.seqlens) {
        const struct plan_topk &topk = p.topk;
        const int64_t length =
            plan_topk_length(plan_topk_count(topk.topk, topk.length, request), topk.extra_topk,
                             plan_topk_count(topk.extra_topk, topk.extra_length, request));
        return (int32_t)((uint64_t)(length - 1) / PLAN_BLOCK) + 1;
    }
    const int32_t length = (int32_t)min((int64_t)p.seqlens[request], p.capacity);
    return (int32_t)((uint32_t)(max(length, 1) - 1) / PLAN_BLOCK) + 1;
}

DEVICE int64_t cost_of(const struct plan_params &p, int64_t request)
{
    return request < p.b ? blocks_of(p, request) + PLAN_OVERHEAD : 0;
}

/* Returns warp_inclusive_sum, and stores the warp's total to sums (one per warp). */
template <typename Int> DEVICE Int sum_within_warp(Int x, Int sums[WARPS])
{
    x = warp_inclusive_sum(x);
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = x;
    return x;
}

/* After a barrier: returns the total of the warps before this one, and sets *whole to that of all `warps`
 * warps. */
DEVICE uint32_t sum_of_warps_before(const uint32_t sums[WARPS], int warps, uint32_t *whole)
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t sum = lane < warps ? sums[lane] : 0;
    *whole = __reduce_add_sync(~0u, sum);
    return __reduce_add_sync(~0u, lane < (int)threadIdx.x / 32 ? sum : 0);
}

/* Returns the inclusive sum over the CTA, and sets *whole to the total. sums (one per warp) must not be in
 * use. */
template <typename Int> DEVICE Int block_inclusive_sum(Int x, Int sums[WARPS], Int *whole)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    x = sum_within_warp(x, sums);
    __syncthreads();
    const Int sum = warp_inclusive_sum(sums[lane]); /* computed redundantly by every warp */
    *whole = __shfl_sync(~0u, sum, WARPS - 1);
    const Int before = __shfl_sync(~0u, sum, (warp + WARPS - 1) % WARPS);
    return warp ? x + before : x;
}

/* Writes the header, and the first entry of num_splits. Called by one thread. */
DEVICE void write_header(const struct plan_params &p, int64_t payload)
{
    p.num_splits[0] = 0;
    if (!p.header) return;
    p.header->magic = PLAN_MAGIC;
    p.header->num_partitions = p.num_partitions;
    p.header->batch = p.b;
    p.header->payload = payload;
    p.header->zero = 0;
}

/* Writes a row in two stores; plans are 16-byte aligned. */
DEVICE void write_row(const struct plan_params &p, int32_t i, const struct plan_partition &row)
{
    int4 *to = (int4 *)(p.partitions + i);
    to[0] = make_int4(row.begin_request, row.end_request, row.begin_block, row.end_block);
    to[1] = make_int4(row.begin_split, row.first_is_split, row.last_is_split, row.zero);
}

/* Returns the last i in [0, count) with values[i] ≤ x. The values ascend, and the first is ≤ x. */
template <typename Int> DEVICE int last_not_above(const Int *values, int count, Int x)
{
    int low = 0;
#pragma unroll 1
    for (int step = 1 << (31 - __clz(count)); step > 0; step >>= 1)
        if (low + step < count && values[low + step] <= x) low += step;
    return low;
}
