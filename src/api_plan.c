/* SPDX-License-Identifier: MIT
 *
 * The public functions of the split plan, and the checks of plans that decode shares.
 */
#include "api.h"

#include "threads.h"

#include <stdio.h>
#include <string.h>

static const char plan_operation[] = "decode_plan";

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv)
{
    if (h_q % h_kv == 0) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: h_q is %lld, must be a multiple of the %lld key heads",
                operation, name, (long long)h_q, (long long)h_kv);
}

/* The partitions to plan: as asked, or what the target's workers suggest. */
static fmla_status choose_partitions(const fmla_decode_plan_args *args, int64_t b, fmla_device target,
                                     int32_t *partitions)
{
    char name[32];
    /* In sparse decode every query token reads keys of its own, as every key head does in dense decode. */
    const int64_t s_q = args->sparse ? 1 : args->s_q, h_kv = args->sparse ? args->s_q : args->h_kv;
    const int64_t h_q = args->sparse ? args->s_q * args->h_q : args->h_q;
    *partitions = args->num_partitions;
    if (*partitions) return FMLA_OK;
    if (args->num_workers) {
        *partitions = plan_default_partitions(args->num_workers, s_q, h_q, h_kv);
    } else if (target.device_type == FMLA_DEVICE_CPU) {
        *partitions = plan_even_partitions(threads_now().workers, s_q, h_q, h_kv);
    } else {
        const int32_t workers = dispatch_workers(target);
        if (!workers)
            return fail(
                FMLA_UNSUPPORTED,
                "decode_plan: target: is %s, whose number of SMs is not known here; set num_workers or "
                "num_partitions: %s",
                device_name(target, name), dispatch_device_reason(target));
        *partitions = args->sparse ? dispatch_sparse_partitions(target, b, args->s_q, args->h_q, args->topk,
                                                                args->extra_topk)
                                   : plan_default_partitions(workers, s_q, h_q, h_kv);
    }
    return FMLA_OK;
}

/* The lengths of a plan for sparse decode; `like` gets its requests and its device. */
static fmla_status check_plan_topk(const fmla_decode_plan_args *args, unsigned extra,
                                   struct checked_tensor *like, struct plan_topk *topk)
{
    const unsigned allow = ALLOW_I32 | ALLOW_NULL | extra;
    struct checked_tensor length, extra_length;
    if (args->seqlens)
        return fail(FMLA_INVALID_ARGUMENT, "decode_plan: seqlens: is given, must be NULL where sparse is 1");
    TRY(check_range(plan_operation, "b", args->b, 0, MAX_BATCH));
    TRY(check_range(plan_operation, "topk", args->topk, 0, INT32_MAX));
    TRY(check_range(plan_operation, "extra_topk", args->extra_topk, 0, INT32_MAX));
    TRY(check_range(plan_operation, "capacity", args->capacity, 0, 0));
    TRY(check_range(plan_operation, "h_kv", args->h_kv, 0, 1));
    TRY(check_tensor(plan_operation, "topk_length", args->topk_length, 1, allow, &length));
    TRY(check_tensor(plan_operation, "extra_topk_length", args->extra_topk_length, 1, allow, &extra_length));
    *like = length.name ? length : extra_length;
    if (!like->name) {
        *like = (struct checked_tensor){.name = "b", .device = {FMLA_DEVICE_CPU, 0}, .shape = {args->b}};
        if (args->target.device_type || args->target.id) {
            like->device = args->target;
            TRY(check_device_argument(plan_operation, "target", &like->device));
        }
    }
    TRY(check_same_device(plan_operation, &extra_length, like));
    if (extra_length.name) TRY(check_size(plan_operation, &extra_length, 0, "b", like->shape[0], like->name));
    if (args->b) TRY(check_size(plan_operation, like, 0, "b", args->b, "b"));
    *topk = (struct plan_topk){.topk = args->topk,
                               .extra_topk = args->extra_topk,
                               .length = (const int32_t *)(const void *)length.data,
                               .extra_length = (const int32_t *)(const void *)extra_length.data};
    return FMLA_OK;
}

