/* SPDX-License-Identifier: MIT */
#include "op_call.h"

#include <string.h>

#define OPERATION(op, OP)                                                                                    \
    static fmla_status run_##op(const union call_args *args)                                                 \
    {                                                                                                        \
        return fmla_##op(&args->op);                                                                         \
    }
#include "operations.def"

#define WITH_WORKSPACE(X)                                                                                    \
    X(dense_decode, DENSE_DECODE)                                                                            \
    X(sparse_decode, SPARSE_DECODE)                                                                          \
    X(sparse_prefill, SPARSE_PREFILL)                                                                        \
    X(mha_forward, MHA_FORWARD)                                                                              \
    X(mha_backward, MHA_BACKWARD)
#define QUERIES(op, OP)                                                                                      \
    static fmla_status workspace_##op(const union call_args *args, size_t *bytes, size_t *alignment)         \
    {                                                                                                        \
        return fmla_##op##_workspace_size(&args->op, bytes, alignment);                                      \
    }                                                                                                        \
    static fmla_status kernel_##op(const union call_args *args, const char **name)                           \
    {                                                                                                        \
        return fmla_##op##_kernel(&args->op, name);                                                          \
    }
WITH_WORKSPACE(QUERIES)

#define QUERIES_OF(op, OP) [OP_##OP].workspace = workspace_##op, [OP_##OP].kernel = kernel_##op,
const struct op_functions op_functions[OPERATIONS] = {
#define OPERATION(op, OP) [OP_##OP].run = run_##op,
#include "operations.def"
    WITH_WORKSPACE(QUERIES_OF)};

void *op_option(enum operation op, const union call_args *args, const char *name)
{
    for (const struct member *member = descriptors[op].members; member->name; member++)
        if (member->kind != MEMBER_TENSOR && !strcmp(member->name, name))
            return (char *)args + member->offset;
    return NULL;
}
