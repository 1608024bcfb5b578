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

/* Returns true only if no two elements share memory: with dimensions sorted by stride, each must stride over
 * all before it. The condition is sufficient, not necessary. */
bool elements_are_distinct(const struct checked_tensor *tensor, int ndim);

/* Checks that an integer option is in [low, high]. */
fmla_status check_range(const char *operation, const char *name, int64_t value, int64_t low, int64_t high);

/* Copies a caller's struct of any published size into `copy` (size bytes, the newest version). `sizes` are
 * the published sizes, ascending, zero-terminated. */
fmla_status check_struct(const char *operation, const char *name, const void *args, void *copy, size_t size,
                         const size_t *sizes);

/* ---- Rules that a descriptor cannot express (check_rules.c) ------------------------------------ */

/* Checks a device argument and turns pinned host memory into the CPU. */
fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device);

/* Checks that the output pointer is not NULL. */
fmla_status check_answer(const char *operation, const char *name, const void *answer);

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv);

/* Checks the options of `out` and `lse`, and fills `rules`. */
fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules);

/* Checks that an output shares no memory with another tensor; either may be absent. `except` ends the message:
 * what else is allowed, or "". */
fmla_status check_apart(const char *operation, const struct checked_tensor *output,
                        const struct checked_tensor *other, const char *except);

/* Checks that starts of requests are given exactly if the call has all tokens in one dimension. */
fmla_status check_starts(const struct checked_call *call, const char *name,
                         const struct checked_tensor *starts);

/* Checks that lengths in use, which may be absent, are as many as there are requests with starts. */
fmla_status check_used(const struct checked_call *call, const struct checked_tensor *used);

/* Sets *scale to the caller's softmax scale, or to the default if `given` is 0. */
fmla_status check_scale(const char *operation, float given, int64_t d_qk, float *scale);

/* Checks that the caller's memory has at least `needed` bytes and the alignment. */
fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment);

/* Checks that `plan` is a complete plan in host memory, for `batch` requests or, if batch < 0, any number. */
fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch);

/* Checks a plan in two tables for b requests: both or neither are given, and not together with `plan`. */
fmla_status check_tables(const struct checked_call *call, const struct checked_tensor *rows,
                         const struct checked_tensor *splits, const void *plan, int32_t num_partitions,
                         int64_t b);

#endif
