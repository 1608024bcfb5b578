/* SPDX-License-Identifier: MIT
 *
 * The gradients of dense MHA, row by row. With P = exp(scale · q·k - lse), P' = P / (1 + exp(sink - lse)),
 * delta = Σ dout · out of the row and dS = P' · (dout·v - delta) + P · dlse:
 *
 *   dq = scale · Σ_t dS_t k_t        dk_t = scale · Σ_rows dS_t q        dv_t = Σ_rows P'_t dout
 *   dsink = -Σ_rows delta / (1 + exp(lse - sink))
 *
 * over the rows of all query heads that read the key head, dsink of each head. Sums are in double and rounded
 * once. The gradients of padding, and of tokens and keys of no request, are 0.
 */
#include "ref.h"

#include <math.h>
#include <string.h>

/* Workspace: the keys of one key head of a request with their gradients, one row, and the sums of dsink. */
struct memory {
    double *k, *dk, *v, *dv; /* [keys][d_qk], the same, [keys][d_v], the same */
    double *q, *dq, *dout;   /* [d_qk], the same, [d_v] */
    double *dsink;           /* [h_q] */
};

static int64_t most_keys(const struct backward_problem *p)
{
    return p->is_ragged ? p->ragged_k.tokens : p->s_k;
}

static fmla_status prepare(const struct kernel_driver *driver, union problem problem,
                           struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    const size_t width = (size_t)(p->d_qk + p->d_v); /* sizes are below 2^31 */
    size_t of_keys;
    (void)driver;
    if (__builtin_mul_overflow(2 * (size_t)most_keys(p), width, &of_keys) ||
        __builtin_mul_overflow(of_keys + 2 * width + (size_t)p->h_q, sizeof(double), &prepared->bytes))
        return fail(FMLA_UNSUPPORTED, "%s: k: %lld keys of a request exceed the address space",
                    operation_name(OP_MHA_BACKWARD), (long long)most_keys(p));
    return FMLA_OK;
}

static struct memory memory_of(const struct backward_problem *p)
{
    const size_t keys = (size_t)most_keys(p), d_qk = (size_t)p->d_qk, d_v = (size_t)p->d_v;
    struct memory m = {.k = p->workspace};
    m.dk = m.k + keys * d_qk;
    m.v = m.dk + keys * d_qk;
    m.dv = m.v + keys * d_v;
    m.q = m.dv + keys * d_v;
    m.dq = m.q + d_qk;
    m.dout = m.dq + d_qk;
    m.dsink = m.dout + d_v;
    return m;
}

/* Returns the vector of a head of a token. */
static uint16_t *vector_of(const struct token_view *view, int64_t request, int64_t token, int64_t head)
{
    return view->data + request * view->request + token * view->token + head * view->head;
}

static void load(double *to, const struct backward_problem *p, const uint16_t *from, int64_t width)
{
    for (int64_t d = 0; d < width; d++) to[d] = (double)ref_load(from, p->element, d);
}

static void store(const struct backward_problem *p, uint16_t *to, const double *from, int64_t width)
{
    for (int64_t d = 0; d < width; d++) ref_store(to, p->element, d, (float)from[d]);
}

static double dot_of(const double *a, const double *b, int64_t width)
{
    double sum = 0.0;
    for (int64_t d = 0; d < width; d++) sum += a[d] * b[d];
    return sum;
}

static void add(double *sum, double factor, const double *x, int64_t width)
{
    for (int64_t d = 0; d < width; d++) sum[d] += factor * x[d];
}

/* Adds the gradients of one row, which sees the first `seen` keys of its request. `token` counts the tokens
 * of all requests. */
