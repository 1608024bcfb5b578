/* SPDX-License-Identifier: MIT
 *
 * What either decode does about requests that are cut: the workspace, which has the plan, if it is made inside the call, and
 * the slots of partial results; the plan of the caller; the join.
 *
 * Workspace:  plan, if made inside the call | out of the slots | lse of the slots | what the operation adds
 * with two slots a partition of the plan, or one a chunk of a request (src/cuda/params.h).
 */
#ifndef FMLA_CUDA_SPLIT_H
#define FMLA_CUDA_SPLIT_H

#include "kernels.h"

#include "../problem.h"

enum { CUDA_WORKSPACE_ALIGNMENT = 256 /* what the driver's allocations have */ };

static inline size_t cuda_line_up(size_t bytes)
{
    return (bytes + CUDA_WORKSPACE_ALIGNMENT - 1) / CUDA_WORKSPACE_ALIGNMENT * CUDA_WORKSPACE_ALIGNMENT;
}

static inline int64_t cuda_ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* A call, as far as the workspace depends on it. */
struct cuda_cut {
    const char *operation;
    int64_t b, rows /* of a request */, d_v, capacity;
    int64_t tiles; /* of a request: blocks of threads that take a partition together */
    int32_t sms;
    int32_t chunk_keys;  /* 0: by a plan */
    bool chunks_at_once; /* a worker for each chunk; else as many as keep the device busy */
    const void *plan;
    size_t plan_size;
    bool plan_in_tables;
    int32_t num_partitions; /* the caller's, or the default */
};

struct cuda_split {
    int32_t num_partitions;
    int64_t chunks, chunk_lanes; /* of a request; 0: by a plan */
    int64_t slots;
    size_t plan_offset, slot_out_offset, slot_lse_offset, bytes;
};

fmla_status cuda_split_lay_out(const struct cuda_cut *cut, struct cuda_split *split);

/* The most that calls up to some sizes may have, by plans that are made inside them: partitions, and rows of all slots together. */
struct cuda_most {
    int32_t partitions;
    int64_t slot_rows;
};

/* Such a call has so many partitions, and requests of so many rows. */
void cuda_most_add(struct cuda_most *most, int32_t partitions, int64_t rows);

/* A workspace for all of them: its bytes, and no more than that. */
fmla_status cuda_split_bound(const struct cuda_cut *cut, const struct cuda_most *most,
                             struct cuda_split *split);

/* Workers, each of which takes pieces in turns: partitions, or lanes of the chunks of a request. */
int64_t cuda_split_workers(const struct cuda_cut *cut, const struct cuda_split *split);

/* As kernels are told of it. `partitions` and `num_splits`: the caller's tables, where the plan is in tables. */
struct split_params cuda_split_params(const struct cuda_cut *cut, const struct cuda_split *split,
                                      const struct plan_partition *partitions, const int32_t *num_splits,
                                      void *workspace);

/* Joins the slots, where there are any. `flags`: LAUNCH_…; the join waits itself for what it reads. */
fmla_status cuda_launch_join(const char *operation, const struct cuda_scope *scope, enum element element,
                             const struct join_params *params, unsigned flags, void *stream);

#endif
