/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA on the CPU: the driver. The microkernels (backward.h) do the arithmetic.
 *
 * A first loop computes delta = Σ dout · out of every row and converts its lse to base 2; the sink and the
 * gradient of lse enter through these two (row_numbers). A second loop computes dk and dv by tiles of keys, and
 * dq by tiles of query rows. Each tile reads everything that it meets, so a result is one sum in one order,
 * whatever thread runs it and whatever other requests are in the batch. Scores and dP are therefore computed
 * twice: seven products where one sweep would take five. One sweep would add to dq from all tiles of keys,
 * which requires either an order among them, and so threads that wait, or several copies of dq. Separate loops
 * write zero gradients for padding, and for the tokens and keys of no request.
 *
 * Workspace:  lse, delta [h_kv][tokens][h_q / h_kv] fp32 | gradients of sinks, [blocks of tokens][h_q] fp32 |
 *             spans of requests | one scratch per worker
 */
#include "backward.h"

#include "cost.h"

#include <string.h>

enum { TOKENS_OF_ITEM = 64 };

static int64_t items_of(int64_t tokens)
{
    return (tokens + TOKENS_OF_ITEM - 1) / TOKENS_OF_ITEM;
}

struct work {
    const struct backward_problem *problem;
    const struct cpu_gradients *gradients;
    struct thread_pool pool;
    int64_t tokens; /* of all requests */
    size_t rows, delta_offset, sinks_offset, spans_offset, scratch_offset, scratch_bytes;
    float *lse, *delta, *dsinks; /* dsinks: of TOKENS_OF_ITEM tokens each */
    struct cpu_span *spans;      /* [b + 1]; items are tiles of keys and of rows */
    char *workspace;
};

fmla_status cpu_backward_prepare(const struct kernel_driver *driver, union problem problem,
                                 struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    struct work *w = DECISION(struct work, prepared);
    size_t bytes;
    memset(w, 0, sizeof *w);
    w->problem = p, w->gradients = (const struct cpu_gradients *)driver, w->pool = threads_now();
    w->tokens = backward_tokens(p);
    if (__builtin_mul_overflow((size_t)w->tokens, (size_t)p->h_q, &w->rows) ||
        __builtin_mul_overflow(w->rows, 2 * sizeof(float), &bytes) || bytes > INT64_MAX / 4)
        return fail(FMLA_UNSUPPORTED,
                    "%s: q: two numbers for each of %lld tokens and %lld heads exceed the address space",
                    operation_name(OP_MHA_BACKWARD), (long long)w->tokens, (long long)p->h_q);
    w->delta_offset = cpu_line_up(w->rows * sizeof(float));
    w->sinks_offset = 2 * w->delta_offset;
    w->spans_offset = w->sinks_offset + cpu_line_up((size_t)(items_of(w->tokens) * p->h_q) * sizeof(float));
    w->scratch_offset = w->spans_offset + cpu_line_up((size_t)(p->b + 1) * sizeof(struct cpu_span));
    w->scratch_bytes = w->gradients->scratch_bytes(p);
    prepared->bytes = w->scratch_offset + w->scratch_bytes * (size_t)w->pool.workers;
    prepared->alignment = CACHE_LINE;
    return FMLA_OK;
}

/* ---- lse and delta of rows ------------------------------------------------------------------- */

/* The numbers of a row of which the kernels compute
 *
 *   P' = 2^(S - lse')      dS = P' (dP - delta')
 *
 * although dS = P' (dP - delta) + P dlse. With r = exp(sink - lse), P' = P / (1 + r): so lse' = lse + log2(1 + r)
 * and delta' = delta - (1 + r) dlse. r is at most 2^MOST_RATIO: a larger one would leave no bits of P' and an
 * infinite delta', of which P dlse is the product. 2^-64 P for P' changes no sum, no P above 2^-62 is lost, and
 * dlse may reach 2^63. A NaN stays one. */
