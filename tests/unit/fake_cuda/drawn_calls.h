/* SPDX-License-Identifier: MIT
 *
 * Calls of random shapes on an absent GPU: makes a call of any operation from its layout, and draws
 * layouts of the operations that have a workspace.
 */
#ifndef FMLA_DRAWN_CALLS_H
#define FMLA_DRAWN_CALLS_H

#include "draws.h"

#include "../named_calls.h"

enum { MOST_ARGS = 512 };
enum { MOST_ELEMENTS = 50 /* bits; tensors stay far below the allowed 2^63 bytes */ };

/* Regions other than those of the tensors, which are numbered like the arguments. */
enum { REGION_OF_PLAN = MAX_TENSORS, REGION_OF_TABLES, REGION_OF_SPLITS, REGION_OF_WORKSPACE };

/* The plan of a random call: none, a whole plan, or its tables. */
enum drawn_plan { PLAN_NONE, PLAN_WHOLE, PLAN_TABLES };

/* A layout and the other random properties of a call. */
struct shape {
    struct layout of;
    enum drawn_plan plan;
    bool odd;
};

/* ---- The call of a shape ----------------------------------------------------------------------- */

static _Thread_local bool draw_odd;

/* A tensor without elements has no data. */
static inline void place_in_region(struct held *held, const struct member *m, int which,
                                   const struct layout *layout)
{
    int64_t shape[MAX_DIMENSIONS];
    const int rank = described_shape(m, layout, shape);
    draw_tensor(held, which, described_dtype(m, layout), rank, shape,
                draw_odd && rank > 1 && !described_contiguous_pages(m, layout) && !(m->allowed & IN_ROWS));
    for (int i = 0; i < rank; i++)
        if (!shape[i]) held->tensor.data = NULL, held->tensor.byte_offset = 0;
}

/* Fills in unset sizes of caches and heads. */
static inline struct layout with_defaults(enum operation operation, const struct layout *given)
{
    struct layout l = *given;
    if (!l.type.bits) l.type = bf16;
    if (!l.d_qk) l.d_qk = cache_formats[l.format].d_qk ? cache_formats[l.format].d_qk : 576;
    const bool latent = described_member(operation, "workspace") && !operation_is_mha(operation);
    if (latent) l.d_v = 512;
    if (latent && operation != OP_DENSE_DECODE) l.pages = 9;
    l.extra_pages = 4, l.extra_page_size = 2, l.one_head = l.one = 1, l.s_kv = 100,
    l.fields = FMLA_PARTITION_FIELDS;
    return l;
}

/* Gives a call the tables of a plan. */
static inline void give_tables(enum operation operation, void *args, struct held *held, int64_t partitions,
                               int64_t b)
{
    struct held *const rows = &held[described_index(operation, "partitions")];
    REGION(rows, REGION_OF_TABLES, i32, 2, partitions, FMLA_PARTITION_FIELDS);
    REGION(rows + 1, REGION_OF_SPLITS, i32, 1, b + 1);
    *(const fmla_tensor **)option_at(operation, args, "partitions") = &rows[0].tensor;
    *(const fmla_tensor **)option_at(operation, args, "num_splits") = &rows[1].tensor;
}

/* Makes the call; only the address of its workspace is real. */
static inline void make_call(enum operation operation, void *args, struct held *held, const struct shape *s,
                             fmla_device device)
{
    const struct layout l = with_defaults(operation, &s->of);
    draw_device = device, draw_odd = s->odd;
    named_make(operation, args, held, &l, place_in_region);
    draw_odd = false;
    void **const workspace = option_at(operation, args, "workspace");
    if (workspace) *workspace = region(REGION_OF_WORKSPACE);
    if (!described_member(operation, "plan") || described_is_plan(operation) || !s->plan) return;
    /* The call's plan, or its tables. */
    const enum operation planner = operation == OP_SPARSE_DECODE ? OP_SPARSE_PLAN : OP_DECODE_PLAN;
    static _Thread_local struct held of_plan[MAX_TENSORS];
    static _Thread_local _Alignas(16) char plan[MOST_ARGS];
    struct answer answer[QUESTIONS];
    named_make(planner, plan, of_plan, &l, place_in_region);
    memcpy(option_at(planner, plan, "target"), &device, sizeof device);
    for (int question = 0; question < QUESTIONS; question++)
        CHECK_OK(described_ask(planner, question, plan, &answer[question]));
    if (s->plan == PLAN_TABLES) {
        give_tables(operation, args, held, answer[ASK_KERNEL].count[0], l.b);
    } else if (device.device_type == FMLA_DEVICE_CUDA) {
        *(void **)option_at(operation, args, "plan") = region(REGION_OF_PLAN);
        *(size_t *)option_at(operation, args, "plan_size") = answer[ASK_BYTES].bytes;
    }
}

