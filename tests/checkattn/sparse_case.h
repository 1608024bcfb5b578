/* SPDX-License-Identifier: MIT
 *
 * A case of sparse decode or sparse prefill: tensors in guarded memory with every slot poisoned that no
 * counted index names; and parts of it: requests and rows.
 */
#ifndef CHECKATTN_SPARSE_CASE_H
#define CHECKATTN_SPARSE_CASE_H

#include "sparse_pool.h"

/* X(word, kv_format of the call, type of the queries, d_qk) */
#define SPARSE_FORMATS(X)                                                                                    \
    X("bf16", 0, BF16, 576)                                                                                  \
    X("bf16_512", FMLA_KV_BF16, BF16, 512)                                                                   \
    X("fp8_656", FMLA_KV_FP8_656, BF16, 576)                                                                 \
    X("fp8_584", FMLA_KV_FP8_584, BF16, 512)                                                                 \
    X("fp16", 0, FP16, 576)                                                                                  \
    X("fp8_656_q16", FMLA_KV_FP8_656, FP16, 576)                                                             \
    X("fp8_528", FMLA_KV_FP8_528, BF16, 512)                                                                 \
    X("fp8_528_split", FMLA_KV_FP8_528_SPLIT, BF16, 512)                                                     \
    X("fp4_288", FMLA_KV_FP4_288, BF16, 512)                                                                 \
    X("fp4_288_split", FMLA_KV_FP4_288_SPLIT, BF16, 512)                                                     \
    X("fp8_528_f32", FMLA_KV_FP8_528_F32, BF16, 512)                                                         \
    X("fp4_288_q16", FMLA_KV_FP4_288, FP16, 512)
#define FORMAT_WORD(word, ...) " " word
#define ONE_EACH(...)          1,

/* The axes of the grids, and the meaning of values that are not numbers. */
#define SPARSE_AXES(X)                                                                                       \
    X(S_SHAPE, "shape: 0 1 2 3 4 5 6") /* cache: a row of sparse_shapes */                                   \
    X(S_B, "b: 1 4 74 321")                                                                                  \
    X(S_SQ, "s_q: 1 3")                                                                                      \
    X(S_HQ, "h_q: 1 8 16 48 64 96 128")                                                                      \
    X(S_FORMAT, "format:" SPARSE_FORMATS(FORMAT_WORD))                                                       \
    X(S_LENGTHS, "lengths: none full varied zero beyond")                                                    \
    X(S_EXTRA, "extra: 0 1 2 3 4 5 6 7") /* 0: none; else 1 + the row of sparse_shapes */                    \
    X(S_EXTRA_FORMAT, "extra_format: same half fp8_656 fp8_584 fp8_528 fp8_528_split fp4_288 fp4_288_split " \
                      "fp8_528_f32") /* half: the type of q */                                               \
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
enum { S_EXTRA_SAME, S_EXTRA_HALF, S_EXTRA_BYTES, S_EXTRA_FORMATS = S_EXTRA_BYTES + 7 };
enum { S_FORMATS = sizeof((char[]){SPARSE_FORMATS(ONE_EACH)}) };

/* Indexed by the axis of formats. */
struct sparse_format {
    enum kv_format format;
    int32_t name; /* kv_format of the call */
    int64_t d_qk;
    bool fp16; /* queries */
};
extern const struct sparse_format sparse_formats[S_FORMATS];

/* Returns the format of the extra cache, even if there is none. */
enum kv_format sparse_extra_format(const int64_t *v);

/* Returns true if both formats have keys of one width, or one is not chosen yet. */
bool sparse_is_sound(const int64_t *v);
enum { S_CACHES = 2 };

/* Keys that a request chooses from, indices, page size. */
enum { SPARSE_SHAPES = 7 };
extern const int64_t sparse_shapes[SPARSE_SHAPES][3];

/* X(word, kv_format of the call) */
#define PREFILL_SOURCES_OF(X)                                                                                \
    X("flat", 0)                                                                                             \
    X("flat_gaps", FMLA_KV_BF16)                                                                             \
    X("fp8_656", FMLA_KV_FP8_656)                                                                            \
    X("fp8_584", FMLA_KV_FP8_584)                                                                            \
    X("pages", FMLA_KV_BF16)                                                                                 \
    X("fp8_528", FMLA_KV_FP8_528)                                                                            \
    X("fp8_528_split", FMLA_KV_FP8_528_SPLIT)                                                                \
    X("fp4_288", FMLA_KV_FP4_288)                                                                            \
    X("fp4_288_split", FMLA_KV_FP4_288_SPLIT)                                                                \
    X("fp8_528_f32", FMLA_KV_FP8_528_F32)
