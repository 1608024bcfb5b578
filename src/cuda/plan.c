/* SPDX-License-Identifier: MIT */
#include "cuda.h"
#include "kernels.h"

fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_params *params, void *stream)
{
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_plan, .blocks = 1, .threads = PLAN_THREADS, .stream = stream};
    struct plan_params copy = *params;
    copy.partitions_divisor = divisor_of((uint32_t)params->num_partitions);
    return cuda_launch(operation, scope, &launch, (void *[]){&copy});
}

fmla_status cuda_decode_plan(const struct plan_problem *p)
{
    static const char op[] = "decode_plan";
    const struct plan_params params = {
        .seqlens = p->seqlens,
        .b = p->b,
        .capacity = p->capacity,
        .topk = p->topk,
        .header = p->plan.header,
        .partitions = p->plan.partitions,
        .num_splits = p->plan.num_splits,
        .num_partitions = p->plan.num_partitions,
        .costs = p->costs,
    };
    struct cuda_scope scope;
    fmla_status status = cuda_enter(op, "seqlens", p->device.id, &scope);
    if (status) return status;
    status = cuda_launch_plan(op, &scope, &params, p->stream);
    cuda_leave(&scope);
    return status;
}
