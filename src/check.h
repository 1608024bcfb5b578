/* SPDX-License-Identifier: MIT
 *
 * Checks of public arguments against the descriptors of operations.def. Every function returns FMLA_OK or a
 * failure whose message is "operation: argument: actual value, allowed values".
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

/* Copies a caller's struct into `args` and checks it; fills `call`. */
fmla_status check_call(enum operation operation, const void *caller, void *args, bool shape_only,
                       struct checked_call *call);

/* Returns the bytes from one page of a cache to the next, and from one token to the next; 0 if there is only
 * one. */
void cache_steps(const struct cache_format *format, const struct checked_tensor *cache, int64_t *page_bytes,
                 int64_t *slot_bytes);

/* Checks that dimension `dimension` of a tensor, called `words`, has `size`, as in `other`. */
fmla_status check_size(const char *operation, const struct checked_tensor *tensor, int dimension,
                       const char *words, int64_t size, const char *other);

/* Checks that an integer option is in [low, high]. */
fmla_status check_range(const char *operation, const char *name, int64_t value, int64_t low, int64_t high);

/* Copies a caller's struct of any published size into `copy` (size bytes, the newest version). `sizes` are
 * the published sizes, ascending, zero-terminated. */
fmla_status check_struct(const char *operation, const char *name, const void *args, void *copy, size_t size,
                         const size_t *sizes);

#endif
