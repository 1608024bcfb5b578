/* SPDX-License-Identifier: MIT
 *
 * A case of sparse decode: tensors in guarded memory, every slot of a cache that no counted index names poisoned; and parts
 * of it: requests, and rows.
 */
#ifndef CHECKATTN_SPARSE_CASE_H
#define CHECKATTN_SPARSE_CASE_H

#include "sparse_pool.h"

/* The axes of the grid, and what their values mean where they are not numbers. */
#define SPARSE_AXES(X)                                                                                       \
    X(S_SHAPE, "shape: 0 1 2 3 4 5 6") /* of the cache: a row of sparse_shapes */                            \
    X(S_B, "b: 1 4 74 321")                                                                                  \
    X(S_SQ, "s_q: 1 3")                                                                                      \
    X(S_HQ, "h_q: 1 8 16 48 64 96 128")                                                                      \
    X(S_FORMAT, "format: bf16 bf16_512 fp8_656 fp8_584 fp16 fp8_656_q16")                                    \
    X(S_LENGTHS, "lengths: none full varied zero beyond")                                                    \
    X(S_EXTRA, "extra: 0 1 2 3 4 5 6 7") /* 0: none; else 1 + the row of sparse_shapes */                    \
    X(S_EXTRA_LENGTHS, "extra_lengths: none full varied zero beyond")                                        \
    X(S_INDICES, "indices: some all none twice")                                                             \
    X(S_CODES, "codes: written scales extreme beyond nan")                                                   \
    X(S_INPUTS, "inputs: normal spiked steep (infinite) (beyond)")                                           \
    X(S_SINK, "sink: none finite infinite")                                                                  \
    X(S_EMPTY, "lse_empty: 0 1")                                                                             \
    X(S_BASE, "log_base: 0 2")                                                                               \
    X(S_INVARIANT, "batch_invariant: 0 1")                                                                   \
    X(S_PLAN, "plan: inside given stale")                                                                    \
    X(S_PARTITIONS, "num_partitions: 0 1 3 78")                                                              \
    X(S_LAYOUT, "layout: contiguous padded swapped odd (far)")                                               \
    X(S_LSE, "lse: 1 0")                                                                                     \
    X(S_THREADS, "threads: built_in one own")
enum { SPARSE_AXES(AXIS_NAME) S_AXES };
enum { S_BF16, S_BF16_512, S_FP8_656, S_FP8_584, S_FP16, S_FP8_656_Q16 /* queries in fp16 */, S_FORMATS };
enum { S_PLAN_INSIDE, S_PLAN_GIVEN, S_PLAN_STALE };
/* Besides those of memory.h: pages more than 2^31 bytes apart. They cost address space, not memory. */
enum { S_LAYOUT_FAR = LAYOUTS };
enum { S_CACHES = 2 };

/* Keys a request chooses from, indices, page size. */
enum { SPARSE_SHAPES = 7 };
extern const int64_t sparse_shapes[SPARSE_SHAPES][3];

/* Its tensors. */
#define SPARSE(member) TENSOR_sparse_decode_##member

struct sparse_case {
    struct test_case c;
    enum kv_format format;
    struct kv_layout layout;
    struct sparse_pool pool[S_CACHES];
};

/* With FAULT_LSE_CANCELLED no list has more than one entry that counts. */
extern const struct maker sparse_maker;

/* A token's list, and how many of its entries count; of cache k. */
int32_t *sparse_list(const struct test_case *c, int k, int64_t request, int64_t token);
int64_t sparse_count(const struct test_case *c, int k, int64_t request);

#endif
