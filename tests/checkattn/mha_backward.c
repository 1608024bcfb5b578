/* SPDX-License-Identifier: MIT
 *
 * Tests dense MHA, backward. The oracle computes the gradients of a row or key as a separate problem
 * without a mask: a row of dq over the keys that it sees, a key's dk and dv over the rows that see it.
 * Small cases are compared whole, large ones in chosen rows and keys. Gradients of padding and
 * outside all requests must be zero; inputs there are NaN.
 */
#include "mha_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GRADIENT(member) TENSOR_mha_backward_##member
enum { FIRST = GRADIENT(dq), GRADIENTS = 3 };

/* ---- A case ----------------------------------------------------------------------------------- */

/* In every other request the first query is NaN instead of the last key; it must not affect keys that it
 * does not see. */
static void put_nan_queries(struct test_case *c)
{
    if (c->v[H_INPUTS] != INPUTS_NAN_ENDS || !c->v[H_CAUSAL]) return;
    for (int64_t r = 1; r < case_requests(c); r += 2) {
        const int64_t key = mha_begin(c, true, r) + mha_length(c, true, r) - 1;
        const bool any = mha_length(c, true, r) && mha_length(c, false, r);
        for (int64_t h = 0; any && h < c->h_kv; h++)
            mha_put_vector(c, MHA(k), r, key, h, false), mha_put_vector(c, MHA(v), r, key, h, false);
        for (int64_t h = 0; any && h < c->h_q; h++)
            for (int64_t d = 0; d < c->d_qk; d++) /* differs from the fill of outputs */
                ((uint16_t *)case_row(c, MHA(q), r, mha_begin(c, false, r), h))[d] = 0x7fff;
    }
}

/* Computes out and lse with the library's forward operation, in host memory. */
static void attend(struct test_case *c)
{
    const int32_t *base = op_option(c->op->of, &c->args, "log_base"),
                  *causal = op_option(c->op->of, &c->args, "causal");
    union call_args args = {.mha_forward = FMLA_INIT(fmla_mha_forward_args)};
    fmla_mha_forward_args *forward = &args.mha_forward;
    forward->q = &c->tensor[MHA(q)].tensor, forward->k = &c->tensor[MHA(k)].tensor;
    forward->v = &c->tensor[MHA(v)].tensor;
    if (c->flat)
        forward->cu_seqlens_q = &c->tensor[MHA(cu_seqlens_q)].tensor,
        forward->cu_seqlens_k = &c->tensor[MHA(cu_seqlens_k)].tensor;
    if (case_names(c, c->op->sink)) forward->attn_sink = &c->tensor[c->op->sink].tensor;
    if (case_names(c, GRADIENT(seqused_q))) forward->seqused_q = &c->tensor[GRADIENT(seqused_q)].tensor;
    if (case_names(c, GRADIENT(seqused_k))) forward->seqused_k = &c->tensor[GRADIENT(seqused_k)].tensor;
    forward->out = &c->tensor[MHA(out)].tensor, forward->lse = &c->tensor[MHA(lse)].tensor;
    forward->causal = *causal, forward->log_base = *base, forward->lse_empty = (int32_t)c->v[H_EMPTY];
    forward->softmax_scale = *(const float *)op_option(c->op->of, &c->args, "softmax_scale");
    if (!call_on_host(&mha_forward, &args, -1)) return;
    fprintf(stderr, "checkattn: forward: %s\n", fmla_last_error());
    exit(1);
}

/* Makes out and lse of padding NaN. */
static void poison_padding(struct test_case *c)
{
    for (int64_t r = 0; r < case_requests(c); r++)
        for (int64_t j = mha_length(c, false, r); j < mha_extent(c, false, r); j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                const int64_t token = mha_begin(c, false, r) + j, request = c->flat ? 0 : r;
                memset(case_row(c, MHA(out), request, token, h), 0xff, (size_t)c->d_v * sizeof(uint16_t));
                *(float *)case_row(c, MHA(lse), request, token, h) = NAN;
            }
}

