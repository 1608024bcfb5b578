/* SPDX-License-Identifier: MIT
 *
 * A case of dense decode: drawn tensors in guarded memory with everything unused poisoned, and ways to run it, whole,
 * one request of it, or one row of it.
 */
#ifndef CHECKATTN_DECODE_CASE_H
#define CHECKATTN_DECODE_CASE_H

#include "checkattn.h"
#include "device.h"
#include "random.h"

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
enum { SINK_NONE, SINK_FINITE, SINK_INFINITE };
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

struct decode_case {
    int64_t v[AXES]; /* the values of the axes */
    struct random_state random;
    char name[256];
    int64_t b, s_q, h_q, h_kv, d_qk, s_k, page_size, max_pages, pages;
    int64_t *length; /* of each request, clamped */
    struct guarded q, kv, table, seqlens, sink, out, lse;
    fmla_tensor kv_view; /* of kv; requests of a contiguous cache may share memory */
    int64_t kv_strides[4];
    bool paged;
    void *far; /* LAYOUT_FAR: where the pages are */
    size_t far_bytes;
    void *plan;
    struct guarded partitions, num_splits; /* its tables by themselves */
    fmla_dense_decode_args args;           /* of tensors in host memory, on a GPU too */
    fmla_device device;                    /* where it runs */
    struct device_blocks blocks;           /* on a GPU: the copies there */
};

/* One case through all that is checked of it, by the file that has the grid. */
void decode_case_check(const struct run *run, const int64_t v[AXES], uint64_t seed, struct tally *tally);

/* Draws the values that caches and queries are copied from; before the first case. */
void decode_case_draw(uint64_t seed);

/* Does the kernel take such a case? Values that are not chosen yet are -1. All kernels take all cases, but Hopper's: it
 * wants a cache that TMA can bring in by blocks of 64 keys, and tiles of 64 rows that are boxes of the queries. Said here
 * once more, in the words of the case; the library must agree. */
bool decode_case_taken(const char *kernel, const int64_t v[AXES]);

/* Checks that the library refuses a case that the kernel does not take. */
void decode_case_refused(struct decode_case *c, const struct run *run, struct tally *tally);

void decode_case_make(struct decode_case *c, const struct run *run, const int64_t v[AXES], uint64_t seed);
void decode_case_free(struct decode_case *c);

/* Makes the plan that the case asks for, and passes it. On a GPU the device makes it too, and *same says whether all that
 * were made, in one piece and as tables, have the same bits. */
fmla_status decode_case_plan(struct decode_case *c, bool *same);

/* From now on a plan that was made is passed as its tables. */
void decode_case_use_tables(struct decode_case *c);

/* Copies the case to the device that it is for; nothing to do on the CPU. With `like`, a case of the same shapes and
 * no smaller cache, into the memory of that one. */
void decode_case_to_device(struct decode_case *c, const struct decode_case *like);

/* Runs it on the CPU, with a workspace of exactly the size that was answered, full of `fill`. */
fmla_status decode_case_call(fmla_dense_decode_args *args, int fill);

/* The same where the case runs; `args` may be of views of its tensors. */
fmla_status decode_case_run(const struct decode_case *c, fmla_dense_decode_args *args, int fill);

/* The kernel that would run it. */
fmla_status decode_case_kernel(const struct decode_case *c, const char **name);

/* The keys that a row sees. */
int64_t decode_case_seen(const struct decode_case *c, int64_t request, int64_t token);

/* One request of a case, as a batch of its own. out and lse are the caller's to set. */
struct request_view {
    fmla_dense_decode_args args;
    fmla_tensor q, kv, table, seqlens, sink;
    int64_t q_shape[4], kv_shape[4], table_shape[2], seqlens_shape[1], sink_shape[1];
};

void decode_case_request(const struct decode_case *c, int64_t request, struct request_view *view);

/* One row by `kernel`, as a problem of its own over the first `seen` keys of its request; out has D_V elements. */
fmla_status decode_case_row(const struct decode_case *c, const char *kernel, int64_t request, int64_t token,
                            int64_t head, int64_t seen, uint16_t *out, float *lse);

/* How far from the oracle's the lse of a row may be for the rounding of its products. */
double decode_case_bound(const struct decode_case *c, int64_t request, int64_t token, int64_t head);

/* ---- Comparing (decode_compare.c) ----------------------------------------------------------- */

/* What is in out and lse against the oracle: all rows of a small case, chosen ones of a large one. */
void decode_compare_oracle(struct decode_case *c, const struct run *run, struct tally *tally);

/* Batch-invariant: request r alone has the bits that it has in the batch. */
void decode_compare_alone(struct decode_case *c, int64_t r, const struct run *run, struct tally *tally);

/* Batch-invariant: a request has the bits that it has in the batch also alone, or behind another one, and with room for
 * more keys. The
 * others of the batch are left out by strides, so only lengths and table are copied. */
void decode_compare_elsewhere(struct decode_case *c, const struct run *run, struct tally *tally);

/* FNV-1a over everything that the call only reads, canaries included. */
uint64_t decode_hash_inputs(const struct decode_case *c);

#endif
