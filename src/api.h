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

/* Starts of requests are given exactly where the call has their tokens in one dimension. */
fmla_status check_starts(const struct checked_call *call, const char *name,
                         const struct checked_tensor *starts);

/* The scale of scores: the caller's, or the default for 0. */
fmla_status check_scale(const char *operation, float given, int64_t d_qk, float *scale);

/* Memory of the caller: `needed` bytes, aligned. */
fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment);

/* Is this a plan in host memory, whole? `batch` < 0: of any batch. */
fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch);

/* A plan as two tables, in place of `plan`: both or neither, for b requests. */
fmla_status check_tables(const struct checked_call *call, const struct checked_tensor *rows,
                         const struct checked_tensor *splits, const void *plan, int32_t num_partitions,
                         int64_t b);

/* ---- The public functions of an operation with a workspace ---------------------------------- */

/* Who takes a call that passed, and the workspace that came with it. */
struct taken {
    const struct kernel *kernel;
    void *workspace;
    size_t workspace_size;
};

/* How much workspace the call needs. */
fmla_status taken_size(const struct taken *taken, union problem problem, size_t *bytes, size_t *alignment);

/* Runs it; *workspace is the problem's. */
fmla_status taken_run(const struct taken *taken, union problem problem, const char *operation,
                      void **workspace);

/* Of a file that has workspace_size, workspace_bound, kernel_name and run, for any of its operations. */
#define PUBLIC_FUNCTIONS(op, OP)                                                                             \
    fmla_status fmla_##op##_workspace_size(const fmla_##op##_args *args, size_t *bytes, size_t *alignment)   \
    {                                                                                                        \
        return workspace_size(OP, args, bytes, alignment);                                                   \
    }                                                                                                        \
    fmla_status fmla_##op##_workspace_bound(const fmla_##op##_args *args, size_t *bytes, size_t *alignment)  \
    {                                                                                                        \
        return workspace_bound(OP, args, bytes, alignment);                                                  \
    }                                                                                                        \
    fmla_status fmla_##op##_kernel(const fmla_##op##_args *args, const char **name)                          \
    {                                                                                                        \
        return kernel_name(OP, args, name);                                                                  \
    }                                                                                                        \
    fmla_status fmla_##op(const fmla_##op##_args *args)                                                      \
    {                                                                                                        \
        return run(OP, args);                                                                                \
    }

#endif
