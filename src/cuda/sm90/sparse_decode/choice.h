/* SPDX-License-Identifier: MIT
 *
 * What Hopper's sparse decode takes, which of its two kernels, and how many partitions that one is best given.
 * Functions of the problem and of the number of SMs alone: the plan, the workspace and the launch ask each for itself.
 */
#ifndef FMLA_SM90_SPARSE_DECODE_CHOICE_H
#define FMLA_SM90_SPARSE_DECODE_CHOICE_H

#include "../../../problem.h"

/* What a tile takes; of that of the kernel for small batches (small/) two blocks of threads fit an SM. */
enum {
    SM90_SPARSE_DECODE_HEADS = 64,
    SM90_SPARSE_DECODE_SMALL_HEADS = 16,
    SM90_SPARSE_DECODE_SMALL_BLOCKS_OF_SM = 2
};

/* Lists with lengths are cut into chunks of up to so many keys: a plan, which evens lengths out, and a second kernel cost more. */
enum { SM90_SPARSE_DECODE_FEW_KEYS = 512 };

/* NULL if it takes the problem; else what it takes, and which argument differs. */
const char *sm90_sparse_decode_refuses(const struct attention_problem *problem, const char **argument);

/* Is the portable kernel faster? Over caches of the queries' type Hopper has no kernel of small tiles, and for few keys the portable
 * one, whose tiles have 16 to 64 heads, is sooner done (docs/kernels/sparse-decode.md has the measured crossover). */
bool sm90_sparse_decode_leaves(const struct attention_problem *problem);

/* Which of the kernels over caches of bytes takes the formats of both: whose `format` it is, and whether some blocks of keys have FP4.
 * The queries' kernels, over caches of their type, are found alike. */
struct sm90_sparse_formats {
    enum kv_format format;
    bool some_fp4;
};

struct sm90_sparse_formats sm90_sparse_decode_formats(const struct attention_problem *problem);

/* As far as the choice depends on a call. */
struct sm90_sparse_shape {
    int64_t b, s_q, h_q, topk, extra_topk;
    int32_t sms;
    bool lengths; /* lists have lengths of their own */
};

struct sm90_sparse_shape sm90_sparse_shape_of(const struct attention_problem *problem, int32_t sms);

/* Is it for the kernel for small batches? In batch-invariant mode that is not to depend on the batch. Where b is 0, how many
 * requests there will be is not known: partitions for large batches serve small ones, where those for small batches would
 * leave SMs without work in large ones. */
bool sm90_sparse_decode_is_small(const struct sm90_sparse_shape *shape, bool batch_invariant);

/* Where all keys of the batch are so few that a kernel's blocks of threads for them begin at once: how many keys each is best
 * given, a multiple of PLAN_BLOCK. Requests are then cut into chunks of so many keys, and no plan need be made or read.
 * 0: by a plan. `heads`: of the kernel's tiles. */
int32_t sm90_sparse_decode_chunk(const struct sm90_sparse_shape *shape, int heads);

/* Partitions where the caller names none: as many as let every block of threads begin at once, with pieces as even as
 * can be. Of the shape alone, with lengths or without: a plan is needed only with them, or where there are many keys. */
int32_t sm90_sparse_decode_partitions(const struct sm90_sparse_shape *shape);

/* The most that it answers for the shape with any b, which is not looked at: the rows of a plan that may be copied over that of
 * another batch. */
int32_t sm90_sparse_decode_rows(const struct sm90_sparse_shape *shape);

/* The most rows where requests have `tiles` tiles of so many heads, any b, and lists at most as long as the shape says. It is never
 * less for fewer tiles; 1 where there are more tiles than half of what fits the GPU at a time. */
int32_t sm90_sparse_decode_most_partitions(const struct sm90_sparse_shape *shape, int64_t tiles, int heads);

#endif
