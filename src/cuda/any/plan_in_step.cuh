/* SPDX-License-Identifier: MIT
 *
 * The plan in step on the device: its rows, and its cost next to that of the plan from plan_jumps.cuh. Given
 * the starts of the requests on the line, every request or partition is independent. The arithmetic is that
 * of the host.
 */
#pragma once

#include "plan_common.cuh"

/* The costs of both plans, over the whole CTA. */
struct Costs {
    struct plan_tally filled, in_step;
    uint32_t payload; /* of the plan in step */
};

/* Called by one thread. */
DEVICE void costs_clear(Costs &costs)
{
    costs.filled = costs.in_step = plan_tally_none();
    costs.payload = 0;
}

/* Adds a thread's counts to `all`; the compiler reduces each atomic over the warp. The caller must
 * synchronise the CTA afterwards. */
DEVICE void costs_gather(const struct plan_tally &tally, struct plan_tally &all)
{
    if (tally.most) {
        atomicMax(&all.longest, tally.longest);
        atomicMax(&all.most, tally.most);
        atomicMin(&all.least, tally.least);
    }
    if (tally.splits) {
        atomicAdd(&all.splits, tally.splits);
        atomicMax(&all.walk, tally.walk);
    }
}

/* Called by `threads` threads, of which this is number `thread`. */
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

/* Writes the rows. Called by all `threads` threads, after a barrier if rows of another plan were written.
 * before [b + 1] is the number of splits of the requests before each one; it is read if requests are
 * split. */
DEVICE void write_in_step(const struct plan_params &p, const uint32_t *start, const int32_t *before,
                          struct plan_step step, int threads, uint32_t payload)
{
    const int b = (int)p.b;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < p.num_partitions; i += threads) {
        int32_t request = b, split = 0;
        if (step.splits == 1) {
            request = min(i * step.whole, b);
        } else if (i < before[b]) {
            request = last_not_above(before, b, i);
            split = i - before[request];
        }
        write_row(p, i, plan_step_row(start, b, step, request, split));
    }
    if (threadIdx.x == 0 && p.header) p.header->payload = payload;
}
