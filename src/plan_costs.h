/* SPDX-License-Identifier: MIT
 *
 * Predicts the time of a plan from measured costs, and makes the plan in step (docs/semantics.md, "The plan
 * by costs"). The functions use integers only and are shared by the host planner and the device planner, so
 * both choose the same plan. Included by plan.h.
 */
#ifndef FMLA_PLAN_COSTS_H
#define FMLA_PLAN_COSTS_H

/* How a request is cut into row tiles of PLAN_ROW_TILE rows. The costs depend on this and on the lengths. */
struct plan_costs {
    int32_t row_tiles;     /* per request, over all key heads; 0: no costs, use the default plan */
    int32_t tiles_of_head; /* per key head; if there are several, they read the same keys */
};

/* Measured on an H200 with dense decode of 64, 128 and 256 rows and 1 to 8 splits a partition. Times are in
 * sixteenths of the time of one block.
 *
 * A split costs 3.75 blocks besides its own: the last block drains, the result is stored, and the first
 * block of the next split is loaded. Merging costs one block, plus its traffic per split and row tile, plus a
 * walk over the splits of the request that has the most. Each block by which the longest partition exceeds
 * the mean costs less than a block, up to an eighth of the mean: the other partitions have ended by then,
 * which raises the clock or, if only one row tile reads the keys, its share of the memory bandwidth. If
 * partitions differ in their numbers of blocks, all of them take 2 % longer. */
enum {
    PLAN_UNIT = 16,
    COST_SPLIT = 60,
    COST_JOIN = 16,
    COST_SPLIT_TILE_EIGHTHS = 3,
    COST_WALK_EIGHTHS = 5,
    COST_OVER_MEAN = 14, /* per block above the mean, if several row tiles read the same keys */
    COST_OVER_MEAN_ONE_TILE = 8,
    COST_HIDDEN_MOST_16THS = 2, /* of the mean */
    COST_UNEVEN_256THS = 5      /* of the mean */
};

/* Limits of batches that are planned by costs; others get the default plan. With more requests every
 * partition has many of them, and plans differ little. The limit on the sum of all blocks + overheads keeps
 * times within 31 bits. */
enum {
    PLAN_FEW = 1024 /* requests */,
    PLAN_MOST_COST = INT32_MAX / PLAN_FEW /* of one request */,
    PLAN_MOST_LINE = 1 << 24
};

/* The quantities from which plan_time computes the time of a plan. */
struct plan_tally {
    uint32_t longest;     /* the time of the slowest partition */
    uint32_t most, least; /* blocks of a partition that is not idle */
    uint32_t splits;      /* of all requests that are split */
    uint32_t walk;        /* splits of the request that has the most; 0: none is split */
};

PLAN_FN struct plan_tally plan_tally_none(void)
{
    const struct plan_tally none = {0, 0, UINT32_MAX, 0, 0};
    return none;
}

PLAN_FN uint32_t plan_most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

PLAN_FN uint32_t plan_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Returns the mean time of a partition's own blocks. */
PLAN_FN uint32_t plan_mean(uint32_t blocks, int32_t num_partitions)
{
    return blocks * PLAN_UNIT / (uint32_t)num_partitions;
}

/* Adds a partition that is not idle. */
PLAN_FN void plan_tally_partition(struct plan_tally *tally, struct plan_costs costs, uint32_t mean,
                                  uint32_t splits, uint32_t blocks)
{
    const uint32_t own = blocks * PLAN_UNIT;
    const uint32_t saved = PLAN_UNIT - (costs.tiles_of_head > 1 ? COST_OVER_MEAN : COST_OVER_MEAN_ONE_TILE);
    const uint32_t hidden =
        own > mean ? plan_least((own - mean) * saved / PLAN_UNIT, mean * COST_HIDDEN_MOST_16THS / PLAN_UNIT)
                   : 0;
    tally->longest = plan_most(tally->longest, splits * COST_SPLIT + own - hidden);
    tally->most = plan_most(tally->most, blocks);
    tally->least = plan_least(tally->least, blocks);
}

/* Adds the splits of a request. */
PLAN_FN void plan_tally_request(struct plan_tally *tally, uint32_t splits)
{
    if (splits < 2) return;
    tally->splits += splits;
    tally->walk = plan_most(tally->walk, splits);
}

PLAN_FN int64_t plan_time(const struct plan_tally *tally, struct plan_costs costs, uint32_t mean)
{
    int64_t time = tally->longest;
    if (tally->most != tally->least) time += mean * COST_UNEVEN_256THS / 256;
    if (tally->splits)
        time += COST_JOIN + ((int64_t)tally->splits * costs.row_tiles * COST_SPLIT_TILE_EIGHTHS +
                             (int64_t)tally->walk * COST_WALK_EIGHTHS) /
                                8;
    return time;
}

