/* SPDX-License-Identifier: MIT
 *
 * Shared by the files of public functions: checks that a descriptor cannot express, and the common part of
 * operations with a workspace.
 */
#ifndef FMLA_API_H
#define FMLA_API_H

#include "check.h"
#include "dispatch.h"
#include "plan.h"

/* Checks a device argument and turns pinned host memory into the CPU. */
fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device);

/* Checks that the output pointer is not NULL. */
fmla_status check_answer(const char *operation, const char *name, const void *answer);

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv);

/* Checks the options of `out` and `lse`, and fills `rules`. */
fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules);

/* Checks that starts of requests are given exactly if the call has all tokens in one dimension. */
fmla_status check_starts(const struct checked_call *call, const char *name,
                         const struct checked_tensor *starts);

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

/* ---- The public functions of an operation with a workspace ---------------------------------- */

/* The kernel of a checked call, and the workspace that the caller gave. */
struct taken {
    const struct kernel *kernel;
    void *workspace;
    size_t workspace_size;
};

/* Returns the workspace that the call needs. */
fmla_status taken_size(const struct taken *taken, union problem problem, size_t *bytes, size_t *alignment);

/* Returns the name of the kernel; refuses whatever taken_size refuses. */
fmla_status taken_kernel(const struct taken *taken, union problem problem, const char *operation,
                         const char **name);

/* Runs the call; *workspace is the member of the problem that receives the workspace. */
fmla_status taken_run(const struct taken *taken, union problem problem, const char *operation,
                      void **workspace);

/* Defines the public functions of an operation. The file has workspace_size, workspace_bound, kernel_name and
 * run, which take the operation. */
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
