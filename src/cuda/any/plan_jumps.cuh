/* SPDX-License-Identifier: MIT
 *
 * The chain of partitions for up to PLAN_THREADS requests, nearly all of it at once.
 *
 * With step = payload - PLAN_OVERHEAD, a partition that begins at X is followed by one at X + step, unless a request begins
 * between X + step and X + payload: then by one at the start of that request (there is room for one only: a request is
 * longer than the overhead). So between two partitions that begin with a request, partitions stand `step` apart. From the
 * start of request q the chain first meets the start of
 *
 *      e = the first request after q with (start[e] - start[q]) mod step ≤ PLAN_OVERHEAD
 *
 * after n = ceil((start[e] - start[q] - PLAN_OVERHEAD) / step) partitions. Every thread finds e for one q, as far as LOOK
 * requests on. Then the chain is followed from meeting to meeting (a load from shared memory each; where e was too far, a
 * warp looks on), and everything between the meetings is arithmetic.
 */
#pragma once

#include "plan_common.cuh"

struct Jumps {
    uint32_t start[TILE + 1];
    uint32_t residue[TILE];      /* start mod step */
    int32_t next[TILE];          /* e, or 0 */
    int32_t meeting[TILE + 1];   /* requests that partitions begin with, in order */
    int32_t partition[TILE + 1]; /* which partitions */
    int32_t meetings;
    int32_t cuts[TILE];
    int32_t sums[WARPS + 1];
};

/* Where a partition begins. */
struct Begin {
    int32_t request, block, split;
};

/* The last i in [0, count) with values[i] ≤ x; values rise, and the first is ≤ x. */
template <typename Int> __device__ __forceinline__ int last_not_above(const Int *values, int count, Int x)
{
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (values[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ bool meets(const Jumps &jumps, uint32_t residue, int e, uint32_t step)
{
    const uint32_t other = jumps.residue[e];
    return (other >= residue ? other - residue : other + step - residue) <= PLAN_OVERHEAD;
}

static constexpr int LOOK = 32;

__device__ __forceinline__ int32_t find_meeting(const Jumps &jumps, int q, int b, uint32_t step)
{
    const uint32_t residue = jumps.residue[q];
    for (int e = q + 1; e < min(q + 1 + LOOK, b); e++)
        if (meets(jumps, residue, e, step)) return e;
    return 0;
}

/* By the first warp: the meetings from request 0 on, as many as there are partitions at most. */
__device__ __forceinline__ void follow(Jumps &jumps, int b, int32_t num_partitions, uint32_t step)
{
    const int lane = (int)threadIdx.x % 32;
    int count = 0, q = 0;
    while (count < min(num_partitions, TILE)) {
        if (lane == 0) jumps.meeting[count] = q;
        count++;
        int e = jumps.next[q];
        for (int first = q + 1 + LOOK; !e && first < b; first += 32) {
            const bool here = first + lane < b && meets(jumps, jumps.residue[q], first + lane, step);
            const unsigned found = __ballot_sync(~0u, here);
            if (found) e = first + __ffs((int)found) - 1;
        }
        if (!e) break;
        q = e;
    }
    if (lane == 0) jumps.meetings = count;
}

/* Where on the line a partition begins, if those before it do not take everything. */
__device__ __forceinline__ uint64_t position_of(const Jumps &jumps, int32_t partition, uint32_t step)
{
    const int i = last_not_above(jumps.partition, jumps.meetings, partition);
    return jumps.start[jumps.meeting[i]] + (uint64_t)(partition - jumps.partition[i]) * step;
}

/* `at` is the position of the partition. */
__device__ __forceinline__ Begin begin_of(const Jumps &jumps, int b, int32_t partition, uint32_t at, uint32_t step)
{
    const int i = last_not_above(jumps.partition, jumps.meetings, partition), q = jumps.meeting[i];
    Begin begin = {};
    begin.request = q + last_not_above(jumps.start + q, b - q, at);
    begin.block = (int32_t)(at - jumps.start[begin.request]);
    if (begin.block) /* as many as begin within the request, up to this one */
        begin.split = partition - jumps.partition[i] - (int32_t)((jumps.start[begin.request] - jumps.start[q]) / step);
    return begin;
}

/* The whole plan but for its header. 0 < b ≤ TILE and a line shorter than 2^31; `end` is where this thread's request ends. */
__device__ __forceinline__ void plan_by_jumps(const struct plan_params &p, int64_t payload, int64_t end)
{
    __shared__ Jumps jumps;
    const int thread = (int)threadIdx.x, b = (int)p.b;
    const uint32_t step = (uint32_t)payload - PLAN_OVERHEAD;
    jumps.start[thread + 1] = (uint32_t)end;
    jumps.cuts[thread] = 0;
    if (thread == 0) jumps.start[0] = 0;
    __syncthreads();
    const uint32_t start = jumps.start[thread];
    jumps.residue[thread] = start % step;
    __syncthreads();
    jumps.next[thread] = find_meeting(jumps, thread, b, step);
    __syncthreads();
    if (thread < 32) follow(jumps, b, p.num_partitions, step);
    __syncthreads();

    /* Partitions from meeting to meeting; no more of them count than there are. */
    int32_t steps = 0;
    if (thread + 1 < jumps.meetings) {
        const uint32_t way = jumps.start[jumps.meeting[thread + 1]] - jumps.start[jumps.meeting[thread]];
        steps = (int32_t)min((way - PLAN_OVERHEAD + step - 1) / step, (uint32_t)p.num_partitions);
    }
    const int32_t before = block_inclusive_sum(steps, jumps.sums);
    jumps.partition[thread + 1] = before;
    if (thread == 0) jumps.partition[0] = 0;
    __syncthreads();

    struct plan_partition *rows = plan_partitions(p.plan);
    const uint32_t line_end = jumps.start[b];
    const int32_t last_blocks = (int32_t)(line_end - jumps.start[b - 1]) - PLAN_OVERHEAD;
    for (int32_t i = thread; i < p.num_partitions; i += PLAN_THREADS) {
        /* The first partition with room up to the end of the line takes what is left; those after it are idle. */
        const uint64_t at = position_of(jumps, i, step);
        if (i && position_of(jumps, i - 1, step) + (uint64_t)payload >= line_end) {
            write_row(rows, i, b, 0, 0, b - 1, last_blocks, false);
            continue;
        }
        const Begin begin = begin_of(jumps, b, i, (uint32_t)at, step);
        if (at + (uint64_t)payload >= line_end) {
            write_row(rows, i, begin.request, begin.block, begin.split, b - 1, last_blocks, false);
            continue;
        }
        const Begin next = begin_of(jumps, b, i + 1, (uint32_t)position_of(jumps, i + 1, step), step);
        const bool cut = next.block > 0;
        const int32_t last = cut ? next.request : next.request - 1;
        const int32_t blocks = (int32_t)(jumps.start[last + 1] - jumps.start[last]) - PLAN_OVERHEAD;
        write_row(rows, i, begin.request, begin.block, begin.split, last, cut ? next.block : blocks, cut);
        if (cut) atomicAdd(&jumps.cuts[next.request], 1);
    }
    __syncthreads();
    const int32_t cuts = block_inclusive_sum(jumps.cuts[thread], jumps.sums);
    if (thread < b) plan_num_splits_of(p.plan, p.num_partitions)[thread + 1] = thread + 1 + cuts;
}
