/* SPDX-License-Identifier: MIT
 *
 * What the files of public functions share: checks that are about more than one tensor.
 */
#ifndef FMLA_API_H
#define FMLA_API_H

#include "check.h"
#include "dispatch.h"
#include "plan.h"

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const fmla_status try_status = (call);                                                               \
        if (try_status) return try_status;                                                                   \
    } while (0)

enum { MAX_PARTITIONS = 65536 };

/* Batches are counted in 32 bits in plans; leave room for one split more a partition. */
enum { MAX_BATCH = INT32_MAX - MAX_PARTITIONS - 1 };

/* A device that is an argument by itself. Pinned host memory becomes the CPU. */
fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device);

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv);

/* What becomes of out and lse. */
fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules);

/* Memory of the caller: `needed` bytes, aligned. */
fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment);

/* Is this a plan in host memory, whole? `batch` < 0: of any batch. */
fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch);

/* A plan as two tables, in place of `plan`: both or neither (tables->name is then NULL). `like` has b requests.
 * `extra`: CHECK_… */
fmla_status check_tables(const char *operation, const fmla_tensor *partitions, const fmla_tensor *num_splits,
                         const void *plan, int32_t num_partitions, const struct checked_tensor *like,
                         unsigned extra, struct checked_tensor *rows, struct checked_tensor *splits);

/* Tables in host memory: any plan ends with the last request, so one of another batch shows. */
fmla_status check_last_partition(const char *op, const struct plan_partition *partitions,
                                 int32_t num_partitions, int64_t b);

#endif
