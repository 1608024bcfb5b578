/* SPDX-License-Identifier: MIT */
#include "prefill_batch.h"

#include "batch.h"

#include "tokens.h"

#include <stdlib.h>
#include <string.h>

static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, int32 = {FMLA_TYPE_INT, 32, 1},
                        fp32 = {FMLA_TYPE_FLOAT, 32, 1};

static int64_t pages_of(const struct prefill_shape *s)
{
    return s->page_size ? (s->s_kv + s->page_size - 1) / s->page_size : 0;
}

/* Elements of a token as kv's last dimension has them. */
static int64_t token_size(const struct prefill_shape *s)
{
    return sparse_is_bytes(s->format) ? tokens_size(s->format) : s->d_qk;
}

double prefill_batch_bytes(const struct prefill_shape *s)
{
    const double rows = (double)s->s_q * (double)s->h_q;
    const double keys = ((double)s->s_kv + (double)s->page_size) * (double)s->h_kv;
    return rows * (2.0 * (double)(s->d_qk + SPARSE_D_V) + 8.0) +
           keys * (double)token_size(s) * (sparse_is_bytes(s->format) ? 1.0 : 2.0) +
           4.0 * (double)s->s_q * (double)s->h_kv * (double)s->topk;
}

/* Keys of kv, each once, in any order; what is more than those names none. */
static void draw_list(const struct prefill_shape *s, int32_t *order, int32_t *list,
                      struct random_state *random)
{
    const int64_t slots = s->page_size ? pages_of(s) * s->page_size : s->s_kv;
    const int32_t none[] = {-1, (int32_t)slots, 2147480000};
    for (int64_t i = 0; i < s->topk; i++) {
        list[i] = none[i % 3];
        if (i >= s->s_kv || (s->holes && !random_between(random, 0, 7))) continue;
        const int64_t j = random_between(random, i, s->s_kv - 1);
        list[i] = order[j];
        order[j] = order[i], order[i] = list[i];
    }
}

static bool make_lists(struct prefill_batch *batch, const struct prefill_shape *s,
                       struct random_state *random, struct fault *fault)
{
    int32_t *order = malloc((size_t)(s->s_kv + 1) * sizeof *order);
    if (!order) return fault_set(fault, "no memory for the lists");
    for (int64_t i = 0; i < s->s_kv; i++) order[i] = (int32_t)i;
    for (int64_t l = 0; l < s->s_q * s->h_kv; l++)
        draw_list(s, order, (int32_t *)batch->indices.data + l * s->topk, random);
    for (int64_t t = 0; t < s->s_q; t++)
        ((int32_t *)batch->length.data)[t] = (int32_t)random_between(random, 0, s->topk);
    free(order);
    return true;
}

static void make_shapes(struct prefill_batch *batch, const struct prefill_shape *s)
{
    const int64_t q[3] = {s->s_q, s->h_q, s->d_qk}, out[3] = {s->s_q, s->h_q, SPARSE_D_V};
    const int64_t lists[3] = {s->s_q, s->h_kv, s->topk}, flat[4] = {s->s_kv, s->h_kv, s->d_qk, 0};
    const int64_t paged[4] = {pages_of(s), s->page_size, 1, token_size(s)};
    memcpy(batch->q_shape, q, sizeof q), memcpy(batch->out_shape, out, sizeof out);
    memcpy(batch->row_shape, q, sizeof batch->row_shape), memcpy(batch->indices_shape, lists, sizeof lists);
    memcpy(batch->kv_shape, s->page_size ? paged : flat, sizeof flat);
    batch->s_q[0] = s->s_q, batch->h_q[0] = s->h_q;
}

static void fill(struct prefill_batch *batch, const struct prefill_shape *s, struct random_state *random)
{
    const float of_q = (float)random_unit(random) * 0.1f - 0.05f,
                of_kv = (float)random_unit(random) * 0.1f - 0.05f;
    batch_fill_around(of_q, batch->q.data, bf16, s->s_q * s->h_q * s->d_qk, s->d_qk, random);
    if (sparse_is_bytes(s->format))
        sparse_fill_bytes(s->format, of_kv, &batch->kv, random);
    else
        batch_fill_around(of_kv, batch->kv.data, bf16, prefill_keys(&batch->kv) * s->h_kv * s->d_qk, s->d_qk,
                          random);
    for (int64_t h = 0; h < s->h_q; h++) ((float *)batch->sink.data)[h] = random_normal(random);
}

static void make_args(struct prefill_batch *batch, const struct prefill_shape *s)
{
    fmla_sparse_prefill_args *args = &batch->args;
    *args = FMLA_INIT(fmla_sparse_prefill_args);
    args->q = &batch->q, args->kv = &batch->kv, args->indices = &batch->indices;
    if (s->varlen) args->topk_length = &batch->length;
    if (s->sink) args->attn_sink = &batch->sink;
    args->out = &batch->out, args->max_logits = &batch->max_logits, args->lse = &batch->lse;
    args->kv_format = s->format, args->softmax_scale = PREFILL_SCALE;
}

