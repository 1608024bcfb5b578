/* SPDX-License-Identifier: MIT
 *
 * Which problems Hopper's sparse decode takes, which of its two kernels, and how many partitions suit that
 * one. The functions depend on the problem and the number of SMs alone: the plan, the workspace and the
 * launch call them separately.
 */
#ifndef FMLA_SM90_SPARSE_DECODE_CHOICE_H
#define FMLA_SM90_SPARSE_DECODE_CHOICE_H

#include "../../../problem.h"

/* Heads of a tile; two CTAs of the kernel for small batches (small/) fit an SM. */
enum {
    SM90_SPARSE_DECODE_HEADS = 64,
    SM90_SPARSE_DECODE_SMALL_HEADS = 16,
    SM90_SPARSE_DECODE_SMALL_BLOCKS_OF_SM = 2
};

/* Lists with lengths are split without a plan up to so many keys a split: a plan, which balances
 * lengths, and a second kernel cost more. */
enum { SM90_SPARSE_DECODE_FEW_KEYS = 512 };

/* Returns NULL if the kernel takes the problem; else states its condition and sets `argument` to the argument
 * that violates it. */
const char *sm90_sparse_decode_refuses(const struct attention_problem *problem, const char **argument);

/* Returns whether the portable kernel is faster. Over caches of the queries' type Hopper has no kernel of
 * small tiles, and for few keys the portable kernel, whose tiles have 16 to 64 heads, is done sooner
 * (docs/kernels/sparse-decode.md has the measured crossover). */
bool sm90_sparse_decode_leaves(const struct attention_problem *problem);

/* Which of the kernels over FP8 and FP4 caches takes the formats of both caches: the kernel's `format`,
 * and whether some blocks of keys are FP4. The kernels over caches of the queries' type are found in the
 * same way. */
struct sm90_sparse_formats {
    enum kv_format format;
    bool some_fp4;
};

struct sm90_sparse_formats sm90_sparse_decode_formats(const struct attention_problem *problem);

/* The properties of a call that the choice depends on. */
struct sm90_sparse_shape {
    int64_t b, s_q, h_q, topk, extra_topk;
    int32_t sms;
    bool lengths; /* whether lists have lengths of their own */
};

struct sm90_sparse_shape sm90_sparse_shape_of(const struct attention_problem *problem, int32_t sms);

/* Returns whether the call is for the kernel for small batches. In batch-invariant mode that must not
 * depend on the batch. b = 0 means that the number of requests is unknown: partitions for large batches
 * serve small ones, but those for small batches would leave SMs idle in large ones. */
bool sm90_sparse_decode_is_small(const struct sm90_sparse_shape *shape, bool batch_invariant);

/* Returns how many keys, a multiple of PLAN_BLOCK, each CTA is best given if the batch has so few keys
 * that all CTAs for them begin at once. Requests are then cut into splits of so many keys, and no plan is
 * made or read. Returns 0 if the call goes by a plan. `heads`: of the kernel's tiles. */
int32_t sm90_sparse_decode_split_keys(const struct sm90_sparse_shape *shape, int heads);

/* Returns the partitions to use if the caller names none: as many as let every CTA begin at once, with
 * splits as even as possible. Depends on the shape alone, with lengths or without: a plan is needed only
 * with lengths, or for many keys. */
int32_t sm90_sparse_decode_partitions(const struct sm90_sparse_shape *shape);

/* Returns the maximum of sm90_sparse_decode_partitions for the shape with any b (the shape's b is
 * ignored): the rows of a plan that may be copied over that of another batch. */
int32_t sm90_sparse_decode_rows(const struct sm90_sparse_shape *shape);

/* Returns the most rows if requests have `tiles` tiles of `heads` heads, any b, and lists at most as long
 * as the shape says. It is never less for fewer tiles; 1 if there are more tiles than half of what fits
 * the GPU at a time. */
int32_t sm90_sparse_decode_most_partitions(const struct sm90_sparse_shape *shape, int64_t tiles, int heads);

#endif
