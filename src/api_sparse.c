/* SPDX-License-Identifier: MIT
 *
 * The public functions of sparse decode.
 */
#include "api.h"

#include <string.h>

static const char op[] = "sparse_decode";

/* The keys that are named in a cache. */
static fmla_status check_indices(const struct checked_tensor *indices, const struct checked_tensor *length,
                                 const struct attention_problem *p, const char *about,
                                 struct key_source *keys)
{
    TRY(check_size(op, indices, 0, "b", p->b, "q"));
    TRY(check_size(op, indices, 1, "s_q", p->s_q, "q"));
    TRY(check_range(op, about, indices->shape[2], 0, INT32_MAX));
    if (length->name) TRY(check_size(op, length, 0, "b", p->b, "q"));
    fill_lists(indices, length, indices->shape[2], keys);
    return FMLA_OK;
}

/* The tensors of a call, checked. */
struct tensors {
    struct checked_tensor q, kv, indices, length, sink, extra_kv, extra_indices, extra_length, out, lse;
};

static fmla_status check_tensors(const fmla_sparse_decode_args *args, unsigned extra, struct tensors *t,
                                 const struct api_format **format)
{
    const unsigned i32 = ALLOW_I32 | extra;
    TRY(check_tensor(op, "q", args->q, 4, ALLOW_BF16 | ALLOW_FP16 | extra, &t->q));
    TRY(check_kv_format(op, args->kv_format, "kv_cache", args->kv_cache, &t->q, format));
    const unsigned same = 1u << t->q.element, bytes = (*format)->allow | extra;
    TRY(check_tensor(op, "kv_cache", args->kv_cache, 4, bytes, &t->kv));
    TRY(check_tensor(op, "indices", args->indices, 3, i32, &t->indices));
    TRY(check_tensor(op, "topk_length", args->topk_length, 1, i32 | ALLOW_NULL, &t->length));
    TRY(check_tensor(op, "attn_sink", args->attn_sink, 1, ALLOW_F32 | ALLOW_NULL | extra, &t->sink));
    TRY(check_tensor(op, "extra_kv_cache", args->extra_kv_cache, 4, bytes | ALLOW_NULL, &t->extra_kv));
    TRY(check_tensor(op, "extra_indices", args->extra_indices, 3, i32 | ALLOW_NULL, &t->extra_indices));
    TRY(check_tensor(op, "extra_topk_length", args->extra_topk_length, 1, i32 | ALLOW_NULL,
                     &t->extra_length));
    TRY(check_tensor(op, "out", args->out, 4, same | CHECK_OUTPUT | extra, &t->out));
    TRY(check_tensor(op, "lse", args->lse, 3, ALLOW_F32 | ALLOW_NULL | CHECK_OUTPUT | extra, &t->lse));
    const struct checked_tensor *others[] = {&t->kv,           &t->indices,  &t->length,
                                             &t->sink,         &t->extra_kv, &t->extra_indices,
                                             &t->extra_length, &t->out,      &t->lse};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        TRY(check_same_device(op, others[i], &t->q));
    if (!t->extra_kv.name && t->extra_indices.name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: extra_kv_cache: is NULL, must be given as extra_indices is",
                    op);
    if (t->extra_kv.name && !t->extra_indices.name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: extra_indices: is NULL, must be given as extra_kv_cache is",
                    op);
    if (!t->extra_kv.name && t->extra_length.name)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: extra_topk_length: is given, must be NULL as extra_kv_cache is", op);
    return FMLA_OK;
}

