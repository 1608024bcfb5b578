/* SPDX-License-Identifier: MIT
 *
 * The split plan (docs/semantics.md, "The split plan"): its bytes, and the host planner that every device
 * planner is held bit-equal to.
 */
#ifndef FMLA_PLAN_H
#define FMLA_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PLAN_BLOCK = 64 /* keys of a block */, PLAN_OVERHEAD = 5 /* cost of touching a request, in blocks */ };
enum { PLAN_ROW_TILE = 64 /* rows (query token, query head) that one worker handles together */ };

/* One partition; the order of the fields is the published one. */
struct plan_partition {
    int32_t begin_request;
    int32_t end_request; /* inclusive; begin_request - 1 when idle */
    int32_t begin_block;
    int32_t end_block; /* exclusive, of end_request */
    int32_t begin_split;
    int32_t first_is_split; /* begin_request has more than one split */
    int32_t last_is_split;  /* end_request has */
    int32_t zero;
};

/* A plan in one piece: this, then num_partitions × plan_partition, then num_splits [batch + 1]. */
struct plan_header {
    uint32_t magic; /* PLAN_MAGIC */
    int32_t num_partitions;
    int64_t batch;
    int64_t payload;
    int64_t zero;
};

#define PLAN_MAGIC 0x31504d46u /* "FMP1" */

#if defined(__CUDACC__)
#define PLAN_FN static __host__ __device__ __forceinline__
#else
#define PLAN_FN static inline
#endif

#include "plan_costs.h"

static inline size_t plan_bytes(int64_t batch, int32_t num_partitions)
{
    return sizeof(struct plan_header) + (size_t)num_partitions * sizeof(struct plan_partition) +
           ((size_t)batch + 1) * sizeof(int32_t);
}

PLAN_FN struct plan_partition *plan_partitions(const struct plan_header *plan)
{
    return (struct plan_partition *)(plan + 1);
}

PLAN_FN int32_t *plan_num_splits(const struct plan_header *plan)
{
    return (int32_t *)(plan_partitions(plan) + plan->num_partitions);
}

/* Where a plan is: in one piece, or in two tables by themselves. */
struct plan_tables {
    struct plan_header *header;        /* NULL: the tables are by themselves */
    struct plan_partition *partitions; /* [num_partitions], aligned to 16 bytes */
    int32_t *num_splits;               /* [batch + 1] */
    int32_t num_partitions;
    int32_t
        planned; /* the keys are shared among so many of them at most, and those behind stay idle; 0: among all */
};

/* Of a plan in one piece. Its header is not read: a planner has yet to write it. */
static inline struct plan_tables plan_tables_of(void *plan, int32_t num_partitions)
{
    struct plan_header *header = (struct plan_header *)plan;
    struct plan_partition *partitions = plan_partitions(header);
    return (struct plan_tables){header, partitions, (int32_t *)(partitions + num_partitions), num_partitions,
                                0};
}

static inline int32_t plan_planned(struct plan_tables plan)
{
    return plan.planned ? plan.planned : plan.num_partitions;
}

/* The lengths of a batch: request r has `topk` keys at most, of which the first length[r] count, and behind them
 * `extra_topk` keys of a second cache. In sparse decode these are the entries of a token's lists. */
struct plan_topk {
    int64_t topk, extra_topk;
    const int32_t *length, *extra_length; /* [batch]; NULL: all */
};

PLAN_FN int64_t plan_topk_count(int64_t topk, const int32_t *length, int64_t request)
{
    if (!length) return topk;
    return length[request] < 0 ? 0 : length[request] > topk ? topk : length[request];
}

/* Where the keys of the second cache start in the list that the plan cuts: behind those of the first, which has one entry
 * at least, at a block's edge. */
PLAN_FN int64_t plan_extra_begin(int64_t count)
{
    return count > PLAN_BLOCK ? (count + PLAN_BLOCK - 1) / PLAN_BLOCK * PLAN_BLOCK : PLAN_BLOCK;
}

/* The length of that list. */
PLAN_FN int64_t plan_topk_length(int64_t count, int64_t extra_topk, int64_t extra_count)
{
    return extra_topk ? plan_extra_begin(count) + extra_count : count > 1 ? count : 1;
}

/* Row tiles of a request over all key heads: how many workers one partition keeps busy. */
int64_t plan_row_tiles(int64_t s_q, int64_t h_q, int64_t h_kv);

/* max(1, workers / h_kv / ceil(s_q · h_q / h_kv / 64)). */
int32_t plan_default_partitions(int64_t workers, int64_t s_q, int64_t h_q, int64_t h_kv);

/* The fewest partitions that keep all workers equally busy: partitions × row tiles is a multiple of the workers. The
 * CPU's choice, where a worker takes one row tile of a partition at a time. */
int32_t plan_even_partitions(int32_t workers, int64_t s_q, int64_t h_q, int64_t h_kv);

/* The costs of a request with these heads. */
struct plan_costs plan_costs_of(int64_t s_q, int64_t h_q, int64_t h_kv);

/* Writes the plan of `batch` requests, of the lengths that `lists` has; those of keys in pages are one list's. It is the
 * default one, or where `costs` says so and the plan in step takes less time by them, that one. In one piece it has
 * plan_bytes(batch, num_partitions) bytes. */
void plan_build(struct plan_tables plan, int64_t batch, struct plan_topk lists, struct plan_costs costs);

#endif
