/* SPDX-License-Identifier: MIT
 *
 * A case of sparse decode: tensors in guarded memory, every slot of a cache that no counted index names poisoned, and ways
 * to run it, whole, one request of it, or rows of it.
 */
#ifndef CHECKATTN_SPARSE_CASE_H
#define CHECKATTN_SPARSE_CASE_H

#include "checkattn.h"
#include "device.h"
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

struct sparse_case {
    int64_t v[S_AXES];
    struct random_state random;
    char name[360];
    int64_t b, s_q, h_q, d_qk;
    enum kv_format format;
    struct kv_layout layout;
    struct sparse_pool pool[S_CACHES];
    struct guarded q, sink, out, lse;
    void *plan;
    struct guarded partitions, num_splits; /* its tables by themselves */
    fmla_sparse_decode_args args;
    fmla_device device;          /* where it runs */
    struct device_blocks blocks; /* on a GPU: the copies there */
};

/* One case through all that is checked of it, by the file that has the grid. */
void sparse_case_check(const struct run *run, const int64_t v[S_AXES], uint64_t seed, struct tally *tally);

/* Draws the values that caches and queries are copied from; before the first case. */
void sparse_case_draw(uint64_t seed);

void sparse_case_make(struct sparse_case *c, const struct run *run, const int64_t v[S_AXES], uint64_t seed);
void sparse_case_free(struct sparse_case *c);

/* From now on no list has more than one entry that counts; before the case is copied to a device. */
void sparse_case_leave_one(struct sparse_case *c);

/* Makes the plan that the case asks for, and passes it; *same says whether it has the same bits as tables, and, on a GPU, as
 * the one that the device makes. */
fmla_status sparse_case_plan(struct sparse_case *c, bool *same);

/* From now on a plan that was made is passed as its tables. */
void sparse_case_use_tables(struct sparse_case *c);

/* Runs it, with a workspace of exactly the size that was answered, full of `fill`. */
fmla_status sparse_case_call(fmla_sparse_decode_args *args, int fill);

/* Copies the case to the device that it is for; nothing to do on the CPU. With `like`, a case of the same shapes without a
 * plan of its own, it takes that one's place there: a graph of `like` then reads this one. */
void sparse_case_to_device(struct sparse_case *c, const struct sparse_case *like);

/* What was copied there, back. */
void sparse_case_from_device(struct sparse_case *c);

/* sparse_case_call, or the same on the device; what `args` name must be in the case's blocks there. */
fmla_status sparse_case_run(const struct sparse_case *c, fmla_sparse_decode_args *args, int fill);

/* Which kernel the library says would run. */
fmla_status sparse_case_kernel(const struct sparse_case *c, const char **name);

/* Is the case one that the kernel under test says it takes? Of those that it does not: it must say so, by its name. */
bool sparse_case_taken(const struct sparse_case *c, const struct run *run);
void sparse_case_refused(struct sparse_case *c, const struct run *run, struct tally *tally);

/* An entry of a token's list. */
int32_t *sparse_case_entry(const struct sparse_pool *pool, int64_t request, int64_t token, int64_t i);

/* What the token sees nothing of: no counted index names a key. */
bool sparse_case_sees_none(const struct sparse_case *c, int64_t request, int64_t token);

/* Part of a case as a problem of its own. out and lse are the caller's to set. */
struct sparse_view {
    fmla_sparse_decode_args args;
    fmla_tensor q, sink, kv[S_CACHES], indices[S_CACHES], length[S_CACHES];
    int64_t q_shape[4], q_strides[4], sink_shape[1], indices_shape[S_CACHES][3], length_shape[1];
    int32_t count[S_CACHES];
    float sinks[128];
};

/* One request, its lists cut where they end to count, in room for `more` entries more of anything; free `*memory`, of so many
 * bytes. */
size_t sparse_case_request(const struct sparse_case *c, int64_t request, int64_t more,
                           struct sparse_view *view, int32_t **memory);

/* `heads` heads of a token by `kernel`: from `head` on, every `step`-th. out has S_D_V elements for each. */
fmla_status sparse_case_rows(const struct sparse_case *c, const char *kernel, int64_t request, int64_t token,
                             int64_t head, int64_t step, int64_t heads, uint16_t *out, float *lse);

/* ---- Comparing (sparse_compare.c) ------------------------------------------------------------ */

/* How far from the oracle's the lse of a row may be for the rounding of its products. */
double sparse_compare_bound(const struct sparse_case *c, int64_t request, int64_t token, int64_t head);

/* What is in out and lse against the oracle: all rows of a small case, chosen ones of a large one. */
void sparse_compare_oracle(struct sparse_case *c, const struct run *run, struct tally *tally);

/* Batch-invariant: a request alone, with room for more, has the bits that it has in the batch. */
void sparse_compare_alone(struct sparse_case *c, const struct run *run, struct tally *tally);

/* FNV-1a over everything that the call only reads, canaries included. */
uint64_t sparse_hash_inputs(const struct sparse_case *c);

#endif
