/* SPDX-License-Identifier: MIT
 *
 * Shared by the parts of checkattn: the kernel under test, planted faults, and the tally.
 */
#ifndef CHECKATTN_H
#define CHECKATTN_H

#include "compare.h"
#include "memory.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define COUNT_OF(array) ((int64_t)(sizeof(array) / sizeof *(array)))

/* A defect that a kernel could have, planted into its result or its input: checkattn must detect it. */
#define FAULTS_OF(X)                                                                                         \
    X(NONE, "none")                                                                                          \
    X(DROPPED_KEY, "dropped-key")     /* a row misses its last key */                                        \
    X(MASK, "mask")                   /* a causal row sees one key too many */                               \
    X(SWAPPED_PAGE, "swapped-page")   /* two pages of a request are swapped */                               \
    X(OUT_OF_BOUNDS, "out-of-bounds") /* one element written past the end of out */                          \
    X(GAP, "gap")                     /* one element written into a gap between rows */                      \
    X(UNWRITTEN, "unwritten")         /* one row is never written */                                         \
    X(NAN, "nan")                     /* one element is NaN */                                               \
    X(LSE, "lse")                     /* one lse uses the other convention for rows without a key */         \
    X(UNSTABLE, "unstable")           /* the second run differs in one bit */                                \
    X(LSE_CANCELLED,                                                                                         \
      "lse-cancelled") /* one lse far smaller than its summands is off by 2^-18 of their magnitude */        \
    X(MERGE_BASE, "merge-base")     /* parts joined in the wrong base */                                     \
    X(INVALID_KEY, "invalid-key")   /* sparse: an invalid index reads key 0 */                               \
    X(LATE_KEY, "late-key")         /* sparse: an index past the length counts */                            \
    X(WRONG_SCALE, "wrong-scale")   /* FP8: a group of values has the scale of another */                    \
    X(NO_EXTRA, "no-extra")         /* sparse: the extra cache is left out */                                \
    X(CACHE_SLOT, "cache-slot")     /* two tokens in each other's slots */                                   \
    X(CACHE_VALUE, "cache-value")   /* one value of the cache is rounded the other way */                    \
    X(CACHE_SCALE, "cache-scale")   /* one scale is not the right power of two */                            \
    X(CACHE_GAP, "cache-gap")       /* one byte written between two pages */                                 \
    X(GATHER_VALUE, "gather-value") /* one value of a vector is off by its last bit */                       \
    X(GATHER_ZERO, "gather-zero")   /* the row of a skipped slot is not all zeros */                         \
    X(OUTSIDE, "outside")           /* gradients: one value of a token outside all requests is not 0 */      \
    X(SINK, "sink")                 /* gradients: a row is missing from that of a sink */                    \
    X(LSE_BASE, "lse-base")         /* sparse prefill: one lse in the other base */                          \
    X(MAX_SCALE, "max-scale")       /* sparse prefill: one max_logits without softmax_scale */               \
    X(MAX_NAN, "max-nan")           /* sparse prefill: one max_logits of a row of NaN is finite */           \
    X(COUNT, "count")               /* timing: the keys of a row are counted twice over */                   \
    X(BATCH, "batch")               /* one bit of a row of each request depends on the rest of the batch */
#define FAULT_ENUMERATOR(name, text) FAULT_##name,
enum defect { FAULTS_OF(FAULT_ENUMERATOR) FAULTS };

extern const char *const fault_names[FAULTS];

struct run {
    const char *kernel; /* under test */
    int32_t types;      /* supported, as fmla_capabilities reports */
    int32_t products;   /* of dense decode, likewise */
    fmla_device device; /* device it runs on */
    uint64_t seed;
    enum defect fault;
    bool verbose;
    bool own_threads;   /* run every loop of the library on our own threads */
    bool keep_threads;  /* the caller has set the threads for all its calls */
    bool by_default;    /* no kernel is forced; `kernel` is a name for messages */
    int64_t most_cases; /* per kernel; 0 = all that the grid needs. Other values are reported as partial */
    int64_t only_case;  /* number in the grid; 0 = all */
    uint64_t part,
        parts; /* on a CPU: every parts-th case from the part-th on, in and beside the grid; parts 0 = all */
};

struct tally {
    int64_t cases, failed;
    int64_t rows;                  /* compared with the oracle */
    int64_t refused;               /* cases that the kernel rightly leaves to another */
    int64_t pairs, covered;        /* of axis values */
    double cosine_out, cosine_lse; /* the largest cosine difference of a case */
    int64_t number;                /* of the running grid case; 0 = outside the grid */
    bool planted;                  /* a fault was planted */
    double seconds;
};

/* Returns true if the grid case of this number was requested. Notes the number. */
static inline bool wants_case(const struct run *run, struct tally *tally, uint64_t number)
{
    tally->number = (int64_t)number;
    return !run->only_case || run->only_case == tally->number;
}

/* Parse a number in a range; and "cpu" or "cuda:N". */
bool read_number(const char *text, uint64_t least, uint64_t most, uint64_t *number);
bool read_device(const char *text, fmla_device *device);

/* Prints the first errors of a case and counts it. */
void report(struct tally *tally, const struct run *run, const char *where, const char *what);

static inline bool on_gpu(const struct run *run)
{
    return run->device.device_type == FMLA_DEVICE_CUDA;
}

/* Returns true if calls run on copies of a case (device.h). */
static inline bool is_apart(fmla_device device)
{
    return device.device_type != FMLA_DEVICE_CPU;
}

/* Compare the device's planner with the host's, which tests/unit/test_plan.c checks. */
void check_device_plan(const struct run *run, struct tally *tally);
void check_sparse_plan(const struct run *run, struct tally *tally);

/* Sets the threads that calls use from now on. */
enum { THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN };
void use_threads(const struct run *run, int64_t threads);

/* In a row with a score of +inf the lse is NaN. On a GPU it may be +inf, and max_logits NaN
 * (docs/semantics.md); these count as the oracle's value. */
static inline float as_infinite_row(const struct run *run, bool infinite, float mine, float theirs)
{
    const bool other = isnan(theirs) ? mine == INFINITY : theirs == INFINITY && isnan(mine);
    return infinite && on_gpu(run) && other ? theirs : mine;
}

/* Runs a task for each of `count` rows of a comparison on all processors, unless this already is one of
 * several threads. */
void for_rows(const struct run *run, int64_t count, fmla_task task, void *task_data);

/* A parallel loop on our own threads, for fmla_set_parallel_for. */
void pthread_for(void *pool, int64_t count, fmla_task task, void *task_data);
enum { PTHREAD_WORKERS = 3 };

#endif
