/* SPDX-License-Identifier: MIT
 *
 * A case of sparse decode against the oracle: small cases whole, large ones in chosen rows. The oracle is given the rows of
 * one query token as a problem of their own.
 */
#include "magnitude.h"
#include "sparse_case.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one query token: heads head, head + step, … */
struct rows {
    int64_t request, token, head, step, heads;
};

enum { MOST_TOKENS = 1024, MOST_HEADS = 128 };

/* All of a small case. Of a large one the first and the last token, tokens that see nothing, and drawn ones, with four heads
 * each, of all tiles of heads: 64 rows and more. */
static int64_t choose_rows(struct sparse_case *c, struct rows *rows)
{
    enum { DRAWN = 16, ROLES = 4, HEADS = 4, SMALL = 60000 };
    const int64_t tokens = c->b * c->s_q, keys = c->pool[0].topk + c->pool[1].topk;
    int64_t count = 0;
    if (tokens <= MOST_TOKENS && tokens * c->h_q * keys <= SMALL) {
        for (int64_t i = 0; i < tokens; i++)
            rows[count++] = (struct rows){i / c->s_q, i % c->s_q, 0, 1, c->h_q};
        return count;
    }
    const int64_t heads = c->h_q < HEADS ? c->h_q : HEADS, step = c->h_q / heads;
    rows[count++] = (struct rows){0, 0, 0, step, heads};
    rows[count++] = (struct rows){c->b - 1, c->s_q - 1, c->h_q - 1 - (heads - 1) * step, step, heads};
    for (int64_t r = 0; r < c->b && count < 2 + ROLES; r++)
        if (sparse_case_sees_none(c, r, c->s_q - 1))
            rows[count++] = (struct rows){r, c->s_q - 1, 0, step, heads};
    for (int i = 0; i < (c->h_q < HEADS ? DRAWN * HEADS / (int)c->h_q : DRAWN); i++)
        rows[count++] =
            (struct rows){random_between(&c->random, 0, c->b - 1), random_between(&c->random, 0, c->s_q - 1),
                          random_between(&c->random, 0, step - 1), step, heads};
    return count;
}

struct oracle {
    struct sparse_case *c;
    const struct rows *rows;
    const int64_t *first; /* where the results of each are */
    uint16_t (*out)[S_D_V];
    float *lse;
    atomic_int failures;
};

static void oracle_rows(void *data, int64_t i, int32_t worker)
{
    struct oracle *o = data;
    const struct rows *r = &o->rows[i];
    (void)worker;
    if (sparse_case_rows(o->c, "ref", r->request, r->token, r->head, r->step, r->heads, o->out[o->first[i]],
                         &o->lse[o->first[i]]) != FMLA_OK)
        atomic_fetch_add(&o->failures, 1);
}

/* Of a row. */
static struct magnitude magnitude_of(const struct sparse_case *c, int64_t request, int64_t token,
                                     int64_t head)
{
    struct magnitude magnitude = {0};
    float q[SPARSE_WIDEST], key[SPARSE_WIDEST];
    for (int64_t d = 0; d < c->d_qk; d++)
        q[d] = (float)guarded_value(&c->q, (const uint16_t *)guarded_at(&c->q, request, token, head, 0) + d);
    for (int k = 0; k < S_CACHES; k++)
        for (int64_t i = 0; c->pool[k].topk && i < c->pool[k].count[request]; i++) {
            const int32_t slot = *sparse_case_entry(&c->pool[k], request, token, i);
            if (!sparse_pool_is_key(&c->pool[k], slot)) continue;
            sparse_pool_values(&c->pool[k], sparse_pool_token(&c->pool[k], slot), slot, key);
            magnitude_add(&magnitude, (double)c->args.softmax_scale, q, key, c->d_qk);
        }
    return magnitude;
}

double sparse_compare_bound(const struct sparse_case *c, int64_t request, int64_t token, int64_t head)
{
    const struct magnitude magnitude = magnitude_of(c, request, token, head);
    return magnitude_bound(&magnitude, c->args.log_base);
}

