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
 * requests on. The chain from meeting to meeting is followed SPAN meetings at a time, along jumps that all threads have put
 * together by doubling; where e was too far, a warp looks on. If partitions are so long that e is usually further, the
 * warp looks for all of them. Everything between the meetings is arithmetic.
 */
#pragma once

#include "plan_in_step.cuh"

static constexpr int LOOK = 64, SPAN = 8;
static constexpr uint32_t FAR_STEP = 64 * (PLAN_OVERHEAD + 1); /* one request in 64 is met */
static constexpr uint32_t NOWHERE = 0x80000000u;               /* far from every residue */

/* Where a partition begins, if those before it do not take everything. */
struct Begin {
    uint32_t at; /* on the line; no further than its end */
    int32_t request, block, split;
};

struct Jumps {
    uint32_t start[TILE + 1];
    union {
        struct {                           /* until the meetings are known */
            uint32_t residue[TILE + LOOK]; /* start mod step; NOWHERE from b on */
            int32_t next[TILE + 1];        /* e; b, which leads to itself, if it is not among the next LOOK */
            int32_t further[TILE + 1];     /* after SPAN meetings */
        };
        Begin begins[PLAN_THREADS];
    };
    int32_t meeting[TILE + SPAN]; /* requests that partitions begin with, in order */
    int32_t partition[TILE + 1];  /* which partitions */
    int32_t meetings;
    int32_t cuts[TILE];
    uint32_t cost_sums[WARPS];
    int32_t step_sums[WARPS], cut_sums[WARPS];
    Costs costs;
};

/* (other - residue) mod step ≤ PLAN_OVERHEAD, for residues below step; never for NOWHERE. */
__device__ __forceinline__ bool meets(uint32_t residue, uint32_t other, uint32_t step)
{
    const uint32_t ahead = other - residue;
    return min(ahead, ahead + step) <= PLAN_OVERHEAD;
}

__device__ __forceinline__ int32_t find_meeting(const Jumps &jumps, int q, int b, uint32_t step)
{
    constexpr int AT_ONCE = 8; /* loads that do not wait for each other */
    static_assert(LOOK % AT_ONCE == 0, "");
    const uint32_t residue = jumps.residue[q];
    for (int first = q + 1; first < q + 1 + LOOK; first += AT_ONCE) {
        int32_t found = 0;
#pragma unroll
        for (int i = AT_ONCE - 1; i >= 0; i--)
            if (meets(residue, jumps.residue[first + i], step)) found = first + i;
        if (found) return found;
    }
    return b;
}

/* By the first warp: the first request from `first` on that the chain from q meets, or b. */
__device__ __forceinline__ int32_t look_on(const Jumps &jumps, int q, int first, int b, uint32_t step)
{
    constexpr int AT_ONCE = 4;
    const int lane = (int)threadIdx.x % 32;
    for (; first < b; first += 32 * AT_ONCE) {
        int32_t found = b;
#pragma unroll
        for (int i = AT_ONCE - 1; i >= 0; i--) {
            const int e = first + 32 * i + lane;
            if (e < b && meets(jumps.residue[q], jumps.residue[e], step)) found = e;
        }
        found = __reduce_min_sync(~0u, found);
        if (found < b) return found;
    }
    return b;
}

/* By the first warp: appends the meetings from request q on that follow each other within LOOK; the last one. */
__device__ __forceinline__ int32_t follow_spans(Jumps &jumps, int b, int32_t q, int &count)
{
    const int lane = (int)threadIdx.x % 32;
    int32_t last = q;
    while (q < b) {
        int32_t head = b; /* of up to 32 spans, one a lane; then all spans at once */
        for (int i = 0; i < 32 && q < b; i++) {
            if (lane == i) head = q;
            q = jumps.further[q];
        }
        int in_span = 0;
        for (int i = 0; i < SPAN; i++) {
            if (head < b) jumps.meeting[count + SPAN * lane + i] = last = head, in_span++;
            head = jumps.next[head];
        }
        count += __reduce_add_sync(~0u, in_span);
        last = __reduce_max_sync(~0u, last);
    }
    return last;
}

/* By the first warp: the meetings from request 0 on. */
__device__ __forceinline__ void follow(Jumps &jumps, int b, uint32_t step)
{
    int count = 0;
    for (int32_t q = 0; q < b;) {
        const int looked = step < FAR_STEP ? LOOK : 0;
        if (looked && jumps.next[q] < b) {
            q = follow_spans(jumps, b, q, count);
        } else {
            if (threadIdx.x == 0) jumps.meeting[count] = q;
            count++;
        }
        q = look_on(jumps, q, q + 1 + looked, b, step);
    }
    if (threadIdx.x == 0) jumps.meetings = count;
}

/* By all threads. */
__device__ __forceinline__ void prepare_spans(Jumps &jumps, int b, uint32_t step)
{
    const int thread = (int)threadIdx.x;
    const int32_t next = thread < b ? find_meeting(jumps, thread, b, step) : b;
    jumps.next[thread] = next;
    if (thread == 0) jumps.next[TILE] = jumps.further[TILE] = TILE;
    int32_t further = next;
    for (int span = 1; span < SPAN; span *= 2) { /* from here: `span` meetings on, and as many again */
        jumps.further[thread] = further;
        __syncthreads();
        further = jumps.further[further];
        __syncthreads();
    }
    jumps.further[thread] = further;
}

