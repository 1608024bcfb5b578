/* SPDX-License-Identifier: MIT
 *
 * The public functions: check the arguments, choose the kernel, call it. No arithmetic of attention.
 */
#include "api.h"

#include "threads.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_WORKERS = 4096 };

/* ---- Threads -------------------------------------------------------------------------------- */

fmla_status fmla_set_parallel_for(fmla_parallel_for run, void *pool, int32_t workers)
{
    if (run) TRY(check_range("set_parallel_for", "workers", workers, 1, MAX_WORKERS));
    threads_set_loop(run, pool, workers);
    return FMLA_OK;
}

fmla_status fmla_set_num_threads(int32_t n)
{
    TRY(check_range("set_num_threads", "n", n, 0, MAX_WORKERS));
    threads_set_count(n);
    return FMLA_OK;
}

int32_t fmla_num_threads(void)
{
    return threads_now().workers;
}

/* ---- What runs here ------------------------------------------------------------------------- */

fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device)
{
    if (device->device_type == FMLA_DEVICE_CUDA_HOST) device->device_type = FMLA_DEVICE_CPU;
    TRY(check_range(operation, name, device->device_type, FMLA_DEVICE_CPU, FMLA_DEVICE_CUDA_HOST));
    return check_range(operation, name, device->id, 0, INT32_MAX);
}

fmla_status fmla_capabilities(fmla_device device, int64_t index, fmla_capability *capability)
{
    static const size_t sizes[] = {sizeof(fmla_capability), offsetof(fmla_capability, part_of), 0};
    fmla_capability row;
    TRY(check_struct("capabilities", "capability", capability, &row, sizeof row, sizes));
    TRY(check_device_argument("capabilities", "device", &device));
    if (index < 0 || !dispatch_capability(device, index, &row))
        return fail(FMLA_INVALID_ARGUMENT, "capabilities: index: is %lld, and there is no such row",
                    (long long)index);
    memcpy(capability, &row, row.struct_size < sizeof row ? row.struct_size : sizeof row);
    return FMLA_OK;
}

fmla_status fmla_prepare(fmla_device device)
{
    TRY(check_device_argument("prepare", "device", &device));
    char name[32];
    const char *reason = dispatch_device_reason(device);
    if (!*reason) return dispatch_prepare(device);
    return fail(FMLA_UNSUPPORTED, "prepare: device: is %s, and no kernel of this build runs there: %s",
                device_name(device, name), reason);
}

fmla_status fmla_device_describe(fmla_device device, fmla_device_info *info)
{
    static const size_t sizes[] = {sizeof(fmla_device_info), 0};
    fmla_device_info full;
    TRY(check_struct("device_describe", "info", info, &full, sizeof full, sizes));
    TRY(check_device_argument("device_describe", "device", &device));
    dispatch_describe(device, &full);
    memcpy(info, &full, full.struct_size < sizeof full ? full.struct_size : sizeof full);
    return FMLA_OK;
}

/* ---- Dense decode --------------------------------------------------------------------------- */

fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules)
{
    TRY(check_range(operation, "lse_empty", lse_empty, FMLA_LSE_EMPTY_POSITIVE_INFINITY,
                    FMLA_LSE_EMPTY_NEGATIVE_INFINITY));
    if (log_base != FMLA_LOG_NATURAL && log_base != FMLA_LOG_BASE_2)
        return fail(FMLA_INVALID_ARGUMENT, "%s: log_base: is %d, must be %d (natural) or %d (base 2)",
                    operation, log_base, FMLA_LOG_NATURAL, FMLA_LOG_BASE_2);
    rules->attn_sink = (const float *)(const void *)sink->data;
    rules->lse_of_empty = lse_empty == FMLA_LSE_EMPTY_POSITIVE_INFINITY ? INFINITY : -INFINITY;
    rules->lse_factor = log_base == FMLA_LOG_BASE_2 ? 1.44269504088896341f : 1.0f;
    return FMLA_OK;
}

fmla_status check_scale(const char *operation, float softmax_scale, int64_t d_qk, float *scale)
{
    if (!isfinite(softmax_scale))
        return fail(FMLA_INVALID_ARGUMENT, "%s: softmax_scale: is %f, must be finite (0 = 1/sqrt(d_qk))",
                    operation, (double)softmax_scale);
    *scale = softmax_scale != 0.0f ? softmax_scale : (float)(1.0 / sqrt((double)d_qk));
    return FMLA_OK;
}

