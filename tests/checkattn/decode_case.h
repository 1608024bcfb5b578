/* SPDX-License-Identifier: MIT
 *
 * A case of dense decode: drawn tensors in guarded memory with everything unused poisoned, and parts of it: requests, and rows.
 */
#ifndef CHECKATTN_DECODE_CASE_H
#define CHECKATTN_DECODE_CASE_H

#include "case.h"

/* The axes of the grid, and what their values mean where they are not numbers. */
enum {
    A_B,
    A_SQ,
    A_SK,
    A_HQ,
    A_HKV,
    A_PAGE,
    A_CAUSAL,
    A_DTYPE,
    A_DQK,
    A_LENGTHS,
    A_SINK,
    A_EMPTY,
    A_BASE,
    A_INVARIANT,
    A_PLAN,
    A_PARTITIONS,
    A_LAYOUT,
    A_INPUTS,
    A_LSE,
    A_THREADS,
    AXES
};
enum { LENGTHS_FIXED, LENGTHS_VARIED, LENGTHS_BEYOND };
enum { PLAN_INSIDE, PLAN_GIVEN, PLAN_STALE };
enum {
    INPUTS_NORMAL,
    INPUTS_SPIKED, /* keys at borders weigh more */
    INPUTS_STEEP,  /* scores of ±200: without the maximum taken out, everything overflows */
    INPUTS_NAN_ENDS, /* causal, s_q > 1: the last key of every request is NaN, and rows that may not see it must not notice */
    INPUTS_INFINITE, /* not of the grid: scores of +inf, all of a row, or one among others */
    INPUTS_BEYOND    /* neither: a softmax_scale of 3e38, whose scores fp32 does not hold */
};
/* Besides those of memory.h, for the cache of a paged case: pages so far apart that the elements of the third and later
 * ones are more than 2^31 elements from the first, those of the fifth more than 2^32. They cost address space, not memory.
 * Everything else is contiguous. */
enum { LAYOUT_FAR = LAYOUTS };
enum { D_V = 512 };

/* Its tensors. */
#define DENSE_TENSORS_OF(X)                                                                                  \
    X(DENSE_OUT, OUT, out)                                                                                   \
    X(DENSE_LSE, BY_HEAD, lse)                                                                               \
    X(DENSE_Q, INPUT, q)                                                                                     \
    X(DENSE_KV, INPUT, kv_cache)                                                                             \
    X(DENSE_BLOCK_TABLE, INPUT, block_table)                                                                 \
    X(DENSE_SEQLENS, INPUT, seqlens)                                                                         \
    X(DENSE_SINK, INPUT, attn_sink)                                                                          \
    X(DENSE_PARTITIONS, TABLE, partitions) X(DENSE_NUM_SPLITS, TABLE, num_splits)
enum { DENSE_TENSORS_OF(TENSOR_NAME) DENSE_TENSORS };

struct decode_case {
    struct test_case c;
    int64_t s_k, page_size, max_pages, pages;
    int64_t *length;    /* of each request, clamped */
    int64_t strides[4]; /* of the cache that is given; requests of a contiguous one may share memory */
    bool paged;
};

extern const struct maker decode_maker;

/* How many keys a row sees, and a row as a problem of its own over the first keys of its request, without a mask. */
int64_t decode_seen_by(const struct test_case *c, int64_t request, int64_t token);
void decode_narrow_to(const struct test_case *c, const struct rows *rows, int64_t seen, struct view *v);

#endif
