/* SPDX-License-Identifier: MIT
 *
 * The public functions of sparse decode.
 */
#include "api.h"

#include <math.h>
#include <string.h>

static const char op[] = "sparse_decode";

/* The cache formats that are public, in the order of FMLA_KV_…. */
static const struct {
    const char *name;
    enum kv_format format;
    unsigned allow; /* types of a cache; 0: the element's, which must be that of q */
    int64_t d_qk;   /* 0: any */
    int64_t token;  /* elements of a token as the tensor's last dimension has them; 0: d_qk */
    int64_t unit;   /* bytes that strides and addresses must be multiples of */
} formats[] = {
    {"not named", KV_BF16, 0, 0, 0, 1},
    {"FMLA_KV_BF16", KV_BF16, ALLOW_BF16, 0, 0, 1},
    {"FMLA_KV_FP16", KV_FP16, ALLOW_FP16, 0, 0, 1},
    {"FMLA_KV_FP8_656", KV_FP8_656, ALLOW_BYTES, 576, 656, 4},
    {"FMLA_KV_FP8_584", KV_FP8_584, ALLOW_BYTES, 512, 584, 2},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* Which one it is: as named, or that of q's type. */
static fmla_status check_format(const fmla_sparse_decode_args *args, const struct checked_tensor *q,
                                int *which)
{
    const fmla_tensor *kv = args->kv_cache;
    TRY(check_range(op, "kv_format", args->kv_format, 0, FORMATS - 1));
    *which = args->kv_format;
    if (!*which) {
        if (kv && kv->dtype.bits == 8)
            return fail(
                FMLA_INVALID_ARGUMENT,
                "%s: kv_format: is 0, must name the format of the bytes in kv_cache: %s (%d) or %s (%d)", op,
                formats[FMLA_KV_FP8_656].name, FMLA_KV_FP8_656, formats[FMLA_KV_FP8_584].name,
                FMLA_KV_FP8_584);
        *which = q->element == ELEMENT_BF16 ? FMLA_KV_BF16 : FMLA_KV_FP16;
    }
    if (formats[*which].allow != ALLOW_BYTES && formats[*which].allow != 1u << q->element)
        return fail(FMLA_INVALID_ARGUMENT, "%s: kv_format: is %s, whose values must have the type of q, %s",
                    op, formats[*which].name, q->element == ELEMENT_BF16 ? "bfloat16" : "float16");
    return FMLA_OK;
}

/* One of the caches, without its indices. */
static fmla_status check_cache(const struct checked_tensor *kv, int which, int64_t d_qk, unsigned extra,
                               struct sparse_cache *cache)
{
    const int64_t unit = formats[which].unit;
    const int64_t bytes = formats[which].allow == ALLOW_BYTES ? 1 : 2;
    const char *const about[] = {"kv_cache: pages (dimension 0)", "kv_cache: page_size (dimension 1)",
                                 "extra_kv_cache: pages (dimension 0)",
                                 "extra_kv_cache: page_size (dimension 1)"};
    const int second = *kv->name == 'e' ? 2 : 0;
    TRY(check_range(op, about[second], kv->shape[0], 0, INT32_MAX));
    TRY(check_range(op, about[second + 1], kv->shape[1], 1, INT32_MAX));
    TRY(check_size(op, kv, 2, "h_kv", 1, "every sparse cache"));
    if (formats[which].token)
        TRY(check_size(op, kv, 3, "bytes of a token", formats[which].token, formats[which].name));
    else
        TRY(check_size(op, kv, 3, "d_qk", d_qk, "q"));
    for (int i = 0; i < 2; i++)
        if (kv->shape[0] && kv->shape[i] > 1 && kv->stride[i] % unit)
            return fail(FMLA_INVALID_ARGUMENT,
                        "%s: %s: stride of dimension %d is %lld, must be a multiple of %lld in %s", op,
                        kv->name, i, (long long)kv->stride[i], (long long)unit, formats[which].name);
    if (which == FMLA_KV_FP8_584 && kv->shape[0] && kv->shape[1] > 1 && kv->stride[1] != 584)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: stride of dimension 1 is %lld, must be 584: a page of %s is in one piece", op,
                    kv->name, (long long)kv->stride[1], formats[which].name);
    if (!(extra & CHECK_SHAPE_ONLY) && kv->shape[0] && (uintptr_t)kv->data % (uintptr_t)unit)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: %s: data + byte_offset is not a multiple of %lld bytes as %s wants", op, kv->name,
                    (long long)unit, formats[which].name);
    cache->data = (const uint8_t *)(const void *)kv->data;
    cache->pages = kv->shape[0], cache->page_size = kv->shape[1];
    /* The stride of a dimension of one element may be anything, and is not multiplied. Of others check_tensor has seen
     * that no offset overflows. */
    if (cache->pages > 1) cache->page_bytes = kv->stride[0] * bytes;
    if (cache->page_size > 1) cache->slot_bytes = which == FMLA_KV_FP8_584 ? 576 : kv->stride[1] * bytes;
    return FMLA_OK;
}

