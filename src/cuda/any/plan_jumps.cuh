/* SPDX-License-Identifier: MIT
 *
 * The chain of partitions for up to PLAN_THREADS requests, mostly in parallel.
 *
 * With step = payload - PLAN_OVERHEAD, a partition that begins at X is followed by one at X + step, unless a
 * request begins between X + step and X + payload. It is then followed by one at the start of that request;
 * there is room for only one, because a request is longer than the overhead. So between two partitions that
 * begin with a request, partitions are `step` apart. From the start of request q the chain first lands on
 * the start of
 *
 *      e = the first request after q with (start[e] - start[q]) mod step ≤ PLAN_OVERHEAD
 *
 * after n = ceil((start[e] - start[q] - PLAN_OVERHEAD) / step) partitions. Every thread finds e and n for one
 * q, up to LOOK requests ahead. The chain from landing to landing is followed SPAN landings at a time, along
 * hops that all threads have combined by doubling; if e was too far ahead, a warp continues the search. If
 * partitions are so long that e is usually farther, the warp searches for all of them. Everything between the
 * landings is arithmetic: every row, and every request's number of splits, is independent.
 *
 * A warp's instructions delay the others, so warps that will have neither requests nor rows leave once the
 * costs are summed (barriers wait only for the remaining warps).
 */
#pragma once

#include "../device/divide.cuh"
#include "plan_in_step.cuh"

static constexpr int LOOK = 64, SPAN = 8;
static constexpr int LOADS_AT_ONCE = 8; /* independent loads */
static constexpr int ROWS_OF_WARP = 30; /* the first and the last lane lack a neighbour */
static constexpr uint32_t FAR_STEP = 64 * (PLAN_OVERHEAD + 1); /* the chain lands on one request in 64 */
static_assert(LOOK % LOADS_AT_ONCE == 0 && SPAN == 8, "");

/* A landing is a request that a partition begins with. A hop leads from one landing to a later one,
 * `partitions` partitions on. If it leads from request 0, this is the number of the partition that begins with
 * the later request. */
struct alignas(8) Hop {
    int32_t request; /* the request that it lands on; b: none */
    int32_t partitions;
};

/* The beginning of a partition, if those before it do not take everything. */
struct Begin {
    uint32_t at; /* on the line; at most its end */
    int32_t request, block, split;
};

struct Jumps {
    uint32_t start[TILE + 1];
    uint32_t phase[TILE + LOADS_AT_ONCE]; /* start modulo step, times Steps::unit; undefined from b on */
    Hop next[TILE + 1];             /* to e; to b, which leads to itself, if e is not among the next LOOK */
    Hop further[2][TILE + 1];       /* [0]: 8 (temporarily 2) landings on; [1]: 4 */
    int32_t landing[TILE + SPAN];   /* the requests that partitions begin with, in order, followed by b */
    int32_t partition[TILE + SPAN]; /* the numbers of these partitions */
    int32_t landings;
    uint32_t cost_sums[WARPS], split_sums[WARPS];
    int32_t before[TILE + 1]; /* in step: splits of the requests before this one */
    Costs costs;
};

/* Arithmetic modulo step. If landings are near (below FAR_STEP), phases are scaled so that a whole step is
 * 2^32, which saves the comparison with the modulus; the remainder, 2^32 mod step, is less than a unit. */
struct Steps {
    struct reciprocal step;
    bool near;
    uint32_t unit, whole; /* whole = 0: 2^32 */
    uint32_t reach;       /* the largest phase that is at most PLAN_OVERHEAD */
};

DEVICE Steps steps_of(uint32_t step)
{
    Steps steps = {reciprocal_of(step), step < FAR_STEP, 1, step, PLAN_OVERHEAD};
    if (steps.near) {
        steps.unit = steps.step.inverse;
        steps.whole = 0;
        steps.reach = step > PLAN_OVERHEAD ? (PLAN_OVERHEAD + 1) * steps.unit - 1 : UINT32_MAX;
    }
    return steps;
}

DEVICE uint32_t phase_of(const Steps &steps, uint32_t start)
{
    return (start - divide(start, steps.step) * steps.step.divisor) * steps.unit;
}