void fill_attention(const struct checked_tensor *q, const struct checked_tensor *out,
                    const struct checked_tensor *lse, struct attention_problem *p)
{
    p->element = q->element, p->device = q->device;
    p->q = (const uint16_t *)(const void *)q->data;
    p->out = (uint16_t *)(void *)out->data;
    p->lse = (float *)(void *)lse->data;
    memcpy(p->q_stride, q->stride, sizeof p->q_stride);
    memcpy(p->out_stride, out->stride, sizeof p->out_stride);
    memcpy(p->lse_stride, lse->stride, sizeof p->lse_stride);
}

/* A cache of dense decode has the type of q: no format is asked. */
fmla_status attention_kernel(const struct attention_problem *p, const char *name,
                             const struct kernel **kernel)
{
    const struct wanted wanted = {.operation = p->operation,
                                  .device = p->device,
                                  .argument = "q",
                                  .elements = 1u << p->element,
                                  .d_qk = p->d_qk,
                                  .d_v = p->d_v,
                                  .formats = p->operation == OP_DENSE_DECODE ? 0 : 1u << p->format,
                                  .problem.attention = p};
    return dispatch(&wanted, name, kernel);
}

fmla_status check_given_plan(struct attention_problem *p, const void *plan, size_t plan_size, unsigned extra,
                             const struct checked_tensor *rows, const struct checked_tensor *splits)
{
    const char *op = operation_name(p->operation);
    const bool on_cpu = p->device.device_type == FMLA_DEVICE_CPU;
    if (p->cut != CUT_BY_PLAN) return FMLA_OK;
    if (plan && on_cpu) {
        const struct plan_header *header = plan;
        TRY(check_plan(op, plan, plan_size, p->b));
        if (p->num_partitions && p->num_partitions != header->num_partitions)
            return fail(FMLA_INVALID_ARGUMENT, "%s: num_partitions: is %d, must be 0 or the %d of the plan",
                        op, p->num_partitions, header->num_partitions);
    }
    p->plan = plan, p->plan_size = plan_size;
    if (!p->plan_in_tables) return FMLA_OK;
    p->partitions = (const struct plan_partition *)(const void *)rows->data;
    p->num_splits = (const int32_t *)(const void *)splits->data;
    return on_cpu && !extra ? check_last_partition(op, p->partitions, p->num_partitions, p->b) : FMLA_OK;
}

fmla_status attention_size(const struct kernel *kernel, const struct attention_problem *p, size_t *bytes,
                           size_t *alignment)
{
    struct prepared prepared;
    TRY(dispatch_decide(kernel, (union problem){.attention = p}, &prepared));
    if (bytes) *bytes = prepared.bytes;
    if (alignment) *alignment = prepared.alignment;
    return FMLA_OK;
}

/* As if a plan were made inside the call, with as many partitions as the one given has. */
fmla_status attention_bound(const struct kernel *kernel, const struct attention_problem *p, size_t *bytes,
                            size_t *alignment)
{
    const struct plan_header *header = p->plan; /* which has been checked, in host memory */
    struct attention_problem all = *p;
    if (header && p->device.device_type == FMLA_DEVICE_CPU) all.num_partitions = header->num_partitions;
    all.plan = NULL, all.plan_in_tables = false, all.bound = true;
    return attention_size(kernel, &all, bytes, alignment);
}

fmla_status attention_run(const struct kernel *kernel, struct attention_problem *p, void *workspace,
                          size_t workspace_size)
{
    struct prepared prepared;
    const union problem problem = {.attention = p};
    TRY(dispatch_decide(kernel, problem, &prepared));
    TRY(check_buffer(operation_name(p->operation), "workspace", workspace, workspace_size, prepared.bytes,
                     prepared.alignment));
    p->workspace = workspace;
    return kernel->driver->run(kernel, problem, &prepared);
}