__device__ __forceinline__ Begin begin_of(const Jumps &jumps, int b, int32_t partition, uint32_t step)
{
    const int i = last_not_above(jumps.partition, jumps.meetings, partition), q = jumps.meeting[i];
    const int32_t ordinal = partition - jumps.partition[i];
    const uint64_t at = jumps.start[q] + (uint64_t)ordinal * step;
    Begin begin = {jumps.start[b], b, 0, 0};
    if (at >= jumps.start[b]) return begin;
    begin.at = (uint32_t)at;
    begin.request = q + last_not_above(jumps.start + q, b - q, begin.at);
    begin.block = (int32_t)(begin.at - jumps.start[begin.request]);
    if (begin.block) /* as many as begin within the request, up to this one */
        begin.split = ordinal - (int32_t)((jumps.start[begin.request] - jumps.start[q]) / step);
    return begin;
}

/* The whole plan of at most TILE requests, none of which costs more than PLAN_MOST_COST. */
__device__ __forceinline__ void plan_by_jumps(const struct plan_params &p, uint32_t cost)
{
    __shared__ Jumps jumps;
    const int thread = (int)threadIdx.x, b = (int)p.b;
    uint32_t line_end;
    const uint32_t end = block_inclusive_sum(cost, jumps.cost_sums, &line_end);
    const uint32_t step = (line_end + (uint32_t)p.num_partitions - 1) / (uint32_t)p.num_partitions;
    const uint64_t payload = step + PLAN_OVERHEAD;
    const bool by_costs = p.costs.row_tiles && line_end <= PLAN_MOST_LINE;
    const uint32_t mean = by_costs ? plan_mean(line_end - (uint32_t)b * PLAN_OVERHEAD, p.num_partitions) : 0;
    if (thread == 0) write_header(p, (int64_t)payload), jumps.start[0] = 0, costs_clear(jumps.costs);
    jumps.start[thread + 1] = end;
    jumps.residue[thread] = thread < b ? (end - cost) % step : NOWHERE;
    if (thread < LOOK) jumps.residue[TILE + thread] = NOWHERE;
    jumps.cuts[thread] = 0;
    __syncthreads();
    if (step < FAR_STEP) prepare_spans(jumps, b, step);
    __syncthreads();
    if (thread < 32)
        follow(jumps, b, step);
    else if (by_costs)
        cost_in_step(p, mean, jumps.start, thread - 32, PLAN_THREADS - 32, jumps.costs);
    __syncthreads();

    /* Partitions from meeting to meeting; no more of them count than there are. */
    int32_t steps = 0;
    if (thread + 1 < jumps.meetings) {
        const uint32_t way = jumps.start[jumps.meeting[thread + 1]] - jumps.start[jumps.meeting[thread]];
        steps = (int32_t)min((way - PLAN_OVERHEAD + step - 1) / step, (uint32_t)p.num_partitions);
    }
    int32_t all_steps, all_cuts;
    const int32_t before = block_inclusive_sum(steps, jumps.step_sums, &all_steps);
    jumps.partition[thread + 1] = before;
    if (thread == 0) jumps.partition[0] = 0;
    __syncthreads();

    struct plan_partition *rows = plan_partitions(p.plan);
    struct plan_tally tally = plan_tally_none();
    for (int32_t first = 0; first < p.num_partitions; first += PLAN_THREADS - 2) {
        /* A row needs the beginnings of three partitions: the first and the last thread write none. */
        const int32_t i = first + thread - 1;
        jumps.begins[thread] = begin_of(jumps, b, max(i, 0), step);
        __syncthreads();
        if (0 < thread && thread < PLAN_THREADS - 1 && i < p.num_partitions) {
            /* The first partition with room up to the end of the line takes what is left; those after it are idle. */
            const Begin before = jumps.begins[thread - 1], begin = jumps.begins[thread],
                        after = jumps.begins[thread + 1];
            const bool idle = i > 0 && before.at + payload >= line_end;
            const bool takes_all = idle || begin.at + payload >= line_end;
            const bool cut = !takes_all && after.block > 0;
            const int32_t last = takes_all ? b - 1 : cut ? after.request : after.request - 1;
            const int32_t blocks = cut ? after.block : (int32_t)plan_request_blocks(jumps.start, last);
            const struct plan_partition row = plan_row(idle ? b : begin.request, idle ? 0 : begin.block,
                                                       idle ? 0 : begin.split, last, blocks, cut);
            rows[i] = row;
            if (by_costs) plan_tally_row(&tally, p.costs, mean, jumps.start, &row);
            if (cut) atomicAdd(&jumps.cuts[after.request], 1);
        }
        __syncthreads();
    }
    if (by_costs) {
        plan_tally_request(&tally, (uint32_t)jumps.cuts[thread] + 1);
        costs_gather(tally, jumps.costs.filled);
    }
    int32_t splits = thread + 1 + block_inclusive_sum(jumps.cuts[thread], jumps.cut_sums, &all_cuts);
    if (by_costs &&
        plan_time(&jumps.costs.in_step, p.costs, mean) < plan_time(&jumps.costs.filled, p.costs, mean))
        splits = write_in_step(p, jumps.start, jumps.partition, jumps.step_sums, jumps.costs.payload);
    if (thread < b) plan_num_splits_of(p.plan, p.num_partitions)[thread + 1] = splits;
}
