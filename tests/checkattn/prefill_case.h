/* SPDX-License-Identifier: MIT
 *
 * A case of sparse prefill: tensors in guarded memory, every slot that no counted index names poisoned; and rows of it.
 */
#ifndef CHECKATTN_PREFILL_CASE_H
#define CHECKATTN_PREFILL_CASE_H

#include "sparse_pool.h"

/* The axes of the grid, and what their values mean where they are not numbers. */
enum {
    P_SHAPE, /* of keys and lists: a row of prefill_shapes */
    P_SQ,
    P_HQ,
    P_HKV,
    P_DQK,
    P_SOURCE,
    P_PAGE, /* slots of a page */
    P_LENGTHS,
    P_INDICES,
    P_CODES,
    P_INPUTS,
    P_SINK,
    P_EMPTY,
    P_BASE,
    P_RESULTS,
    P_LAYOUT,
    P_THREADS,
    P_AXES
};
enum {
    P_FLAT,
    P_FLAT_GAPS, /* gaps between tokens and heads; with LAYOUT_SWAPPED the keys of a head lie together */
    P_FP8_656,
    P_FP8_584,
    P_PAGES,
    P_SOURCES
};
enum { P_RESULTS_BOTH, P_RESULTS_LSE, P_RESULTS_MAX, P_RESULTS_NONE };
/* Besides those of sparse_pool.h: scores that are NaN or infinite, far below -1e30, or far above all others
 * (prefill_extreme.h). */
enum { P_EXTREME = S_BEYOND + 1 };
/* Besides those of memory.h: pages, or keys that are flat, more than 2^31 bytes apart. */
enum { P_LAYOUT_FAR = LAYOUTS };

/* s_kv, topk: those of the grid, then those of special cases. */
enum {
    PREFILL_SHAPES = 10,
    P_SHAPE_FEW = PREFILL_SHAPES,
    P_SHAPE_NO_KEYS,
    P_SHAPE_NO_LISTS,
    P_SHAPE_FAR,
    P_SHAPE_FAR_PAGES,
    P_SHAPE_BLOCKS, /* two blocks of 64 and a part */
    P_SHAPE_PIECES, /* five and a part: of few tokens a kernel may cut the lists */
    PREFILL_ALL_SHAPES
};
extern const int64_t prefill_shapes[PREFILL_ALL_SHAPES][2];

/* Lists are drawn for so many tokens and copied to the others. A prime, so that tokens that a kernel takes at once differ. */
enum { PREFILL_CLASSES = 61 };

/* Its tensors. */
#define PREFILL_TENSORS_OF(X)                                                                                \
    X(PREFILL_OUT, OUT, out)                                                                                 \
    X(PREFILL_MAX, BY_TOKEN, max_logits)                                                                     \
    X(PREFILL_LSE, BY_TOKEN, lse)                                                                            \
    X(PREFILL_Q, INPUT, q)                                                                                   \
    X(PREFILL_SINK, INPUT, attn_sink)                                                                        \
    X(PREFILL_KV, INPUT, kv) X(PREFILL_INDICES, INPUT, indices) X(PREFILL_LENGTH, INPUT, topk_length)
enum { PREFILL_TENSORS_OF(TENSOR_NAME) PREFILL_TENSORS };

struct prefill_case {
    struct test_case c;      /* q, out and indices have a dimension of 1 in front in memory */
    int64_t first_kind;      /* of extreme queries: of the first tile */
    struct sparse_pool pool; /* of flat keys: pages of one slot. count is that of each class */
};

/* Values are drawn with a mean of their own. With FAULT_LSE_CANCELLED no list has more than one entry that counts. */
extern const struct maker prefill_maker;

bool prefill_sees(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* How many entries of a token's lists count, and an entry of one. */
int64_t prefill_case_count(const struct prefill_case *p, int64_t token);
int32_t *prefill_case_entry(const struct prefill_case *p, int64_t token, int64_t key_head, int64_t i);

#endif