/* The lengths of a plan for dense decode. */
static fmla_status check_plan_seqlens(const fmla_decode_plan_args *args, unsigned extra,
                                      struct checked_tensor *seqlens, struct plan_topk *lists)
{
    static const char *const names[] = {"topk_length", "extra_topk_length"};
    const fmla_tensor *tensors[] = {args->topk_length, args->extra_topk_length};
    TRY(check_tensor(plan_operation, "seqlens", args->seqlens, 1, ALLOW_I32 | extra, seqlens));
    for (int i = 0; i < 2; i++)
        if (tensors[i])
            return fail(FMLA_INVALID_ARGUMENT, "decode_plan: %s: is given, must be NULL where sparse is 0",
                        names[i]);
    TRY(check_range(plan_operation, "b", args->b, 0, 0));
    TRY(check_range(plan_operation, "topk", args->topk, 0, 0));
    TRY(check_range(plan_operation, "extra_topk", args->extra_topk, 0, 0));
    TRY(check_range(plan_operation, "h_kv", args->h_kv, 1, INT32_MAX));
    *lists = (struct plan_topk){.topk = args->capacity ? args->capacity : INT32_MAX,
                                .length = (const int32_t *)(const void *)seqlens->data};
    return check_range(plan_operation, "capacity", args->capacity, 0, INT64_MAX);
}

fmla_status check_tables(const char *operation, const fmla_tensor *partitions, const fmla_tensor *num_splits,
                         const void *plan, int32_t num_partitions, const struct checked_tensor *like,
                         unsigned extra, struct checked_tensor *rows, struct checked_tensor *splits)
{
    enum { ALIGNMENT = 16 };
    TRY(check_tensor(operation, "partitions", partitions, 2, ALLOW_I32 | ALLOW_NULL | extra, rows));
    TRY(check_tensor(operation, "num_splits", num_splits, 1, ALLOW_I32 | ALLOW_NULL | extra, splits));
    if (!rows->name && !splits->name) return FMLA_OK;
    if (!rows->name || !splits->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be given as %s is", operation,
                    rows->name ? "num_splits" : "partitions", rows->name ? rows->name : splits->name);
    if (plan)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: plan: is given, must be NULL as partitions and num_splits are", operation);
    TRY(check_same_device(operation, rows, like));
    TRY(check_same_device(operation, splits, like));
    TRY(check_range(operation, "partitions: rows (dimension 0)", rows->shape[0], 1, MAX_PARTITIONS));
    TRY(check_size(operation, rows, 1, "fields", FMLA_PARTITION_FIELDS, "every plan"));
    if (rows->shape[0] > 1 && rows->stride[0] != FMLA_PARTITION_FIELDS)
        return fail(FMLA_INVALID_ARGUMENT, "%s: partitions: stride of dimension 0 is %lld, must be %d",
                    operation, (long long)rows->stride[0], FMLA_PARTITION_FIELDS);
    if (!(extra & CHECK_SHAPE_ONLY) && (uintptr_t)rows->data % ALIGNMENT)
        return fail(FMLA_INVALID_ARGUMENT, "%s: partitions: data + byte_offset is not aligned to %d bytes",
                    operation, ALIGNMENT);
    TRY(check_size(operation, splits, 0, "b + 1", like->shape[0] + 1, like->name));
    if (num_partitions && num_partitions != rows->shape[0])
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: num_partitions: is %d, must be 0 or the %lld rows of partitions", operation,
                    num_partitions, (long long)rows->shape[0]);
    return FMLA_OK;
}

/* `extra`: CHECK_SHAPE_ONLY where only a size is asked, else 0. Of a plan in one piece, only num_partitions is set. */
static fmla_status check_plan_args(const fmla_decode_plan_args *caller, fmla_decode_plan_args *args,
                                   unsigned extra, struct plan_problem *problem, const struct kernel **kernel)
{
    static const size_t sizes[] = {offsetof(fmla_decode_plan_args, partitions),
                                   offsetof(fmla_decode_plan_args, sparse), sizeof(fmla_decode_plan_args), 0};
    const int64_t most = INT32_MAX;
    struct checked_tensor lengths = {0}, rows = {0}, splits = {0};
    struct plan_topk lists = {0};
    char name[64];
    TRY(check_struct(plan_operation, "args", caller, args, sizeof *args, sizes));
    TRY(check_range(plan_operation, "sparse", args->sparse, 0, 1));
    if (args->sparse)
        TRY(check_plan_topk(args, extra, &lengths, &lists));
    else
        TRY(check_plan_seqlens(args, extra, &lengths, &lists));
    snprintf(name, sizeof name, "%s: b (dimension 0)", lengths.name);
    TRY(check_range(plan_operation, name, lengths.shape[0], 0, MAX_BATCH));
    TRY(check_range(plan_operation, "s_q", args->s_q, 1, most));
    TRY(check_range(plan_operation, "h_q", args->h_q, 1, most));
    TRY(check_range(plan_operation, "s_q: times h_q", args->s_q * args->h_q, 1, most));
    if (!args->sparse) TRY(check_heads(plan_operation, "h_q", args->h_q, args->h_kv));
    TRY(check_range(plan_operation, "num_workers", args->num_workers, 0, MAX_PARTITIONS));
    TRY(check_range(plan_operation, "num_partitions", args->num_partitions, 0, MAX_PARTITIONS));
    if (!(extra & CHECK_SHAPE_ONLY))
        TRY(check_tables(plan_operation, args->partitions, args->num_splits, args->plan, args->num_partitions,
                         &lengths, CHECK_OUTPUT, &rows, &splits));
    fmla_device target = lengths.device;
    if (args->target.device_type || args->target.id) {
        target = args->target;
        TRY(check_device_argument(plan_operation, "target", &target));
    }
    const struct wanted wanted = {
        .operation = OP_DECODE_PLAN, .device = lengths.device, .argument = lengths.name};
    TRY(dispatch(&wanted, NULL, kernel));
    *problem = (struct plan_problem){
        .b = lengths.shape[0],
        .kind = args->sparse ? KEYS_LISTED : KEYS_PAGED,
        .lists = lists,
        .device = lengths.device,
        .stream = args->stream,
    };
    if (!args->sparse && dispatch_has_plan_costs(target))
        problem->costs = plan_costs_of(args->s_q, args->h_q, args->h_kv);
    if (!rows.name) return choose_partitions(args, lengths.shape[0], target, &problem->plan.num_partitions);
    problem->plan = (struct plan_tables){.partitions = (struct plan_partition *)(void *)rows.data,
                                         .num_splits = (int32_t *)(void *)splits.data,
                                         .num_partitions = (int32_t)rows.shape[0]};
    return FMLA_OK;
}