#define PREFILL_AXES(X)                                                                                      \
    X(PREFILL_SHAPE, "shape: 0 1 2 3 4 5 6 7 8 9 (few) (no_keys) (no_lists) (far) (far_pages) (blocks) "     \
                     "(splits) (pair)") /* keys and lists: a row of prefill_shapes */                        \
    X(PREFILL_SQ, "s_q: 0 1 62 213 1234 70000")                                                              \
    X(PREFILL_HQ, "h_q: 1 16 64 80 128")                                                                     \
    X(PREFILL_HKV, "h_kv: 1 2")                                                                              \
    X(PREFILL_DQK, "d_qk: 512 576")                                                                          \
    X(PREFILL_SOURCE, "source:" PREFILL_SOURCES_OF(FORMAT_WORD))                                             \
    X(PREFILL_PAGE, "page_size: 64 1 61 576") /* slots of a page */                                          \
    X(PREFILL_LENGTHS, "lengths: none (full) varied (zero) beyond")                                          \
    X(PREFILL_INDICES, "indices: some all none twice blocks any")                                            \
    X(PREFILL_CODES, "codes: written scales extreme (beyond) nan")                                           \
    X(PREFILL_INPUTS, "inputs: normal spiked steep (infinite) (beyond) extreme")                             \
    X(PREFILL_SINK, "sink: none finite infinite")                                                            \
    X(PREFILL_EMPTY, "lse_empty: 0 1")                                                                       \
    X(PREFILL_BASE, "log_base: 0 2")                                                                         \
    X(PREFILL_RESULTS, "results: both lse max none")                                                         \
    X(PREFILL_LAYOUT, "layout: contiguous padded swapped odd (far)")                                         \
    X(PREFILL_THREADS, "threads: built_in one own")
enum { PREFILL_AXES(AXIS_NAME) PREFILL_AXIS_COUNT };
enum {
    PREFILL_FLAT,
    PREFILL_FLAT_GAPS, /* gaps between tokens and heads; with LAYOUT_SWAPPED the keys of a head are adjacent */
    PREFILL_PAGES = 4,
    PREFILL_SOURCES = sizeof((char[]){PREFILL_SOURCES_OF(ONE_EACH)})
};
/* kv_format of the call, by source; byte formats also define d_qk. */
extern const int32_t prefill_formats[PREFILL_SOURCES];
static inline bool prefill_has_codes(int64_t source)
{
    return prefill_formats[source] >= FMLA_KV_FP8_656;
}
enum { PREFILL_RESULTS_BOTH, PREFILL_RESULTS_LSE, PREFILL_RESULTS_MAX, PREFILL_RESULTS_NONE };
/* In addition to those of sparse_pool.h: scores that are NaN or infinite, far below -1e30, or far above
 * all others (prefill_extreme.c). */
enum { PREFILL_EXTREME = S_BEYOND + 1 };

/* s_kv, topk: those of the grid, then those of special cases, in the order of the axis's words. */
enum { PREFILL_SHAPES = 18 };
extern const int64_t prefill_shapes[PREFILL_SHAPES][2];

/* Lists are drawn for this many tokens and copied to the others. A prime, so that tokens in one tile
 * differ. */
enum { PREFILL_CLASSES = 61 };

/* Their tensors; those of the first keys have the same index in both. */
#define SPARSE(member)  TENSOR_sparse_decode_##member
#define PREFILL(member) TENSOR_sparse_prefill_##member

struct sparse_case {
    struct test_case c;
    bool prefill;
    int64_t indices, codes, inputs;    /* values of these axes */
    int64_t first_kind;                /* extreme queries: kind of the first tile */
    struct sparse_pool pool[S_CACHES]; /* flat keys: pages of one slot. count is per request, or per class */
};

/* With FAULT_LSE_CANCELLED no list has more than one entry that counts. Sparse prefill draws values with a
 * mean of its own. */
extern const struct maker sparse_maker, prefill_maker;

/* Return a token's list of cache k, and the number of its entries that count. */
int32_t *sparse_list(const struct test_case *c, int k, int64_t request, int64_t token, int64_t key_head);
int64_t sparse_count(const struct test_case *c, int k, int64_t request, int64_t token);

int64_t sparse_seen(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* Prints values of axes that the kernel under test does not take. */
void sparse_tell_left(const struct axis *axis, int axes, const int64_t *v);

/* Plants a defect in the first list of the first keys that has a place for it. */
bool sparse_plant(struct test_case *c, enum defect fault, struct patch *patch);

/* Extreme inputs of sparse prefill (prefill_extreme.c): put the keys of a list into the order of its
 * class, and change a random key or query into the one for its slot or row. */
void prefill_extreme_list(const struct sparse_case *s, int64_t class, int64_t key_head);
void prefill_extreme_key(const struct sparse_case *s, uint8_t *token, int64_t slot);
void prefill_extreme_query(struct sparse_case *s, uint8_t *row, int64_t token, int64_t head);

#endif