/* Makes the gradient of lse: NaN where a row sees no key. */
static void put_dlse(struct test_case *c)
{
    if (!c->v[H_DLSE]) return;
    for (int64_t r = 0; r < case_requests(c); r++)
        for (int64_t i = 0; i < mha_length(c, false, r) * c->h_q; i++) {
            const int64_t token = mha_begin(c, false, r) + i / c->h_q, request = c->flat ? 0 : r;
            const float *lse = case_row(c, MHA(lse), request, token, i % c->h_q);
            *(float *)case_row(c, GRADIENT(dlse), request, token, i % c->h_q) =
                isinf(*lse) ? NAN : random_normal(&c->random) * 0.3f;
        }
}

static void make(struct test_case *c)
{
    const enum layout layout = near_layout(c->v[H_LAYOUT]);
    /* The default may be such a kernel. */
    const bool products = c->run->by_default ? on_gpu(c->run) : mha_on_tensor_cores(c->run->kernel);
    c->unordered = products && c->v[H_DETERMINISTIC] != 1;
    /* There cuda-sm80 has blocks of 64 or of 128 keys. */
    c->of_batch = products && c->v[H_SIZES] == SIZES_192_128 && strcmp(c->run->kernel, "cuda-sm90") != 0;
    mha_make(c);
    for (int i = MHA(out); i < FIRST + GRADIENTS; i++) case_tensor(c, i, layout, true);
    case_sinks(c, c->v[H_SINK]);
    case_tensor(c, GRADIENT(dlse), layout, c->v[H_DLSE] != 0);
    case_tensor(c, GRADIENT(d_attn_sink), LAYOUT_CONTIGUOUS, c->v[H_SINK] != SINK_NONE);
    put_nan_queries(c);
    attend(c);
    poison_padding(c);
    put_dlse(c);
    for (int64_t r = 0; r < case_requests(c); r++)
        for (int64_t i = 0; i < mha_length(c, false, r) * c->h_q; i++)
            mha_put_vector(c, GRADIENT(dout), r, mha_begin(c, false, r) + i / c->h_q, i % c->h_q,
                           c->v[H_INPUTS] == INPUTS_SPIKED);
    mha_spread(c);
    for (int k = 0; k < GRADIENTS; k++) c->tolerance[k] = tolerance_mha_out;
}

/* ---- By the oracle ---------------------------------------------------------------------------- */

/* Tokens of a request from `token` on, and its keys from `key` on: for one row or one key. */
struct item {
    int64_t of_key; /* no padding after it: items are compared as bytes */
    int64_t request, token, tokens, key, keys, head, heads;
};

static int64_t group_of(const struct test_case *c)
{
    return c->h_q / c->h_kv;
}

/* A row has dq; a key has dk and dv. */
static bool has_gradient(const struct item *item, int k)
{
    return item->of_key == (k > 0);
}

static int64_t heads_of(const struct test_case *c, bool of_key)
{
    return of_key ? c->h_kv : c->h_q;
}

static int64_t width_of(const struct test_case *c, int k)
{
    return k == 2 ? c->d_v : c->d_qk;
}

static struct item row_item(const struct test_case *c, int64_t r, int64_t token, int64_t head)
{
    const int64_t seen = mha_seen(c, r, mha_begin(c, false, r) + token, head);
    return (struct item){.request = r, .token = token, .tokens = 1, .keys = seen, .head = head, .heads = 1};
}

static struct item key_item(const struct test_case *c, int64_t r, int64_t key, int64_t key_head)
{
    const int64_t tokens = mha_length(c, false, r), keys = mha_length(c, true, r);
    int64_t first = c->v[H_CAUSAL] ? key - (keys - tokens) : 0;
    if (first < 0) first = 0;
    return (struct item){true, r, first, tokens - first, key, 1, key_head * group_of(c), group_of(c)};
}

/* Computes the gradients of an item, in memory to be freed: [tokens][heads][d_qk], [keys][d_qk],
 * [keys][d_v]. */
