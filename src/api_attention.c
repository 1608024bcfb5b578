/* SPDX-License-Identifier: MIT
 *
 * The public functions of attention: dense decode, sparse decode, sparse prefill, dense MHA. They check what
 * the descriptors cannot express and build the problem for the back ends.
 */
#include "api.h"

#include <string.h>

/* A public call: its arguments, the checked tensors, the problem, and the kernel. */
struct call {
    union {
        fmla_dense_decode_args dense;
        fmla_sparse_decode_args sparse;
        fmla_sparse_prefill_args prefill;
        fmla_mha_forward_args mha;
    } args;
    struct checked_call checked;
    struct attention_problem problem;
    struct taken taken;
};

/* Tensor `member` of operation `op`, for a struct call *c. */
#define OF(op, member) (&c->checked.tensors[TENSOR_##op##_##member])

/* The members that all four argument structs have. */
struct common {
    void *workspace;
    size_t workspace_size;
    void *stream;
    float softmax_scale;
    int32_t lse_empty, log_base;
};
#define COMMON(args)                                                                                         \
    ((struct common){(args)->workspace, (args)->workspace_size, (args)->stream, (args)->softmax_scale,       \
                     (args)->lse_empty, (args)->log_base})

/* ---- The common part ------------------------------------------------------------------------- */

static fmla_status fill(struct call *c, const struct common *common, const struct checked_tensor *q,
                        const struct checked_tensor *sink, const struct checked_tensor *out,
                        const struct checked_tensor *lse)
{
    const char *op = c->checked.operation;
    const int64_t *size = c->checked.size;
    struct attention_problem *p = &c->problem;
    p->b = size[DIM_b], p->s_q = size[DIM_s_q], p->h_q = size[DIM_h_q], p->h_kv = size[DIM_h_kv];
    p->d_qk = size[DIM_d_qk], p->d_v = size[DIM_d_v];
    TRY(check_result_rules(op, sink, common->lse_empty, common->log_base, &p->rules));
    TRY(check_scale(op, common->softmax_scale, p->d_qk, &p->scale));
    p->element = q->element, p->device = q->device;
    p->format = c->checked.format            ? c->checked.format->format
                : q->element == ELEMENT_BF16 ? KV_BF16
                                             : KV_FP16;
    p->keys[0].format = p->keys[1].format = p->format;
    p->q = q->data, p->out = out->data, p->lse = lse->data;
    memcpy(p->q_stride, q->stride, sizeof p->q_stride);
    memcpy(p->out_stride, out->stride, sizeof p->out_stride);
    memcpy(p->lse_stride, lse->stride, sizeof p->lse_stride);
    p->stream = common->stream;
    c->taken = (struct taken){.operation = op,
                              .problem.attention = p,
                              .workspace_of_problem = &p->workspace,
                              .workspace = common->workspace,
                              .workspace_size = common->workspace_size};
    return FMLA_OK;
}

/* Checks d_v, because the values are the first d_v elements of their keys. */
static fmla_status check_latent(const struct call *c)
{
    return check_range(c->checked.operation,
                       c->checked.bound_at[DIM_d_v] == 3 ? "out: d_v (dimension 3)"
                                                         : "out: d_v (dimension 2)",
                       c->checked.size[DIM_d_v], 1, c->checked.size[DIM_d_qk]);
}

/* Fills `keys` from the pages of a cache. */
static void fill_pages(const struct cache_format *format, const struct checked_tensor *cache,
                       struct key_source *keys)
{
    keys->format = format->format;
    keys->pages = cache->shape[0], keys->page_size = cache->shape[1];
    keys->k.data = cache->data;
    cache_steps(format, cache, &keys->k.page_bytes, &keys->k.slot_bytes);
    keys->v = keys->k;
}

/* Fills `keys` from lists of keys, whose lengths may be absent. */
static void fill_lists(const struct checked_tensor *indices, const struct checked_tensor *lengths,
                       struct key_source *keys)
{
    keys->kind = KEYS_LISTED;
    keys->table = indices->data;
    keys->table_stride[0] = indices->stride[0], keys->table_stride[1] = indices->stride[1];
    keys->lengths = lengths->data;
    keys->capacity = indices->shape[2];
}

/* Checks that the rows of a request, s_q · h_q, fit 32 bits. */
static fmla_status check_rows_of_request(const struct call *c)
{
    return check_range(c->checked.operation, "q: s_q · h_q (dimensions 1 and 2)",
                       c->checked.size[DIM_s_q] * c->checked.size[DIM_h_q], 1, INT32_MAX);
}

