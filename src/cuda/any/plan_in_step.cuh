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
DEVICE void costs_clear(Costs &costs)
{
    costs.filled = costs.in_step = plan_tally_none();
    costs.payload = 0;
}

/* Adds what a thread counted (the compiler has a warp do each of these once); the block has yet to wait for each other. */
DEVICE void costs_gather(const struct plan_tally &tally, struct plan_tally &all)
{
    if (tally.most) {
        atomicMax(&all.longest, tally.longest);
        atomicMax(&all.most, tally.most);
        atomicMin(&all.least, tally.least);
    }
    if (tally.parts) {
        atomicAdd(&all.parts, tally.parts);
        atomicMax(&all.walk, tally.walk);
    }
}

/* By `threads` threads, of which this is number `thread`. */
DEVICE void cost_in_step(const struct plan_params &p, uint32_t mean, const uint32_t *start,
                         struct plan_step step, int thread, int threads, Costs &costs)
{
    const int32_t b = (int32_t)p.b;
    struct plan_tally tally = plan_tally_none();
    uint32_t payload = 0;
#pragma unroll 1
    for (int32_t i = thread; i < b; i += threads)
        plan_tally_step(&tally, &payload, p.costs, mean, start, b, step, i);
    costs_gather(tally, costs.in_step);
    if (payload) atomicMax(&costs.payload, payload);
}

/* By all `threads`, after a barrier if rows of another plan were written. before [b + 1], which is read where requests are
 * cut: the parts of the requests before. */
DEVICE void write_in_step(const struct plan_params &p, const uint32_t *start, const int32_t *before,
                          struct plan_step step, int threads, uint32_t payload)
{
    const int b = (int)p.b;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < p.num_partitions; i += threads) {
        int32_t request = b, part = 0;
        if (step.parts == 1) {
            request = min(i * step.whole, b);
        } else if (i < before[b]) {
            request = last_not_above(before, b, i);
            part = i - before[request];
        }
        write_row(p, i, plan_step_row(start, b, step, request, part));
    }
    if (threadIdx.x == 0 && p.header) p.header->payload = payload;
}
