/* SPDX-License-Identifier: MIT
 *
 * What the files of public functions share: rules that a descriptor cannot say.
 */
#ifndef FMLA_API_H
#define FMLA_API_H

#include "check.h"
#include "dispatch.h"
#include "plan.h"

/* A device that is an argument by itself. Pinned host memory becomes the CPU. */
fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device);

/* Is the place for an answer there? */
fmla_status check_answer(const char *operation, const char *name, const void *answer);

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv);

/* What becomes of out and lse. */
fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules);

/* Memory of the caller: `needed` bytes, aligned. */
fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment);

/* Is this a plan in host memory, whole? `batch` < 0: of any batch. */
fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch);

/* A plan as two tables, in place of `plan`: both or neither, for b requests. */
fmla_status check_tables(const struct checked_call *call, const struct checked_tensor *rows,
                         const struct checked_tensor *splits, const void *plan, int32_t num_partitions,
                         int64_t b);

#endif