/* The shapes against each other; fills the sizes of `p`. */
static fmla_status check_decode_sizes(const char *op, const struct checked_tensor *q,
                                      const struct checked_tensor *kv, const struct checked_tensor *table,
                                      const struct checked_tensor *seqlens, const struct checked_tensor *sink,
                                      const struct checked_tensor *out, const struct checked_tensor *lse,
                                      struct attention_problem *p)
{
    struct key_source *keys = &p->keys[0];
    int64_t max_pages = 1;
    p->b = q->shape[0], p->s_q = q->shape[1], p->h_q = q->shape[2], p->d_qk = q->shape[3];
    keys->pages = kv->shape[0], keys->page_size = kv->shape[1], p->h_kv = kv->shape[2];
    p->d_v = out->shape[3];
    TRY(check_range(op, "q: b (dimension 0)", p->b, 0, MAX_BATCH));
    TRY(check_range(op, "q: s_q (dimension 1)", p->s_q, 1, INT32_MAX));
    TRY(check_range(op, "q: h_q (dimension 2)", p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: s_q · h_q (dimensions 1 and 2)", p->s_q * p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: d_qk (dimension 3)", p->d_qk, 1, INT32_MAX));
    TRY(check_range(op, "kv_cache: pages (dimension 0)", keys->pages, 0, INT32_MAX));
    TRY(check_range(op, "kv_cache: page_size (dimension 1)", keys->page_size, 1, INT32_MAX));
    TRY(check_range(op, "kv_cache: h_kv (dimension 2)", p->h_kv, 1, INT32_MAX));
    TRY(check_heads(op, "q", p->h_q, p->h_kv));
    TRY(check_size(op, kv, 3, "d_qk", p->d_qk, "q"));
    TRY(check_range(op, "out: d_v (dimension 3)", p->d_v, 1, p->d_qk));
    if (table->name) {
        TRY(check_size(op, table, 0, "b", p->b, "q"));
        TRY(check_range(op, "block_table: max_pages (dimension 1)", table->shape[1], 0, INT32_MAX));
        max_pages = table->shape[1];
    } else if (keys->pages < p->b) {
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: kv_cache: pages (dimension 0) is %lld, must be at least the %lld requests of q "
                    "where there is no "
                    "block_table",
                    op, (long long)keys->pages, (long long)p->b);
    }
    p->capacity = max_pages * keys->page_size;            /* < 2^62 */
    if (p->capacity > INT32_MAX) p->capacity = INT32_MAX; /* no length is above it */
    TRY(check_size(op, seqlens, 0, "b", p->b, "q"));
    if (sink->name) TRY(check_size(op, sink, 0, "h_q", p->h_q, "q"));
    TRY(check_size(op, out, 0, "b", p->b, "q"));
    TRY(check_size(op, out, 1, "s_q", p->s_q, "q"));
    TRY(check_size(op, out, 2, "h_q", p->h_q, "q"));
    if (lse->name) {
        TRY(check_size(op, lse, 0, "b", p->b, "q"));
        TRY(check_size(op, lse, 1, "h_q", p->h_q, "q"));
        TRY(check_size(op, lse, 2, "s_q", p->s_q, "q"));
    }
    return FMLA_OK;
}

static void fill_dense_decode(const fmla_dense_decode_args *args, const struct checked_tensor *q,
                              const struct checked_tensor *kv, const struct checked_tensor *table,
                              const struct checked_tensor *seqlens, const struct checked_tensor *out,
                              const struct checked_tensor *lse, struct attention_problem *p)
{
    struct key_source *keys = &p->keys[0];
    const uint64_t bytes =
        sizeof(uint16_t); /* that of a dimension of one element may wrap: it is never used */
    p->operation = OP_DENSE_DECODE;
    fill_attention(q, out, lse, p);
    p->format = q->element == ELEMENT_BF16 ? KV_BF16 : KV_FP16;
    keys->kind = KEYS_PAGED;
    keys->k = (struct key_view){
        (const uint8_t *)(const void *)kv->data, (int64_t)((uint64_t)kv->stride[0] * bytes),
        (int64_t)((uint64_t)kv->stride[1] * bytes), (int64_t)((uint64_t)kv->stride[2] * bytes)};
    keys->v = keys->k;
    keys->table = table->name ? (const int32_t *)(const void *)table->data : NULL;
    keys->table_stride[0] = table->stride[0];
    keys->lengths = (const int32_t *)(const void *)seqlens->data;
    keys->capacity = p->capacity;
    p->causal = args->causal, p->cut = args->batch_invariant ? CUT_INVARIANT : CUT_BY_PLAN;
    p->num_partitions = args->num_partitions;
    p->stream = args->stream;
}

