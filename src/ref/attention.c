/* SPDX-License-Identifier: MIT
 *
 * Attention over paged, listed and ragged keys. The rows of one key head and one query token are computed
 * together, so that each key is decoded once for all of them, first for the scores, then for the values.
 */
#include "ref.h"

#include "../kvformat.h"

#include <math.h>
#include <string.h>

enum { QUANTISED_WIDTH = 576 /* d_qk of the formats that have FP8 products */ };

/* Workspace for the rows that are computed together, and for one key. */
struct memory {
    double *scores;       /* [rows][most_keys] */
    double *sum, *q;      /* [rows][d_v], [rows][d_qk] */
    double *most, *total; /* [rows]: the largest score, the sum of all weights */
    double *key;          /* [d_qk or d_v]: a key, or a value */
};

static size_t most_keys(const struct attention_problem *p)
{
    return (size_t)p->keys[0].capacity + (size_t)p->keys[1].capacity;
}

static fmla_status prepare(const struct kernel_driver *driver, union problem problem,
                           struct prepared *prepared)
{
    const struct attention_problem *p = problem.attention;
    /* Sizes are below 2^31, so of_row is at most 2^33 - 2, and `doubles` below 2^64. */
    const size_t of_row = most_keys(p) + (size_t)(p->d_v + p->d_qk) + 2;
    const size_t doubles =
        (size_t)(p->h_q / p->h_kv) * of_row + (size_t)(p->d_qk > p->d_v ? p->d_qk : p->d_v);
    (void)driver;
    if (__builtin_mul_overflow(doubles, sizeof(double), &prepared->bytes))
        return fail(FMLA_UNSUPPORTED, "%s: %s: %zu keys of a token exceed the address space",
                    operation_name(p->operation), p->keys[0].kind == KEYS_LISTED ? "indices" : "q",
                    most_keys(p));
    return FMLA_OK;
}

static struct memory memory_of(const struct attention_problem *p)
{
    const int64_t rows = p->h_q / p->h_kv;
    struct memory m = {.scores = p->workspace};
    m.sum = m.scores + (size_t)rows * most_keys(p);
    m.q = m.sum + rows * p->d_v;
    m.most = m.q + rows * p->d_qk;
    m.total = m.most + rows;
    m.key = m.total + rows;
    return m;
}

/* ---- Keys ------------------------------------------------------------------------------------ */

/* A request; dense MHA's are spans. */
struct request {
    int64_t index, tokens;
    struct span span; /* else zero */
};

/* Rows that see the same keys. */
struct rows {
    struct request request;
    int64_t token, key_head;
    int64_t count;
};

/* Returns how many entries of one source a request has; lengths are clamped. */
static int64_t entries_of(const struct key_source *source, int64_t request)
{
    const int64_t count = source->lengths ? source->lengths[request] : source->capacity;
    return count < 0 ? 0 : count > source->capacity ? source->capacity : count;
}

/* Returns how many entries a row of the token sees: with a causal mask, the last token sees all. */
static int64_t seen_of(const struct attention_problem *p, const struct key_source *source,
                       const struct rows *rows)
{
    const struct request *r = &rows->request;
    const int64_t count = p->operation == OP_MHA_FORWARD ? r->span.keys : entries_of(source, r->index);
    return p->causal ? count - r->tokens + rows->token + 1 : count;
}

/* Finds the page of entry t and its slot in it; returns false where the entry names no key. */
static bool find(const struct key_source *source, const struct rows *rows, int64_t t, int64_t *page,
                 int64_t *slot)
{
    const int64_t *stride = source->table_stride, row = rows->request.index * stride[0];
    if (source->kind == KEYS_PAGED) {
        *page = source->table ? source->table[row + t / source->page_size] : rows->request.index;
        *slot = rows->request.span.first_key + t % source->page_size;
        return true;
    }
    const int64_t index = source->table[row + rows->token * stride[1] + rows->key_head * stride[2] + t];
    *page = index / source->page_size, *slot = index % source->page_size;
    return index >= 0 && index < source->pages * source->page_size;
}