/* Takes the call's plan, contiguous or in tables; the rest of the problem is complete. The contents are read
 * only on the CPU. Tables of any plan end with the last request of the batch, so tables of another batch
 * are detected. */
static fmla_status take_plan(struct call *c, const void *plan, size_t plan_size,
                             const struct checked_tensor *rows, const struct checked_tensor *splits)
{
    const char *op = c->checked.operation;
    struct attention_problem *p = &c->problem;
    const bool on_cpu = p->device.device_type == FMLA_DEVICE_CPU;
    if (p->splitting != SPLIT_BY_PLAN) return FMLA_OK;
    if (plan && on_cpu) {
        const struct plan_header *header = plan;
        TRY(check_plan(op, plan, plan_size, p->b));
        if (p->num_partitions && p->num_partitions != header->num_partitions)
            return fail(FMLA_INVALID_ARGUMENT, "%s: num_partitions: is %d, must be 0 or the %d of the plan",
                        op, p->num_partitions, header->num_partitions);
    }
    p->plan = plan, p->plan_size = plan_size;
    if (!p->plan_in_tables) return FMLA_OK;
    p->partitions = rows->data, p->num_splits = splits->data;
    if (!on_cpu || c->checked.shape_only) return FMLA_OK;
    const int32_t end = p->partitions[p->num_partitions - 1].end_request;
    if (end == p->b - 1) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT,
                "%s: partitions: end with request %d, must end with request %lld, the last of q's batch", op,
                end, (long long)p->b - 1);
}

/* Fills how requests are split, as far as the choice of a kernel depends on it. */
static fmla_status fill_splitting(struct call *c, int32_t batch_invariant, int32_t num_partitions,
                                  const void *plan, const struct checked_tensor *rows,
                                  const struct checked_tensor *splits)
{
    struct attention_problem *p = &c->problem;
    TRY(check_tables(&c->checked, rows, splits, plan, num_partitions, p->b));
    p->splitting = batch_invariant ? SPLIT_BATCH_INVARIANT : SPLIT_BY_PLAN;
    p->plan_in_tables = rows->name && p->splitting == SPLIT_BY_PLAN;
    p->num_partitions = p->plan_in_tables ? (int32_t)rows->shape[0] : num_partitions;
    return FMLA_OK;
}

static fmla_status choose(struct call *c, const char *name)
{
    const struct attention_problem *p = &c->problem;
    const struct wanted wanted = {.operation = p->operation,
                                  .device = p->device,
                                  .argument = "q",
                                  .values = p->keys[0].values_apart ? "v" : NULL,
                                  .elements = 1u << p->element,
                                  .d_qk = p->d_qk,
                                  .d_v = p->d_v,
                                  .formats = c->checked.format ? 1u << p->format : 0,
                                  .extra_formats = c->checked.second ? 1u << p->keys[1].format : 0,
                                  .products = p->operation == OP_DENSE_DECODE ? 1u << p->products : 0,
                                  .problem.attention = p};
    return dispatch(&wanted, name, &c->taken.kernel);
}

/* Fills the pages of dense decode. Keys in the type of q may have several heads, byte caches have one. */
static fmla_status fill_dense_cache(struct call *c, const struct checked_tensor *cache,
                                    struct key_source *keys)
{
    const struct checked_tensor *scale = OF(dense_decode, kv_scale);
    fill_pages(c->checked.format, cache, keys);
    if (!c->checked.format->token) {
        const uint64_t bytes = sizeof(uint16_t); /* uint64_t because an unused stride may wrap */
        keys->k = (struct key_view){cache->data, (int64_t)((uint64_t)cache->stride[0] * bytes),
                                    (int64_t)((uint64_t)cache->stride[1] * bytes),
                                    (int64_t)((uint64_t)cache->stride[2] * bytes)};
        keys->v = keys->k;
    } else {
        TRY(check_range(c->checked.operation, "kv_cache: h_kv (dimension 2)", cache->shape[2], 1, 1));
    }
    if (scale->name && c->problem.format != KV_FP8_576)
        return fail(FMLA_INVALID_ARGUMENT, "%s: kv_scale: is a tensor, must be NULL: %s has no cache scale",
                    c->checked.operation, c->checked.format->name);
    c->problem.kv_scale = scale->data;
    return FMLA_OK;
}

