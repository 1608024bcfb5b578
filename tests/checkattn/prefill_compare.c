/* SPDX-License-Identifier: MIT
 *
 * A case of sparse prefill against the oracle: small cases whole, large ones in chosen rows. The oracle is given the rows of
 * one token and one key head as a problem of their own.
 */
#include "magnitude.h"
#include "prefill_case.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 1024, MOST_HEADS = 128 };

/* ---- Rows by the oracle ---------------------------------------------------------------------- */

fmla_status prefill_case_rows(const struct prefill_case *c, const struct prefill_rows *r, uint16_t *out,
                              float *max_logits, float *lse)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const struct sparse_pool *pool = &c->pool;
    const int64_t q_shape[] = {1, r->heads, c->d_qk}, out_shape[] = {1, r->heads, S_D_V};
    const int64_t q_strides[] = {c->q.strides[1], c->q.strides[2] * r->step, 1};
    const int64_t rows_shape[] = {1, r->heads}, list_shape[] = {1, 1, pool->topk}, one[] = {1};
    const int64_t keys_shape[] = {pool->s_k, 1, c->d_qk};
    int32_t count = (int32_t)prefill_case_count(c, r->token);
    float sinks[MOST_HEADS];
    fmla_tensor kv = pool->view;
    const fmla_tensor
        q = {guarded_at(&c->q, 0, r->token, r->head, 0), cpu, 3, dtype_bf16, q_shape, q_strides, 0},
        indices = {prefill_case_entry(c, r->token, r->key_head, 0), cpu, 3, dtype_i32, list_shape, NULL, 0},
        length = {&count, cpu, 1, dtype_i32, one, NULL, 0},
        sink = {sinks, cpu, 1, dtype_f32, rows_shape + 1, NULL, 0},
        out_tensor = {out, cpu, 3, dtype_bf16, out_shape, NULL, 0},
        max_tensor = {max_logits, cpu, 2, dtype_f32, rows_shape, NULL, 0},
        lse_tensor = {lse, cpu, 2, dtype_f32, rows_shape, NULL, 0};
    /* Rows are taken from keys where they were made, so that no kernel and oracle share a defect of far ones. */
    if (pool->far) kv.data = pool->memory.tensor.data, kv.byte_offset = 0, kv.strides = NULL;
    if (kv.ndim == 3) {
        kv.data = (char *)kv.data + r->key_head * c->head_bytes;
        kv.shape = keys_shape, kv.strides = pool->memory.strides + 1;
    }
    fmla_sparse_prefill_args args = c->args;
    args.q = &q, args.kv = &kv, args.indices = &indices, args.topk_length = &length;
    for (int64_t i = 0; c->args.attn_sink && i < r->heads; i++)
        sinks[i] = *(const float *)guarded_at(&c->sink, r->head + i * r->step, 0, 0, 0);
    if (c->args.attn_sink) args.attn_sink = &sink;
    args.out = &out_tensor, args.max_logits = &max_tensor, args.lse = &lse_tensor;
    args.kernel = "ref";

    /* Not filled: of a long list's workspace the oracle touches little. */
    fmla_status status = fmla_sparse_prefill_workspace_size(&args, &args.workspace_size, NULL);
    if (status) return status;
    args.workspace = malloc(args.workspace_size + 1);
    if (!args.workspace) exit(1);
    status = fmla_sparse_prefill(&args);
    free(args.workspace);
    return status;
}

static void add_rows(const struct prefill_case *c, struct prefill_rows *rows, int64_t *count, int64_t token,
                     int64_t head, int64_t step, int64_t heads)
{
    if (*count < MOST_ROWS)
        rows[(*count)++] = (struct prefill_rows){token, head / (c->h_q / c->h_kv), head, step, heads};
}

/* All of a small case. Of a large one the first and the last token, tokens of a special role, and drawn ones, with four heads
 * each, of all tiles of heads: 64 rows and more. */
