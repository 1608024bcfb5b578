/* SPDX-License-Identifier: MIT
 *
 * A case of sparse prefill: tensors in guarded memory, every slot that no counted index names poisoned; and rows of it.
 */
#ifndef CHECKATTN_PREFILL_CASE_H
#define CHECKATTN_PREFILL_CASE_H

#include "sparse_pool.h"

/* The axes of the grid, and what their values mean where they are not numbers. */
#define PREFILL_AXES(X)                                                                                      \
    X(                                                                                                       \
        P_SHAPE, "shape: 0 1 2 3 4 5 6 7 8 9 (few) (no_keys) (no_lists) (far) (far_pages) (blocks) "         \
                 "(pieces)") /* of keys and lists: a row of prefill_shapes */                                \
    X(P_SQ, "s_q: 0 1 62 213 1234 70000")                                                                    \
    X(P_HQ, "h_q: 1 16 64 80 128")                                                                           \
    X(P_HKV, "h_kv: 1 2")                                                                                    \
    X(P_DQK, "d_qk: 512 576")                                                                                \
    X(P_SOURCE, "source: flat flat_gaps fp8_656 fp8_584 pages")                                              \
    X(P_PAGE, "page_size: 64 1 61 576") /* slots of a page */                                                \
    X(P_LENGTHS, "lengths: none (full) varied (zero) beyond")                                                \
    X(P_INDICES, "indices: some all none twice blocks any")                                                  \
    X(P_CODES, "codes: written scales extreme (beyond) nan")                                                 \
    X(P_INPUTS, "inputs: normal spiked steep (infinite) (beyond) extreme")                                   \
    X(P_SINK, "sink: none finite infinite")                                                                  \
    X(P_EMPTY, "lse_empty: 0 1")                                                                             \
    X(P_BASE, "log_base: 0 2")                                                                               \
    X(P_RESULTS, "results: both lse max none")                                                               \
    X(P_LAYOUT, "layout: contiguous padded swapped odd (far)")                                               \
    X(P_THREADS, "threads: built_in one own")
enum { PREFILL_AXES(AXIS_NAME) P_AXES };
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
#define PREFILL(member) TENSOR_sparse_prefill_##member

struct prefill_case {
    struct test_case c;
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