/* Everything but the workspace. `extra`: CHECK_SHAPE_ONLY where only a size is asked, else 0. */
static fmla_status check_dense_decode(const fmla_dense_decode_args *caller, fmla_dense_decode_args *args,
                                      unsigned extra, struct attention_problem *p,
                                      const struct kernel **kernel)
{
    static const size_t sizes[] = {offsetof(fmla_dense_decode_args, partitions),
                                   sizeof(fmla_dense_decode_args), 0};
    static const char op[] = "dense_decode";
    struct checked_tensor q, kv, table, seqlens, sink, out, lse, rows, splits;
    TRY(check_struct(op, "args", caller, args, sizeof *args, sizes));
    TRY(check_tensor(op, "q", args->q, 4, ALLOW_BF16 | ALLOW_FP16 | extra, &q));
    const unsigned same = 1u << q.element;
    TRY(check_tensor(op, "kv_cache", args->kv_cache, 4, same | extra, &kv));
    TRY(check_tensor(op, "block_table", args->block_table, 2, ALLOW_I32 | ALLOW_NULL | extra, &table));
    TRY(check_tensor(op, "seqlens", args->seqlens, 1, ALLOW_I32 | extra, &seqlens));
    TRY(check_tensor(op, "attn_sink", args->attn_sink, 1, ALLOW_F32 | ALLOW_NULL | extra, &sink));
    TRY(check_tensor(op, "out", args->out, 4, same | CHECK_OUTPUT | extra, &out));
    TRY(check_tensor(op, "lse", args->lse, 3, ALLOW_F32 | ALLOW_NULL | CHECK_OUTPUT | extra, &lse));
    const struct checked_tensor *others[] = {&kv, &table, &seqlens, &sink, &out, &lse};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) TRY(check_same_device(op, others[i], &q));

    memset(p, 0, sizeof *p);
    TRY(check_decode_sizes(op, &q, &kv, &table, &seqlens, &sink, &out, &lse, p));
    TRY(check_result_rules(op, &sink, args->lse_empty, args->log_base, &p->rules));
    TRY(check_range(op, "causal", args->causal, 0, 1));
    TRY(check_range(op, "batch_invariant", args->batch_invariant, 0, 1));
    TRY(check_range(op, "num_partitions", args->num_partitions, 0, MAX_PARTITIONS));
    TRY(check_tables(op, args->partitions, args->num_splits, args->plan, args->num_partitions, &q, extra,
                     &rows, &splits));
    TRY(check_scale(op, args->softmax_scale, p->d_qk, &p->scale));

    fill_dense_decode(args, &q, &kv, &table, &seqlens, &out, &lse, p);
    p->plan_in_tables = rows.name && p->cut == CUT_BY_PLAN;
    if (p->plan_in_tables) p->num_partitions = (int32_t)rows.shape[0];
    TRY(attention_kernel(p, args->kernel, kernel));
    return check_given_plan(p, args->plan, args->plan_size, extra, &rows, &splits);
}

fmla_status fmla_dense_decode_workspace_size(const fmla_dense_decode_args *caller, size_t *bytes,
                                             size_t *alignment)
{
    fmla_dense_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_dense_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_size(kernel, &p, bytes, alignment);
}

fmla_status fmla_dense_decode_workspace_bound(const fmla_dense_decode_args *caller, size_t *bytes,
                                              size_t *alignment)
{
    fmla_dense_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_dense_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_bound(kernel, &p, bytes, alignment);
}

fmla_status fmla_dense_decode_kernel(const fmla_dense_decode_args *caller, const char **name)
{
    fmla_dense_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    if (!name) return fail(FMLA_INVALID_ARGUMENT, "dense_decode: name: is NULL, must point to the answer");
    TRY(check_dense_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    *name = kernel->name;
    return FMLA_OK;
}

fmla_status fmla_dense_decode(const fmla_dense_decode_args *caller)
{
    fmla_dense_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_dense_decode(caller, &args, 0, &p, &kernel));
    return attention_run(kernel, &p, args.workspace, args.workspace_size);
}