/* Fills the queries. With FP8 products they are either values, to be quantised by the kernel, or codes. */
static fmla_status fill_queries(struct call *c)
{
    const char *op = c->checked.operation;
    const int32_t products = c->checked.products;
    const struct checked_tensor *q = OF(dense_decode, q), *scale = OF(dense_decode, q_scale);
    struct attention_problem *p = &c->problem;
    if (products == FMLA_PRODUCTS_FP8 && p->format != KV_FP8_576 && p->format != KV_FP8_656)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: products: is FMLA_PRODUCTS_FP8 (1), must be FMLA_PRODUCTS_BF16 (0) with %s; FP8 "
                    "products need FMLA_KV_FP8_656 or FMLA_KV_FP8_576",
                    op, c->checked.format->name);
    if (q->of_bytes && p->format == KV_FP8_656)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: q: has codes of one byte, must be bfloat16 with FMLA_KV_FP8_656, where the last 64 "
                    "values of a query are not quantised",
                    op);
    if (scale->name && !q->of_bytes)
        return fail(FMLA_INVALID_ARGUMENT, "%s: q_scale: is a tensor, must be NULL: q has values, not codes",
                    op);
    p->products = products;
    if (q->of_bytes) p->q = NULL, p->q_codes = q->data, p->q_scale = scale->data;
    return FMLA_OK;
}

/* ---- The operations -------------------------------------------------------------------------- */

static fmla_status prepare_dense_decode(struct call *c)
{
    static const char op[] = "dense_decode";
    const fmla_dense_decode_args *args = &c->args.dense;
    const struct common common = COMMON(args);
    const struct checked_tensor *kv = OF(dense_decode, kv_cache), *table = OF(dense_decode, block_table);
    struct attention_problem *p = &c->problem;
    struct key_source *keys = &p->keys[0];
    TRY(check_rows_of_request(c));
    TRY(check_latent(c));
    TRY(fill(c, &common, OF(dense_decode, q), OF(dense_decode, attn_sink), OF(dense_decode, out),
             OF(dense_decode, lse)));
    TRY(check_heads(op, "q", p->h_q, p->h_kv));
    keys->kind = KEYS_PAGED;
    TRY(fill_dense_cache(c, kv, keys));
    TRY(fill_queries(c));
    if (!table->name && keys->pages < p->b)
        return fail(
            FMLA_INVALID_ARGUMENT,
            "%s: kv_cache: pages (dimension 0) is %lld, must be at least the %lld requests of q where "
            "there is no block_table",
            op, (long long)keys->pages, (long long)p->b);
    p->capacity = (table->name ? table->shape[1] : 1) * keys->page_size; /* < 2^62 */
    if (p->capacity > INT32_MAX) p->capacity = INT32_MAX;                /* no length exceeds it */
    keys->table = table->name ? table->data : NULL, keys->table_stride[0] = table->stride[0];
    keys->lengths = OF(dense_decode, seqlens)->data;
    keys->capacity = p->capacity;
    p->causal = args->causal;
    const struct checked_tensor *rows = OF(dense_decode, partitions), *splits = OF(dense_decode, num_splits);
    TRY(fill_splitting(c, args->batch_invariant, args->num_partitions, args->plan, rows, splits));
    TRY(choose(c, args->kernel));
    return take_plan(c, args->plan, args->plan_size, rows, splits);
}

static fmla_status check_extra(const struct call *c)
{
    static const char op[] = "sparse_decode";
    const bool cache = OF(sparse_decode, extra_kv_cache)->name, list = OF(sparse_decode, extra_indices)->name;
    if (cache != list)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be given with %s", op,
                    cache ? "extra_indices" : "extra_kv_cache", cache ? "extra_kv_cache" : "extra_indices");
    if (!cache && OF(sparse_decode, extra_topk_length)->name)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: extra_topk_length: is given, must be NULL without extra_kv_cache", op);
    if (!cache && c->args.sparse.extra_kv_format)
        return fail(FMLA_INVALID_ARGUMENT, "%s: extra_kv_format: is %d, must be 0 without extra_kv_cache", op,
                    c->args.sparse.extra_kv_format);
    return FMLA_OK;
}