static int64_t choose_rows(struct prefill_case *c, struct prefill_rows *rows)
{
    enum { DRAWN = 16, ROLES = 4, HEADS = 4, SMALL = 60000, EXTREME = 600000, KINDS = 16 };
    const int64_t group = c->h_q / c->h_kv, last = c->s_q - 1;
    const int64_t keys = c->pool.topk < c->pool.s_k ? c->pool.topk : c->pool.s_k;
    const bool extreme = c->v[P_INPUTS] == P_EXTREME;
    int64_t count = 0;
    if (c->s_q * c->h_kv <= MOST_ROWS && c->s_q * c->h_q * keys <= (extreme ? EXTREME : SMALL)) {
        for (int64_t t = 0; t < c->s_q; t++)
            for (int64_t k = 0; k < c->h_kv; k++) add_rows(c, rows, &count, t, k * group, 1, group);
        return count;
    }
    const int64_t heads = group < HEADS ? group : HEADS, step = group / heads;
    add_rows(c, rows, &count, 0, 0, step, heads);
    add_rows(c, rows, &count, 0, (c->h_kv - 1) * group, step, heads);
    add_rows(c, rows, &count, last, c->h_q - 1 - (heads - 1) * step, step, heads);
    for (int64_t t = last, found = 0; t >= 0 && t > last - PREFILL_CLASSES && found < ROLES; t--) {
        if (prefill_case_first_key(c, t, 0) >= 0) continue;
        add_rows(c, rows, &count, t, 0, step, heads);
        found++;
    }
    for (int64_t t = 1; extreme && t < last && t < KINDS; t++) /* of all lists and tiles */
        add_rows(c, rows, &count, t, random_between(&c->random, 0, step - 1), step, heads);
    for (int64_t i = 0; i < DRAWN * HEADS / heads; i++)
        add_rows(c, rows, &count, random_between(&c->random, 0, last),
                 random_between(&c->random, 0, c->h_kv - 1) * group + random_between(&c->random, 0, step - 1),
                 step, heads);
    return count;
}

struct oracle {
    const struct prefill_case *c;
    const struct prefill_rows *rows;
    const int64_t *first; /* where the results of each are */
    uint16_t (*out)[S_D_V];
    float *max_logits, *lse;
    atomic_int failures;
};

static void oracle_rows(void *data, int64_t i, int32_t worker)
{
    struct oracle *o = data;
    const int64_t at = o->first[i];
    (void)worker;
    if (prefill_case_rows(o->c, &o->rows[i], o->out[at], &o->max_logits[at], &o->lse[at]) != FMLA_OK)
        atomic_fetch_add(&o->failures, 1);
}

/* ---- Comparing ------------------------------------------------------------------------------- */

/* The three results; told by name. */
enum { OUT, MAX, LSE, RESULTS };

static void tell(const struct prefill_case *c, const struct run *run, struct tally *tally, const char *name,
                 const struct comparison *result, const char *where)
{
    char what[360];
    snprintf(what, sizeof what, "%s: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; %s", name,
             (long long)result->wrong, (long long)result->count, result->worst_abs, compare_cosine(result),
             where);
    report(tally, run, c->name, what);
}

/* Of a row. */
static struct magnitude magnitude_of(const struct prefill_case *c, int64_t token, int64_t head)
{
    const struct sparse_pool *pool = &c->pool;
    const int64_t key_head = head / (c->h_q / c->h_kv);
    struct magnitude magnitude = {0};
    float q[SPARSE_WIDEST], key[SPARSE_WIDEST];
    for (int64_t d = 0; d < c->d_qk; d++)
        q[d] = (float)guarded_value(&c->q, (const uint16_t *)guarded_at(&c->q, 0, token, head, 0) + d);
    for (int64_t i = 0; i < prefill_case_count(c, token); i++) {
        const int32_t slot = *prefill_case_entry(c, token, key_head, i);
        if (!sparse_pool_is_key(pool, slot)) continue;
        sparse_pool_values(pool, sparse_pool_token(pool, slot) + key_head * c->head_bytes, slot, key);
        magnitude_add(&magnitude, (double)c->args.softmax_scale, q, key, c->d_qk);
    }
    return magnitude;
}