static fmla_status by_oracle(const struct test_case *c, const struct item *item,
                             uint16_t *gradients[GRADIENTS])
{
    const int64_t first_q = item->token + mha_begin(c, false, item->request),
                  first_k = item->key + mha_begin(c, true, item->request);
    const int64_t shapes[GRADIENTS][4] = {
        {1, item->tokens, item->heads, c->d_qk}, {1, item->keys, 1, c->d_qk}, {1, item->keys, 1, c->d_v}};
    fmla_tensor results[GRADIENTS];
    struct view view;
    view_make(c, &view, true);
    if (!c->flat) view_narrow_all(c, &view, DIM_b, item->request, 1);
    view_narrow_all(c, &view, c->flat ? DIM_tokens_q : DIM_s_q, first_q, item->tokens);
    view_narrow_all(c, &view, c->flat ? DIM_tokens_k : DIM_s_k, first_k, item->keys);
    view_narrow_all(c, &view, DIM_h_q, item->head, item->heads);
    view_narrow_all(c, &view, DIM_h_kv, item->head / group_of(c), 1);
    for (int i = MHA(q); c->flat && i < FIRST; i++)
        if (i != MHA(cu_seqlens_q) && i != MHA(cu_seqlens_k)) mha_set_apart(&view, i);
    if (c->flat && c->v[H_DLSE]) mha_set_apart(&view, GRADIENT(dlse));
    set_tensor(c->op, &view.args, GRADIENT(d_attn_sink), NULL);
    for (int k = 0; k < GRADIENTS; k++) {
        const int64_t *shape = shapes[k];
        gradients[k] = must_alloc((size_t)(shape[1] * shape[2] * shape[3] + 1) * sizeof(uint16_t));
        results[k] = (fmla_tensor){.data = gradients[k],
                                   .device = {FMLA_DEVICE_CPU, 0},
                                   .ndim = 4,
                                   .dtype = c->dtype,
                                   .shape = shape};
        set_tensor(c->op, &view.args, FIRST + k, &results[k]);
    }
    fmla_mha_backward_args *args = &view.args.mha_backward;
    mha_whole(c, &view), args->causal = 0, args->kernel = "ref";
    return call_on_host(c->op, &view.args, -1);
}

/* Returns the address of the item's gradient k in the case. */
static uint16_t *place_of(const struct test_case *c, const struct item *item, int k)
{
    const int64_t at = mha_begin(c, item->of_key, item->request) + (item->of_key ? item->key : item->token);
    return case_row(c, FIRST + k, item->request, at, item->of_key ? item->head / group_of(c) : item->head);
}

/* ---- What rounding is relative to ------------------------------------------------------------- */

static void load(const struct test_case *c, int i, int64_t request, int64_t at, int64_t head, double *to)
{
    const int64_t width = i == MHA(q) || i == MHA(k) ? c->d_qk : c->d_v,
                  first = mha_begin(c, i == MHA(k) || i == MHA(v), request);
    const uint16_t *row = case_row(c, i, request, first + at, head);
    for (int64_t d = 0; d < width; d++) to[d] = guarded_value(&c->tensor[i], row + d);
}

static double dot(const double *a, const double *b, int64_t width, double *magnitude)
{
    double sum = 0.0;
    for (int64_t d = 0; d < width; d++) sum += a[d] * b[d], *magnitude += fabs(a[d] * b[d]);
    return sum;
}

/* The bound of each element of an item's gradients, and its largest term. */
struct terms {
    double bound[GRADIENTS][MHA_WIDEST], largest[GRADIENTS][MHA_WIDEST];
};

/* Returns the largest relative error of rounding to the case's 16-bit type. */
static double roundoff(const struct test_case *c)
{
    return c->v[H_DTYPE] ? 0x1p-11 : 0x1p-8;
}

static void add_term(struct terms *terms, int k, int64_t d, double term, double off)
{
    terms->bound[k][d] += fabs(off);
    terms->largest[k][d] = fmax(terms->largest[k][d], fabs(term));
}

/* The numbers of a row. The sink is -inf if there is none. */
struct row {
    double natural, sink, dlse; /* of the natural logarithm */
};