static fmla_status prepare_sparse_decode(struct call *c)
{
    const fmla_sparse_decode_args *args = &c->args.sparse;
    const struct common common = COMMON(args);
    struct attention_problem *p = &c->problem;
    TRY(check_extra(c));
    TRY(check_rows_of_request(c));
    TRY(check_latent(c));
    TRY(fill(c, &common, OF(sparse_decode, q), OF(sparse_decode, attn_sink), OF(sparse_decode, out),
             OF(sparse_decode, lse)));
    p->h_kv = 1;
    fill_pages(c->checked.format, OF(sparse_decode, kv_cache), &p->keys[0]);
    fill_lists(OF(sparse_decode, indices), OF(sparse_decode, topk_length), &p->keys[0]);
    if (OF(sparse_decode, extra_kv_cache)->name) {
        fill_pages(c->checked.second, OF(sparse_decode, extra_kv_cache), &p->keys[1]);
        fill_lists(OF(sparse_decode, extra_indices), OF(sparse_decode, extra_topk_length), &p->keys[1]);
    }
    p->capacity = plan_topk_length(p->keys[0].capacity, p->keys[1].capacity, p->keys[1].capacity);
    const struct checked_tensor *rows = OF(sparse_decode, partitions),
                                *splits = OF(sparse_decode, num_splits);
    TRY(fill_splitting(c, args->batch_invariant, args->num_partitions, args->plan, rows, splits));
    TRY(choose(c, args->kernel));
    return take_plan(c, args->plan, args->plan_size, rows, splits);
}

/* Every token becomes a request of one token. Keys outside pages become pages of one slot. */
static fmla_status prepare_sparse_prefill(struct call *c)
{
    const fmla_sparse_prefill_args *args = &c->args.prefill;
    const struct common common = COMMON(args);
    const struct checked_tensor *q = OF(sparse_prefill, q), *out = OF(sparse_prefill, out),
                                *kv = OF(sparse_prefill, kv), *indices = OF(sparse_prefill, indices),
                                *max = OF(sparse_prefill, max_logits), *lse = OF(sparse_prefill, lse);
    struct attention_problem *p = &c->problem;
    struct key_source *keys = &p->keys[0];
    TRY(check_latent(c));
    TRY(fill(c, &common, q, OF(sparse_prefill, attn_sink), out, lse));
    p->b = c->checked.size[DIM_s_q], p->s_q = 1;
    if (c->checked.flat) {
        TRY(check_heads(c->checked.operation, "q", p->h_q, p->h_kv));
        keys->k.data = kv->data;
        keys->pages = kv->shape[0], keys->page_size = 1;
        /* As for pages, the stride of a dimension of one element is not multiplied. */
        if (kv->shape[0] > 1) keys->k.page_bytes = kv->stride[0] * (int64_t)sizeof(uint16_t);
        if (p->h_kv > 1) keys->k.head_bytes = kv->stride[1] * (int64_t)sizeof(uint16_t);
        keys->v = keys->k;
    } else {
        fill_pages(c->checked.format, kv, keys);
    }
    fill_lists(indices, OF(sparse_prefill, topk_length), keys);
    keys->table_stride[1] = 0, keys->table_stride[2] = indices->stride[1];
    p->capacity = keys->capacity, p->splitting = SPLIT_EVENLY;
    p->q_stride[0] = q->stride[0], p->q_stride[1] = 0, p->q_stride[2] = q->stride[1];
    p->out_stride[0] = out->stride[0], p->out_stride[1] = 0, p->out_stride[2] = out->stride[1];
    p->max_logits = max->data;
    p->max_stride[0] = max->stride[0], p->max_stride[1] = 1;
    p->lse_stride[0] = lse->stride[0], p->lse_stride[1] = 1;
    return choose(c, args->kernel);
}

/* Returns the view of a tensor of keys or values. A stride that is never used may wrap. */
static struct key_view view_of(const struct call *c, const struct checked_tensor *tensor)
{
    const bool flat = c->checked.flat;
    const uint64_t bytes = sizeof(uint16_t);
    return (struct key_view){tensor->data, flat ? 0 : (int64_t)((uint64_t)tensor->stride[0] * bytes),
                             (int64_t)((uint64_t)tensor->stride[1 - flat] * bytes),
                             (int64_t)((uint64_t)tensor->stride[2 - flat] * bytes)};
}

/* Keys and values are in pages without a table: one page per request, or one page for all if the call is
 * flat. */
