/* SPDX-License-Identifier: MIT */
#include "op_call.h"

#include <string.h>

#define OPERATION(op, OP)                                                                                    \
    static fmla_status run_##op(const union call_args *args)                                                 \
    {                                                                                                        \
        return fmla_##op(&args->op);                                                                         \
    }
#include "operations.def"

#define WITH_WORKSPACE(op)                                                                                   \
    static fmla_status workspace_##op(const union call_args *args, size_t *bytes, size_t *alignment)         \
    {                                                                                                        \
        return fmla_##op##_workspace_size(&args->op, bytes, alignment);                                      \
    }                                                                                                        \
    static fmla_status kernel_##op(const union call_args *args, const char **name)                           \
    {                                                                                                        \
        return fmla_##op##_kernel(&args->op, name);                                                          \
    }
WITH_WORKSPACE(dense_decode)
WITH_WORKSPACE(sparse_decode)
WITH_WORKSPACE(sparse_prefill)
WITH_WORKSPACE(mha_forward)
WITH_WORKSPACE(mha_backward)

const struct op_functions op_functions[OPERATIONS] = {
#define OPERATION(op, OP) [OP_##OP].run = run_##op,
#include "operations.def"
    [OP_DENSE_DECODE].workspace = workspace_dense_decode,
    [OP_DENSE_DECODE].kernel = kernel_dense_decode,
    [OP_SPARSE_DECODE].workspace = workspace_sparse_decode,
    [OP_SPARSE_DECODE].kernel = kernel_sparse_decode,
    [OP_SPARSE_PREFILL].workspace = workspace_sparse_prefill,
    [OP_SPARSE_PREFILL].kernel = kernel_sparse_prefill,
    [OP_MHA_FORWARD].workspace = workspace_mha_forward,
    [OP_MHA_FORWARD].kernel = kernel_mha_forward,
    [OP_MHA_BACKWARD].workspace = workspace_mha_backward,
    [OP_MHA_BACKWARD].kernel = kernel_mha_backward,
};

void *op_option(enum operation op, const union call_args *args, const char *name)
{
    for (const struct member *member = descriptors[op].members; member->name; member++)
        if (member->kind != MEMBER_TENSOR && !strcmp(member->name, name))
            return (char *)args + member->offset;
    return NULL;
}