static struct row row_of(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    const int64_t at = mha_begin(c, false, request) + token, apart = c->flat ? 0 : request;
    const double base = c->v[H_BASE] ? 1.4426950408889634 : 1.0;
    struct row row = {(double)*(const float *)case_row(c, MHA(lse), apart, at, head) / base, -INFINITY, 0.0};
    if (case_names(c, c->op->sink))
        row.sink = (double)*(const float *)guarded_at(&c->tensor[c->op->sink], head, 0, 0, 0);
    if (c->v[H_DLSE]) row.dlse = (double)*(const float *)case_row(c, GRADIENT(dlse), apart, at, head) * base;
    return row;
}

/* Returns the relative error of exp(sink - lse) in fp32. */
static double of_sink(const struct row *row)
{
    return 0x1p-19 * (isfinite(row->sink) ? fabs(row->sink) + fabs(row->natural) + 1.0 : 0.0);
}

/* P or dS, the result and the oracle's result are rounded to 16 bits; scores, dP and delta are fp32 sums,
 * whose errors are relative to their terms. */
static void find_terms(const struct test_case *c, const struct item *item, struct terms *terms)
{
    const double scale = (double)*(const float *)op_option(c->op->of, &c->args, "softmax_scale");
    double q[MHA_WIDEST], k[MHA_WIDEST], v[MHA_WIDEST], out[MHA_WIDEST], dout[MHA_WIDEST];
    memset(terms, 0, sizeof *terms);
    for (int64_t j = item->token; j < item->token + item->tokens; j++)
        for (int64_t h = item->head; h < item->head + item->heads; h++) {
            const struct row row = row_of(c, item->request, j, h);
            const double natural = row.natural;
            if (isinf(natural)) continue;
            load(c, MHA(q), item->request, j, h, q), load(c, MHA(out), item->request, j, h, out);
            load(c, GRADIENT(dout), item->request, j, h, dout);
            for (int64_t t = item->key; t < item->key + item->keys; t++) {
                double of_score = 0.0, of_dp = 0.0;
                load(c, MHA(k), item->request, t, h / group_of(c), k);
                load(c, MHA(v), item->request, t, h / group_of(c), v);
                const double of_lse = exp(scale * dot(q, k, c->d_qk, &of_score) - natural) * row.dlse,
                             p = exp(scale * dot(q, k, c->d_qk, &of_score) - natural) /
                                 (1.0 + exp(row.sink - natural));
                const double of_out = p * (dot(dout, v, c->d_v, &of_dp) - dot(dout, out, c->d_v, &of_dp)),
                             ds = of_out + of_lse;
                const double part =
                    3.0 * roundoff(c) + 0x1p-19 * (scale * of_score + fabs(natural)) + of_sink(&row);
                const double off = scale * ((fabs(of_out) + fabs(of_lse)) * part + p * 0x1p-18 * of_dp);
                for (int64_t d = 0; d < c->d_qk; d++) {
                    add_term(terms, 0, d, scale * ds * k[d], off * k[d]);
                    add_term(terms, 1, d, scale * ds * q[d], off * q[d]);
                }
                for (int64_t d = 0; d < c->d_v; d++) add_term(terms, 2, d, p * dout[d], p * part * dout[d]);
            }
        }
}

/* ---- Comparing -------------------------------------------------------------------------------- */

enum { MOST_ITEMS = 4096, SMALL = 10000, CHOSEN = 32 };

/* Chooses rows and keys: all of a small case; of a large one those at both ends of requests, and random
 * ones. */
static int64_t choose_items(struct test_case *c, struct item *items)
{
    int64_t *const *first = ((const struct mha_case *)c)->first;
    const int64_t requests = case_requests(c);
    int64_t count = 0, most = 0;
    for (int64_t r = 0; r < requests; r++)
        most += (mha_length(c, false, r) + 1) * (mha_length(c, true, r) + 1) * c->h_q;
    const bool all =
        most <= SMALL && first[0][requests] * c->h_q + first[1][requests] * c->h_kv <= MOST_ITEMS;
    for (int of_key = 0; of_key < 2; of_key++) {
        const int64_t heads = heads_of(c, of_key);
        struct item (*item)(const struct test_case *, int64_t, int64_t, int64_t) =
            of_key ? key_item : row_item;
        for (int64_t r = 0; r < requests; r++) {
            const int64_t length = mha_length(c, of_key, r);
            for (int64_t i = 0; all && i < length * heads; i++)
                items[count++] = item(c, r, i / heads, i % heads);
            if (all || !length) continue;
            items[count++] = item(c, r, 0, r % heads);
            items[count++] = item(c, r, length - 1, heads - 1 - r % heads);
        }
        for (int i = 0; !all && requests && i < CHOSEN; i++) {
            const int64_t r = random_between(&c->random, 0, requests - 1), length = mha_length(c, of_key, r);
            if (!length) continue;
            items[count++] = item(c, r, random_between(&c->random, 0, length - 1),
                                  random_between(&c->random, 0, heads - 1));
        }
    }
    return count;
}

