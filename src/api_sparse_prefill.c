/* SPDX-License-Identifier: MIT
 *
 * The public functions of sparse prefill.
 */
#include "api.h"

#include <string.h>

static const char op[] = "sparse_prefill";

/* The tensors of a call, checked. */
struct tensors {
    struct checked_tensor q, kv, indices, length, sink, out, max_logits, lse;
    int kv_rank; /* 3: flat, 4: pages */
};

/* Which of the two kv is. What is neither, check_tensor names; bytes are always pages. */
static fmla_status check_kv_rank(const fmla_tensor *kv, const struct api_format *format, int *rank)
{
    *rank = kv && kv->ndim == 3 && !format->token ? 3 : 4;
    if (!kv || kv->ndim == *rank || format->token) return FMLA_OK;
    return fail(
        FMLA_INVALID_ARGUMENT,
        "%s: kv: has %d dimensions, must have 3 ([s_kv, h_kv, d_qk]) or 4 ([pages, page_size, 1, d_qk])", op,
        kv->ndim);
}

static fmla_status check_tensors(const fmla_sparse_prefill_args *args, unsigned extra, struct tensors *t,
                                 const struct api_format **format)
{
    const unsigned i32 = ALLOW_I32 | extra, result = ALLOW_F32 | ALLOW_NULL | CHECK_OUTPUT | extra;
    TRY(check_tensor(op, "q", args->q, 3, ALLOW_BF16 | extra, &t->q));
    TRY(check_kv_format(op, args->kv_format, "kv", args->kv, &t->q, format));
    TRY(check_kv_rank(args->kv, *format, &t->kv_rank));
    TRY(check_tensor(op, "kv", args->kv, t->kv_rank, (*format)->allow | extra, &t->kv));
    TRY(check_tensor(op, "indices", args->indices, 3, i32, &t->indices));
    TRY(check_tensor(op, "topk_length", args->topk_length, 1, i32 | ALLOW_NULL, &t->length));
    TRY(check_tensor(op, "attn_sink", args->attn_sink, 1, ALLOW_F32 | ALLOW_NULL | extra, &t->sink));
    TRY(check_tensor(op, "out", args->out, 3, ALLOW_BF16 | CHECK_OUTPUT | extra, &t->out));
    TRY(check_tensor(op, "max_logits", args->max_logits, 2, result, &t->max_logits));
    TRY(check_tensor(op, "lse", args->lse, 2, result, &t->lse));
    const struct checked_tensor *others[] = {&t->kv,  &t->indices,    &t->length, &t->sink,
                                             &t->out, &t->max_logits, &t->lse};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        TRY(check_same_device(op, others[i], &t->q));
    return FMLA_OK;
}

/* Keys without pages: to all that follows, pages of one slot. */
static fmla_status check_flat(const struct checked_tensor *kv, struct attention_problem *p)
{
    struct key_source *keys = &p->keys[0];
    TRY(check_range(op, "kv: s_kv (dimension 0)", kv->shape[0], 0, INT32_MAX));
    TRY(check_range(op, "kv: h_kv (dimension 1)", kv->shape[1], 1, INT32_MAX));
    TRY(check_size(op, kv, 2, "d_qk", p->d_qk, "q"));
    p->h_kv = kv->shape[1];
    TRY(check_heads(op, "q", p->h_q, p->h_kv));
    keys->k.data = (const uint8_t *)(const void *)kv->data;
    keys->pages = kv->shape[0], keys->page_size = 1;
    /* As of pages: the stride of a dimension of one element is not multiplied. */
    if (kv->shape[0] > 1) keys->k.page_bytes = kv->stride[0] * (int64_t)sizeof(uint16_t);
    if (p->h_kv > 1) keys->k.head_bytes = kv->stride[1] * (int64_t)sizeof(uint16_t);
    keys->v = keys->k;
    return FMLA_OK;
}

/* A result of a number a row. */
static fmla_status check_row_result(const struct checked_tensor *result, const struct attention_problem *p)
{
    if (!result->name) return FMLA_OK;
    TRY(check_size(op, result, 0, "s_q", p->b, "q"));
    return check_size(op, result, 1, "h_q", p->h_q, "q");
}

