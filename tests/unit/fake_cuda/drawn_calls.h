/* SPDX-License-Identifier: MIT
 *
 * Calls of drawn shapes, of the three operations that have a workspace: what a shape is, a shape by lot, the call of a shape.
 */
#ifndef FMLA_DRAWN_CALLS_H
#define FMLA_DRAWN_CALLS_H

#include "draws.h"

#include "plan_call.h"

enum { MOST_ELEMENTS = 50 /* bits: tensors stay far below the 2^63 bytes that are allowed */ };

/* Less of `x`, until x · others has at most so many bits. */
static inline int64_t draw_fit(int64_t x, double others)
{
    while (x > 0 && (double)x * others > (double)(INT64_C(1) << MOST_ELEMENTS)) x /= 2;
    return x;
}

/* What is drawn of a plan: none, a plan in one piece, or its tables. */
enum drawn_plan { PLAN_NONE, PLAN_WHOLE, PLAN_TABLES };

struct drawn_options {
    enum drawn_plan plan;
    int32_t num_partitions, batch_invariant;
    bool odd, lse, sink;
};

static inline struct drawn_options draw_options(void)
{
    const int64_t plan = draw_below(4), partitions = draw_below(8);
    return (struct drawn_options){.plan = plan < 2    ? PLAN_NONE
                                          : plan == 2 ? PLAN_WHOLE
                                                      : PLAN_TABLES,
                                  .num_partitions = partitions < 6 ? 0 : (int32_t)draw_size(65536),
                                  .batch_invariant = draw_one_in(8),
                                  .odd = draw_one_in(8),
                                  .lse = draw_one_in(2),
                                  .sink = draw_one_in(2)};
}

/* Tokens and heads of a request: those that models have, and any. */
static inline void draw_heads(int64_t *s_q, int64_t *h_q)
{
    *h_q = DRAW_OF(1 << 20, 1, 2, 8, 15, 16, 17, 32, 33, 48, 63, 64, 65, 96, 127, 128, 128, 129, 192, 256);
    *s_q = DRAW_OF(1 << 12, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16);
    if (*s_q * *h_q > INT32_MAX) *s_q = INT32_MAX / *h_q;
}

/* ---- Sparse decode ----------------------------------------------------------------------------- */

struct sparse_shape {
    int64_t b, s_q, h_q, topk, extra_topk, page_size;
    int32_t format; /* FMLA_KV_… */
    bool extra, lengths, extra_lengths, fp16, wide;
    struct drawn_options options;
};

struct drawn_sparse {
    fmla_sparse_decode_args args;
    struct plan_call plan; /* the one that the call is given */
    size_t bytes;          /* of the workspace, as answered */
    struct held q, kv, indices, length, extra_kv, extra_indices, extra_length, sink, out, lse, rows, splits;
};

static inline struct sparse_shape draw_sparse(int64_t sms)
{
    struct sparse_shape s = {.format = (int32_t)(1 + draw_below(4)), .options = draw_options()};
    draw_heads(&s.s_q, &s.h_q);
    s.fp16 = s.format == FMLA_KV_FP16 || (s.format >= FMLA_KV_FP8_656 && draw_one_in(4));
    s.wide = s.format == FMLA_KV_FP8_656 || (s.format != FMLA_KV_FP8_584 && draw_one_in(2));
    s.topk = draw_one_in(10) ? 0 : DRAW_OF(INT32_MAX, 1, 63, 64, 65, 128, 192, 512, 1024, 2048, 2049, 4096);
    s.extra = draw_one_in(3);
    if (s.extra) s.extra_topk = draw_one_in(6) ? 0 : DRAW_OF(INT32_MAX, 1, 64, 70, 128, 512, 1024, 8192);
    const int64_t tile = draw_one_in(2) ? 16 : 64;
    s.b = draw_one_in(3) ? draw_size(1 << 20) - draw_one_in(8)
                         : draw_near_sms(sms, s.s_q * ((s.h_q + tile - 1) / tile), 1 << 20);
    s.b = draw_fit(s.b, (double)s.s_q * (double)(s.h_q * 576 + s.topk + s.extra_topk));
    s.page_size = DRAW_OF(1 << 16, 1, 2, 64, 64, 64, 61, 128);
    s.lengths = draw_one_in(2), s.extra_lengths = s.extra && draw_one_in(2);
    return s;
}