/* Returns whether (start - start of q) mod step ≤ PLAN_OVERHEAD, given their phases. */
DEVICE bool lands_on(uint32_t phase_of_q, uint32_t phase, uint32_t whole, uint32_t reach)
{
    const uint32_t ahead = phase - phase_of_q;
    return min(ahead, ahead + whole) <= reach;
}

/* Returns the number of partitions from one that begins at `from` with a request to the first that begins at
 * `to - PLAN_OVERHEAD` or later. */
DEVICE int32_t partitions_between(uint32_t from, uint32_t to, const Steps &steps)
{
    return (int32_t)divide(to - from - PLAN_OVERHEAD - 1, steps.step) + 1;
}

/* Returns e for request q if it is among the next LOOK, else b. Only if landings are near. */
DEVICE int32_t find_landing(const Jumps &jumps, int q, int b, const Steps &steps)
{
    const uint32_t phase = jumps.phase[q];
    const int end = min(q + 1 + LOOK, b);
    for (int first = q + 1; first < end; first += LOADS_AT_ONCE) {
        int32_t found = 0;
#pragma unroll
        for (int i = LOADS_AT_ONCE - 1; i >= 0; i--)
            if (lands_on(phase, jumps.phase[first + i], 0, steps.reach)) found = first + i;
        if (found) return min(found, b);
    }
    return b;
}

/* Returns the first request from `first` on that the chain from q lands on, or b. Called by the first
 * warp. */
DEVICE int32_t look_on(const Jumps &jumps, int q, int first, int b, const Steps &steps)
{
    constexpr int AT_ONCE = 4;
    const int lane = (int)threadIdx.x % 32;
    for (; first < b; first += 32 * AT_ONCE) {
        int32_t found = b;
#pragma unroll
        for (int i = AT_ONCE - 1; i >= 0; i--) {
            const int e = first + 32 * i + lane;
            if (e < b && lands_on(jumps.phase[q], jumps.phase[e], steps.whole, steps.reach)) found = e;
        }
        found = __reduce_min_sync(~0u, found);
        if (found < b) return found;
    }
    return b;
}

DEVICE Hop hop_on(Hop hop, Hop next)
{
    return {next.request, hop.partitions + next.partitions};
}

DEVICE void add_landing(Jumps &jumps, int i, Hop hop)
{
    jumps.landing[i] = hop.request;
    jumps.partition[i] = hop.partitions;
}

/* Appends the landings from this one on that follow each other within LOOK, and returns the last. Called by
 * the first warp. */
DEVICE Hop follow_spans(Jumps &jumps, int b, Hop hop, int &count)
{
    const int lane = (int)threadIdx.x % 32;
    Hop last = hop;
    while (hop.request < b) {
        Hop head = {b, 0}; /* of up to 32 spans, one per lane; then all spans advance together */
#pragma unroll 1
        for (int i = 0; i < 32 && hop.request < b; i++) {
            if (lane == i) head = hop;
            hop = hop_on(hop, jumps.further[0][hop.request]);
        }
        int in_span = 0;
        for (int i = 0; i < SPAN; i++) {
            if (head.request < b) add_landing(jumps, count + SPAN * lane + i, last = head), in_span++;
            head = hop_on(head, jumps.next[head.request]);
        }
        count += __reduce_add_sync(~0u, in_span);
        last.request = __reduce_max_sync(~0u, last.request);
        last.partitions = __reduce_max_sync(~0u, last.partitions);
    }
    return last;
}

/* Lists the landings from request 0 on. Called by the first warp. */
DEVICE void follow(Jumps &jumps, int b, const Steps &steps)
{
    int count = 0;
    for (Hop hop = {0, 0}; hop.request < b;) {
        if (steps.near && jumps.next[hop.request].request < b) {
            hop = follow_spans(jumps, b, hop, count);
        } else {
            if (threadIdx.x == 0) add_landing(jumps, count, hop);
            count++;
        }
        const int q = hop.request;
        hop.request = look_on(jumps, q, q + 1 + (steps.near ? LOOK : 0), b, steps);
        hop.partitions += partitions_between(jumps.start[q], jumps.start[hop.request], steps);
    }
    if (threadIdx.x == 0) jumps.landings = count, jumps.landing[count] = b;
}