bool prefill_batch_make(struct prefill_batch *batch, const struct prefill_shape *s, struct fault *fault)
{
    struct random_state random = {s->seed + 2025};
    memset(batch, 0, sizeof *batch);
    if ((double)s->s_kv + (double)s->page_size > INT32_MAX)
        return fault_set(fault, "%lld keys are more than indices count", (long long)s->s_kv);
    make_shapes(batch, s);
    size_t out_bytes, row_bytes;
    batch->q = sparse_tensor(bf16, 3, batch->q_shape, NULL);
    batch->kv = sparse_tensor(sparse_is_bytes(s->format) ? (fmla_dtype){FMLA_TYPE_UINT, 8, 1} : bf16,
                              s->page_size ? 4 : 3, batch->kv_shape, NULL);
    batch->indices = sparse_tensor(int32, 3, batch->indices_shape, NULL);
    batch->length = sparse_tensor(int32, 1, batch->s_q, NULL);
    batch->sink = sparse_tensor(fp32, 1, batch->h_q, NULL);
    batch->out = sparse_tensor(bf16, 3, batch->out_shape, &out_bytes);
    batch->max_logits = sparse_tensor(fp32, 2, batch->row_shape, NULL);
    batch->lse = sparse_tensor(fp32, 2, batch->row_shape, &row_bytes);
    if (!batch->indices.data) return sparse_no_indices(&batch->indices, fault);
    if (!batch->q.data || !batch->kv.data || !batch->length.data || !batch->sink.data || !batch->out.data ||
        !batch->max_logits.data || !batch->lse.data)
        return fault_set(fault, "no memory for %.0f bytes of tensors", prefill_batch_bytes(s));
    if (!make_lists(batch, s, &random, fault)) return false;
    fill(batch, s, &random);
    memset(batch->out.data, 0xff, out_bytes); /* what a kernel fails to write must not pass */
    memset(batch->max_logits.data, 0xff, row_bytes), memset(batch->lse.data, 0xff, row_bytes);
    make_args(batch, s);
    return true;
}

void prefill_batch_free(struct prefill_batch *batch)
{
    free(batch->q.data), free(batch->kv.data), free(batch->indices.data), free(batch->length.data);
    free(batch->sink.data), free(batch->out.data), free(batch->max_logits.data), free(batch->lse.data);
    free(batch->args.workspace);
    memset(batch, 0, sizeof *batch);
}

/* ---- A call ---------------------------------------------------------------------------------- */

fmla_status prefill_call_workspace(fmla_sparse_prefill_args *args)
{
    size_t bytes = 0, alignment = 1;
    args->workspace = NULL, args->workspace_size = 0;
    const fmla_status status = fmla_sparse_prefill_workspace_size(args, &bytes, &alignment);
    if (status != FMLA_OK) return status;
    const size_t unit = alignment > sizeof(void *) ? alignment : sizeof(void *);
    args->workspace = aligned_alloc(unit, (bytes / unit + 1) * unit);
    args->workspace_size = bytes;
    return FMLA_OK;
}

int64_t prefill_keys(const fmla_tensor *kv)
{
    return kv->ndim == 4 ? kv->shape[0] * kv->shape[1] : kv->shape[0];
}

int64_t prefill_count(const fmla_sparse_prefill_args *args, int64_t token)
{
    const int64_t topk = args->indices->shape[2];
    const int64_t count = args->topk_length ? ((const int32_t *)args->topk_length->data)[token] : topk;
    return count < 0 ? 0 : count > topk ? topk : count;
}

struct prefill_work prefill_work(const fmla_sparse_prefill_args *args)
{
    const int64_t *q = args->q->shape, *lists = args->indices->shape;
    const int64_t slots = prefill_keys(args->kv);
    const fmla_tensor *kv = args->kv;
    const double rows = (double)q[0] * (double)q[1], row = (double)(q[2] + args->out->shape[2]);
    struct prefill_work work = {0};
    for (int64_t l = 0; l < lists[0] * lists[1]; l++) {
        const int32_t *list = (const int32_t *)args->indices->data + l * lists[2];
        const int64_t count = prefill_count(args, l / lists[1]);
        for (int64_t i = 0; i < count; i++) work.keys += list[i] >= 0 && list[i] < slots;
    }
    const double heads = (double)lists[1], all = (double)slots * heads;
    const int64_t token_bytes = kv->shape[kv->ndim - 1] * (kv->dtype.bits / 8);
    work.flop = heads > 0.0 ? 2.0 * work.keys * (double)q[1] / heads * row : 0.0;
    work.bytes = 2.0 * rows * row + (work.keys < all ? work.keys : all) * (double)token_bytes +
                 4.0 * (double)lists[0] * heads * (double)lists[2];
    if (args->topk_length) work.bytes += 4.0 * (double)lists[0];
    work.bytes += 4.0 * rows * ((args->max_logits ? 1.0 : 0.0) + (args->lse ? 1.0 : 0.0));
    return work;
}