double prefill_compare_bound(const struct prefill_case *c, int64_t token, int64_t head)
{
    const struct magnitude magnitude = magnitude_of(c, token, head);
    return magnitude_bound(&magnitude, c->args.log_base);
}

/* Are these inputs of the kind that the table of tolerances is for? */
static bool is_ordinary(const struct prefill_case *c)
{
    return c->v[P_INPUTS] == S_NORMAL && (c->v[P_CODES] == S_CODES_WRITTEN || c->v[P_CODES] == S_CODES_NAN);
}

static void add_out(struct comparison *outs, const struct prefill_case *c, int64_t token, int64_t head,
                    const uint16_t theirs[S_D_V])
{
    const struct tolerance *tolerance = &tolerance_sparse_prefill_out;
    const uint16_t *mine = prefill_case_out(c, token, head);
    const double sink =
        c->args.attn_sink ? (double)*(const float *)guarded_at(&c->sink, head, 0, 0, 0) : -INFINITY;
    struct magnitude magnitude = {0}; /* looked for where an element misses */
    for (int d = 0; d < S_D_V; d++) {
        const double value = guarded_value(&c->out, mine + d), reference = guarded_value(&c->out, theirs + d);
        const bool look = !is_ordinary(c) && compare_misses(tolerance, value, reference);
        if (look && !magnitude.any) magnitude = magnitude_of(c, token, head);
        compare_add_within(outs, tolerance, value, reference,
                           look ? magnitude_out_bound(&magnitude, sink, d) : 0.0);
    }
}

/* Adds a max_logits or an lse. */
static void add_row(struct comparison *comparison, const struct tolerance *tolerance, double rounded,
                    const struct prefill_case *c, int64_t token, int64_t head, float mine, float theirs)
{
    const bool misses = compare_misses(tolerance, (double)mine, (double)theirs);
    compare_add_within(comparison, tolerance, (double)mine, (double)theirs,
                       misses ? fmax(rounded, prefill_compare_bound(c, token, head)) : 0.0);
}

static void compare_rows(struct prefill_case *c, const struct run *run, struct tally *tally,
                         const struct oracle *o, int64_t count)
{
    static const char *const names[RESULTS] = {"out", "max_logits", "lse"};
    /* Only a GPU's kernels round scales. The absolute bound is for a scale of 0.5: products are as exact with a larger one,
     * and scores, which may be all but 0, as much less. */
    const double rounded = on_gpu(run) && c->v[P_CODES] == S_CODES_SCALES ? rounded_scale_lse : 0.0;
    struct tolerance row = tolerance_prefill_lse;
    row.abs = fmax(row.abs, tolerance_prefill_lse.abs * (double)c->args.softmax_scale / 0.5);
    const struct tolerance *tolerances[RESULTS] = {&tolerance_sparse_prefill_out, &row, &row};
    struct comparison results[RESULTS] = {0};
    char where[200] = "";
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < o->rows[i].heads; h++) {
            const int64_t token = o->rows[i].token, head = o->rows[i].head + h * o->rows[i].step;
            const int64_t at = o->first[i] + h;
            const bool infinite = o->max_logits[at] == INFINITY;
            const float my_max = as_infinite_row(run, infinite, *prefill_case_max(c, token, head),
                                                 o->max_logits[at]),
                        my_lse =
                            as_infinite_row(run, infinite, *prefill_case_lse(c, token, head), o->lse[at]);
            /* Of rows whose scores fp32 does not hold nothing is promised. */
            if (c->v[P_INPUTS] == S_BEYOND && prefill_case_first_key(c, token, o->rows[i].key_head) >= 0)
                continue;
            add_out(&results[OUT], c, token, head, o->out[at]);
            if (c->args.max_logits)
                add_row(&results[MAX], &row, rounded, c, token, head, my_max, o->max_logits[at]);
            if (c->args.lse) add_row(&results[LSE], &row, rounded, c, token, head, my_lse, o->lse[at]);
            if (!*where && results[OUT].wrong + results[MAX].wrong + results[LSE].wrong)
                snprintf(where, sizeof where,
                         "first in token %lld, head %lld (max_logits %g, oracle %g; lse %g, oracle %g)",
                         (long long)token, (long long)head, (double)my_max, (double)o->max_logits[at],
                         (double)my_lse, (double)o->lse[at]);
        }
    tally->rows += o->first[count];
    tally->cosine_out = fmax(tally->cosine_out, compare_cosine(&results[OUT]));
    tally->cosine_lse = fmax(tally->cosine_lse, compare_cosine(&results[LSE]));
    for (int i = 0; i < RESULTS; i++) {
        const bool other = i == OUT && !is_ordinary(c);
        if (!(other ? compare_passed_other : compare_passed)(&results[i], tolerances[i])) {
            tell(c, run, tally, names[i], &results[i], where);
            return;
        }
    }
}

