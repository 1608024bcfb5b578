/* SPDX-License-Identifier: MIT
 *
 * The split plan (docs/semantics.md, "The split plan"): its bytes, and the host planner, whose output every
 * device planner must match bit for bit.
 */
#ifndef FMLA_PLAN_H
#define FMLA_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PLAN_BLOCK = 64 /* keys per block */, PLAN_OVERHEAD = 5 /* cost of touching a request, in blocks */ };
enum { PLAN_ROW_TILE = 64 /* rows (query token, query head) that one worker processes together */ };

/* One partition. The order of the fields is part of the public interface. */
struct plan_partition {
    int32_t begin_request;
    int32_t end_request; /* inclusive; begin_request - 1 when idle */
    int32_t begin_block;
    int32_t end_block; /* exclusive, of end_request */
    int32_t begin_split;
    int32_t first_is_split; /* begin_request has more than one split */
    int32_t last_is_split;  /* the same for end_request */
    int32_t zero;
};

/* The header of a contiguous plan; it is followed by num_partitions × plan_partition, then num_splits [batch
 * + 1]. */
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

/* Pointers into a plan, which is either contiguous or two separate tables. */
struct plan_tables {
    struct plan_header *header;        /* NULL: separate tables */
    struct plan_partition *partitions; /* [num_partitions], 16-byte aligned */
    int32_t *num_splits;               /* [batch + 1] */
    int32_t num_partitions;
    int32_t planned; /* partitions that may have keys, the rest are idle; 0: all */
};

/* Returns the tables of a contiguous plan. Does not read the header, which the planner has yet to write. */
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

/* The lengths of a batch: request r has at most `topk` keys, of which the first length[r] are valid, followed
 * by `extra_topk` keys of a second cache. In sparse decode these are the entries of a token's lists. */
struct plan_topk {
    int64_t topk, extra_topk;
    const int32_t *length, *extra_length; /* [batch]; NULL: all */
};

PLAN_FN int64_t plan_topk_count(int64_t topk, const int32_t *length, int64_t request)
{
    if (!length) return topk;
    return length[request] < 0 ? 0 : length[request] > topk ? topk : length[request];
}

/* Returns where the keys of the second cache start in the list that the plan splits: at the first block
 * boundary after those of the first cache, which has at least one entry. */
PLAN_FN int64_t plan_extra_begin(int64_t count)
{
    return count > PLAN_BLOCK ? (count + PLAN_BLOCK - 1) / PLAN_BLOCK * PLAN_BLOCK : PLAN_BLOCK;
}

/* Returns the length of that list. */
PLAN_FN int64_t plan_topk_length(int64_t count, int64_t extra_topk, int64_t extra_count)
{
    return extra_topk ? plan_extra_begin(count) + extra_count : count > 1 ? count : 1;
}

/* Returns the row tiles of a request over all key heads, which is how many workers one partition keeps
 * busy. */
int64_t plan_row_tiles(int64_t s_q, int64_t h_q, int64_t h_kv);

/* Returns max(1, workers / h_kv / ceil(s_q · h_q / h_kv / 64)). */
int32_t plan_default_partitions(int64_t workers, int64_t s_q, int64_t h_q, int64_t h_kv);

/* Returns the fewest partitions that keep all workers equally busy: partitions × row tiles is a multiple of
 * the workers. The CPU uses it; there a worker takes one row tile of a partition at a time. */
int32_t plan_even_partitions(int32_t workers, int64_t s_q, int64_t h_q, int64_t h_kv);

/* Returns the costs of a request with these heads. */
struct plan_costs plan_costs_of(int64_t s_q, int64_t h_q, int64_t h_kv);

/* Writes the plan of `batch` requests whose lengths are in `lists` (paged keys use one list). It writes the
 * default plan, or the plan in step if `costs` are given and predict less time for it. A contiguous plan has
 * plan_bytes(batch, num_partitions) bytes. */
void plan_build(struct plan_tables plan, int64_t batch, struct plan_topk lists, struct plan_costs costs);

#endif
