// The split plan on the host, with the cost of a request overridable (blocks a partition pays beside a request's own).
#pragma once
#include "decode.h"
#include <stdlib.h>

static inline int plan_blocks(int length) { return length > 0 ? (length + PAGE - 1) / PAGE : 1; }

static inline void plan_decode(const int *seqlens, int b, int partitions, int overhead, partition *rows, int *num_splits) {
    int64_t total = 0;
    for (int r = 0; r < b; r++) total += plan_blocks(seqlens[r]) + overhead;
    int64_t payload = (total + partitions - 1) / partitions + overhead;
    int request = 0, block = 0, split = 0;
    num_splits[0] = 0;
    for (int k = 0; k < partitions; k++) {
        partition row = {b, b - 1, 0, 0, 0, 0, 0, 0};
        if (request < b) {
            row.begin_request = request, row.begin_block = block, row.begin_split = split;
            row.first_is_split = split > 0;
            int64_t rem = payload;
            int cut = 0;
            row.end_request = request - 1;
            while (request < b) {
                int left = plan_blocks(seqlens[request]) - block;
                if (rem >= left + overhead) {
                    rem -= left + overhead;
                    row.end_request = request, row.end_block = block + left;
                    row.last_is_split = split > 0;
                    num_splits[request + 1] = num_splits[request] + split + 1;
                    request++, block = 0, split = 0;
                } else {
                    if (rem > overhead) {
                        block += (int)(rem - overhead), split++, cut = 1;
                        row.end_request = request, row.end_block = block, row.last_is_split = 1;
                    }
                    break;
                }
            }
            if (cut && row.begin_request == row.end_request) row.first_is_split = 1;
        }
        rows[k] = row;
    }
    if (request < b) abort();
}

// ---------------------------------------------------------------- by costs
// What the filling charges beside the blocks, in sixteenths of a block: a piece, a part of a split request on top.
typedef struct { int piece, part; } plan_costs;
enum { PLAN_UNIT = 16 };

// Fills partitions up to `capacity`, cutting requests or not; returns whether everything found room. `rows` may be null.
static inline int plan_fill(const int *seqlens, int b, int partitions, const plan_costs *c, int64_t capacity, int cut,
                            partition *rows, int *num_splits) {
    int request = 0, block = 0, split = 0;
    if (rows) num_splits[0] = 0;
    for (int k = 0; k < partitions; k++) {
        partition row = {b, b - 1, 0, 0, 0, 0, 0, 0};
        if (request < b) {
            row.begin_request = request, row.begin_block = block, row.begin_split = split;
            row.first_is_split = split > 0;
            row.end_request = request - 1;
            int64_t rem = capacity;
            int was_cut = 0;
            while (request < b) {
                int left = plan_blocks(seqlens[request]) - block;
                int64_t cost = (int64_t)left * PLAN_UNIT + c->piece + (split > 0 ? c->part : 0);
                if (rem >= cost) {
                    rem -= cost;
                    row.end_request = request, row.end_block = block + left;
                    row.last_is_split = split > 0;
                    if (rows) num_splits[request + 1] = num_splits[request] + split + 1;
                    request++, block = 0, split = 0;
                } else {
                    int64_t room = (rem - c->piece - c->part) / PLAN_UNIT;
                    if (room > left - 1) room = left - 1;
                    if (cut && room > 0) {
                        block += (int)room, split++, was_cut = 1;
                        row.end_request = request, row.end_block = block, row.last_is_split = 1;
                    }
                    break;
                }
            }
            if (was_cut && row.begin_request == row.end_request) row.first_is_split = 1;
        }
        if (rows) rows[k] = row;
    }
    return request == b;
}

// Smallest capacity that suffices. More capacity always suffices too, for whole requests and up to the loss of a cut.
static inline int64_t plan_capacity(const int *seqlens, int b, int partitions, const plan_costs *c, int cut) {
    int64_t low = 0, high = 0;
    for (int r = 0; r < b; r++) high += (int64_t)plan_blocks(seqlens[r]) * PLAN_UNIT + c->piece;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (plan_fill(seqlens, b, partitions, c, middle, cut, 0, 0))
            high = middle;
        else
            low = middle;
    }
    return high;
}