/* Called by all threads; the caller must synchronise the CTA afterwards. */
DEVICE void prepare_spans(Jumps &jumps, int b, const Steps &steps)
{
    const int q = (int)threadIdx.x;
    if (q == 0) jumps.next[b] = jumps.further[0][b] = jumps.further[1][b] = {b, 0};
    Hop hop = {b, 0};
    if (q < b) {
        hop.request = find_landing(jumps, q, b, steps);
        hop.partitions = partitions_between(jumps.start[q], jumps.start[hop.request], steps);
        jumps.next[q] = hop;
    }
    const Hop *hops = jumps.next;
    for (int span = 2, level = 0; span <= SPAN; span *= 2, level = !level) { /* half of the span, twice */
        __syncthreads();
        if (q < b) jumps.further[level][q] = hop = hop_on(hop, hops[hop.request]);
        hops = jumps.further[level];
    }
}

DEVICE Begin begin_of(const Jumps &jumps, int b, int32_t partition, const Steps &steps)
{
    const int i = last_not_above(jumps.partition, jumps.landings, partition), q = jumps.landing[i];
    const int32_t ordinal = partition - jumps.partition[i];
    const uint32_t at = jumps.start[q] + (uint32_t)ordinal * steps.step.divisor;
    Begin begin = {jumps.start[b], b, 0, 0};
    if (at >= jumps.start[b]) return begin;
    begin.at = at;
    begin.request = q + last_not_above(jumps.start + q, jumps.landing[i + 1] - q, at);
    begin.block = (int32_t)(at - jumps.start[begin.request]);
    if (begin.block) /* the partitions that begin within the request, up to this one */
        begin.split = ordinal - (int32_t)divide(jumps.start[begin.request] - jumps.start[q], steps.step);
    return begin;
}

/* Writes and counts the rows of partitions first - 1 + lane, except for the first and the last lane. All
 * lanes of a warp must call. */
DEVICE void fill_rows(const struct plan_params &p, const Jumps &jumps, int32_t first, const Steps &steps,
                      uint32_t mean, struct plan_tally *tally)
{
    const int lane = (int)threadIdx.x % 32, b = (int)p.b;
    const int32_t i = first - 1 + lane;
    const uint32_t line_end = jumps.start[b], payload = steps.step.divisor + PLAN_OVERHEAD;
    const Begin begin = begin_of(jumps, b, max(i, 0), steps);
    const uint32_t before = __shfl_up_sync(~0u, begin.at, 1);
    const int32_t after = __shfl_down_sync(~0u, begin.request, 1);
    const int32_t after_block = __shfl_down_sync(~0u, begin.block, 1);
    if (lane == 0 || lane == 31 || i >= p.num_partitions) return;
    /* The first partition with room up to the end of the line takes the rest; those after it are idle. */
    const bool idle = i > 0 && before + payload >= line_end;
    const bool takes_all = idle || begin.at + payload >= line_end;
    const bool cut = !takes_all && after_block > 0;
    const int32_t last = takes_all ? b - 1 : cut ? after : after - 1;
    const int32_t blocks = cut ? after_block : (int32_t)plan_request_blocks(jumps.start, last);
    const struct plan_partition row =
        plan_row(idle ? b : begin.request, idle ? 0 : begin.block, idle ? 0 : begin.split, last, blocks, cut);
    write_row(p, i, row);
    if (p.costs.row_tiles) plan_tally_row(tally, p.costs, mean, jumps.start, &row);
}

/* Returns the number of splits of requests 0 … r: one each, plus one for each partition that begins inside a
 * request. */
DEVICE int32_t splits_up_to(const Jumps &jumps, int32_t r, const Steps &steps, int32_t *of_request)
{
    const int i = last_not_above(jumps.landing, jumps.landings, r), q = jumps.landing[i];
    const int32_t begun = partitions_between(jumps.start[q], jumps.start[r + 1], steps);
    *of_request = r == q ? begun : begun - partitions_between(jumps.start[q], jumps.start[r], steps) + 1;
    return r + jumps.partition[i] + begun - i;
}

