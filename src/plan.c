/* SPDX-License-Identifier: MIT
 *
 * The host planner. The default plan is one pass over the requests: every partition is filled up to the same
 * payload, and a request that does not fit is cut at a block boundary. With costs, the default plan is
 * compared with the plan in step.
 */
#include "plan.h"

int64_t plan_row_tiles(int64_t s_q, int64_t h_q, int64_t h_kv)
{
    return h_kv * ((s_q * (h_q / h_kv) + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE);
}

int32_t plan_default_partitions(int64_t workers, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    const int64_t row_tiles = plan_row_tiles(s_q, h_q, h_kv) / h_kv;
    const int64_t partitions = workers / h_kv / row_tiles;
    return (int32_t)(partitions > 1 ? partitions : 1);
}

int32_t plan_even_partitions(int32_t workers, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    int64_t a = workers, b = plan_row_tiles(s_q, h_q, h_kv);
    while (b) { /* the greatest common divisor */
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return (int32_t)(workers / a);
}

struct plan_costs plan_costs_of(int64_t s_q, int64_t h_q, int64_t h_kv)
{
    const int64_t row_tiles = plan_row_tiles(s_q, h_q, h_kv);
    return (struct plan_costs){(int32_t)row_tiles, (int32_t)(row_tiles / h_kv)};
}

/* Returns the blocks of a request. A request without keys has one block, so that some partition writes its
 * (empty) result. */
static int64_t blocks_of(const struct plan_topk *lists, int64_t request)
{
    const int64_t length =
        plan_topk_length(plan_topk_count(lists->topk, lists->length, request), lists->extra_topk,
                         plan_topk_count(lists->extra_topk, lists->extra_length, request));
    return length > PLAN_BLOCK ? (length + PLAN_BLOCK - 1) / PLAN_BLOCK : 1;
}

/* Writes the header of a contiguous plan. */
static void write_header(struct plan_tables plan, int64_t batch, int64_t payload)
{
    if (plan.header) *plan.header = (struct plan_header){PLAN_MAGIC, plan.num_partitions, batch, payload, 0};
}

static void build_default(struct plan_tables plan, int64_t batch, const struct plan_topk *lists)
{
    const int32_t num_partitions = plan.num_partitions;
    int32_t *num_splits = plan.num_splits;
    int64_t total = 0;
    for (int64_t r = 0; r < batch; r++) total += blocks_of(lists, r) + PLAN_OVERHEAD;
    const int64_t planned = plan_planned(plan);
    const int64_t payload = (total + planned - 1) / planned + PLAN_OVERHEAD; /* all requests fit */
    write_header(plan, batch, payload);
    num_splits[0] = 0;

    int64_t request = 0;     /* the next one to place */
    int64_t done = 0;        /* its blocks that are already placed */
    int32_t split = 0;       /* its splits that are already placed */
    int64_t last_blocks = 0; /* blocks of the last request that was placed whole */
    for (int32_t p = 0; p < num_partitions; p++) {
        const int32_t begin = (int32_t)request, begin_block = (int32_t)done, begin_split = split;
        int64_t room = payload;
        bool cut = false;
        while (request < batch && !cut) {
            const int64_t blocks = blocks_of(lists, request);
            const int64_t left = blocks - done;
            if (room >= left + PLAN_OVERHEAD) {
                room -= left + PLAN_OVERHEAD;
                num_splits[request + 1] = num_splits[request] + split + 1;
                last_blocks = blocks;
                request++, done = 0, split = 0;
            } else if (room > PLAN_OVERHEAD) {
                done += room - PLAN_OVERHEAD, split++;
                cut = true;
            } else {
                break;
            }
        }
        plan.partitions[p] = plan_row(begin, begin_block, begin_split, (int32_t)(cut ? request : request - 1),
                                      (int32_t)(cut ? done : last_blocks), cut);
    }
}

/* ---- Planning by costs ----------------------------------------------------------------------- */

/* Fills start [batch + 1] (plan_costs.h); returns false for a batch beyond the limits of planning by
 * costs. */
static bool line_up(uint32_t *start, int64_t batch, const struct plan_topk *lists)
{
    if (batch < 1 || batch > PLAN_FEW) return false;
    int64_t line = 0;
    for (int64_t r = 0; r < batch; r++) {
        const int64_t cost = blocks_of(lists, r) + PLAN_OVERHEAD;
        start[r] = (uint32_t)line;
        line += cost;
        if (cost > PLAN_MOST_COST || line > PLAN_MOST_LINE) return false;
    }
    start[batch] = (uint32_t)line;
    return true;
}

static void write_in_step(struct plan_tables plan, int32_t b, const uint32_t *start, struct plan_step step,
                          uint32_t payload)
{
    struct plan_partition *row = plan.partitions, *const end = row + plan.num_partitions;
    int32_t *num_splits = plan.num_splits;
    write_header(plan, b, payload);
    for (int32_t r = 0; r < b; r++) {
        const int32_t splits = plan_step_splits(step, plan_request_blocks(start, r));
        num_splits[r + 1] = num_splits[r] + splits;
        if (r % step.whole == 0)
            for (int32_t split = 0; split < splits; split++) *row++ = plan_step_row(start, b, step, r, split);
    }
    while (row < end) *row++ = plan_step_row(start, b, step, b, 0);
}

void plan_build(struct plan_tables plan, int64_t batch, struct plan_topk lists, struct plan_costs costs)
{
    uint32_t start[PLAN_FEW + 1];
    build_default(plan, batch, &lists);
    if (!costs.row_tiles || !line_up(start, batch, &lists)) return;
    const int32_t b = (int32_t)batch, num_partitions = plan.num_partitions, *num_splits = plan.num_splits;
    const uint32_t mean = plan_mean(start[b] - (uint32_t)b * PLAN_OVERHEAD, num_partitions);
    const struct plan_step step = plan_step_of(b, num_partitions);
    struct plan_tally filled = plan_tally_none(), in_step = plan_tally_none();
    uint32_t payload = 0;
    for (int32_t p = 0; p < num_partitions; p++)
        plan_tally_row(&filled, costs, mean, start, &plan.partitions[p]);
    for (int32_t r = 0; r < b; r++) {
        plan_tally_request(&filled, (uint32_t)(num_splits[r + 1] - num_splits[r]));
        plan_tally_step(&in_step, &payload, costs, mean, start, b, step, r);
    }
    if (plan_time(&in_step, costs, mean) < plan_time(&filled, costs, mean))
        write_in_step(plan, b, start, step, payload);
}