/* The oracle's result for an item: dq of a row, dk and dv of a key. */
struct known {
    uint16_t gradients[GRADIENTS][MHA_WIDEST];
    bool has_terms;
    struct terms terms;
};

struct comparing {
    struct test_case *c;
    const struct item *items;
    struct known *known;
    struct comparison of[MOST_ITEMS][GRADIENTS];
};

static fmla_status ask_item(const struct test_case *c, const void *item, void *result)
{
    uint16_t *theirs[GRADIENTS];
    const fmla_status status = by_oracle(c, item, theirs);
    for (int k = 0; k < GRADIENTS; free(theirs[k++]))
        if (has_gradient(item, k))
            memcpy(((struct known *)result)->gradients[k], theirs[k],
                   (size_t)width_of(c, k) * sizeof(uint16_t));
    return status;
}

/* Threads never ask for the same item. */
static const struct terms *terms_of(const struct comparing *all, int64_t i)
{
    struct known *known = &all->known[i];
    if (!known->has_terms) find_terms(all->c, &all->items[i], &known->terms);
    known->has_terms = true;
    return &known->terms;
}

static void compare_item(void *data, int64_t i, int32_t worker)
{
    struct comparing *all = data;
    const struct test_case *c = all->c;
    const struct item *item = &all->items[i];
    (void)worker;
    for (int k = 0; k < GRADIENTS; k++) {
        const struct guarded *g = &c->tensor[FIRST + k];
        if (!has_gradient(item, k)) continue;
        const uint16_t *mine = place_of(c, item, k);
        for (int64_t d = 0; d < width_of(c, k); d++) {
            const double value = guarded_value(g, mine + d),
                         expected = guarded_value(g, all->known[i].gradients[k] + d);
            /* dS cancel in a sum over similar keys, as spiked ones are, so for such inputs the cosine too
             * counts only what rounding does not explain. */
            const bool look = c->other || compare_misses(&c->tolerance[k], value, expected);
            /* Two roundings to fp16 subnormals of a few units may differ by one unit. */
            const bool rounded = (look && fabs(value - expected) <= terms_of(all, i)->bound[k][d]) ||
                                 (c->v[H_DTYPE] && fabs(value - expected) <= 0x1p-24);
            compare_add_within(&all->of[i][k], &c->tolerance[k], rounded ? expected : value, expected, 0.0);
        }
    }
}

static void add_comparison(struct comparison *to, const struct comparison *from)
{
    to->count += from->count, to->wrong += from->wrong;
    to->worst_abs = fmax(to->worst_abs, from->worst_abs);
    to->sum_ab += from->sum_ab, to->sum_aabb += from->sum_aabb, to->sum_refref += from->sum_refref;
    to->most_refref = fmax(to->most_refref, from->most_refref);
}

/* Returns true if every element of gradient k of the tokens, or keys, in [from, to) is 0. */
static bool are_zeros(const struct test_case *c, int k, int64_t request, int64_t from, int64_t to)
{
    const int64_t width = width_of(c, k);
    bool zeros = true;
    for (int64_t t = from; t < to; t++)
        for (int64_t i = 0; i < heads_of(c, k) * width; i++)
            zeros &= !(((uint16_t *)case_row(c, FIRST + k, request, t, i / width))[i % width] & 0x7fff);
    return zeros;
}

