/* SPDX-License-Identifier: MIT
 *
 * The split plan on the device, bit-equal to plan_build (src/plan.c), by one block of threads. What has to be done one
 * partition after the other decides how long it takes: for up to PLAN_THREADS requests plan_jumps.cuh avoids most of it,
 * for more plan_walk.cuh does it.
 */
#include "plan_jumps.cuh"
#include "plan_walk.cuh"

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_plan(const __grid_constant__ struct plan_params p)
{
    __shared__ int64_t sums[WARPS + 1];
    const int thread = (int)threadIdx.x;

    const int64_t end = block_inclusive_sum(blocks_of(p, thread) + PLAN_OVERHEAD, sums);
    int64_t total = sums[WARPS];
    if (p.b > TILE) {
        int64_t cost = 0;
        for (int64_t r = TILE + thread; r < p.b; r += PLAN_THREADS) cost += blocks_of(p, r) + PLAN_OVERHEAD;
        block_inclusive_sum(cost, sums);
        total += sums[WARPS];
    }
    const int64_t payload = (total + p.num_partitions - 1) / p.num_partitions + PLAN_OVERHEAD;
    if (thread == 0) {
        p.plan->magic = PLAN_MAGIC;
        p.plan->num_partitions = p.num_partitions;
        p.plan->batch = p.b;
        p.plan->payload = payload;
        p.plan->zero = 0;
        plan_num_splits_of(p.plan, p.num_partitions)[0] = 0;
    }
    if (0 < p.b && p.b <= TILE && total < INT32_MAX)
        plan_by_jumps(p, payload, end);
    else
        plan_by_walk(p, payload, end);
}