/* Makes the plan of at most TILE requests. Returns false, with nothing written, if one of them costs more
 * than PLAN_MOST_COST. */
DEVICE bool plan_by_jumps(const struct plan_params &p, Jumps &jumps)
{
    const int thread = (int)threadIdx.x, warp = thread / 32, b = (int)p.b;
    const int warps_of_requests = (b + 31) / 32;
    const int warps = min(WARPS, warps_of_requests + (p.num_partitions + ROWS_OF_WARP - 1) / ROWS_OF_WARP);
    const uint32_t blocks = thread < b ? (uint32_t)blocks_of(p, thread) : 1;
    const struct plan_step in_step = plan_step_of(b, p.num_partitions);
    const uint32_t cost = thread < b ? blocks + PLAN_OVERHEAD : 0;
    uint32_t end = 0, splits_in_step = 0; /* inclusive sums */
    if (warp < warps_of_requests) {
        end = sum_within_warp(cost, jumps.cost_sums);
        if (in_step.splits > 1)
            splits_in_step = sum_within_warp(thread < b ? (uint32_t)plan_step_splits(in_step, blocks) : 0,
                                             jumps.split_sums);
    }
    if (__syncthreads_or(cost > PLAN_MOST_COST)) return false;
    if (warp >= warps) return true;

    uint32_t line_end, all_splits;
    end += sum_of_warps_before(jumps.cost_sums, warps_of_requests, &line_end);
    if (in_step.splits > 1)
        splits_in_step += sum_of_warps_before(jumps.split_sums, warps_of_requests, &all_splits);
    const Steps steps = steps_of((uint32_t)fast_divide((int)line_end - 1, p.partitions_divisor) + 1);
    const bool by_costs = p.costs.row_tiles && line_end <= PLAN_MOST_LINE;
    const int all_blocks = (int)line_end - b * PLAN_OVERHEAD;
    const uint32_t mean = /* plan_mean, by a multiplication */
        by_costs ? (uint32_t)fast_divide(all_blocks * PLAN_UNIT, p.partitions_divisor) : 0;
    if (thread == 0) jumps.start[0] = 0, jumps.before[0] = 0, costs_clear(jumps.costs);
    if (thread < b) {
        jumps.start[thread + 1] = end;
        jumps.phase[thread] = phase_of(steps, end - cost);
        jumps.before[thread + 1] = (int32_t)splits_in_step;
    }
    __syncthreads();
    if (steps.near) prepare_spans(jumps, b, steps);
    __syncthreads();
    if (warp == 0)
        follow(jumps, b, steps);
    else if (by_costs)
        cost_in_step(p, mean, jumps.start, in_step, thread - 32, 32 * (warps - 1), jumps.costs);
    if (thread == 32) write_header(p, (int64_t)steps.step.divisor + PLAN_OVERHEAD);
    __syncthreads();

    /* Rows start with the last warp, because the first ones have requests. */
    struct plan_tally tally = plan_tally_none();
#pragma unroll 1
    for (int32_t first = ROWS_OF_WARP * (warps - 1 - warp); first < p.num_partitions;
         first += ROWS_OF_WARP * warps)
        fill_rows(p, jumps, first, steps, mean, &tally);
    int32_t splits = 0, of_request = 0;
    if (thread < b) splits = splits_up_to(jumps, thread, steps, &of_request);
    if (by_costs) {
        plan_tally_request(&tally, (uint32_t)of_request);
        costs_gather(tally, jumps.costs.filled);
        __syncthreads();
        if (plan_time(&jumps.costs.in_step, p.costs, mean) < plan_time(&jumps.costs.filled, p.costs, mean)) {
            write_in_step(p, jumps.start, jumps.before, in_step, 32 * warps, jumps.costs.payload);
            splits = in_step.splits > 1 ? (int32_t)splits_in_step : thread + 1;
        }
    }
    if (thread < b) p.num_splits[thread + 1] = splits;
    return true;
}