/* Returns true if every element of vectors outside all requests and of padding is 0. */
static bool zeros_outside(const struct test_case *c)
{
    bool zeros = true;
    for (int k = 0; k < GRADIENTS; k++) {
        const int64_t *first = ((const struct mha_case *)c)->first[k > 0], requests = case_requests(c);
        for (int64_t r = 0; r < requests; r++)
            zeros &= are_zeros(c, k, c->flat ? 0 : r, mha_begin(c, k, r) + mha_length(c, k, r),
                               mha_begin(c, k, r) + mha_extent(c, k, r));
        if (!c->flat) continue;
        zeros &= are_zeros(c, k, 0, 0, first[0]);
        zeros &= are_zeros(c, k, 0, first[requests], k ? c->tokens_k : c->tokens_q);
    }
    return zeros;
}

/* If elements are mostly one term each, the rounding of P or dS does not average out: half its square
 * times that share of the cosine difference is added to the allowance. */
static bool passed(const struct comparing *all, int64_t count, const struct comparison *sum, int k)
{
    const struct test_case *c = all->c;
    struct tolerance tolerance = c->tolerance[k];
    double largest = 0.0;
    if (c->other) return compare_passed_other(sum, &tolerance);
    if (compare_passed(sum, &tolerance) || sum->wrong) return !sum->wrong;
    for (int64_t i = 0; i < count; i++) {
        if (!has_gradient(&all->items[i], k)) continue;
        for (int64_t d = 0; d < width_of(c, k); d++) {
            const double term = terms_of(all, i)->largest[k][d];
            largest += term * term;
        }
    }
    tolerance.cosine += roundoff(c) * roundoff(c) / 2.0 * largest / sum->sum_refref;
    return compare_passed(sum, &tolerance);
}

/* Compares the gradients of the sinks with their definition, summed in double. */
static void compare_sinks(struct test_case *c)
{
    double out[MHA_WIDEST], dout[MHA_WIDEST];
    for (int64_t h = 0; case_names(c, GRADIENT(d_attn_sink)) && h < c->h_q; h++) {
        const float came = *(const float *)guarded_at(&c->tensor[GRADIENT(d_attn_sink)], h, 0, 0, 0);
        double sum = 0.0, bound = 0.0;
        for (int64_t r = 0; r < case_requests(c); r++)
            for (int64_t j = 0; j < mha_length(c, false, r); j++) {
                const struct row row = row_of(c, r, j, h);
                double magnitude = 0.0;
                if (isinf(row.natural)) continue;
                load(c, MHA(out), r, j, h, out), load(c, GRADIENT(dout), r, j, h, dout);
                const double delta = dot(out, dout, c->d_v, &magnitude),
                             share = 1.0 / (1.0 + exp(row.natural - row.sink));
                sum -= delta * share;
                bound += share * (magnitude * 0x1p-18 + fabs(delta) * (0x1p-18 + of_sink(&row)));
            }
        if (isnan(sum) ? isnan(came) : fabs((double)came - sum) <= bound + 1e-30) continue;
        failed(c, "d_attn_sink of head %lld is %g, must be %g ± %g", (long long)h, (double)came, sum, bound);
        return;
    }
}

static void compare(struct test_case *c, uint64_t inputs, struct oracle *oracle)
{
    struct comparing *all = calloc(1, sizeof *all);
    struct item *items = calloc(MOST_ITEMS, sizeof *items);
    if (!all || !items) exit(1);
    const int64_t count = choose_items(c, items);
    oracle_ask(oracle, c, inputs,
               &(struct items){items, count, sizeof *items, sizeof(struct known), ask_item});
    all->c = c, all->items = items, all->known = oracle->results;
    for_rows(c->run, count, compare_item, all);
    c->tally->rows += count;
    if (oracle->refused) failed(c, "the oracle refused rows or keys");
    if (!zeros_outside(c)) failed(c, "a gradient of padding or of a token of no request is not 0");
    compare_sinks(c);
    for (int k = 0; k < GRADIENTS; k++) {
        struct comparison sum = {0};
        int64_t first = -1;
        for (int64_t i = 0; i < count; i++) {
            add_comparison(&sum, &all->of[i][k]);
            if (first < 0 && all->of[i][k].wrong) first = i;
        }
        c->tally->cosine_out = fmax(c->tally->cosine_out, compare_cosine(&sum));
        if (passed(all, count, &sum, k)) continue;
        const struct item *item = &items[first < 0 ? 0 : first];
        failed(c,
               "%s: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; first in request %lld, token "
               "%lld, key %lld, head %lld",
               c->op->tensor[FIRST + k]->name, (long long)sum.wrong, (long long)sum.count, sum.worst_abs,
               compare_cosine(&sum), (long long)item->request, (long long)item->token, (long long)item->key,
               (long long)item->head);
    }
    free(items), free(all);
}

