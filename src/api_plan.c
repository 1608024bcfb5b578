/* SPDX-License-Identifier: MIT
 *
 * The public functions of the split plans.
 */
#include "api.h"

#include "threads.h"

#include <stdio.h>
#include <string.h>

/* The common arguments of both plan operations; only the lengths differ. */
struct request {
    struct checked_call call;
    struct plan_problem problem; /* for a contiguous plan, only num_partitions of its tables is set */
    const struct kernel *kernel;
    fmla_device target;
    int32_t num_workers;
    void *plan;
    size_t plan_size;
    int64_t s_q, h_q, h_kv; /* in the planner's terms */
};

/* Chooses the number of partitions: the caller's, or a number for the target's workers. For sparse attention
 * on a GPU it is enough for any batch, so that a plan may be copied over that of another batch. */
static fmla_status choose_partitions(struct request *r)
{
    char name[32];
    const struct plan_problem *p = &r->problem;
    int32_t *partitions = &r->problem.plan.num_partitions;
    if (*partitions) return FMLA_OK;
    if (r->num_workers) {
        *partitions = plan_default_partitions(r->num_workers, r->s_q, r->h_q, r->h_kv);
    } else if (r->target.device_type == FMLA_DEVICE_CPU) {
        *partitions = plan_even_partitions(threads_now().workers, r->s_q, r->h_q, r->h_kv);
    } else {
        const int32_t workers = dispatch_workers(r->target);
        if (!workers)
            return fail(
                FMLA_UNSUPPORTED,
                "%s: target: is %s, whose number of SMs is unknown (%s); set num_workers or num_partitions",
                r->call.operation, device_name(r->target, name), dispatch_device_reason(r->target));
        *partitions = p->kind == KEYS_LISTED ? dispatch_sparse_rows(r->target, r->h_kv, r->h_q / r->h_kv,
                                                                    p->lists.topk, p->lists.extra_topk)
                                             : plan_default_partitions(workers, r->s_q, r->h_q, r->h_kv);
    }
    return FMLA_OK;
}

/* Chooses how many of the partitions share the batch, which depends on the batch. A number of rows other than
 * the default is the caller's choice and is used in full. */
static void choose_planned(struct request *r)
{
    const struct plan_topk *lists = &r->problem.lists;
    struct plan_tables *plan = &r->problem.plan;
    const int64_t s_q = r->h_kv, h_q = r->h_q / r->h_kv;
    if (r->problem.kind != KEYS_LISTED || r->num_workers || r->target.device_type == FMLA_DEVICE_CPU ||
        !dispatch_workers(r->target))
        return;
    if (plan->num_partitions == dispatch_sparse_rows(r->target, s_q, h_q, lists->topk, lists->extra_topk))
        plan->planned =
            dispatch_sparse_partitions(r->target, r->problem.b, s_q, h_q, lists->topk, lists->extra_topk);
}

/* Completes a request whose lengths are known. `asked`: 0 or num_partitions. */
static fmla_status finish(struct request *r, enum operation operation, const struct checked_tensor *rows,
                          const struct checked_tensor *splits, int32_t asked, fmla_device target)
{
    const char *op = r->call.operation;
    struct plan_problem *p = &r->problem;
    TRY(check_tables(&r->call, rows, splits, r->plan, asked, p->b));
    r->target = p->device;
    if (target.device_type || target.id) {
        r->target = target;
        TRY(check_device_argument(op, "target", &r->target));
    }
    const struct wanted wanted = {.operation = operation,
                                  .device = p->device,
                                  .argument = r->call.first ? r->call.first->name : "target",
                                  .problem.plan = p};
    TRY(dispatch(&wanted, NULL, &r->kernel));
    if (p->kind == KEYS_PAGED && dispatch_has_plan_costs(r->target))
        p->costs = plan_costs_of(r->s_q, r->h_q, r->h_kv);
    p->plan.num_partitions = asked;
    if (rows->name)
        p->plan = (struct plan_tables){
            .partitions = rows->data, .num_splits = splits->data, .num_partitions = (int32_t)rows->shape[0]};
    else
        TRY(choose_partitions(r));
    if (!asked) choose_planned(r);
    return FMLA_OK;
}

#define OF(op, member) (&r->call.tensors[TENSOR_##op##_##member])

static fmla_status prepare_decode_plan(const void *caller, bool shape_only, struct request *r)
{
    static const char op[] = "decode_plan";
    fmla_decode_plan_args args;
    TRY(check_call(OP_DECODE_PLAN, caller, &args, shape_only, &r->call));
    TRY(check_range(op, "s_q: s_q · h_q", args.s_q * args.h_q, 1, INT32_MAX));
    TRY(check_heads(op, "h_q", args.h_q, args.h_kv));
    r->num_workers = args.num_workers, r->plan = shape_only ? NULL : args.plan, r->plan_size = args.plan_size;
    r->s_q = args.s_q, r->h_q = args.h_q, r->h_kv = args.h_kv;
    r->problem = (struct plan_problem){.b = r->call.size[DIM_b],
                                       .kind = KEYS_PAGED,
                                       .lists = {.topk = args.capacity ? args.capacity : INT32_MAX,
                                                 .length = OF(decode_plan, seqlens)->data},
                                       .device = r->call.first->device,
                                       .stream = args.stream};
    return finish(r, OP_DECODE_PLAN, OF(decode_plan, partitions), OF(decode_plan, num_splits),
                  args.num_partitions, args.target);
}

