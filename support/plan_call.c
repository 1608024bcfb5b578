/* SPDX-License-Identifier: MIT */
#include "plan_call.h"

/* Members common to both plans' structs. */
#define SHARED(call)                                                                                         \
    .s_q = (call)->s_q, .h_q = (call)->h_q, .target = (call)->target, .num_workers = (call)->num_workers,    \
    .num_partitions = (call)->num_partitions, .plan = (call)->plan, .plan_size = (call)->plan_size,          \
    .stream = (call)->stream, .partitions = (call)->partitions, .num_splits = (call)->num_splits

static fmla_sparse_plan_args sparse_args(const struct plan_call *call)
{
    return (fmla_sparse_plan_args){.struct_size = sizeof(fmla_sparse_plan_args),
                                   .topk_length = call->topk_length,
                                   .extra_topk_length = call->extra_topk_length,
                                   .b = call->b,
                                   .topk = call->topk,
                                   .extra_topk = call->extra_topk,
                                   SHARED(call)};
}

static fmla_decode_plan_args dense_args(const struct plan_call *call)
{
    return (fmla_decode_plan_args){.struct_size = sizeof(fmla_decode_plan_args),
                                   .seqlens = call->seqlens,
                                   .h_kv = call->h_kv,
                                   .capacity = call->capacity,
                                   SHARED(call)};
}

const fmla_tensor **plan_call_length(struct plan_call *call, int k)
{
    return k ? &call->extra_topk_length : call->sparse ? &call->topk_length : &call->seqlens;
}

#define PLAN_CALL(name, function, parameters, arguments)                                                     \
    fmla_status plan_call_##name parameters                                                                  \
    {                                                                                                        \
        if (call->sparse) {                                                                                  \
            const fmla_sparse_plan_args args = sparse_args(call);                                            \
            return fmla_sparse_##function arguments;                                                         \
        }                                                                                                    \
        const fmla_decode_plan_args args = dense_args(call);                                                 \
        return fmla_decode_##function arguments;                                                             \
    }
PLAN_CALL(size, plan_size, (const struct plan_call *call, size_t *bytes), (&args, bytes))
PLAN_CALL(partitions, plan_partitions, (const struct plan_call *call, int32_t *count), (&args, count))
PLAN_CALL(run, plan, (const struct plan_call *call), (&args))