struct row_numbers {
    float lse, delta;
    float dsink; /* its part of the gradient of the sink */
};

enum { MOST_RATIO = 64 };

static struct row_numbers numbers_of(const struct backward_problem *p, int64_t head, float lse_of_row,
                                     float delta, float dlse)
{
    const float to_base_2 = p->rules.lse_factor == 1.0f ? TILE_LOG2_E : 1.0f, lse = lse_of_row * to_base_2;
    struct row_numbers row = {lse, delta - dlse * p->rules.lse_factor, 0.0f};
    if (isinf(lse_of_row)) return (struct row_numbers){INFINITY, 0.0f, 0.0f};
    if (!p->rules.attn_sink) return row;
    const float above = p->rules.attn_sink[head] * TILE_LOG2_E - lse;
    const float ratio = exp2f(above > MOST_RATIO ? MOST_RATIO : above);
    row.lse = lse + log1pf(ratio) * TILE_LOG2_E;
    row.delta = delta - dlse * p->rules.lse_factor * (1.0f + ratio);
    row.dsink = -delta / (1.0f + exp2f(-above));
    return row;
}

/* Returns the request of a token of ragged requests; b: it belongs to none. */
static int64_t request_at(const struct work *w, int64_t token)
{
    int64_t low = 0, high = w->problem->b; /* that of the token is in [low - 1, high - 1] */
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (w->spans[middle].span.first_token <= token)
            low = middle + 1;
        else
            high = middle;
    }
    const struct span *const span = low ? &w->spans[low - 1].span : NULL;
    return span && token < span->first_token + span->tokens ? low - 1 : w->problem->b;
}

/* Returns the first token of its request that sees a key; all behind it do. */
static int64_t first_seeing(const struct backward_problem *p, const struct span *span)
{
    const int64_t blind = p->causal ? span->tokens - span->keys : 0;
    return !span->keys ? span->tokens : blind > 0 ? blind : 0;
}

/* Computes the numbers of the rows of a token. Without keys they are those of an empty row, whatever lse holds. */
static void run_token(const struct work *w, int64_t t, float *dsinks)
{
    const struct backward_problem *p = w->problem;
    const int64_t group = backward_group(p), token = p->is_ragged ? t : t % p->s_q,
                  number = p->is_ragged ? request_at(w, t) : t / p->s_q, request = p->is_ragged ? 0 : number;
    const struct span *const span = number < p->b ? &w->spans[number].span : NULL;
    const int64_t of_request = span ? token - span->first_token : 0;
    const bool sees = span && of_request >= first_seeing(p, span) && of_request < span->tokens;
    for (int64_t h = 0; h < p->h_q; h++) {
        const int64_t row = (h / group * w->tokens + t) * group + h % group;
        struct row_numbers numbers = {INFINITY, 0.0f, 0.0f};
        if (sees) {
            const float lse = p->lse[request * p->lse_stride[0] + h * p->lse_stride[1] + token],
                        dlse = p->dlse ? p->dlse[request * p->dlse_stride[0] + h * p->dlse_stride[1] + token]
                                       : 0.0f;
            const float delta = w->gradients->delta(
                (const uint16_t *)(const void *)backward_at(&p->out, request, token, h),
                (const uint16_t *)(const void *)backward_at(&p->dout, request, token, h), p->d_v, p->element);
            numbers = numbers_of(p, h, lse, delta, dlse);
        }
        w->lse[row] = numbers.lse, w->delta[row] = numbers.delta, dsinks[h] += numbers.dsink;
    }
}

/* Does so for up to TOKENS_OF_ITEM tokens. */
static void run_rows(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const int64_t first = index * TOKENS_OF_ITEM,
                  end = first + TOKENS_OF_ITEM < w->tokens ? first + TOKENS_OF_ITEM : w->tokens;
    float *const dsinks = w->dsinks + index * w->problem->h_q;
    (void)worker;
    for (int64_t h = 0; h < w->problem->h_q; h++) dsinks[h] = 0.0f;
    for (int64_t t = first; t < end; t++) run_token(w, t, dsinks);
}