/* ---- Faults ----------------------------------------------------------------------------------- */

/* Recomputes dq of a row, or dk and dv of a key, over one key or token more or fewer: the output of a
 * kernel with that defect. */
static bool plant_item(struct test_case *c, bool of_key, int64_t change)
{
    for (int64_t r = 0; r < case_requests(c); r++) {
        const int64_t tokens = mha_length(c, false, r), keys = mha_length(c, true, r);
        for (int64_t i = of_key ? keys - 1 : 0; of_key ? i > 0 : i < tokens; of_key ? i-- : i++) {
            struct item item = (of_key ? key_item : row_item)(c, r, i, 0);
            uint16_t *theirs[GRADIENTS];
            if (of_key)
                item.token -= change, item.tokens += change;
            else
                item.keys += change;
            if (item.token < 0 || item.tokens < 1 || item.keys < 1 || item.keys > keys) continue;
            const bool good = by_oracle(c, &item, theirs) == FMLA_OK;
            for (int k = 0; k < GRADIENTS; free(theirs[k++]))
                if (has_gradient(&item, k))
                    memcpy(place_of(c, &item, k), theirs[k], (size_t)width_of(c, k) * sizeof(uint16_t));
            return good;
        }
    }
    return false;
}

/* Plants a defect in the last element of a gradient's vector, of padding or outside all requests. */
static bool plant_outside(struct test_case *c)
{
    const int k = (int)(c->random.state % GRADIENTS);
    const int64_t requests = case_requests(c), end = ((const struct mha_case *)c)->first[k > 0][requests];
    int64_t r = 0, token = end;
    while (r < requests && mha_length(c, k, r) == mha_extent(c, k, r)) r++;
    if (r < requests) token = mha_begin(c, k, r) + mha_length(c, k, r);
    if (r == requests && (!c->flat || end >= (k ? c->tokens_k : c->tokens_q))) return false;
    uint16_t *vector = case_row(c, FIRST + k, c->flat ? 0 : r, token, heads_of(c, k) - 1);
    vector[width_of(c, k) - 1] = 1;
    return true;
}

/* Leaves a row out of the gradient of the last sink, if that row counts. */
static bool plant_sink(struct test_case *c)
{
    float *const dsink = guarded_at(&c->tensor[GRADIENT(d_attn_sink)], c->h_q - 1, 0, 0, 0);
    double out[MHA_WIDEST], dout[MHA_WIDEST], magnitude = 0.0;
    for (int64_t r = 0; c->v[H_SINK] && r < case_requests(c); r++)
        for (int64_t j = 0; j < mha_length(c, false, r); j++) {
            const struct row row = row_of(c, r, j, c->h_q - 1);
            if (isinf(row.natural)) continue;
            load(c, MHA(out), r, j, c->h_q - 1, out), load(c, GRADIENT(dout), r, j, c->h_q - 1, dout);
            *dsink += (float)(dot(out, dout, c->d_v, &magnitude) / (1.0 + exp(row.natural - row.sink)));
            return true;
        }
    return false;
}