/* Queries the workspace size and runs the call. */
static inline fmla_status run_call(enum operation operation, void *args, size_t *bytes)
{
    struct answer answer = {0};
    if (described_member(operation, "workspace")) {
        const fmla_status status = described_ask(operation, ASK_BYTES, args, &answer);
        if (status) return status;
        CHECK_EQ(answer.alignment, 256);
        *bytes = *(size_t *)option_at(operation, args, "workspace_size") = answer.bytes;
    }
    return described_run(operation, args);
}

/* <op>_make: regular tensors, no plan. */
#define OPERATION(op, OP)                                                                                    \
    static inline void op##_make(struct op##_call *c, const struct layout *layout, fmla_device device)       \
    {                                                                                                        \
        const struct shape shape = {.of = *layout};                                                          \
        make_call(OP_##OP, &c->args, c->held, &shape, device);                                               \
    }                                                                                                        \
    static inline fmla_status op##_run(struct op##_call *c)                                                  \
    {                                                                                                        \
        return run_call(OP_##OP, &c->args, &c->bytes);                                                       \
    }
#include "operations.def"

/* ---- Shapes by lot ----------------------------------------------------------------------------- */

/* Halves `x` until x · others has at most MOST_ELEMENTS bits. */
static inline int64_t draw_fit(int64_t x, double others)
{
    while (x > 0 && (double)x * others > (double)(INT64_C(1) << MOST_ELEMENTS)) x /= 2;
    return x;
}

/* Returns all or none of these tensors. */
static inline unsigned draw_bits_of(unsigned has)
{
    return draw_one_in(2) ? has : 0;
}

static inline void draw_options(struct shape *s)
{
    const int64_t plan = draw_below(4), partitions = draw_below(8);
    s->plan = plan < 2 ? PLAN_NONE : plan == 2 ? PLAN_WHOLE : PLAN_TABLES;
    s->of.num_partitions = partitions < 6 ? 0 : (int32_t)draw_size(65536);
    s->of.batch_invariant = draw_one_in(8), s->odd = draw_one_in(8);
    s->of.batch_dependent = draw_one_in(2), s->of.num_splits = draw_one_in(3) ? (int32_t)draw_below(65) : 0;
    s->of.has = draw_bits_of(HAS_LSE) | draw_bits_of(HAS_SINK);
}

/* Draws tokens and heads of a request: usual ones of models, or any. */
static inline void draw_heads(struct layout *l)
{
    l->h_q = DRAW_OF(1 << 20, 1, 2, 8, 15, 16, 17, 32, 33, 48, 63, 64, 65, 96, 127, 128, 128, 129, 192, 256);
    l->s_q = DRAW_OF(1 << 12, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16);
    if (l->s_q * l->h_q > INT32_MAX) l->s_q = INT32_MAX / l->h_q;
}

/* Draws a format of keys named by lists. */
static inline int32_t draw_listed(void)
{
    return (int32_t)DRAW_AMONG(FMLA_KV_BF16, FMLA_KV_FP16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP8_528,
                               FMLA_KV_FP8_528_SPLIT, FMLA_KV_FP4_288, FMLA_KV_FP4_288_SPLIT,
                               FMLA_KV_FP8_528_F32);
}

/* Draws one for an extra cache, which has the first one's d_qk and, if 16 bits wide, the type of q. */
static inline int32_t draw_second(const struct layout *l)
{
    const int64_t first = cache_formats[l->format].d_qk, d_qk = first ? first : l->d_qk;
    for (;;) {
        const int32_t format = draw_listed();
        const int64_t its = cache_formats[format].d_qk;
        if (its ? its == d_qk : (format == FMLA_KV_FP16) == (l->type.code == FMLA_TYPE_FLOAT)) return format;
    }
}

static inline void draw_sparse(struct layout *l, int64_t sms)
{
    draw_heads(l);
    l->format = draw_listed();
    const bool bytes = l->format >= FMLA_KV_FP8_656;
    if (l->format == FMLA_KV_FP16 || (bytes && draw_one_in(4))) l->type = fp16;
    if (!bytes) l->d_qk = draw_one_in(2) ? 576 : 512;
    l->topk = draw_one_in(10) ? 0 : DRAW_OF(INT32_MAX, 1, 63, 64, 65, 128, 192, 512, 1024, 2048, 2049, 4096);
    if (draw_one_in(3)) {
        l->has |= HAS_EXTRA | draw_bits_of(HAS_EXTRA_LENGTHS);
        l->extra_topk = draw_one_in(6) ? 0 : DRAW_OF(INT32_MAX, 1, 64, 70, 128, 512, 1024, 8192);
        if (draw_one_in(2)) l->extra_format = draw_second(l);
    }
    const int64_t tile = draw_one_in(2) ? 16 : 64;
    l->b = draw_one_in(3) ? draw_size(1 << 20) - draw_one_in(8)
                          : draw_near_sms(sms, l->s_q * ((l->h_q + tile - 1) / tile), 1 << 20);
    l->b = draw_fit(l->b, (double)l->s_q * (double)(l->h_q * 576 + l->topk + l->extra_topk));
    l->page_size = DRAW_OF(1 << 16, 1, 2, 64, 64, 64, 61, 128);
    l->has |= draw_bits_of(HAS_LENGTHS);
}

static inline void draw_dense(struct layout *l, int64_t sms)
{
    l->type = draw_one_in(3) ? fp16 : bf16, l->d_qk = draw_one_in(2) ? 576 : 512, l->causal = draw_one_in(2);
    draw_heads(l);
    l->h_kv = DRAW_OF(64, 1, 1, 1, 2, 4, 8);
    if (l->h_q % l->h_kv) l->h_q = l->h_kv * draw_clamp(l->h_q / l->h_kv, 1, INT32_MAX / l->s_q / l->h_kv);
    const bool table = !draw_one_in(8);
    if (table) l->has |= HAS_TABLE;
    l->page_size = DRAW_OF(1 << 20, 1, 16, 63, 64, 64, 64, 128, 256);
    l->max_pages = table ? draw_one_in(10) ? 0 : draw_size(INT32_MAX) : 1;
    l->b = draw_one_in(3) ? draw_size(1 << 20) - draw_one_in(8) : draw_near_sms(sms, 1, 1 << 20);
    l->b = draw_fit(l->b, (double)(l->s_q * l->h_q) * 576.0 + (double)l->max_pages);
    l->pages = table ? DRAW_OF(1 << 20, 1, 64, 1000) : l->b;
    if (table && draw_one_in(10)) l->pages = 0;
    l->pages = draw_fit(l->pages, (double)(l->page_size * l->h_kv) * 576.0);
    if (!table && l->b > l->pages) l->b = l->pages;
}

static inline void draw_prefill(struct layout *l, int64_t sms)
{
    l->format = draw_one_in(2) ? FMLA_KV_BF16 : draw_listed();
    if (l->format == FMLA_KV_FP16) l->format = FMLA_KV_BF16; /* like the queries */
    const bool bytes = l->format != FMLA_KV_BF16;
    l->h_q = DRAW_OF(1 << 16, 1, 2, 8, 16, 63, 64, 65, 96, 127, 128, 128, 129, 192, 256);
    l->flat = !bytes && draw_one_in(2);
    l->h_kv = l->flat ? DRAW_OF(16, 1, 1, 2, 4) : 1;
    if (l->h_q % l->h_kv) l->h_q = l->h_kv * draw_clamp(l->h_q / l->h_kv, 1, 1 << 16);
    const int64_t tiles = (l->h_q / l->h_kv + 63) / 64;
    l->s_q = draw_one_in(3) ? draw_size(INT32_MAX) - draw_one_in(8) : draw_near_sms(sms, tiles, 1 << 20);
    l->topk = draw_one_in(10) ? 0 : DRAW_OF(INT32_MAX, 1, 63, 64, 65, 192, 512, 1024, 2048, 2049, 4096);
    l->s_q =
        draw_fit(l->s_q, (double)(l->h_q * 576 + l->h_kv * l->topk) * 32.0); /* a few thousand launches */
    if (!bytes) l->d_qk = draw_one_in(2) ? 576 : 512;
    l->page_size = DRAW_OF(1 << 16, 1, 2, 64, 64, 61, 128);
    l->has |= draw_bits_of(HAS_LENGTHS);
}

static inline void draw_mha(struct layout *l)
{
    static const int64_t sizes[][2] = {{256, 256}, {192, 128}, {128, 128}, {96, 64}, {64, 64}};
    const int64_t size = draw_below(5);
    l->type = draw_one_in(3) ? fp16 : bf16, l->d_qk = sizes[size][0], l->d_v = sizes[size][1];
    l->h_kv = DRAW_OF(1 << 10, 1, 1, 2, 4, 8, 16, 128), l->h_q = l->h_kv * DRAW_OF(1 << 6, 1, 1, 2, 4, 8, 16);
    l->flat = draw_one_in(2), l->causal = draw_one_in(2),
    l->has |= draw_bits_of(HAS_DLSE) | draw_bits_of(HAS_USED);
    const int64_t b = draw_size(1 << 20) - draw_one_in(8), q = draw_size(INT32_MAX) - draw_one_in(8),
                  k = draw_size(INT32_MAX) - draw_one_in(8);
    const double others = (double)(l->h_q * 256) * (double)(l->flat || !b ? 1 : b);
    *(l->flat ? &l->tokens_q : &l->s_q) = draw_fit(q, others);
    *(l->flat ? &l->tokens_k : &l->s_k) = draw_fit(k, others);
    l->b = b, l->splits = b + 1;
}

static inline struct shape draw_shape(enum operation operation, int64_t sms)
{
    struct shape s = {0};
    draw_options(&s);
    if (operation == OP_SPARSE_DECODE) draw_sparse(&s.of, sms);
    if (operation == OP_DENSE_DECODE) draw_dense(&s.of, sms);
    if (operation == OP_SPARSE_PREFILL) draw_prefill(&s.of, sms);
    if (operation_is_mha(operation)) draw_mha(&s.of);
    return s;
}

/* Writes a shape as text and returns its length. */
static inline int shape_in_words(enum operation operation, const struct shape *s, char *words, size_t size)
{
    int length = snprintf(words, size, "%s of", descriptors[operation].name);
    for (int i = 1; i < DIMENSIONS; i++)
        if (s->of.size[i])
            length += snprintf(words + length, size - (size_t)length, " %s %" PRId64 ",", dimension_words[i],
                               s->of.size[i]);
    return length +
           snprintf(words + length, size - (size_t)length,
                    " %d bits, formats %d and %d, tensors %x, plan %d of %d partitions, %d splits%s%s%s%s",
                    s->of.type.bits, s->of.format, s->of.extra_format, s->of.has, s->plan,
                    s->of.num_partitions, s->of.num_splits, s->of.flat ? ", flat" : "",
                    s->of.batch_dependent ? ", batch-dependent" : "",
                    s->of.batch_invariant ? ", batch-invariant" : "", s->odd ? ", odd" : "");
}

#endif
