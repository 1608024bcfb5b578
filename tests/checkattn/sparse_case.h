/* SPDX-License-Identifier: MIT
 *
 * A case of sparse decode: tensors in guarded memory, every slot of a cache that no counted index names poisoned; and parts
 * of it: requests, and rows.
 */
#ifndef CHECKATTN_SPARSE_CASE_H
#define CHECKATTN_SPARSE_CASE_H

#include "sparse_pool.h"

/* The axes of the grid, and what their values mean where they are not numbers. */
enum {
    S_SHAPE, /* of the cache: a row of sparse_shapes */
    S_B,
    S_SQ,
    S_HQ,
    S_FORMAT,
    S_LENGTHS,
    S_EXTRA, /* 0: none; else 1 + the row of sparse_shapes */
    S_EXTRA_LENGTHS,
    S_INDICES,
    S_CODES,
    S_INPUTS,
    S_SINK,
    S_EMPTY,
    S_BASE,
    S_INVARIANT,
    S_PLAN,
    S_PARTITIONS,
    S_LAYOUT,
    S_LSE,
    S_THREADS,
    S_AXES
};
enum { S_BF16, S_BF16_512, S_FP8_656, S_FP8_584, S_FP16, S_FP8_656_Q16 /* queries in fp16 */, S_FORMATS };
enum { S_PLAN_INSIDE, S_PLAN_GIVEN, S_PLAN_STALE };
/* Besides those of memory.h: pages more than 2^31 bytes apart. They cost address space, not memory. */
enum { S_LAYOUT_FAR = LAYOUTS };
enum { S_CACHES = 2 };

/* Keys a request chooses from, indices, page size. */
enum { SPARSE_SHAPES = 7 };
extern const int64_t sparse_shapes[SPARSE_SHAPES][3];

/* Its tensors. Those of a cache follow one another. */
#define SPARSE_TENSORS_OF(X)                                                                                 \
    X(SPARSE_OUT, OUT, out)                                                                                  \
    X(SPARSE_LSE, BY_HEAD, lse)                                                                              \
    X(SPARSE_Q, INPUT, q)                                                                                    \
    X(SPARSE_SINK, INPUT, attn_sink)                                                                         \
    X(SPARSE_KV, INPUT, kv_cache)                                                                            \
    X(SPARSE_INDICES, INPUT, indices)                                                                        \
    X(SPARSE_LENGTH, INPUT, topk_length)                                                                     \
    X(SPARSE_EXTRA_KV, INPUT, extra_kv_cache)                                                                \
    X(SPARSE_EXTRA_INDICES, INPUT, extra_indices)                                                            \
    X(SPARSE_EXTRA_LENGTH, INPUT, extra_topk_length)                                                         \
    X(SPARSE_PARTITIONS, TABLE, partitions) X(SPARSE_NUM_SPLITS, TABLE, num_splits)
enum { SPARSE_TENSORS_OF(TENSOR_NAME) SPARSE_TENSORS };

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