/* Every query token reads its own keys, as every key head does in dense decode. */
static fmla_status prepare_sparse_plan(const void *caller, bool shape_only, struct request *r)
{
    static const char op[] = "sparse_plan";
    fmla_sparse_plan_args args;
    TRY(check_call(OP_SPARSE_PLAN, caller, &args, shape_only, &r->call));
    TRY(check_range(op, "s_q: s_q · h_q", args.s_q * args.h_q, 1, INT32_MAX));
    const struct checked_tensor *length = OF(sparse_plan, topk_length),
                                *extra = OF(sparse_plan, extra_topk_length);
    const struct checked_tensor *given = length->name ? length : extra;
    fmla_device device = given->device;
    if (given->name && args.b) TRY(check_size(op, given, 0, "b", args.b, "b"));
    if (!given->name) {
        device = (fmla_device){FMLA_DEVICE_CPU, 0};
        if (args.target.device_type || args.target.id) device = args.target;
        TRY(check_device_argument(op, "target", &device));
    }
    r->num_workers = args.num_workers, r->plan = shape_only ? NULL : args.plan, r->plan_size = args.plan_size;
    r->s_q = 1, r->h_q = args.s_q * args.h_q, r->h_kv = args.s_q;
    r->problem = (struct plan_problem){.b = given->name ? given->shape[0] : args.b,
                                       .kind = KEYS_LISTED,
                                       .lists = {.topk = args.topk,
                                                 .extra_topk = args.extra_topk,
                                                 .length = length->data,
                                                 .extra_length = extra->data},
                                       .device = device,
                                       .stream = args.stream};
    return finish(r, OP_SPARSE_PLAN, OF(sparse_plan, partitions), OF(sparse_plan, num_splits),
                  args.num_partitions, args.target);
}

/* ---- The public functions -------------------------------------------------------------------- */

typedef fmla_status preparer(const void *caller, bool shape_only, struct request *request);

static fmla_status plan_size_of(preparer *prepare, const void *caller, size_t *bytes)
{
    struct request r;
    TRY(prepare(caller, true, &r));
    TRY(check_answer(r.call.operation, "bytes", bytes));
    *bytes = plan_bytes(r.problem.b, r.problem.plan.num_partitions);
    return FMLA_OK;
}

static fmla_status plan_partitions_of(preparer *prepare, const void *caller, int32_t *count)
{
    struct request r;
    TRY(prepare(caller, true, &r));
    TRY(check_answer(r.call.operation, "count", count));
    *count = r.problem.plan.num_partitions;
    return FMLA_OK;
}

static fmla_status make_plan(preparer *prepare, const void *caller)
{
    struct request r;
    struct plan_tables *plan = &r.problem.plan;
    TRY(prepare(caller, false, &r));
    if (!plan->partitions) {
        const size_t needed = plan_bytes(r.problem.b, plan->num_partitions);
        TRY(check_buffer(r.call.operation, "plan", r.plan, r.plan_size, needed, 16));
        const int32_t planned = plan->planned;
        *plan = plan_tables_of(r.plan, plan->num_partitions);
        plan->planned = planned;
    }
    return r.kernel->driver->run(r.kernel->driver, (union problem){.plan = &r.problem}, NULL);
}

fmla_status fmla_decode_plan_size(const fmla_decode_plan_args *args, size_t *bytes)
{
    return plan_size_of(prepare_decode_plan, args, bytes);
}

fmla_status fmla_decode_plan_partitions(const fmla_decode_plan_args *args, int32_t *count)
{
    return plan_partitions_of(prepare_decode_plan, args, count);
}

fmla_status fmla_decode_plan(const fmla_decode_plan_args *args)
{
    return make_plan(prepare_decode_plan, args);
}

fmla_status fmla_sparse_plan_size(const fmla_sparse_plan_args *args, size_t *bytes)
{
    return plan_size_of(prepare_sparse_plan, args, bytes);
}

fmla_status fmla_sparse_plan_partitions(const fmla_sparse_plan_args *args, int32_t *count)
{
    return plan_partitions_of(prepare_sparse_plan, args, count);
}

fmla_status fmla_sparse_plan(const fmla_sparse_plan_args *args)
{
    return make_plan(prepare_sparse_plan, args);
}

fmla_status fmla_plan_describe(const void *plan, size_t plan_size, fmla_plan_view *view)
{
    static const size_t sizes[] = {sizeof(fmla_plan_view), 0};
    fmla_plan_view full;
    TRY(check_struct("plan_describe", "view", view, &full, sizeof full, sizes));
    TRY(check_plan("plan_describe", plan, plan_size, -1));
    const struct plan_header *header = plan;
    full.batch = header->batch;
    full.num_partitions = header->num_partitions;
    full.payload = header->payload;
    full.partitions = &plan_partitions(header)->begin_request;
    full.num_splits = plan_num_splits(header);
    memcpy(view, &full, full.struct_size < sizeof full ? full.struct_size : sizeof full);
    return FMLA_OK;
}