/* Adds up the gradients of the sinks. */
static void write_dsinks(const struct work *w)
{
    const struct backward_problem *p = w->problem;
    for (int64_t h = 0; p->d_attn_sink && h < p->h_q; h++) {
        double sum = 0.0;
        for (int64_t i = 0; i < items_of(w->tokens); i++) sum += (double)w->dsinks[i * p->h_q + h];
        p->d_attn_sink[h] = (float)sum;
    }
}

/* ---- Tokens and keys that do not count ------------------------------------------------------- */

static void clear(const struct token_view *view, int64_t request, int64_t token, int64_t heads, int64_t width)
{
    for (int64_t h = 0; h < heads; h++)
        memset(view->data + request * view->request + token * view->token + h * view->head, 0,
               (size_t)width * sizeof(uint16_t));
}

/* Clears the gradients of a request's padding. */
static void run_padding(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const struct backward_problem *p = w->problem;
    const struct span *span = &w->spans[index].span;
    const int64_t request = p->is_ragged ? 0 : index, token = span->first_token + span->tokens,
                  key = span->first_key + span->keys;
    (void)worker;
    for (int64_t i = 0; i < span->padding_tokens; i++) clear(&p->dq, request, token + i, p->h_q, p->d_qk);
    for (int64_t i = 0; i < span->padding_keys; i++) {
        clear(&p->dk, request, key + i, p->h_kv, p->d_qk);
        clear(&p->dv, request, key + i, p->h_kv, p->d_v);
    }
}

static void clear_padding(struct work *w)
{
    const struct backward_problem *p = w->problem;
    double values = 0;
    for (int64_t r = 0; r < p->b; r++) {
        const struct span *span = &w->spans[r].span;
        values += (double)span->padding_tokens * (double)(p->h_q * p->d_qk) +
                  (double)span->padding_keys * (double)(p->h_kv * (p->d_qk + p->d_v));
    }
    threads_run(&w->pool, p->b, cost_of_moving(2.0 * values), run_padding, w);
}

/* The `count` tokens, or keys, of a gradient that lie outside of [first, end). */
struct outside {
    const struct token_view *view;
    int64_t heads, width, first, end, count;
};

/* Writes zeros to TOKENS_OF_ITEM of them, from number TOKENS_OF_ITEM · `index` on. */
static void run_outside(void *data, int64_t index, int32_t worker)
{
    const struct outside *o = data;
    const int64_t from = index * TOKENS_OF_ITEM,
                  to = from + TOKENS_OF_ITEM < o->count ? from + TOKENS_OF_ITEM : o->count;
    (void)worker;
    for (int64_t i = from; i < to; i++)
        clear(o->view, 0, i < o->first ? i : i - o->first + o->end, o->heads, o->width);
}

/* Clears the gradients that belong to no request. Ragged requests follow each other without gaps, so these
 * lie before the first request and after the last. */
static void clear_outside(const struct work *w, const struct ragged *ragged, const struct token_view *view,
                          int64_t heads, int64_t width)
{
    struct outside o = {.view = view, .heads = heads, .width = width};
    o.first = o.end = ragged_start(ragged, 0, 0);
    for (int64_t r = 1; r <= w->problem->b; r++) o.end = ragged_start(ragged, r, o.end);
    o.count = ragged->tokens - (o.end - o.first);
    if (o.count)
        threads_run(&w->pool, (o.count + TOKENS_OF_ITEM - 1) / TOKENS_OF_ITEM,
                    cost_of_moving(2.0 * (double)o.count * (double)(heads * width)), run_outside, &o);
}

/* ---- Tiles ----------------------------------------------------------------------------------- */

/* Returns the lanes of a tile of a request that has `count` lanes per head. The result depends on nothing
 * else, and so the bits of a request do not depend on its batch. */