// What a plan takes, in sixteenths of a block. A piece costs 3.75 blocks beside its own (drain, store, refill). The merge
// costs a block, its traffic (a part of 64 rows) and a walk over the parts of the longest request. A block more in the
// longest partition costs less than a block, up to 1/8 above the mean: the others are idle then, the clock (or, with one
// tile of rows, the share of the memory) rises. Partitions that do not run in step cost 2 % of everything; why is not known.
enum {
    COST_PIECE = 60,
    COST_MERGE = 16,
    COST_PART_TILE_EIGHTHS = 3,
    COST_WALK_EIGHTHS = 5,
    COST_OVER_MEAN = 14,
    COST_OVER_MEAN_ONE_TILE = 8,
    COST_HIDDEN_MOST = 2,
    COST_UNEVEN_256THS = 5
};
static inline int64_t plan_time(const int *seqlens, int b, int partitions, int tiles, const partition *rows,
                                const int *num_splits) {
    int64_t total = 0, most = 0, parts = 0, walk = 0;
    for (int r = 0; r < b; r++) {
        int64_t n = num_splits[r + 1] - num_splits[r];
        total += (int64_t)plan_blocks(seqlens[r]) * PLAN_UNIT;
        if (n > 1) parts += n, walk = n > walk ? n : walk;
    }
    int64_t mean = total / partitions, price = tiles > 1 ? COST_OVER_MEAN : COST_OVER_MEAN_ONE_TILE, one = 0;
    int even = 1;
    for (int k = 0; k < partitions; k++) {
        const partition *p = &rows[k];
        int64_t blocks = 0, pieces = p->end_request - p->begin_request + 1;
        for (int r = p->begin_request; r <= p->end_request; r++)
            blocks += (r == p->end_request ? p->end_block : plan_blocks(seqlens[r])) -
                      (r == p->begin_request ? p->begin_block : 0);
        blocks *= PLAN_UNIT;
        if (pieces && one == 0) one = blocks;
        if (pieces && one != blocks) even = 0;
        int64_t hidden = 0;
        if (blocks > mean) {
            hidden = (blocks - mean) * (PLAN_UNIT - price) / PLAN_UNIT;
            if (hidden > mean * COST_HIDDEN_MOST / PLAN_UNIT) hidden = mean * COST_HIDDEN_MOST / PLAN_UNIT;
        }
        int64_t time = pieces * COST_PIECE + blocks - hidden;
        if (time > most) most = time;
    }
    if (!even) most += mean * COST_UNEVEN_256THS / 256;
    return most + (parts ? COST_MERGE + (parts * tiles * COST_PART_TILE_EIGHTHS + walk * COST_WALK_EIGHTHS) / 8 : 0);
}

// The plan of least modelled time among five: whole requests; requests cut, at two prices; cut over 1/32 fewer partitions,
// since 128, 64 and 32 often divide what 132, 66 and 33 do not; cut over half of them (less to merge).
static inline int plan_by_costs(const int *seqlens, int b, int partitions, int tiles, partition *rows,
                                int *num_splits) {
    const struct {
        int cut, n;
        plan_costs c;
    } candidates[] = {{0, partitions, {4 * PLAN_UNIT, 0}},
                      {1, partitions, {2 * PLAN_UNIT, 3 * PLAN_UNIT}},
                      {1, partitions, {4 * PLAN_UNIT, 0}},
                      {1, partitions - partitions / 32, {12 * PLAN_UNIT, 0}},
                      {1, (partitions + 1) / 2, {2 * PLAN_UNIT, 3 * PLAN_UNIT}}};
    const int count = sizeof candidates / sizeof candidates[0];
    int best = -1;
    int64_t least = 0;
    for (int i = 0; i <= count; i++) {
        int use = i < count ? i : best, n = candidates[use].n, cut = candidates[use].cut;
        const plan_costs *c = &candidates[use].c;
        for (int k = n; k < partitions; k++) rows[k] = (partition){b, b - 1, 0, 0, 0, 0, 0, 0};
        if (!plan_fill(seqlens, b, n, c, plan_capacity(seqlens, b, n, c, cut), cut, rows, num_splits)) abort();
        int64_t time = plan_time(seqlens, b, partitions, tiles, rows, num_splits);
        if (i < count && (best < 0 || time < least)) best = i, least = time;
    }
    return best;
}
