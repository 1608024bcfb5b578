/* SPDX-License-Identifier: MIT */
#include "cuda.h"
#include "kernels.h"

fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_problem *p)
{
    struct plan_params params = {
        .b = p->b,
        .header = p->plan.header,
        .partitions = p->plan.partitions,
        .num_splits = p->plan.num_splits,
        .num_partitions = p->plan.num_partitions,
        .planned = plan_planned(p->plan),
        .partitions_divisor = divisor_of((uint32_t)plan_planned(p->plan)),
        .costs = p->costs,
    };
    if (p->kind == KEYS_PAGED)
        params.seqlens = p->lists.length, params.capacity = p->lists.topk;
    else
        params.topk = p->lists;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){.schedule = CUDA_PLAN}), .blocks = 1, .stream = p->stream};
    return cuda_launch(operation, scope, &launch, (void *[]){&params});
}

/* Returns the argument whose device makes the plan. */
static const char *argument_of(const struct plan_problem *p)
{
    if (p->kind == KEYS_PAGED) return "seqlens";
    return p->lists.length ? "topk_length" : p->lists.extra_length ? "extra_topk_length" : "target";
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct plan_problem *const p = problem.plan;
    const char *const op = p->kind == KEYS_PAGED ? "decode_plan" : "sparse_plan";
    struct cuda_scope scope;
    (void)driver, (void)prepared;
    fmla_status status = cuda_enter(op, argument_of(p), p->device.id, &scope);
    if (status) return status;
    status = cuda_launch_plan(op, &scope, p);
    cuda_leave(&scope);
    return status;
}

const struct kernel_driver cuda_plan_driver = {.run = run};