/* Decodes the first `width` elements of a key, or value. */
static void decode(const struct attention_problem *p, const struct key_source *source,
                   const struct key_view *view, const struct rows *rows, int64_t page, int64_t slot,
                   int64_t width, double *to)
{
    const struct kv_layout layout = kv_layout_of(source->format, (int32_t)width);
    const uint8_t *data = view->data + page * view->page_bytes + rows->key_head * view->head_bytes;
    int64_t page_size = source->page_size;
    if (!layout.scale_bytes) { /* tokens may have any stride: each is a page of one slot */
        data += slot * view->slot_bytes;
        page_size = 1, slot = 0;
    }
    if (!kv_is_quantised(&layout)) { /* as kv_load, but selects the format once */
        const enum element element = layout.element == KV_ELEMENT_BF16 ? ELEMENT_BF16 : ELEMENT_FP16;
        for (int64_t d = 0; d < width; d++) to[d] = (double)ref_load(data, element, d);
        return;
    }
    const uint8_t *token = data + kv_token_at(&layout, slot);
    const float of_cache = p->kv_scale ? *p->kv_scale : 1.0f;
    const int32_t span = layout.group ? layout.group : layout.nope;
    int32_t d = 0;
    while (d < layout.nope) { /* as kv_load, but loads a scale once per group; `to` has room for a key */
        const float scale = kv_scale_of(&layout, data, page_size, slot, d, of_cache);
        for (const int32_t end = d + span; d < end; d++) {
            const float code = kv_code_value(&layout, token, d);
            to[d] = kv_is_exact(&layout) ? (double)code * (double)scale
                                         : (double)num_from_bf16(num_to_bf16(code * scale));
        }
    }
    for (; d < width; d++) to[d] = (double)kv_load(&layout, data, page_size, slot, d, of_cache);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

static double dot_of(const double *q, const double *key, int64_t width)
{
    double dot[4] = {0}; /* four sums: a single one would wait for each addition */
    int64_t d = 0;
    for (; d + 4 <= width; d += 4, q += 4, key += 4)
        for (int i = 0; i < 4; i++) dot[i] += q[i] * key[i];
    for (; d < width; d++) dot[0] += *q++ * *key++;
    return (dot[0] + dot[1]) + (dot[2] + dot[3]);
}

static void add_value(double *sum, double weight, const double *value, int64_t width)
{
    for (const double *const end = value + width; value < end;) *sum++ += weight * *value++;
}

/* Computes the scores of all rows or, with `values`, adds up the values, weighted by the probabilities that
 * have replaced the scores. Returns the number of keys. */
static int64_t meet_keys(const struct attention_problem *p, const struct rows *rows, const struct memory *m,
                         bool values)
{
    const int64_t width = values ? p->d_v : p->d_qk;
    int64_t keys = 0, page, slot;
    for (int i = 0; i < KEY_SOURCES && p->keys[i].kind != KEYS_NONE; i++) {
        const struct key_source *source = &p->keys[i];
        const int64_t seen = seen_of(p, source, rows);
        for (int64_t t = 0; t < seen; t++) {
            if (!find(source, rows, t, &page, &slot)) continue;
            decode(p, source, values ? &source->v : &source->k, rows, page, slot, width, m->key);
            for (int64_t r = 0; r < rows->count; r++) {
                double *score = m->scores + (size_t)r * most_keys(p) + (size_t)keys;
                if (values)
                    add_value(m->sum + r * width, *score, m->key, width);
                else
                    *score = (double)p->scale * dot_of(m->q + r * width, m->key, width);
            }
            keys++;
        }
    }
    return keys;
}

static void write_row(const struct attention_problem *p, const struct rows *rows, int64_t head,
                      const double *sum, double most, double total)
{
    const struct result_rules *rules = &p->rules;
    const bool empty = !sum || total == 0.0;
    const double lse = (most == -INFINITY ? 0.0 : most) + log(total); /* natural */
    double factor = 1.0;
    if (rules->attn_sink && !empty) factor = 1.0 / (1.0 + exp((double)rules->attn_sink[head] - lse));
    const int64_t request = rows->request.index, token = rows->request.span.first_token + rows->token;
    uint16_t *out = p->out + request * p->out_stride[0] + token * p->out_stride[1] + head * p->out_stride[2];
    for (int64_t d = 0; d < p->d_v; d++)
        ref_store(out, p->element, d, empty ? 0.0f : (float)(sum[d] / total * factor));
    if (p->max_logits)
        p->max_logits[request * p->max_stride[0] + head * p->max_stride[1] + token] =
            (float)(most * (double)rules->lse_factor);
    if (p->lse)
        p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token] =
            empty ? rules->lse_of_empty : (float)(lse * (double)rules->lse_factor);
}