static void add_row(const struct backward_problem *p, const struct memory *m, int64_t request, int64_t token,
                    int64_t head, int64_t seen)
{
    const float lse = p->lse[request * p->lse_stride[0] + head * p->lse_stride[1] + token];
    const double factor = (double)p->rules.lse_factor, natural = (double)lse / factor,
                 scale = (double)p->scale;
    const double sink = p->rules.attn_sink ? (double)p->rules.attn_sink[head] : -INFINITY;
    const uint16_t *out = vector_of(&p->out, request, token, head);
    double delta = 0.0, dlse = 0.0;
    memset(m->dq, 0, (size_t)p->d_qk * sizeof *m->dq);
    load(m->q, p, vector_of(&p->q, request, token, head), p->d_qk);
    load(m->dout, p, vector_of(&p->dout, request, token, head), p->d_v);
    for (int64_t d = 0; d < p->d_v; d++) delta += m->dout[d] * (double)ref_load(out, p->element, d);
    if (p->dlse)
        dlse = (double)p->dlse[request * p->dlse_stride[0] + head * p->dlse_stride[1] + token] * factor;
    if (seen > 0 && !isinf(lse)) m->dsink[head] -= delta / (1.0 + exp(natural - sink));
    for (int64_t t = 0; t < seen && !isinf(lse); t++) {
        const double *k = m->k + t * p->d_qk, *v = m->v + t * p->d_v;
        const double of_lse = exp(scale * dot_of(m->q, k, p->d_qk) - natural), /* P */
            weight = of_lse / (1.0 + exp(sink - natural));                     /* P' */
        const double of_score = weight * (dot_of(m->dout, v, p->d_v) - delta) + of_lse * dlse;
        add(m->dq, scale * of_score, k, p->d_qk);
        add(m->dk + t * p->d_qk, scale * of_score, m->q, p->d_qk);
        add(m->dv + t * p->d_v, weight, m->dout, p->d_v);
    }
    store(p, vector_of(&p->dq, request, token, head), m->dq, p->d_qk);
}

static void run_key_head(const struct backward_problem *p, const struct memory *m, int64_t request,
                         const struct span *span, int64_t key_head)
{
    const int64_t group = p->h_q / p->h_kv;
    for (int64_t t = 0; t < span->keys; t++) {
        load(m->k + t * p->d_qk, p, vector_of(&p->k, request, span->first_key + t, key_head), p->d_qk);
        load(m->v + t * p->d_v, p, vector_of(&p->v, request, span->first_key + t, key_head), p->d_v);
    }
    memset(m->dk, 0, (size_t)(span->keys * p->d_qk) * sizeof *m->dk);
    memset(m->dv, 0, (size_t)(span->keys * p->d_v) * sizeof *m->dv);
    for (int64_t j = 0; j < span->tokens; j++) {
        /* With a causal mask, the last token sees all keys. */
        const int64_t seen = p->causal ? span->keys - span->tokens + j + 1 : span->keys;
        for (int64_t h = key_head * group; h < (key_head + 1) * group; h++)
            add_row(p, m, request, span->first_token + j, h, seen);
    }
    for (int64_t t = 0; t < span->keys; t++) {
        store(p, vector_of(&p->dk, request, span->first_key + t, key_head), m->dk + t * p->d_qk, p->d_qk);
        store(p, vector_of(&p->dv, request, span->first_key + t, key_head), m->dv + t * p->d_v, p->d_v);
    }
}

/* Writes zeros to all heads of `tokens` tokens, or keys, from `first` on. */
static void clear(const struct token_view *view, int64_t request, int64_t first, int64_t tokens,
                  int64_t heads, int64_t width)
{
    for (int64_t token = first; token < first + tokens; token++)
        for (int64_t h = 0; h < heads; h++)
            memset(vector_of(view, request, token, h), 0, (size_t)width * sizeof(uint16_t));
}

static void clear_padding(const struct backward_problem *p, int64_t request, const struct span *span)
{
    const int64_t token = span->first_token + span->tokens, key = span->first_key + span->keys;
    clear(&p->dq, request, token, span->padding_tokens, p->h_q, p->d_qk);
    clear(&p->dk, request, key, span->padding_keys, p->h_kv, p->d_qk);
    clear(&p->dv, request, key, span->padding_keys, p->h_kv, p->d_v);
}

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    const struct memory m = memory_of(p);
    struct span span = {0};
    (void)driver, (void)prepared;
    if (p->is_ragged) { /* tokens and keys of requests are overwritten below */
        clear(&p->dq, 0, 0, p->ragged_q.tokens, p->h_q, p->d_qk);
        clear(&p->dk, 0, 0, p->ragged_k.tokens, p->h_kv, p->d_qk);
        clear(&p->dv, 0, 0, p->ragged_k.tokens, p->h_kv, p->d_v);
    }
    memset(m.dsink, 0, (size_t)p->h_q * sizeof *m.dsink);
    for (int64_t request = 0; request < p->b; request++) {
        span = backward_span(p, request, &span);
        for (int64_t key_head = 0; key_head < p->h_kv; key_head++)
            run_key_head(p, &m, request, &span, key_head);
        clear_padding(p, request, &span);
    }
    for (int64_t h = 0; p->d_attn_sink && h < p->h_q; h++) p->d_attn_sink[h] = (float)m.dsink[h];
    return FMLA_OK;
}

const struct kernel_driver ref_mha_backward_driver = {.prepare = prepare, .run = run};