/* In the functions below, start[r] is the sum of (blocks + PLAN_OVERHEAD) over the requests before r, r in
 * [0, b]. */

PLAN_FN uint32_t plan_request_blocks(const uint32_t *start, int32_t request)
{
    return start[request + 1] - start[request] - PLAN_OVERHEAD;
}

/* Adds a row of a plan, idle or not. */
PLAN_FN void plan_tally_row(struct plan_tally *tally, struct plan_costs costs, uint32_t mean,
                            const uint32_t *start, const struct plan_partition *row)
{
    const int32_t first = row->begin_request, last = row->end_request;
    if (last < first) return;
    const uint32_t line = start[last] + (uint32_t)row->end_block - start[first] - (uint32_t)row->begin_block;
    plan_tally_partition(tally, costs, mean, (uint32_t)(last - first) + 1,
                         line - (uint32_t)(last - first) * PLAN_OVERHEAD);
}

/* Returns a row from its begin and end. `cut`: its last request continues in the next row. */
PLAN_FN struct plan_partition plan_row(int32_t begin_request, int32_t begin_block, int32_t begin_split,
                                       int32_t end_request, int32_t end_block, bool cut)
{
    const bool idle = end_request < begin_request, alone = end_request == begin_request;
    struct plan_partition row;
    row.begin_request = begin_request;
    row.end_request = end_request;
    row.begin_block = begin_block;
    row.end_block = end_block;
    row.begin_split = begin_split;
    row.first_is_split = !idle && (begin_split > 0 || (alone && cut));
    row.last_is_split = !idle && (cut || (alone && begin_split > 0));
    row.zero = 0;
    return row;
}

/* ---- The plan in step ------------------------------------------------------------------------ */

/* Either every partition has the same number of whole requests, or every request is split into the same
 * number of splits of equal blocks, one per partition. The remaining partitions are idle. */
struct plan_step {
    int32_t whole;  /* requests per partition */
    int32_t splits; /* per request; at most the request's blocks */
};

PLAN_FN struct plan_step plan_step_of(int32_t b, int32_t num_partitions)
{
    const struct plan_step step = {(b + num_partitions - 1) / num_partitions,
                                   b < num_partitions ? num_partitions / b : 1};
    return step;
}

PLAN_FN int32_t plan_step_splits(struct plan_step step, uint32_t blocks)
{
    return (int32_t)plan_least((uint32_t)step.splits, blocks);
}

/* Returns the block at which split `split` of `splits` begins: split · blocks / splits, splits ≤ 65536. */
PLAN_FN int32_t plan_split_begin(uint32_t blocks, uint32_t splits, uint32_t split)
{
    return (int32_t)(split * (blocks / splits) + split * (blocks % splits) / splits);
}

/* Adds request i, or the i-th partition of whole requests; i in [0, b). Raises *payload to the largest load
 * of a partition that is added. */
PLAN_FN void plan_tally_step(struct plan_tally *tally, uint32_t *payload, struct plan_costs costs,
                             uint32_t mean, const uint32_t *start, int32_t b, struct plan_step step,
                             int32_t i)
{
    if (step.whole > 1) {
        if ((int64_t)i * step.whole >= b) return;
        const int32_t first = i * step.whole, end = first + step.whole < b ? first + step.whole : b;
        const uint32_t load = start[end] - start[first], splits = (uint32_t)(end - first);
        plan_tally_partition(tally, costs, mean, splits, load - splits * PLAN_OVERHEAD);
        *payload = plan_most(*payload, load);
    } else {
        const uint32_t blocks = plan_request_blocks(start, i),
                       splits = (uint32_t)plan_step_splits(step, blocks);
        const uint32_t most = (blocks + splits - 1) / splits;
        plan_tally_partition(tally, costs, mean, 1, most);
        tally->least = plan_least(tally->least, blocks / splits);
        plan_tally_request(tally, splits);
        *payload = plan_most(*payload, most + PLAN_OVERHEAD);
    }
}

/* Returns the row of split `split` of a request, or of the whole requests from `request` on; an idle row if
 * `request` = b. */
PLAN_FN struct plan_partition plan_step_row(const uint32_t *start, int32_t b, struct plan_step step,
                                            int32_t request, int32_t split)
{
    if (request == b) return plan_row(b, 0, 0, b - 1, (int32_t)plan_request_blocks(start, b - 1), false);
    if (step.whole > 1) {
        const int32_t last = request + step.whole < b ? request + step.whole - 1 : b - 1;
        return plan_row(request, 0, 0, last, (int32_t)plan_request_blocks(start, last), false);
    }
    const uint32_t blocks = plan_request_blocks(start, request),
                   splits = (uint32_t)plan_step_splits(step, blocks);
    return plan_row(request, plan_split_begin(blocks, splits, (uint32_t)split), split, request,
                    plan_split_begin(blocks, splits, (uint32_t)split + 1), (uint32_t)split + 1 < splits);
}

#endif