/* Loads the query of a head, [d_qk]; with FP8 products, the bf16 values of its codes. */
static void load_query(const struct attention_problem *p, const struct rows *rows, int64_t head, double *to)
{
    const int64_t request = rows->request.index, token = rows->request.span.first_token + rows->token;
    if (p->products == FMLA_PRODUCTS_FP8) {
        uint16_t values[QUANTISED_WIDTH];
        attention_quantise(p, request, token, head, values);
        for (int64_t d = 0; d < p->d_qk; d++) to[d] = (double)num_from_bf16(values[d]);
        return;
    }
    const uint16_t *query = p->q + request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2];
    for (int64_t d = 0; d < p->d_qk; d++) to[d] = (double)ref_load(query, p->element, d);
}

static void attend(const struct attention_problem *p, const struct rows *rows, const struct memory *m)
{
    const int64_t first_head = rows->key_head * rows->count;
    for (int64_t r = 0; r < rows->count; r++) load_query(p, rows, first_head + r, m->q + r * p->d_qk);
    const int64_t keys = meet_keys(p, rows, m, false);
    for (int64_t r = 0; r < rows->count; r++) {
        double *scores = m->scores + (size_t)r * most_keys(p), most = -INFINITY, total = 0.0;
        for (int64_t t = 0; t < keys; t++)
            if (scores[t] > most) most = scores[t];
        /* No key, or no score above -inf: every exp below is 0 (or NaN). */
        const double max = most == -INFINITY ? 0.0 : most;
        for (int64_t t = 0; t < keys; t++) total += scores[t] = exp(scores[t] - max);
        m->most[r] = most, m->total[r] = total;
    }
    memset(m->sum, 0, (size_t)(rows->count * p->d_v) * sizeof *m->sum);
    meet_keys(p, rows, m, true);
    for (int64_t r = 0; r < rows->count; r++)
        write_row(p, rows, first_head + r, m->sum + r * p->d_v, m->most[r], m->total[r]);
}

static fmla_status check_pages(const struct attention_problem *p, const struct key_source *source)
{
    for (int64_t request = 0; request < p->b; request++)
        for (int64_t t = 0; t < entries_of(source, request); t += source->page_size) {
            const int32_t page = source->table[request * source->table_stride[0] + t / source->page_size];
            if (page < 0 || page >= source->pages)
                return fail(FMLA_INVALID_ARGUMENT,
                            "%s: block_table: entry [%lld, %lld] is %d, must be in [0, %lld)",
                            operation_name(p->operation), (long long)request,
                            (long long)(t / source->page_size), page, (long long)source->pages);
        }
    return FMLA_OK;
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct attention_problem *p = problem.attention;
    const struct memory m = memory_of(p);
    (void)driver, (void)prepared;
    for (int i = 0; i < KEY_SOURCES; i++) {
        const bool in_pages = p->keys[i].kind == KEYS_PAGED && p->keys[i].table;
        const fmla_status status = in_pages ? check_pages(p, &p->keys[i]) : FMLA_OK;
        if (status) return status;
    }
    struct rows rows = {.request.tokens = p->s_q, .count = p->h_q / p->h_kv};
    struct request *request = &rows.request;
    for (; request->index < p->b; request->index++) {
        if (p->operation == OP_MHA_FORWARD) {
            request->span =
                span_of(&p->ragged_q, &p->ragged_k, p->s_q, p->capacity, request->index, &request->span);
            request->tokens = request->span.tokens;
        }
        for (rows.token = 0; rows.token < request->tokens; rows.token++)
            for (rows.key_head = 0; rows.key_head < p->h_kv; rows.key_head++) attend(p, &rows, &m);
        for (; rows.token < request->tokens + request->span.padding_tokens; rows.token++)
            for (int64_t head = 0; head < p->h_q; head++) write_row(p, &rows, head, NULL, -INFINITY, 0.0);
    }
    return FMLA_OK;
}

const struct kernel_driver ref_attention_driver = {.prepare = prepare, .run = run};