/* The keys that are named in a cache. */
static fmla_status check_indices(const struct checked_tensor *indices, const struct checked_tensor *length,
                                 const struct sparse_decode_problem *p, const char *about,
                                 struct sparse_cache *cache, int64_t *topk)
{
    TRY(check_size(op, indices, 0, "b", p->b, "q"));
    TRY(check_size(op, indices, 1, "s_q", p->s_q, "q"));
    TRY(check_range(op, about, indices->shape[2], 0, INT32_MAX));
    if (length->name) TRY(check_size(op, length, 0, "b", p->b, "q"));
    cache->indices = (const int32_t *)(const void *)indices->data;
    memcpy(cache->indices_stride, indices->stride, sizeof cache->indices_stride);
    *topk = indices->shape[2];
    return FMLA_OK;
}

/* The tensors of a call, checked. */
struct tensors {
    struct checked_tensor q, kv, indices, length, sink, extra_kv, extra_indices, extra_length, out, lse;
};

static fmla_status check_tensors(const fmla_sparse_decode_args *args, unsigned extra, struct tensors *t,
                                 int *which)
{
    const unsigned i32 = ALLOW_I32 | extra;
    TRY(check_tensor(op, "q", args->q, 4, ALLOW_BF16 | ALLOW_FP16 | extra, &t->q));
    TRY(check_format(args, &t->q, which));
    const unsigned same = 1u << t->q.element, bytes = formats[*which].allow | extra;
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
static fmla_status check_sizes(const struct tensors *t, int which, unsigned extra,
                               struct sparse_decode_problem *p)
{
    const struct checked_tensor *q = &t->q, *out = &t->out, *lse = &t->lse;
    p->b = q->shape[0], p->s_q = q->shape[1], p->h_q = q->shape[2], p->d_qk = q->shape[3];
    p->d_v = out->shape[3];
    TRY(check_range(op, "q: b (dimension 0)", p->b, 0, MAX_BATCH));
    TRY(check_range(op, "q: s_q (dimension 1)", p->s_q, 1, INT32_MAX));
    TRY(check_range(op, "q: h_q (dimension 2)", p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: s_q · h_q (dimensions 1 and 2)", p->s_q * p->h_q, 1, INT32_MAX));
    TRY(check_range(op, "q: d_qk (dimension 3)", p->d_qk, 1, INT32_MAX));
    if (formats[which].d_qk) TRY(check_size(op, q, 3, "d_qk", formats[which].d_qk, formats[which].name));
    TRY(check_cache(&t->kv, which, p->d_qk, extra, &p->cache[0]));
    TRY(check_range(op, "out: d_v (dimension 3)", p->d_v, 1, p->d_qk));
    TRY(check_indices(&t->indices, &t->length, p, "indices: topk (dimension 2)", &p->cache[0],
                      &p->topk.topk));
    if (t->extra_kv.name) {
        TRY(check_cache(&t->extra_kv, which, p->d_qk, extra, &p->cache[1]));
        TRY(check_indices(&t->extra_indices, &t->extra_length, p, "extra_indices: extra_topk (dimension 2)",
                          &p->cache[1], &p->topk.extra_topk));
    }
    p->topk.length = (const int32_t *)(const void *)t->length.data;
    p->topk.extra_length = (const int32_t *)(const void *)t->extra_length.data;
    p->capacity = plan_topk_length(p->topk.topk, p->topk.extra_topk, p->topk.extra_topk);
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

static fmla_status check_scale(float scale)
{
    if (isfinite(scale)) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: softmax_scale: is %f, must be finite (0 = 1/sqrt(d_qk))", op,
                (double)scale);
}

/* The plan that the call brings; the problem is whole otherwise. */
static fmla_status check_given_plan(const fmla_sparse_decode_args *args, unsigned extra,
                                    const struct checked_tensor *rows, const struct checked_tensor *splits,
                                    struct sparse_decode_problem *p)
{
    if (p->batch_invariant) return FMLA_OK;
    if (args->plan) {
        if (p->device.type == FMLA_DEVICE_CPU) {
            const struct plan_header *plan = args->plan;
            TRY(check_plan(op, args->plan, args->plan_size, p->b));
            if (p->num_partitions && p->num_partitions != plan->num_partitions)
                return fail(FMLA_INVALID_ARGUMENT,
                            "%s: num_partitions: is %d, must be 0 or the %d of the plan", op,
                            p->num_partitions, plan->num_partitions);
        }
        p->plan = args->plan, p->plan_size = args->plan_size;
    }
    if (p->plan_in_tables) {
        p->partitions = (const struct plan_partition *)(const void *)rows->data;
        p->num_splits = (const int32_t *)(const void *)splits->data;
        if (p->device.type == FMLA_DEVICE_CPU && !extra)
            TRY(check_last_partition(op, p->partitions, p->num_partitions, p->b));
    }
    return FMLA_OK;
}

/* Everything but the workspace. `extra`: CHECK_SHAPE_ONLY where only a size is asked, else 0. */
static fmla_status check_sparse_decode(const fmla_sparse_decode_args *caller, fmla_sparse_decode_args *args,
                                       unsigned extra, struct sparse_decode_problem *p,
                                       const struct kernel **kernel)
{
    static const size_t sizes[] = {sizeof(fmla_sparse_decode_args), 0};
    struct checked_tensor rows, splits;
    struct tensors t;
    int which;
    TRY(check_struct(op, "args", caller, args, sizeof *args, sizes));
    TRY(check_tensors(args, extra, &t, &which));
    memset(p, 0, sizeof *p);
    TRY(check_sizes(&t, which, extra, p));
    TRY(check_result_rules(op, &t.sink, args->lse_empty, args->log_base, &p->rules));
    TRY(check_range(op, "batch_invariant", args->batch_invariant, 0, 1));
    TRY(check_range(op, "num_partitions", args->num_partitions, 0, MAX_PARTITIONS));
    TRY(check_tables(op, args->partitions, args->num_splits, args->plan, args->num_partitions, &t.q, extra,
                     &rows, &splits));
    TRY(check_scale(args->softmax_scale));

    p->element = t.q.element, p->device = t.q.device, p->format = formats[which].format;
    p->q = (const uint16_t *)(const void *)t.q.data;
    p->out = (uint16_t *)(void *)t.out.data;
    p->lse = (float *)(void *)t.lse.data;
    memcpy(p->q_stride, t.q.stride, sizeof p->q_stride);
    memcpy(p->out_stride, t.out.stride, sizeof p->out_stride);
    memcpy(p->lse_stride, t.lse.stride, sizeof p->lse_stride);
    p->scale = args->softmax_scale != 0.0f ? args->softmax_scale : (float)(1.0 / sqrt((double)p->d_qk));
    p->batch_invariant = args->batch_invariant;
    p->plan_in_tables = rows.name && !p->batch_invariant;
    p->num_partitions = p->plan_in_tables ? (int32_t)rows.shape[0] : args->num_partitions;
    p->stream = args->stream;
    const struct wanted wanted = {.operation = OP_SPARSE_DECODE,
                                  .device = t.q.device,
                                  .argument = "q",
                                  .elements = 1u << p->element,
                                  .d_qk = p->d_qk,
                                  .d_v = p->d_v,
                                  .sparse_decode = p,
                                  .formats = 1u << p->format};
    TRY(dispatch(&wanted, args->kernel, kernel));
    return check_given_plan(args, extra, &rows, &splits, p);
}

static fmla_status workspace_size(const struct kernel *kernel, const struct sparse_decode_problem *p,
                                  size_t *bytes, size_t *alignment)
{
    *bytes = 0, *alignment = 16;
    return kernel->sparse_decode_size(kernel, p, bytes, alignment);
}

fmla_status fmla_sparse_decode_workspace_size(const fmla_sparse_decode_args *caller, size_t *bytes,
                                              size_t *alignment)
{
    fmla_sparse_decode_args args;
    struct sparse_decode_problem p;
    const struct kernel *kernel;
    size_t needed, aligned;
    TRY(check_sparse_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    TRY(workspace_size(kernel, &p, &needed, &aligned));
    if (bytes) *bytes = needed;
    if (alignment) *alignment = aligned;
    return FMLA_OK;
}

fmla_status fmla_sparse_decode_kernel(const fmla_sparse_decode_args *caller, const char **name)
{
    fmla_sparse_decode_args args;
    struct sparse_decode_problem p;
    const struct kernel *kernel;
    if (!name) return fail(FMLA_INVALID_ARGUMENT, "%s: name: is NULL, must point to the answer", op);
    TRY(check_sparse_decode(caller, &args, CHECK_SHAPE_ONLY, &p, &kernel));
    *name = kernel->name;
    return FMLA_OK;
}

fmla_status fmla_sparse_decode(const fmla_sparse_decode_args *caller)
{
    fmla_sparse_decode_args args;
    struct sparse_decode_problem p;
    const struct kernel *kernel;
    size_t needed, alignment;
    TRY(check_sparse_decode(caller, &args, 0, &p, &kernel));
    TRY(workspace_size(kernel, &p, &needed, &alignment));
    TRY(check_buffer(op, "workspace", args.workspace, args.workspace_size, needed, alignment));
    p.workspace = args.workspace, p.workspace_size = args.workspace_size;
    return kernel->sparse_decode(kernel, &p);
}