fmla_status fmla_decode_plan_size(const fmla_decode_plan_args *caller, size_t *bytes)
{
    fmla_decode_plan_args args;
    struct plan_problem problem;
    const struct kernel *kernel;
    TRY(check_plan_args(caller, &args, CHECK_SHAPE_ONLY, &problem, &kernel));
    if (!bytes) return fail(FMLA_INVALID_ARGUMENT, "decode_plan: bytes: is NULL, must point to the answer");
    *bytes = plan_bytes(problem.b, problem.plan.num_partitions);
    return FMLA_OK;
}

fmla_status fmla_decode_plan_partitions(const fmla_decode_plan_args *caller, int32_t *count)
{
    fmla_decode_plan_args args;
    struct plan_problem problem;
    const struct kernel *kernel;
    TRY(check_plan_args(caller, &args, CHECK_SHAPE_ONLY, &problem, &kernel));
    if (!count) return fail(FMLA_INVALID_ARGUMENT, "decode_plan: count: is NULL, must point to the answer");
    *count = problem.plan.num_partitions;
    return FMLA_OK;
}

fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment)
{
    if (size < needed)
        return fail(FMLA_BUFFER_TOO_SMALL, "%s: %s_size: is %zu, must be at least %zu bytes", operation, name,
                    size, needed);
    if (needed && !buffer)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must point to %zu bytes", operation, name,
                    needed);
    if (needed && (uintptr_t)buffer % alignment)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is not aligned to %zu bytes", operation, name, alignment);
    return FMLA_OK;
}

fmla_status fmla_decode_plan(const fmla_decode_plan_args *caller)
{
    fmla_decode_plan_args args;
    struct plan_problem problem;
    const struct kernel *kernel;
    TRY(check_plan_args(caller, &args, 0, &problem, &kernel));
    if (!problem.plan.partitions) {
        const size_t needed = plan_bytes(problem.b, problem.plan.num_partitions);
        TRY(check_buffer(plan_operation, "plan", args.plan, args.plan_size, needed, 16));
        problem.plan = plan_tables_of(args.plan, problem.plan.num_partitions);
    }
    return kernel->driver->run(kernel, (union problem){.plan = &problem}, NULL);
}

fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch)
{
    const struct plan_header *header = plan;
    TRY(check_buffer(operation, "plan", plan, plan_size, sizeof *header, 16));
    if (header->magic != PLAN_MAGIC)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: holds no plan, must come from fmla_decode_plan",
                    operation);
    if (header->num_partitions < 1 || header->num_partitions > MAX_PARTITIONS || header->batch < 0 ||
        header->batch > MAX_BATCH)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is damaged: %d partitions of %lld requests", operation,
                    header->num_partitions, (long long)header->batch);
    if (batch >= 0 && header->batch != batch)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: was made for %lld requests, must be for the %lld of q",
                    operation, (long long)header->batch, (long long)batch);
    return check_buffer(operation, "plan", plan, plan_size, plan_bytes(header->batch, header->num_partitions),
                        16);
}

fmla_status check_last_partition(const char *op, const struct plan_partition *partitions,
                                 int32_t num_partitions, int64_t b)
{
    const int32_t end = partitions[num_partitions - 1].end_request;
    if (end == b - 1) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT,
                "%s: partitions: end with request %d, must end with %lld: made for another batch than q's",
                op, end, (long long)b - 1);
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
