/* SPDX-License-Identifier: MIT
 *
 * Checks of public arguments by the descriptors of operations.def. Every function returns FMLA_OK or a failure whose message
 * is "operation: argument: what came, what is allowed".
 */
#ifndef FMLA_CHECK_H
#define FMLA_CHECK_H

#include "error.h"
#include "problem.h"

#include <stdbool.h>

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const fmla_status try_status = (call);                                                               \
        if (try_status) return try_status;                                                                   \
    } while (0)

/* Copies a caller's struct into `args`, and checks it. */
fmla_status check_call(enum operation operation, const void *caller, void *args, bool shape_only,
                       struct checked_call *call);

/* The bytes from one page of a cache, and from one token, to the next; 0 where there is but one. */
void cache_steps(const struct cache_format *format, const struct checked_tensor *cache, int64_t *page_bytes,
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
