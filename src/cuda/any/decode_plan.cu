/* SPDX-License-Identifier: MIT
 *
 * Makes the split plan on the device in one CTA, bit-equal to plan_build_by_costs (src/plan.c). The chain of
 * partitions, each of which depends on the one before, determines the run time: for up to PLAN_THREADS
 * requests plan_jumps.cuh avoids most of it, for more plan_walk.cuh follows it. Only plan_jumps.cuh considers
 * costs.
 */
#include "plan_jumps.cuh"
#include "plan_walk.cuh"

extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    decode_plan(const __grid_constant__ struct plan_params p)
{
    __shared__ union {
        Jumps jumps;
        Tile tile;
    } shared;
    if (0 < p.b && p.b <= TILE && plan_by_jumps(p, shared.jumps)) return;
    plan_by_walk(p, shared.tile);
}
