/* SPDX-License-Identifier: MIT
 *
 * Checks of public arguments by the descriptors of operations.def. Every function returns FMLA_OK or a failure whose message
 * is "operation: argument: what came, what is allowed".
 */
#ifndef FMLA_CHECK_H
#define FMLA_CHECK_H

#include "error.h"
#include "operations.h"

#include <stdbool.h>

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const fmla_status try_status = (call);                                                               \
        if (try_status) return try_status;                                                                   \
    } while (0)

/* A tensor that passed: byte offset applied, strides given. */
struct checked_tensor {
    const char *name; /* NULL: there is none */
    void *data;
    int64_t shape[MAX_DIMENSIONS];
    int64_t stride[MAX_DIMENSIONS];
    enum element element; /* floating types */
    fmla_device device;   /* pinned host memory counts as cpu */
};

/* A call that passed all that its descriptor says. */
struct checked_call {
    const char *operation;
    const void *args; /* the copy of the caller's struct */
    bool shape_only;  /* a size is asked: data is not looked at, and may be NULL */
    bool flat;        /* the keys are not in pages */
    int32_t kv_format;
    const struct cache_format *format;          /* of the caches; NULL where the operation has none */
    const struct checked_tensor *first;         /* of those that are there: its device is the call's */
    struct checked_tensor tensors[MAX_TENSORS]; /* by TENSOR_<op>_<member> */
    int64_t size[DIMENSIONS];                   /* 0 where nothing binds the name */
    const struct checked_tensor *bound_by[DIMENSIONS];
    int bound_at[DIMENSIONS]; /* its dimension */
};

/* Copies a caller's struct into `args`, and checks it. */
fmla_status check_call(enum operation operation, const void *caller, void *args, bool shape_only,
                       struct checked_call *call);

/* The bytes from one page of a cache, and from one token, to the next; 0 where there is but one. */
void cache_steps(const struct checked_call *call, const struct checked_tensor *cache, int64_t *page_bytes,
                 int64_t *slot_bytes);

/* Dimension `dimension` of a tensor, called `words`, must have `size`, as in `other`. */
fmla_status check_size(const char *operation, const struct checked_tensor *tensor, int dimension,
                       const char *words, int64_t size, const char *other);

/* An integer option in [low, high]. */
fmla_status check_range(const char *operation, const char *name, int64_t value, int64_t low, int64_t high);

/* Copies a caller's struct of any published size into `copy` (size bytes, the newest version). sizes: the
 * published ones, ascending, zero-terminated. */
fmla_status check_struct(const char *operation, const char *name, const void *args, void *copy, size_t size,
                         const size_t *sizes);

#endif