void prefill_compare(struct prefill_case *c, const struct run *run, struct tally *tally)
{
    struct prefill_rows rows[MOST_ROWS];
    int64_t first[MOST_ROWS + 1] = {0};
    if (!c->s_q) return;
    const int64_t count = choose_rows(c, rows);
    for (int64_t i = 0; i < count; i++) first[i + 1] = first[i] + rows[i].heads;
    struct oracle oracle = {.c = c,
                            .rows = rows,
                            .first = first,
                            .out = calloc((size_t)first[count] + 1, sizeof *oracle.out),
                            .max_logits = calloc((size_t)first[count] + 1, sizeof(float)),
                            .lse = calloc((size_t)first[count] + 1, sizeof(float))};
    if (!oracle.out || !oracle.max_logits || !oracle.lse) exit(1);
    for_rows(run, count, oracle_rows, &oracle);
    if (atomic_load(&oracle.failures)) report(tally, run, c->name, "the oracle refused rows");
    compare_rows(c, run, tally, &oracle, count);
    free(oracle.out), free(oracle.max_logits), free(oracle.lse);
}

void prefill_compare_intact(const struct prefill_case *c, const struct run *run, struct tally *tally)
{
    if (!guarded_intact(&c->out))
        report(tally, run, c->name, "out: bytes outside the tensor's elements were written");
    if (!guarded_intact(&c->max_logits) || !guarded_intact(&c->lse))
        report(tally, run, c->name, "max_logits or lse: bytes outside the tensor's elements were written");
}

/* ---- Memory ---------------------------------------------------------------------------------- */

uint64_t prefill_hash_inputs(const struct prefill_case *c)
{
    const struct guarded *all[] = {&c->q, &c->sink, &c->pool.memory, &c->pool.indices, &c->pool.length};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t at = 0; at < all[i]->whole; at += sizeof hash) { /* whole is a multiple of 64 */
            uint64_t word;
            memcpy(&word, all[i]->memory + at, sizeof word);
            hash = (hash ^ word) * 0x100000001b3u;
        }
    return hash;
}

unsigned char *prefill_results_copy(const struct prefill_case *c)
{
    unsigned char *copy = malloc(c->out.whole + c->max_logits.whole + c->lse.whole);
    if (!copy) exit(1);
    memcpy(copy, c->out.memory, c->out.whole);
    memcpy(copy + c->out.whole, c->max_logits.memory, c->max_logits.whole);
    memcpy(copy + c->out.whole + c->max_logits.whole, c->lse.memory, c->lse.whole);
    return copy;
}

bool prefill_results_same(const struct prefill_case *c, const unsigned char *copy)
{
    return !memcmp(copy, c->out.memory, c->out.whole) &&
           !memcmp(copy + c->out.whole, c->max_logits.memory, c->max_logits.whole) &&
           !memcmp(copy + c->out.whole + c->max_logits.whole, c->lse.memory, c->lse.whole);
}

void prefill_results_reset(struct prefill_case *c)
{
    guarded_reset(&c->out), guarded_reset(&c->max_logits), guarded_reset(&c->lse);
}
