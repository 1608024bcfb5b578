/* SPDX-License-Identifier: MIT
 *
 * The split plan on the device, bit-equal to plan_build_by_costs (src/plan.c), by one block of threads. What has to be done one
 * partition after the other decides how long it takes: for up to PLAN_THREADS requests plan_jumps.cuh avoids most of it,
 * for more plan_walk.cuh does it. Costs are looked at by the first alone.
 */
#include "plan_jumps.cuh"
#include "plan_walk.cuh"

extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    decode_plan(const __grid_constant__ struct plan_params p)
{
    const bool few = 0 < p.b && p.b <= TILE;
    const int64_t cost = few ? blocks_of(p, threadIdx.x) + PLAN_OVERHEAD : 0;
    if (few && !__syncthreads_or(cost > PLAN_MOST_COST))
        plan_by_jumps(p, (uint32_t)cost);
    else
        plan_by_walk(p);
}