/* The shapes against each other; fills the sizes and the keys of `p`. */
static fmla_status check_sizes(const struct tensors *t, const struct api_format *format, unsigned extra,
                               struct attention_problem *p)
{
    const struct checked_tensor *q = &t->q, *indices = &t->indices, *out = &t->out;
    p->b = q->shape[0], p->s_q = 1, p->h_q = q->shape[1], p->d_qk = q->shape[2];
    p->d_v = out->shape[2], p->capacity = indices->shape[2];
    TRY(check_range(op, "q: s_q (dimension 0)", p->b, 0, INT32_MAX));
    TRY(check_range(op, "q: h_q (dimension 1)", p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: d_qk (dimension 2)", p->d_qk, 1, INT32_MAX));
    if (format->d_qk) TRY(check_size(op, q, 2, "d_qk", format->d_qk, format->name));
    p->h_kv = 1;
    TRY(t->kv_rank == 3 ? check_flat(&t->kv, p)
                        : check_kv_pages(op, &t->kv, format, p->d_qk, extra, &p->keys[0]));
    TRY(check_range(op, "out: d_v (dimension 2)", p->d_v, 1, p->d_qk));
    TRY(check_size(op, indices, 0, "s_q", p->b, "q"));
    TRY(check_size(op, indices, 1, "h_kv", p->h_kv, "kv"));
    TRY(check_range(op, "indices: topk (dimension 2)", p->capacity, 0, INT32_MAX));
    if (t->length.name) TRY(check_size(op, &t->length, 0, "s_q", p->b, "q"));
    if (t->sink.name) TRY(check_size(op, &t->sink, 0, "h_q", p->h_q, "q"));
    TRY(check_size(op, out, 0, "s_q", p->b, "q"));
    TRY(check_size(op, out, 1, "h_q", p->h_q, "q"));
    TRY(check_row_result(&t->max_logits, p));
    return check_row_result(&t->lse, p);
}

/* A token is a request of one token. */
static void fill_sparse_prefill(const struct tensors *t, struct attention_problem *p)
{
    const struct checked_tensor *q = &t->q, *out = &t->out;
    p->operation = OP_SPARSE_PREFILL;
    p->cut = CUT_EVENLY;
    fill_attention(q, out, &t->lse, p);
    p->q_stride[0] = q->stride[0], p->q_stride[1] = 0, p->q_stride[2] = q->stride[1];
    p->out_stride[0] = out->stride[0], p->out_stride[1] = 0, p->out_stride[2] = out->stride[1];
    p->max_logits = (float *)(void *)t->max_logits.data;
    p->max_stride[0] = t->max_logits.stride[0], p->max_stride[1] = 1;
    p->lse_stride[0] = t->lse.stride[0], p->lse_stride[1] = 1;
    fill_lists(&t->indices, &t->length, p->capacity, &p->keys[0]);
    p->keys[0].table_stride[1] = 0, p->keys[0].table_stride[2] = t->indices.stride[1];
}

/* Everything but the workspace. `extra`: CHECK_SHAPE_ONLY where only a size is asked, else 0. */
static fmla_status check_sparse_prefill(const fmla_sparse_prefill_args *caller,
                                        fmla_sparse_prefill_args *args, unsigned extra,
                                        struct attention_problem *p, const struct kernel **kernel)
{
    static const size_t sizes[] = {sizeof(fmla_sparse_prefill_args), 0};
    struct tensors t;
    const struct api_format *format;
    TRY(check_struct(op, "args", caller, args, sizeof *args, sizes));
    TRY(check_tensors(args, extra, &t, &format));
    memset(p, 0, sizeof *p);
    TRY(check_sizes(&t, format, extra, p));
    TRY(check_result_rules(op, &t.sink, args->lse_empty, args->log_base, &p->rules));
    TRY(check_scale(op, args->softmax_scale, p->d_qk, &p->scale));

    fill_sparse_prefill(&t, p);
    p->format = format->format, p->stream = args->stream;
    return attention_kernel(p, args->kernel, kernel);
}

fmla_status fmla_sparse_prefill_workspace_size(const fmla_sparse_prefill_args *caller, size_t *bytes,
                                               size_t *alignment)
{
    fmla_sparse_prefill_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_prefill(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_size(kernel, &p, bytes, alignment);
}

fmla_status fmla_sparse_prefill_workspace_bound(const fmla_sparse_prefill_args *caller, size_t *bytes,
                                                size_t *alignment)
{
    fmla_sparse_prefill_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_prefill(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    return attention_bound(kernel, &p, bytes, alignment);
}

fmla_status fmla_sparse_prefill_kernel(const fmla_sparse_prefill_args *caller, const char **name)
{
    fmla_sparse_prefill_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    if (!name) return fail(FMLA_INVALID_ARGUMENT, "sparse_prefill: name: is NULL, must point to the answer");
    TRY(check_sparse_prefill(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    *name = kernel->name;
    return FMLA_OK;
}

fmla_status fmla_sparse_prefill(const fmla_sparse_prefill_args *caller)
{
    fmla_sparse_prefill_args args;
    struct attention_problem p;
    const struct kernel *kernel;
    TRY(check_sparse_prefill(caller, &args, 0, &p, &kernel));
    return attention_run(kernel, &p, args.workspace, args.workspace_size);
}