/* The plan, or its tables, of the call that `plan` is for, if it has one. */
static inline void plan_of_call(const struct drawn_options *options, struct plan_call *plan, int64_t b,
                                struct held *rows, struct held *splits, const void **whole, size_t *bytes)
{
    int32_t partitions = 0;
    *whole = NULL, *bytes = 0;
    if (options->plan == PLAN_WHOLE && draw_device.device_type == FMLA_DEVICE_CUDA) {
        *whole = region(12);
        CHECK(plan_call_size(plan, bytes) == FMLA_OK, "%s", fmla_last_error());
    } else if (options->plan == PLAN_TABLES) {
        CHECK(plan_call_partitions(plan, &partitions) == FMLA_OK, "%s", fmla_last_error());
        REGION(rows, 13, i32, 2, partitions, FMLA_PARTITION_FIELDS);
        REGION(splits, 14, i32, 1, b + 1);
    }
}

static inline void sparse_of_shape(struct drawn_sparse *c, const struct sparse_shape *s, fmla_device device)
{
    const int64_t d_qk = s->wide ? 576 : 512;
    const bool bytes = s->format >= FMLA_KV_FP8_656, pieces = s->format == FMLA_KV_FP8_584;
    const int64_t token = s->format == FMLA_KV_FP8_656 ? 656 : pieces ? 584 : d_qk;
    const fmla_dtype type = s->fp16 ? fp16 : bf16, cached = bytes ? u8 : type;
    const bool odd = s->options.odd;
    memset(c, 0, sizeof *c), draw_device = device;
    DRAW_TENSOR(&c->q, 0, type, 4, odd, s->b, s->s_q, s->h_q, d_qk);
    DRAW_TENSOR(&c->kv, 1, cached, 4, odd && !pieces, 9, s->page_size, 1, token);
    DRAW_TENSOR(&c->indices, 2, i32, 3, odd, s->b, s->s_q, s->topk);
    REGION(&c->length, 3, i32, 1, s->b);
    DRAW_TENSOR(&c->extra_kv, 4, cached, 4, odd && !pieces, 4, 2, 1, token);
    DRAW_TENSOR(&c->extra_indices, 5, i32, 3, odd, s->b, s->s_q, s->extra_topk);
    REGION(&c->extra_length, 9, i32, 1, s->b);
    REGION(&c->sink, 8, f32, 1, s->h_q);
    DRAW_TENSOR(&c->out, 6, type, 4, odd, s->b, s->s_q, s->h_q, 512);
    DRAW_TENSOR(&c->lse, 10, f32, 3, odd, s->b, s->h_q, s->s_q);
    c->args = FMLA_INIT(fmla_sparse_decode_args);
    fmla_sparse_decode_args *a = &c->args;
    a->q = &c->q.tensor, a->kv_cache = &c->kv.tensor, a->indices = &c->indices.tensor;
    a->out = &c->out.tensor;
    if (s->lengths) a->topk_length = &c->length.tensor;
    if (s->extra) a->extra_kv_cache = &c->extra_kv.tensor, a->extra_indices = &c->extra_indices.tensor;
    if (s->extra_lengths) a->extra_topk_length = &c->extra_length.tensor;
    if (s->options.sink) a->attn_sink = &c->sink.tensor;
    if (s->options.lse) a->lse = &c->lse.tensor;
    a->kv_format = s->format, a->batch_invariant = s->options.batch_invariant;
    a->num_partitions = s->options.num_partitions;
    c->plan = (struct plan_call){0};
    c->plan.sparse = true, c->plan.b = s->b, c->plan.s_q = s->s_q, c->plan.h_q = s->h_q;
    c->plan.topk = s->topk, c->plan.extra_topk = s->extra_topk;
    c->plan.topk_length = a->topk_length, c->plan.extra_topk_length = a->extra_topk_length;
    c->plan.target = device, c->plan.num_partitions = s->options.num_partitions;
    plan_of_call(&s->options, &c->plan, s->b, &c->rows, &c->splits, &a->plan, &a->plan_size);
    if (s->options.plan == PLAN_TABLES) a->partitions = &c->rows.tensor, a->num_splits = &c->splits.tensor;
}