/* Are these inputs of the kind that the table of tolerances is for? */
static bool is_ordinary(const struct sparse_case *c)
{
    return c->v[S_INPUTS] == S_NORMAL && (c->v[S_CODES] == S_CODES_WRITTEN || c->v[S_CODES] == S_CODES_NAN);
}

/* Where one key has a value of 1e5 the cosine would be that of the few elements that it is in, whose weight is as uncertain as the
 * rounding of a score with such products; elements of at most 1 are what the bound is for. */
static void add_element(struct comparison *outs, double mine, double theirs, double within)
{
    struct comparison alone = {0};
    const bool large = isfinite(theirs) && fabs(theirs) > 1.0;
    compare_add_within(large ? &alone : outs, &tolerance_sparse_decode_out, mine, theirs, within);
    outs->count += alone.count, outs->wrong += alone.wrong;
    outs->worst_abs = fmax(outs->worst_abs, alone.worst_abs);
}

static void add_out(struct comparison *outs, const struct sparse_case *c, int64_t request, int64_t token,
                    int64_t head, const uint16_t theirs[S_D_V])
{
    const uint16_t *mine = guarded_at(&c->out, request, token, head, 0);
    const double sink =
        c->args.attn_sink ? (double)*(const float *)guarded_at(&c->sink, head, 0, 0, 0) : -INFINITY;
    struct magnitude magnitude = {0}; /* looked for where an element misses */
    for (int d = 0; d < S_D_V; d++) {
        const double value = guarded_value(&c->out, mine + d), reference = guarded_value(&c->out, theirs + d);
        const bool look = !is_ordinary(c) && compare_misses(&tolerance_sparse_decode_out, value, reference);
        if (look && !magnitude.any) magnitude = magnitude_of(c, request, token, head);
        add_element(outs, value, reference, look ? magnitude_out_bound(&magnitude, sink, d) : 0.0);
    }
}