static int64_t lanes_of(const struct work *w, int64_t count)
{
    int64_t most = w->gradients->most_lanes;
    while (most > PLAN_ROW_TILE && count < 2 * most) most /= 2;
    return most;
}

static int64_t tiles_of(const struct work *w, int64_t count)
{
    const int64_t lanes = lanes_of(w, count);
    return (count + lanes - 1) / lanes;
}

/* Fills the spans and adds up the cost; returns the number of tiles. */
static int64_t find_spans(const struct work *w, double *cost)
{
    const struct backward_problem *p = w->problem;
    struct span span = {0};
    int64_t tile = 0;
    for (int64_t r = 0; r < p->b; r++) {
        span = backward_span(p, r, &span);
        w->spans[r] = (struct cpu_span){span, tile};
        tile += p->h_kv * (tiles_of(w, span.keys) + tiles_of(w, span.tokens * backward_group(p)));
        *cost +=
            3.5 * cost_of_attention((double)span.tokens * (double)p->h_q, (double)span.keys, p->d_qk, p->d_v);
    }
    w->spans[p->b].first_item = tile;
    return tile;
}

/* Runs one tile. The tiles of a key head are those of its keys, then those of its rows. */
static void run_tile(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const struct backward_problem *p = w->problem;
    const int64_t group = backward_group(p);
    const int64_t request = cpu_span_at(w->spans, p->b, index);
    const struct span *span = &w->spans[request].span;
    const int64_t of_keys = tiles_of(w, span->keys), of_head = of_keys + tiles_of(w, span->tokens * group);
    const int64_t key_head = (index - w->spans[request].first_item) / of_head,
                  tile = (index - w->spans[request].first_item) % of_head;
    const int64_t before = p->is_ragged ? span->first_token : request * p->s_q;
    const int64_t row = (key_head * w->tokens + before) * group;
    struct cpu_lanes lanes = {.problem = p,
                              .span = *span,
                              .request = p->is_ragged ? 0 : request,
                              .key_head = key_head,
                              .lse = w->lse + row,
                              .delta = w->delta + row,
                              .are_keys = tile < of_keys};
    const int64_t all = lanes.are_keys ? span->keys : span->tokens * group, most = lanes_of(w, all);
    lanes.first = (lanes.are_keys ? tile : tile - of_keys) * most;
    const int64_t left = all - lanes.first;
    lanes.count = left < most ? (int32_t)left : (int32_t)most;
    w->gradients->tile(&lanes, w->workspace + w->scratch_offset + (size_t)worker * w->scratch_bytes);
}

fmla_status cpu_backward_run(const struct kernel_driver *driver, union problem problem,
                             const struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    struct work w = *DECIDED(struct work, prepared);
    double cost = 0;
    (void)driver;
    if (p->is_ragged) {
        clear_outside(&w, &p->ragged_q, &p->dq, p->h_q, p->d_qk);
        clear_outside(&w, &p->ragged_k, &p->dk, p->h_kv, p->d_qk);
        clear_outside(&w, &p->ragged_k, &p->dv, p->h_kv, p->d_v);
    }
    w.workspace = p->workspace;
    w.lse = (float *)(void *)w.workspace;
    w.delta = (float *)(void *)(w.workspace + w.delta_offset);
    w.dsinks = (float *)(void *)(w.workspace + w.sinks_offset);
    w.spans = (struct cpu_span *)(void *)(w.workspace + w.spans_offset);
    const int64_t tiles = find_spans(&w, &cost);
    if (p->ragged_q.used || p->ragged_k.used) clear_padding(&w);
    threads_run(&w.pool, items_of(w.tokens), cost_of_moving(4.0 * (double)w.rows * (double)p->d_v), run_rows,
                &w);
    write_dsinks(&w);
    threads_run(&w.pool, tiles, cost, run_tile, &w);
    return FMLA_OK;
}