/* ---- Dense decode ------------------------------------------------------------------------------ */

struct dense_shape {
    int64_t b, s_q, h_q, h_kv, pages, page_size, max_pages;
    bool table, fp16, wide, causal;
    struct drawn_options options;
};

struct drawn_dense {
    fmla_dense_decode_args args;
    struct plan_call plan;
    size_t bytes; /* of the workspace, as answered */
    struct held q, kv, table, seqlens, sink, out, lse, rows, splits;
};

static inline struct dense_shape draw_dense(int64_t sms)
{
    struct dense_shape s = {.fp16 = draw_one_in(3), .wide = draw_one_in(2), .causal = draw_one_in(2)};
    s.options = draw_options();
    draw_heads(&s.s_q, &s.h_q);
    s.h_kv = DRAW_OF(64, 1, 1, 1, 2, 4, 8);
    if (s.h_q % s.h_kv) s.h_q = s.h_kv * draw_clamp(s.h_q / s.h_kv, 1, INT32_MAX / s.s_q / s.h_kv);
    s.table = !draw_one_in(8);
    s.page_size = DRAW_OF(1 << 20, 1, 16, 63, 64, 64, 64, 128, 256);
    s.max_pages = s.table ? draw_one_in(10) ? 0 : draw_size(INT32_MAX) : 1;
    s.b = draw_one_in(3) ? draw_size(1 << 20) - draw_one_in(8) : draw_near_sms(sms, 1, 1 << 20);
    s.b = draw_fit(s.b, (double)(s.s_q * s.h_q) * 576.0 + (double)s.max_pages);
    s.pages = s.table ? DRAW_OF(1 << 20, 1, 64, 1000) : s.b;
    if (s.table && draw_one_in(10)) s.pages = 0;
    s.pages = draw_fit(s.pages, (double)(s.page_size * s.h_kv) * 576.0);
    if (!s.table && s.b > s.pages) s.b = s.pages;
    return s;
}

static inline void dense_of_shape(struct drawn_dense *c, const struct dense_shape *s, fmla_device device)
{
    const int64_t d_qk = s->wide ? 576 : 512;
    const fmla_dtype type = s->fp16 ? fp16 : bf16;
    const bool odd = s->options.odd;
    memset(c, 0, sizeof *c), draw_device = device;
    DRAW_TENSOR(&c->q, 0, type, 4, odd, s->b, s->s_q, s->h_q, d_qk);
    DRAW_TENSOR(&c->kv, 1, type, 4, odd, s->pages, s->page_size, s->h_kv, d_qk);
    DRAW_TENSOR(&c->table, 2, i32, 2, odd, s->b, s->max_pages);
    REGION(&c->seqlens, 3, i32, 1, s->b);
    REGION(&c->sink, 4, f32, 1, s->h_q);
    DRAW_TENSOR(&c->out, 5, type, 4, odd, s->b, s->s_q, s->h_q, 512);
    DRAW_TENSOR(&c->lse, 6, f32, 3, odd, s->b, s->h_q, s->s_q);
    c->args = FMLA_INIT(fmla_dense_decode_args);
    fmla_dense_decode_args *a = &c->args;
    a->q = &c->q.tensor, a->kv_cache = &c->kv.tensor, a->seqlens = &c->seqlens.tensor,
    a->out = &c->out.tensor;
    if (s->table) a->block_table = &c->table.tensor;
    if (s->options.sink) a->attn_sink = &c->sink.tensor;
    if (s->options.lse) a->lse = &c->lse.tensor;
    a->causal = s->causal, a->batch_invariant = s->options.batch_invariant;
    a->num_partitions = s->options.num_partitions;
    c->plan = (struct plan_call){0};
    c->plan.seqlens = &c->seqlens.tensor, c->plan.s_q = s->s_q, c->plan.h_q = s->h_q, c->plan.h_kv = s->h_kv;
    c->plan.target = device, c->plan.num_partitions = s->options.num_partitions;
    plan_of_call(&s->options, &c->plan, s->b, &c->rows, &c->splits, &a->plan, &a->plan_size);
    if (s->options.plan == PLAN_TABLES) a->partitions = &c->rows.tensor, a->num_splits = &c->splits.tensor;
}

