/* SPDX-License-Identifier: MIT
 *
 * The public functions of operations with a workspace: their common part.
 */
#ifndef FMLA_API_H
#define FMLA_API_H

#include "check.h"
#include "dispatch.h"

/* A checked call: its problem, the kernel, and the workspace that the caller gave. */
struct taken {
    const char *operation;
    union problem problem;
    void **workspace_of_problem; /* receives the workspace */
    const struct kernel *kernel;
    void *workspace;
    size_t workspace_size;
};

/* Returns the workspace that the call needs. */
fmla_status taken_size(const struct taken *taken, size_t *bytes, size_t *alignment);

/* Returns the name of the kernel; refuses whatever taken_size refuses. */
fmla_status taken_kernel(const struct taken *taken, const char **name);

fmla_status taken_run(const struct taken *taken);

/* Defines the public functions of an operation. The file has a struct call with a member `taken`;
 * prepare(operation, args, shape_only, call), which checks the arguments and fills it; and bound(call), which
 * turns its problem into the largest of any call up to these sizes. */
#define PUBLIC_FUNCTIONS(op, OP)                                                                             \
    fmla_status fmla_##op##_workspace_size(const fmla_##op##_args *args, size_t *bytes, size_t *alignment)   \
    {                                                                                                        \
        struct call c;                                                                                       \
        TRY(prepare(OP, args, true, &c));                                                                    \
        return taken_size(&c.taken, bytes, alignment);                                                       \
    }                                                                                                        \
    fmla_status fmla_##op##_workspace_bound(const fmla_##op##_args *args, size_t *bytes, size_t *alignment)  \
    {                                                                                                        \
        struct call c;                                                                                       \
        TRY(prepare(OP, args, true, &c));                                                                    \
        bound(&c);                                                                                           \
        return taken_size(&c.taken, bytes, alignment);                                                       \
    }                                                                                                        \
    fmla_status fmla_##op##_kernel(const fmla_##op##_args *args, const char **name)                          \
    {                                                                                                        \
        struct call c;                                                                                       \
        TRY(prepare(OP, args, true, &c));                                                                    \
        return taken_kernel(&c.taken, name);                                                                 \
    }                                                                                                        \
    fmla_status fmla_##op(const fmla_##op##_args *args)                                                      \
    {                                                                                                        \
        struct call c;                                                                                       \
        TRY(prepare(OP, args, false, &c));                                                                   \
        return taken_run(&c.taken);                                                                          \
    }

#endif
