/* SPDX-License-Identifier: MIT
 *
 * A case of sparse prefill: tensors in guarded memory, every slot that no counted index names poisoned, and ways to run it,
 * whole or rows of it.
 */
#ifndef CHECKATTN_PREFILL_CASE_H
#define CHECKATTN_PREFILL_CASE_H

#include "checkattn.h"
#include "device.h"
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
/* Besides those of sparse_pool.h: scores that are NaN or infinite, far below -1e30, or far above all others (prefill_extreme.h). */
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

struct prefill_case {
    int64_t v[P_AXES];
    struct random_state random;
    int64_t first_kind; /* of extreme queries: of the first tile */
    char name[320];
    int64_t s_q, h_q, h_kv, d_qk;
    struct sparse_pool pool; /* of flat keys: pages of one slot. count is that of each class */
    int64_t head_bytes;      /* from a key head to the next */
    struct guarded q, sink, out, max_logits, lse;
    fmla_tensor q_view, indices_view, out_view; /* in memory they have a dimension of 1 in front */
    fmla_sparse_prefill_args args;
    fmla_device device;          /* where it runs */
    struct device_blocks blocks; /* on a GPU: the copies there */
};

/* One case through all that is checked of it, by the file that has the grid. */
void prefill_case_check(const struct run *run, const int64_t v[P_AXES], uint64_t seed, struct tally *tally);

/* Draws the values that keys and queries are copied from, each with a mean of its own; before the first case. */
void prefill_case_draw(uint64_t seed);

/* Of heads, widths and page size what was left 0 is 16, 1, 576 and 64. */
void prefill_case_complete(int64_t v[P_AXES]);

void prefill_case_make(struct prefill_case *c, const struct run *run, const int64_t v[P_AXES], uint64_t seed);
void prefill_case_free(struct prefill_case *c);

/* From now on no list has more than one entry that counts; before the case is copied to a device. */
void prefill_case_leave_one(struct prefill_case *c);

/* Runs it, with a workspace of exactly the size that was answered, full of `fill`. */
fmla_status prefill_case_call(fmla_sparse_prefill_args *args, int fill);

/* Copies the case to the device that it is for; nothing to do on the CPU. With `like`, a case of the same shapes, it takes
 * that one's place there: a graph of `like` then reads this one. */
void prefill_case_to_device(struct prefill_case *c, const struct prefill_case *like);

/* What was copied there, back. */
void prefill_case_from_device(struct prefill_case *c);

/* prefill_case_call, or the same on the device. */
fmla_status prefill_case_run(const struct prefill_case *c, fmla_sparse_prefill_args *args, int fill);

/* Which kernel the library says would run. */
fmla_status prefill_case_kernel(const struct prefill_case *c, const char **name);

/* How many entries of a token's lists count. */
int64_t prefill_case_count(const struct prefill_case *c, int64_t token);

/* An entry of a token's list. */
int32_t *prefill_case_entry(const struct prefill_case *c, int64_t token, int64_t key_head, int64_t i);

/* The first counted entry that names a key; -1: the token sees nothing. */
int64_t prefill_case_first_key(const struct prefill_case *c, int64_t token, int64_t key_head);

/* Where the results of a row are. */
uint16_t *prefill_case_out(const struct prefill_case *c, int64_t token, int64_t head);
float *prefill_case_lse(const struct prefill_case *c, int64_t token, int64_t head);
float *prefill_case_max(const struct prefill_case *c, int64_t token, int64_t head);

/* Rows of a token: heads head, head + step, …, all of one key head. */
struct prefill_rows {
    int64_t token, key_head, head, step, heads;
};

/* These rows alone by the oracle: its keys and its list are views of the case's. out has S_D_V elements for each. */
fmla_status prefill_case_rows(const struct prefill_case *c, const struct prefill_rows *rows, uint16_t *out,
                              float *max_logits, float *lse);

/* How far from the oracle's lse and max_logits of a row may be for the rounding of its products. */
double prefill_compare_bound(const struct prefill_case *c, int64_t token, int64_t head);

/* What is in the results against the oracle: all rows of a small case, chosen ones of a large one. */
void prefill_compare(struct prefill_case *c, const struct run *run, struct tally *tally);

/* Nothing outside the elements of the results was written. */
void prefill_compare_intact(const struct prefill_case *c, const struct run *run, struct tally *tally);

/* FNV-1a over everything that the call only reads, canaries included. */
uint64_t prefill_hash_inputs(const struct prefill_case *c);

/* A copy of the results' memory, to be freed, and whether they are the same now. */
unsigned char *prefill_results_copy(const struct prefill_case *c);
bool prefill_results_same(const struct prefill_case *c, const unsigned char *copy);
void prefill_results_reset(struct prefill_case *c);

#endif