static fmla_status prepare_mha_forward(struct call *c)
{
    const fmla_mha_forward_args *args = &c->args.mha;
    const struct common common = COMMON(args);
    const struct checked_tensor *q = OF(mha_forward, q), *k = OF(mha_forward, k), *v = OF(mha_forward, v),
                                *out = OF(mha_forward, out), *lse = OF(mha_forward, lse);
    const int64_t *size = c->checked.size;
    struct attention_problem *p = &c->problem;
    struct key_source *keys = &p->keys[0];
    TRY(check_starts(&c->checked, "cu_seqlens_q", OF(mha_forward, cu_seqlens_q)));
    TRY(check_starts(&c->checked, "cu_seqlens_k", OF(mha_forward, cu_seqlens_k)));
    TRY(check_used(&c->checked, OF(mha_forward, seqused_q)));
    TRY(check_used(&c->checked, OF(mha_forward, seqused_k)));
    TRY(fill(c, &common, q, OF(mha_forward, attn_sink), out, lse));
    TRY(check_heads(c->checked.operation, "q", p->h_q, p->h_kv));
    keys->kind = KEYS_PAGED;
    p->ragged_q.used = OF(mha_forward, seqused_q)->data, p->ragged_k.used = OF(mha_forward, seqused_k)->data;
    p->has_used = OF(mha_forward, seqused_q)->name || OF(mha_forward, seqused_k)->name;
    if (c->checked.flat) {
        p->b = size[DIM_splits] - 1;
        p->ragged_q.starts = OF(mha_forward, cu_seqlens_q)->data, p->ragged_q.tokens = size[DIM_tokens_q];
        p->ragged_k.starts = OF(mha_forward, cu_seqlens_k)->data, p->ragged_k.tokens = size[DIM_tokens_k];
        p->s_q = args->max_s_q && args->max_s_q < size[DIM_tokens_q] ? args->max_s_q : size[DIM_tokens_q];
        memmove(p->q_stride + 1, p->q_stride, sizeof p->q_stride - sizeof *p->q_stride);
        memmove(p->out_stride + 1, p->out_stride, sizeof p->out_stride - sizeof *p->out_stride);
        p->q_stride[0] = p->out_stride[0] = 0;
        p->lse_stride[0] = 0, p->lse_stride[1] = lse->stride[0];
    }
    keys->pages = c->checked.flat ? 1 : p->b;
    keys->page_size = keys->capacity = p->capacity = size[c->checked.flat ? DIM_tokens_k : DIM_s_k];
    keys->k = view_of(c, k), keys->v = view_of(c, v), keys->values_apart = true;
    if (c->checked.flat && args->max_s_k && args->max_s_k < p->capacity) p->capacity = args->max_s_k;
    p->causal = args->causal;
    p->splitting = SPLIT_BY_LENGTHS;
    p->batch_dependent = args->batch_dependent, p->mha_splits = args->num_splits, p->max_s_q = args->max_s_q;
    return choose(c, args->kernel);
}

/* Checks a call and fills everything except the workspace. */
static fmla_status prepare(enum operation operation, const void *caller, bool shape_only, struct call *c)
{
    TRY(check_call(operation, caller, &c->args, shape_only, &c->checked));
    clear_struct(&c->problem, sizeof c->problem);
    c->problem.operation = operation;
    return operation == OP_DENSE_DECODE    ? prepare_dense_decode(c)
           : operation == OP_SPARSE_DECODE ? prepare_sparse_decode(c)
           : operation == OP_MHA_FORWARD   ? prepare_mha_forward(c)
                                           : prepare_sparse_prefill(c);
}

/* ---- The public functions -------------------------------------------------------------------- */

/* The bound is that of a plan made inside the call with as many partitions as the given plan has. */
static void bound(struct call *c)
{
    struct attention_problem *p = &c->problem;
    const struct plan_header *header = p->plan; /* in host memory, and already checked */
    if (header && p->device.device_type == FMLA_DEVICE_CPU) p->num_partitions = header->num_partitions;
    p->plan = NULL, p->plan_in_tables = false, p->bound = true;
}

PUBLIC_FUNCTIONS(dense_decode, OP_DENSE_DECODE)
PUBLIC_FUNCTIONS(sparse_decode, OP_SPARSE_DECODE)
PUBLIC_FUNCTIONS(sparse_prefill, OP_SPARSE_PREFILL)
PUBLIC_FUNCTIONS(mha_forward, OP_MHA_FORWARD)