/* ---- Sparse prefill ---------------------------------------------------------------------------- */

struct prefill_shape {
    int64_t s_q, h_q, h_kv, topk, page_size;
    int32_t format;
    bool pages, lengths, wide;
    struct drawn_options options;
};

struct drawn_prefill {
    fmla_sparse_prefill_args args;
    struct held q, kv, indices, length, sink, out, max_logits, lse;
};

static inline struct prefill_shape draw_prefill(int64_t sms)
{
    static const int32_t formats[] = {FMLA_KV_BF16, FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584};
    struct prefill_shape s = {.format = formats[draw_below(4)], .options = draw_options()};
    const bool bytes = s.format != FMLA_KV_BF16;
    s.h_q = DRAW_OF(1 << 16, 1, 2, 8, 16, 63, 64, 65, 96, 127, 128, 128, 129, 192, 256);
    s.pages = bytes || draw_one_in(2);
    s.h_kv = s.pages ? 1 : DRAW_OF(16, 1, 1, 2, 4);
    if (s.h_q % s.h_kv) s.h_q = s.h_kv * draw_clamp(s.h_q / s.h_kv, 1, 1 << 16);
    const int64_t tiles = (s.h_q / s.h_kv + 63) / 64;
    s.s_q = draw_one_in(3) ? draw_size(INT32_MAX) - draw_one_in(8) : draw_near_sms(sms, tiles, 1 << 20);
    s.topk = draw_one_in(10) ? 0 : DRAW_OF(INT32_MAX, 1, 63, 64, 65, 192, 512, 1024, 2048, 2049, 4096);
    s.s_q = draw_fit(s.s_q, (double)(s.h_q * 576 + s.h_kv * s.topk) * 32.0); /* few thousand launches */
    s.wide = s.format == FMLA_KV_FP8_656 || (s.format == FMLA_KV_BF16 && draw_one_in(2));
    s.page_size = DRAW_OF(1 << 16, 1, 2, 64, 64, 61, 128);
    s.lengths = draw_one_in(2);
    return s;
}

static inline void prefill_of_shape(struct drawn_prefill *c, const struct prefill_shape *s,
                                    fmla_device device)
{
    const int64_t d_qk = s->wide ? 576 : 512;
    const bool bytes = s->format != FMLA_KV_BF16, pieces = s->format == FMLA_KV_FP8_584;
    const int64_t token = s->format == FMLA_KV_FP8_656 ? 656 : pieces ? 584 : d_qk;
    const bool odd = s->options.odd;
    memset(c, 0, sizeof *c), draw_device = device;
    DRAW_TENSOR(&c->q, 0, bf16, 3, odd, s->s_q, s->h_q, d_qk);
    if (s->pages)
        DRAW_TENSOR(&c->kv, 1, bytes ? u8 : bf16, 4, odd && !pieces, 9, s->page_size, 1, token);
    else
        DRAW_TENSOR(&c->kv, 1, bf16, 3, odd, 100, s->h_kv, d_qk);
    DRAW_TENSOR(&c->indices, 2, i32, 3, odd, s->s_q, s->h_kv, s->topk);
    REGION(&c->length, 3, i32, 1, s->s_q);
    REGION(&c->sink, 4, f32, 1, s->h_q);
    DRAW_TENSOR(&c->out, 5, bf16, 3, odd, s->s_q, s->h_q, 512);
    DRAW_TENSOR(&c->max_logits, 6, f32, 2, odd, s->s_q, s->h_q);
    DRAW_TENSOR(&c->lse, 7, f32, 2, odd, s->s_q, s->h_q);
    c->args = FMLA_INIT(fmla_sparse_prefill_args);
    fmla_sparse_prefill_args *a = &c->args;
    a->q = &c->q.tensor, a->kv = &c->kv.tensor, a->indices = &c->indices.tensor, a->out = &c->out.tensor;
    if (s->lengths) a->topk_length = &c->length.tensor;
    if (s->options.sink) a->attn_sink = &c->sink.tensor;
    if (s->options.lse) a->lse = &c->lse.tensor, a->max_logits = &c->max_logits.tensor;
    a->kv_format = s->format;
}

#endif