static bool plant_after(struct test_case *c, enum defect fault)
{
    static const uint16_t zero, nan = 0x7fff;
    const int64_t r = case_requests(c) - 1;
    if (r < 0 || !mha_length(c, false, r) || !mha_length(c, true, r)) return false;
    uint16_t *row =
        case_row(c, GRADIENT(dk), r, mha_begin(c, true, r) + mha_length(c, true, r) - 1, c->h_kv - 1);
    const struct guarded *dv = &c->tensor[GRADIENT(dv)];
    switch (fault) {
    case FAULT_DROPPED_KEY: return plant_item(c, c->random.state % 2, -1);
    case FAULT_MASK: return c->v[H_CAUSAL] && plant_item(c, c->random.state % 2, 1);
    case FAULT_OUT_OF_BOUNDS: dv->memory[GUARDED_FRONT + dv->bytes] = 0; return true;
    case FAULT_GAP:
        if (!c->tensor[GRADIENT(dk)].tensor.strides) return false;
        memcpy(row + c->d_qk, &zero, sizeof zero);
        return true;
    case FAULT_UNWRITTEN: memset(row, 0xff, (size_t)c->d_qk * sizeof *row); return true;
    case FAULT_SINK: return plant_sink(c);
    case FAULT_NAN: memcpy(row + c->d_qk - 1, &nan, sizeof nan); return true;
    case FAULT_OUTSIDE: return plant_outside(c);
    case FAULT_UNSTABLE: return true; /* case_check plants it between the runs */
    default: return false;
    }
}

/* Cases that suit every fault: requests without keys or tokens, gaps, causal. */
static void fault_cases(struct suite *suite)
{
    const struct run *run = &suite->run[0];
    for (uint64_t i = 0; i < 8; i++)
        suite_case(suite, run->seed + i, false,
                   "b 7, heads 5_5, causal 1, layout padded, shape few%s, sink %s, requests %s",
                   run->fault == FAULT_BATCH ? ", sizes 128_128, deterministic 1" : "",
                   run->fault == FAULT_SINK || i % 4 > 1 ? "finite" : "none",
                   run->fault == FAULT_OUTSIDE ? "within"
                   : i % 2                     ? "varied"
                                               : "apart");
}

static const struct maker maker = {.size = sizeof(struct mha_case),
                                   .draw = mha_draw,
                                   .make = make,
                                   .seen = mha_seen,
                                   .compare = compare,
                                   .part = mha_part};

#define GROUPS "shape groups, deterministic 1"

struct subject mha_backward = {
    MHA_SUBJECT,
    .of = OP_MHA_BACKWARD,
    .values = MHA_BACKWARD_AXES(AXIS_TEXT),
    .plant_after = plant_after,
    .special = {"b 0, requests within", "b 0, sink finite", "b 0, requests within, sink finite", MHA_SPECIAL,
                "b 3, shape rows, heads 5_5, sizes 128_128, causal 1, sink infinite, dlse 1",
                "b 3, shape rows, heads 16_1, sizes 128_128, requests within, sink high, dlse 1",
                "b 3, shape even, heads 5_5, causal 1, sink high, dlse 1, inputs spiked",
                "b 7, shape rows, heads 2_1, sizes 128_128, causal 1, inputs nan_ends", MHA_OWN_THREADS,
                "b 1, " GROUPS ", heads 5_5, sizes 128_128", "b 1, " GROUPS ", heads 32_4, sizes 64_64",
                "b 2, " GROUPS ", heads 2_1, sizes 128_128, requests cut",
                "b 2, " GROUPS ", heads 5_5, sizes 96_64, dtype fp16, requests ragged, used k",
                "b 2, " GROUPS ", heads 2_1, sizes 64_64, used k",
                "b 2, " GROUPS ", heads 5_5, requests ragged, causal 1, used both"},
    .by_oracle = {MHA_BY_ORACLE, "b 7, shape rows, heads 16_1, requests within, causal 1, layout odd"},
    .faults = FAULT(DROPPED_KEY) | FAULT(MASK) | FAULT(OUT_OF_BOUNDS) | FAULT(GAP) | FAULT(UNWRITTEN) |
              FAULT(NAN) | FAULT(OUTSIDE) | FAULT(SINK) | FAULT(UNSTABLE) | FAULT(BATCH),
    .gpu = {MHA_GPU("b 1, " GROUPS),
            .repeats = {MHA_REPEATS, "b 1, " GROUPS, "b 2, " GROUPS ", heads 5_5, causal 1, used both"}},
};
