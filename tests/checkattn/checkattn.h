/* SPDX-License-Identifier: MIT
 *
 * What the parts of checkattn share: which kernel is under test, planted faults, and the tally.
 */
#ifndef CHECKATTN_H
#define CHECKATTN_H

#include "compare.h"
#include "memory.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* A defect that a kernel could have, planted into its result or its input: the harness must go red. */
#define FAULTS_OF(X)                                                                                         \
    X(NONE, "none")                                                                                          \
    X(DROPPED_KEY, "dropped-key")     /* a row misses its last key */                                        \
    X(MASK, "mask")                   /* a causal row sees one key too many */                               \
    X(SWAPPED_PAGE, "swapped-page")   /* two pages of a request change places */                             \
    X(OUT_OF_BOUNDS, "out-of-bounds") /* one element written past the end of out */                          \
    X(GAP, "gap")                     /* one element written into a gap between rows */                      \
    X(UNWRITTEN, "unwritten")         /* one row is never written */                                         \
    X(NAN, "nan")                     /* one element is NaN */                                               \
    X(LSE, "lse")                     /* one lse is of the other convention for rows without a key */        \
    X(UNSTABLE, "unstable")           /* the second run differs in one bit */                                \
    X(LSE_CANCELLED,                                                                                         \
      "lse-cancelled") /* one lse that is small beside what it is summed of is off by 2^-18 of that */       \
    X(MERGE_BASE, "merge-base")     /* parts joined in the wrong base */                                     \
    X(INVALID_KEY, "invalid-key")   /* sparse: an index of no key is taken for key 0 */                      \
    X(LATE_KEY, "late-key")         /* sparse: an index past the length counts */                            \
    X(WRONG_SCALE, "wrong-scale")   /* FP8: a group of values has the scale of another */                    \
    X(NO_EXTRA, "no-extra")         /* sparse: the extra cache is left out */                                \
    X(CACHE_SLOT, "cache-slot")     /* two tokens in each other's slots */                                   \
    X(CACHE_VALUE, "cache-value")   /* one value of the cache is rounded the other way */                    \
    X(CACHE_SCALE, "cache-scale")   /* one scale is not the right power of two */                            \
    X(CACHE_GAP, "cache-gap")       /* one byte written between two pages */                                 \
    X(GATHER_VALUE, "gather-value") /* one value of a vector is off by its last bit */                       \
    X(GATHER_ZERO, "gather-zero")   /* the row of no slot is not all zeros */                                \
    X(OUTSIDE, "outside")           /* gradients: one value of a token of no request is not 0 */             \
    X(LSE_BASE, "lse-base")         /* sparse prefill: one lse in the other base */                          \
    X(MAX_SCALE, "max-scale")       /* sparse prefill: one max_logits without softmax_scale */               \
    X(MAX_NAN, "max-nan")           /* sparse prefill: one max_logits of a row of NaN is a finite number */  \
    X(BATCH, "batch")               /* one bit of a row of each request hangs on what else is in the batch */
#define FAULT_ENUMERATOR(name, text) FAULT_##name,
enum defect { FAULTS_OF(FAULT_ENUMERATOR) FAULTS };

extern const char *const fault_names[FAULTS];

struct run {
    const char *kernel; /* under test */
    int32_t types;      /* that it takes, as fmla_capabilities says */
    int32_t products;   /* of dense decode, likewise */
    fmla_device device; /* where it runs */
    uint64_t seed;
    enum defect fault;
    bool verbose;
    bool own_threads;   /* every loop of the library on threads of our own */
    bool keep_threads;  /* of calls: who runs cases from several threads has set them for all */
    bool by_default;    /* no kernel is forced; `kernel` is a name for messages */
    int64_t most_cases; /* of a kernel; 0 = all that the grid needs. Anything else is told to be partial */
    int64_t only_case;  /* of the grid, by its number; 0 = all */
    uint64_t part,
        parts; /* on a CPU: every parts-th case, beside the grid and of it, from the part-th on; parts 0 = all */
};

struct tally {
    int64_t cases, failed;
    int64_t rows;                  /* compared with the oracle */
    int64_t refused;               /* cases that the kernel leaves to another one, as it should */
    int64_t pairs, covered;        /* of axis values */
    double cosine_out, cosine_lse; /* the largest cosine difference of a case */
    int64_t number;                /* of the grid's case that runs; 0 = one that is not of the grid */
    bool planted;                  /* a fault found its place */
};

/* Is the grid's case of this number asked for? Notes the number. */
static inline bool wants_case(const struct run *run, struct tally *tally, uint64_t number)
{
    tally->number = (int64_t)number;
    return !run->only_case || run->only_case == tally->number;
}

/* Words of a command line: a number in a range; "cpu" or "cuda:N". */
bool read_number(const char *text, uint64_t least, uint64_t most, uint64_t *number);
bool read_device(const char *text, fmla_device *device);

/* Prints the first lines of what went wrong in a case and counts it. */
void report(struct tally *tally, const struct run *run, const char *where, const char *what);

static inline bool on_gpu(const struct run *run)
{
    return run->device.device_type == FMLA_DEVICE_CUDA;
}

/* Are calls made on copies of a case (device.h)? */
static inline bool is_apart(fmla_device device)
{
    return device.device_type != FMLA_DEVICE_CPU;
}

/* The device's planner against the host's, which tests/unit/test_plan.c checks. */
void check_device_plan(const struct run *run, struct tally *tally);
void check_sparse_plan(const struct run *run, struct tally *tally);

/* The threads that calls use from now on. */
enum { THREADS_BUILT_IN, THREADS_ONE, THREADS_OWN };
void use_threads(const struct run *run, int64_t threads);

/* A row with a score of +inf: its lse is NaN. On a GPU it may be +inf, and max_logits NaN (docs/semantics.md), which count
 * here as what the oracle has. */
static inline float as_infinite_row(const struct run *run, bool infinite, float mine, float theirs)
{
    const bool other = isnan(theirs) ? mine == INFINITY : theirs == INFINITY && isnan(mine);
    return infinite && on_gpu(run) && other ? theirs : mine;
}

/* Does a task for each of `count` rows of a comparison, on all processors, unless this is one of several threads already. */
void for_rows(const struct run *run, int64_t count, fmla_task task, void *task_data);

/* A loop over threads of our own, for fmla_set_parallel_for. */
void pthread_for(void *pool, int64_t count, fmla_task task, void *task_data);
enum { PTHREAD_WORKERS = 3 };

#endif