/* ---- Merge ---------------------------------------------------------------------------------- */

fmla_status fmla_merge(const fmla_merge_args *caller)
{
    static const size_t sizes[] = {sizeof(fmla_merge_args), 0};
    static const char op[] = "merge";
    const unsigned floats = ALLOW_BF16 | ALLOW_FP16 | ALLOW_F32;
    fmla_merge_args args;
    struct checked_tensor out_parts, lse_parts, sink, out, lse;
    TRY(check_struct(op, "args", caller, &args, sizeof args, sizes));
    TRY(check_tensor(op, "out_parts", args.out_parts, 5, floats, &out_parts));
    TRY(check_tensor(op, "lse_parts", args.lse_parts, 4, ALLOW_F32, &lse_parts));
    TRY(check_tensor(op, "attn_sink", args.attn_sink, 1, ALLOW_F32 | ALLOW_NULL, &sink));
    TRY(check_tensor(op, "out", args.out, 4, floats | CHECK_OUTPUT, &out));
    TRY(check_tensor(op, "lse", args.lse, 3, ALLOW_F32 | ALLOW_NULL | CHECK_OUTPUT, &lse));
    const struct checked_tensor *others[] = {&lse_parts, &sink, &out, &lse};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        TRY(check_same_device(op, others[i], &out_parts));

    struct merge_problem p = {.n = out_parts.shape[0],
                              .b = out_parts.shape[1],
                              .s_q = out_parts.shape[2],
                              .h_q = out_parts.shape[3],
                              .d_v = out_parts.shape[4]};
    TRY(check_range(op, "out_parts: b (dimension 1)", p.b, 0, INT32_MAX));
    TRY(check_range(op, "out_parts: s_q (dimension 2)", p.s_q, 0, INT32_MAX));
    TRY(check_size(op, &lse_parts, 0, "n", p.n, "out_parts"));
    TRY(check_size(op, &lse_parts, 1, "b", p.b, "out_parts"));
    TRY(check_size(op, &lse_parts, 2, "h_q", p.h_q, "out_parts"));
    TRY(check_size(op, &lse_parts, 3, "s_q", p.s_q, "out_parts"));
    if (sink.name) TRY(check_size(op, &sink, 0, "h_q", p.h_q, "out_parts"));
    TRY(check_size(op, &out, 0, "b", p.b, "out_parts"));
    TRY(check_size(op, &out, 1, "s_q", p.s_q, "out_parts"));
    TRY(check_size(op, &out, 2, "h_q", p.h_q, "out_parts"));
    TRY(check_size(op, &out, 3, "d_v", p.d_v, "out_parts"));
    if (lse.name) {
        TRY(check_size(op, &lse, 0, "b", p.b, "out_parts"));
        TRY(check_size(op, &lse, 1, "h_q", p.h_q, "out_parts"));
        TRY(check_size(op, &lse, 2, "s_q", p.s_q, "out_parts"));
    }
    TRY(check_result_rules(op, &sink, args.lse_empty, args.log_base, &p.rules));

    const struct wanted wanted = {.operation = OP_MERGE,
                                  .device = out_parts.device,
                                  .argument = "out_parts",
                                  .elements = (1u << out_parts.element) | (1u << out.element)};
    const struct kernel *kernel;
    TRY(dispatch(&wanted, args.kernel, &kernel));

    p.device = out_parts.device;
    p.part_element = out_parts.element, p.out_element = out.element;
    p.out_parts = out_parts.data;
    p.lse_parts = (const float *)(const void *)lse_parts.data;
    p.out = out.data;
    p.lse = (float *)(void *)lse.data;
    memcpy(p.out_parts_stride, out_parts.stride, sizeof p.out_parts_stride);
    memcpy(p.lse_parts_stride, lse_parts.stride, sizeof p.lse_parts_stride);
    memcpy(p.out_stride, out.stride, sizeof p.out_stride);
    memcpy(p.lse_stride, lse.stride, sizeof p.lse_stride);
    p.stream = args.stream;
    return kernel->driver->run(kernel, (union problem){.merge = &p}, NULL);
}