void sparse_compare_oracle(struct sparse_case *c, const struct run *run, struct tally *tally)
{
    struct rows rows[MOST_TOKENS];
    int64_t first[MOST_TOKENS + 1] = {0};
    const int64_t count = choose_rows(c, rows);
    for (int64_t i = 0; i < count; i++) first[i + 1] = first[i] + rows[i].heads;
    struct oracle oracle = {c,
                            rows,
                            first,
                            calloc((size_t)first[count] + 1, sizeof *oracle.out),
                            calloc((size_t)first[count] + 1, sizeof(float)),
                            0};
    for_rows(run, count, oracle_rows, &oracle);
    const int failures = atomic_load(&oracle.failures);
    if (failures) report(tally, run, c->name, "the oracle refused rows");

    /* Only a GPU's kernels round scales. */
    const struct tolerance *lse_tolerance = &tolerance_decode_lse;
    const double rounded = on_gpu(run) && c->v[S_CODES] == S_CODES_SCALES ? rounded_scale_lse : 0.0;
    struct comparison outs = {0}, lses = {0};
    char where[160] = "";
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < rows[i].heads; h++) {
            const int64_t head = rows[i].head + h * rows[i].step, at = first[i] + h;
            const float my_lse = as_infinite_row(
                run, c->v[S_INPUTS] == S_INFINITE,
                *(const float *)guarded_at(&c->lse, rows[i].request, head, rows[i].token, 0), oracle.lse[at]);
            /* Of rows whose scores fp32 does not hold nothing is promised. */
            if (c->v[S_INPUTS] == S_BEYOND && !sparse_case_sees_none(c, rows[i].request, rows[i].token))
                continue;
            const int64_t wrong = outs.wrong + lses.wrong;
            add_out(&outs, c, rows[i].request, rows[i].token, head, oracle.out[at]);
            const bool misses = compare_misses(lse_tolerance, (double)my_lse, (double)oracle.lse[at]);
            if (c->args.lse)
                compare_add_within(
                    &lses, lse_tolerance, (double)my_lse, (double)oracle.lse[at],
                    misses ? fmax(rounded, sparse_compare_bound(c, rows[i].request, rows[i].token, head))
                           : 0.0);
            if (wrong == 0 && outs.wrong + lses.wrong)
                snprintf(where, sizeof where,
                         "first in request %lld, token %lld, head %lld (lse %g, oracle %g)",
                         (long long)rows[i].request, (long long)rows[i].token, (long long)head,
                         (double)my_lse, (double)oracle.lse[at]);
        }
    free(oracle.out), free(oracle.lse);
    tally->rows += first[count];
    tally->cosine_out = fmax(tally->cosine_out, compare_cosine(&outs));
    tally->cosine_lse = fmax(tally->cosine_lse, compare_cosine(&lses));
    char what[320];
    if (!(is_ordinary(c) ? compare_passed : compare_passed_other)(&outs, &tolerance_sparse_decode_out)) {
        snprintf(what, sizeof what,
                 "out: %lld of %lld elements off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)outs.wrong, (long long)outs.count, outs.worst_abs, compare_cosine(&outs), where);
        report(tally, run, c->name, what);
    } else if (!compare_passed(&lses, lse_tolerance)) {
        snprintf(what, sizeof what, "lse: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)lses.wrong, (long long)lses.count, lses.worst_abs, compare_cosine(&lses), where);
        report(tally, run, c->name, what);
    }
}

void sparse_compare_alone(struct sparse_case *c, const struct run *run, struct tally *tally)
{
    const int64_t r = random_between(&c->random, 0, c->b - 1);
    const int64_t more = random_between(&c->random, 0, 2) ? random_between(&c->random, 1, 4500) : 0;
    struct guarded out, lse;
    struct sparse_view view;
    int32_t *memory;
    guarded_make(&out, c->out.tensor.dtype, 4, (int64_t[]){1, c->s_q, c->h_q, S_D_V}, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, (int64_t[]){1, c->h_q, c->s_q}, LAYOUT_CONTIGUOUS);
    const size_t bytes = sparse_case_request(c, r, more, &view, &memory);
    view.args.out = &out.tensor, view.args.lse = c->args.lse ? &lse.tensor : NULL;
    const int blocks = c->blocks.count;
    if (is_apart(c->device)) {
        device_add(&c->blocks, memory, bytes), device_add(&c->blocks, view.count, sizeof view.count);
        device_add_guarded(&c->blocks, &out), device_add_guarded(&c->blocks, &lse);
    }
    if (sparse_case_run(c, &view.args, 0x11)) report(tally, run, c->name, fmla_last_error());
    device_drop(&c->blocks, blocks);
    bool same = true;
    for (int64_t j = 0; j < c->s_q; j++)
        for (int64_t h = 0; h < c->h_q; h++) {
            same &= !memcmp(guarded_at(&out, 0, j, h, 0), guarded_at(&c->out, r, j, h, 0),
                            S_D_V * sizeof(uint16_t));
            same &= !memcmp(guarded_at(&lse, 0, h, j, 0), guarded_at(&c->lse, r, h, j, 0), sizeof(float));
        }
    if (!same) {
        char what[160];
        snprintf(what, sizeof what,
                 "batch-invariant: request %lld alone, with room for %lld entries more, has other bits",
                 (long long)r, (long long)more);
        report(tally, run, c->name, what);
    }
    free(memory);
    guarded_free(&out), guarded_free(&lse);
}

uint64_t sparse_hash_inputs(const struct sparse_case *c)
{
    const struct guarded *all[] = {&c->q,
                                   &c->sink,
                                   &c->partitions,
                                   &c->num_splits,
                                   &c->pool[0].memory,
                                   &c->pool[0].indices,
                                   &c->pool[0].length,
                                   &c->pool[1].memory,
                                   &c->pool[1].indices,
                                   &c->pool[1].length};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t at = 0; at < all[i]->whole; at += sizeof hash) { /* whole is a multiple of 64 */
            uint64_t word;
            memcpy(&word, all[i]->memory + at, sizeof word);
            hash = (hash ^ word) * 0x100000001b3u;
        }
    return hash;
}
