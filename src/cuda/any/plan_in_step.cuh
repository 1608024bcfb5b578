/* SPDX-License-Identifier: MIT
 *
 * The plan in step on the device: what it costs, beside what the plan costs that plan_jumps.cuh makes, and its rows. Every
 * request or partition is by itself here, given where requests start on the line; the arithmetic is that of the host.
 */
#pragma once

#include "plan_common.cuh"

/* Of both plans, for the whole block of threads. */
struct Costs {
    struct plan_tally filled, in_step;
    uint32_t payload; /* of the plan in step */
};

/* By one thread. */
__device__ __forceinline__ void costs_clear(Costs &costs)
{
    costs.filled = costs.in_step = plan_tally_none();
    costs.payload = 0;
}

/* By all lanes of a warp: adds what they counted; the block has yet to wait for each other. */
__device__ __forceinline__ void costs_gather(const struct plan_tally &tally, struct plan_tally &all)
{
    const bool first = threadIdx.x % 32 == 0;
    if (__any_sync(~0u, tally.most > 0)) {
        const uint32_t longest = __reduce_max_sync(~0u, tally.longest);
        const uint32_t most = __reduce_max_sync(~0u, tally.most);
        const uint32_t least = __reduce_min_sync(~0u, tally.least);
        if (first) atomicMax(&all.longest, longest), atomicMax(&all.most, most), atomicMin(&all.least, least);
    }
    if (__any_sync(~0u, tally.parts > 0)) {
        const uint32_t parts = __reduce_add_sync(~0u, tally.parts);
        const uint32_t walk = __reduce_max_sync(~0u, tally.walk);
        if (first) atomicAdd(&all.parts, parts), atomicMax(&all.walk, walk);
    }
}

/* By whole warps, of which this is thread `thread` of `threads`. */
__device__ __forceinline__ void cost_in_step(const struct plan_params &p, uint32_t mean,
                                             const uint32_t *start, int thread, int threads, Costs &costs)
{
    const int32_t b = (int32_t)p.b;
    const struct plan_step step = plan_step_of(b, p.num_partitions);
    struct plan_tally tally = plan_tally_none();
    uint32_t payload = 0;
    for (int32_t i = thread; i < b; i += threads)
        plan_tally_step(&tally, &payload, p.costs, mean, start, b, step, i);
    costs_gather(tally, costs.in_step);
    payload = __reduce_max_sync(~0u, payload);
    if (threadIdx.x % 32 == 0 && payload) atomicMax(&costs.payload, payload);
}

/* By all threads, after the rows of another plan if those were written before a barrier. Returns how many splits requests
 * 0 … thread have. before [b + 1] and sums (one a warp) must not be in use. */
__device__ __forceinline__ int32_t write_in_step(const struct plan_params &p, const uint32_t *start,
                                                 int32_t *before, int32_t sums[WARPS], uint32_t payload)
{
    const int thread = (int)threadIdx.x, b = (int)p.b;
    const struct plan_step step = plan_step_of(b, p.num_partitions);
    int32_t splits = thread + 1;
    if (step.parts > 1) {
        const int32_t parts = thread < b ? plan_step_parts(step, plan_request_blocks(start, thread)) : 0;
        int32_t all_parts;
        splits = block_inclusive_sum(parts, sums, &all_parts);
        if (thread == 0) before[0] = 0;
        before[thread + 1] = splits;
        __syncthreads();
    }
    struct plan_partition *rows = plan_partitions(p.plan);
    for (int32_t i = thread; i < p.num_partitions; i += PLAN_THREADS) {
        int32_t request = b, part = 0;
        if (step.parts == 1) {
            request = min(i * step.whole, b);
        } else if (i < before[b]) {
            request = last_not_above(before, b, i);
            part = i - before[request];
        }
        rows[i] = plan_step_row(start, b, step, request, part);
    }
    if (thread == 0) p.plan->payload = payload;
    return splits;
}