/* The shapes against each other; fills the sizes, the caches and the lengths of `p`. */
static fmla_status check_sizes(const struct tensors *t, const struct api_format *format, unsigned extra,
                               struct attention_problem *p)
{
    const struct checked_tensor *q = &t->q, *out = &t->out, *lse = &t->lse;
    p->b = q->shape[0], p->s_q = q->shape[1], p->h_q = q->shape[2], p->d_qk = q->shape[3];
    p->d_v = out->shape[3];
    TRY(check_range(op, "q: b (dimension 0)", p->b, 0, MAX_BATCH));
    TRY(check_range(op, "q: s_q (dimension 1)", p->s_q, 1, INT32_MAX));
    TRY(check_range(op, "q: h_q (dimension 2)", p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: s_q · h_q (dimensions 1 and 2)", p->s_q * p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: d_qk (dimension 3)", p->d_qk, 1, INT32_MAX));
    if (format->d_qk) TRY(check_size(op, q, 3, "d_qk", format->d_qk, format->name));
    TRY(check_kv_pages(op, &t->kv, format, p->d_qk, extra, &p->keys[0]));
    TRY(check_range(op, "out: d_v (dimension 3)", p->d_v, 1, p->d_qk));
    TRY(check_indices(&t->indices, &t->length, p, "indices: topk (dimension 2)", &p->keys[0]));
    if (t->extra_kv.name) {
        TRY(check_kv_pages(op, &t->extra_kv, format, p->d_qk, extra, &p->keys[1]));
        TRY(check_indices(&t->extra_indices, &t->extra_length, p, "extra_indices: extra_topk (dimension 2)",
                          &p->keys[1]));
    }
    p->h_kv = 1;
    p->capacity = plan_topk_length(p->keys[0].capacity, p->keys[1].capacity, p->keys[1].capacity);
    if (t->sink.name) TRY(check_size(op, &t->sink, 0, "h_q", p->h_q, "q"));
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

/* Everything but the workspace. `extra`: CHECK_SHAPE_ONLY where only a size is asked, else 0. */
static fmla_status check_sparse_decode(const fmla_sparse_decode_args *caller, fmla_sparse_decode_args *args,
                                       unsigned extra, struct attention_problem *p,
                                       const struct kernel **kernel)
{
    static const size_t sizes[] = {sizeof(fmla_sparse_decode_args), 0};
    struct checked_tensor rows, splits;
    struct tensors t;
    const struct api_format *format;
    TRY(check_struct(op, "args", caller, args, sizeof *args, sizes));
    TRY(check_tensors(args, extra, &t, &format));
    memset(p, 0, sizeof *p);
    TRY(check_sizes(&t, format, extra, p));
    TRY(check_result_rules(op, &t.sink, args->lse_empty, args->log_base, &p->rules));
    TRY(check_range(op, "batch_invariant", args->batch_invariant, 0, 1));
    TRY(check_range(op, "num_partitions", args->num_partitions, 0, MAX_PARTITIONS));
    TRY(check_tables(op, args->partitions, args->num_splits, args->plan, args->num_partitions, &t.q, extra,
                     &rows, &splits));
    TRY(check_scale(op, args->softmax_scale, p->d_qk, &p->scale));

    p->operation = OP_SPARSE_DECODE, p->format = format->format;
    fill_attention(&t.q, &t.out, &t.lse, p);
    p->cut = args->batch_invariant ? CUT_INVARIANT : CUT_BY_PLAN;
    p->plan_in_tables = rows.name && p->cut == CUT_BY_PLAN;
    p->num_partitions = p->plan_in_tables ? (int32_t)rows.shape[0] : args->num_partitions;
    p->stream = args->stream;
    TRY(attention_kernel(p, args->kernel, kernel));
    return check_given_plan(p, args->plan, args->plan_size, extra, &rows, &splits);
}

fmla_status fmla_sparse_decode_workspace_size(const fmla_sparse_decode_args *caller, size_t *bytes,
                                              size_t *alignment)
{
    fmla_sparse_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_size(kernel, &p, bytes, alignment);
}

fmla_status fmla_sparse_decode_workspace_bound(const fmla_sparse_decode_args *caller, size_t *bytes,
                                               size_t *alignment)
{
    fmla_sparse_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_bound(kernel, &p, bytes, alignment);
}

fmla_status fmla_sparse_decode_kernel(const fmla_sparse_decode_args *caller, const char **name)
{
    fmla_sparse_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    if (!name) return fail(FMLA_INVALID_ARGUMENT, "sparse_decode: name: is NULL, must point to the answer");
    TRY(check_sparse_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    *name = kernel->name;
    return FMLA_OK;
}

fmla_status fmla_sparse_decode(const fmla_sparse_decode_args *caller)
{
    fmla_sparse_decode_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_decode(caller, &args, 0, &p, &kernel));
    return attention_run(kernel, &p, args.workspace, args.workspace_size);
}
