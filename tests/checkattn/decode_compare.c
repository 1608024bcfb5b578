/* SPDX-License-Identifier: MIT
 *
 * A case of dense decode against the oracle, row by row: small cases whole, large ones in chosen rows, each recomputed
 * by the oracle as a problem of its own (one token, one head, the keys it sees).
 */
#include "decode_case.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct row {
    int64_t request, token, head;
};

/* Every row of a small case; of a large one the corners, rows that see nothing or little, and 64 drawn ones.
 */
static int64_t choose_rows(struct decode_case *c, struct row *rows, int64_t most)
{
    int64_t count = 0;
    const int64_t all = c->b * c->s_q * c->h_q;
    if (all <= most) {
        for (int64_t i = 0; i < all; i++)
            rows[count++] = (struct row){i / c->h_q / c->s_q, i / c->h_q % c->s_q, i % c->h_q};
        return count;
    }
    rows[count++] = (struct row){0, 0, 0};
    rows[count++] = (struct row){c->b - 1, c->s_q - 1, c->h_q - 1};
    rows[count++] = (struct row){0, c->s_q - 1, c->h_q / c->h_kv - 1}; /* the last of a key head */
    rows[count++] = (struct row){c->b - 1, 0, c->h_q - c->h_q / c->h_kv};
    for (int64_t r = 0; r < c->b && count < most - 64; r++)
        if (c->length[r] < c->s_q + 1) rows[count++] = (struct row){r, (c->s_q - 1) / 2, 0};
    while (count < most)
        rows[count++] =
            (struct row){random_between(&c->random, 0, c->b - 1), random_between(&c->random, 0, c->s_q - 1),
                         random_between(&c->random, 0, c->h_q - 1)};
    return count;
}

struct oracle_rows {
    struct decode_case *c;
    const struct row *rows;
    uint16_t (*out)[D_V];
    float *lse;
    atomic_int failures;
};

static void oracle_row(void *data, int64_t i, int32_t worker)
{
    struct oracle_rows *o = data;
    const struct row *row = &o->rows[i];
    (void)worker;
    if (decode_case_row(o->c, "ref", row->request, row->token, row->head,
                        decode_case_seen(o->c, row->request, row->token), o->out[i], &o->lse[i]) != FMLA_OK)
        atomic_fetch_add(&o->failures, 1);
}

void decode_compare_oracle(struct decode_case *c, const struct run *run, struct tally *tally)
{
    enum { MOST = 4096, CHOSEN = 84 };
    const int64_t all = c->b * c->s_q * c->h_q;
    const int64_t most = all * c->s_k <= 40000 && all <= MOST ? MOST : CHOSEN;
    struct row *rows = calloc((size_t)most, sizeof *rows);
    if (!rows) exit(1);
    const int64_t count = choose_rows(c, rows, most);
    uint16_t(*out)[D_V] = calloc((size_t)count + 1, sizeof *out);
    float *lse = calloc((size_t)count + 1, sizeof *lse);
    if (!out || !lse) exit(1);
    struct oracle_rows oracle = {c, rows, out, lse, 0};
    for_rows(run, count, oracle_row, &oracle);
    const int failures = atomic_load(&oracle.failures);
    if (failures) report(tally, run, c->name, "the oracle refused a row");

    struct comparison outs = {0}, lses = {0};
    char first[160] = "";
    for (int64_t i = 0; i < count; i++) {
        const uint16_t *mine = guarded_at(&c->out, rows[i].request, rows[i].token, rows[i].head, 0);
        const float my_lse = as_infinite_row(
            run, c->v[A_INPUTS] == INPUTS_INFINITE,
            *(const float *)guarded_at(&c->lse, rows[i].request, rows[i].head, rows[i].token, 0), lse[i]);
        /* Of rows whose scores fp32 does not hold nothing is promised. */
        if (c->v[A_INPUTS] == INPUTS_BEYOND && decode_case_seen(c, rows[i].request, rows[i].token)) continue;
        const int64_t wrong = outs.wrong + lses.wrong;
        for (int d = 0; d < D_V; d++)
            compare_add(&outs, &tolerance_dense_decode_out, guarded_value(&c->out, mine + d),
                        guarded_value(&c->out, &out[i][d]));
        const bool misses = compare_misses(&tolerance_decode_lse, (double)my_lse, (double)lse[i]);
        if (c->args.lse)
            compare_add_within(&lses, &tolerance_decode_lse, (double)my_lse, (double)lse[i],
                               misses ? decode_case_bound(c, rows[i].request, rows[i].token, rows[i].head)
                                      : 0.0);
        if (wrong == 0 && outs.wrong + lses.wrong)
            snprintf(first, sizeof first, "first in request %lld, token %lld, head %lld (lse %g, oracle %g)",
                     (long long)rows[i].request, (long long)rows[i].token, (long long)rows[i].head,
                     (double)my_lse, (double)lse[i]);
    }
    free(rows), free(out), free(lse);
    tally->rows += count;
    tally->cosine_out = fmax(tally->cosine_out, compare_cosine(&outs));
    tally->cosine_lse = fmax(tally->cosine_lse, compare_cosine(&lses));
    char what[320];
    const bool ordinary = c->v[A_INPUTS] == INPUTS_NORMAL || c->v[A_INPUTS] == INPUTS_NAN_ENDS;
    if (!(ordinary ? compare_passed : compare_passed_other)(&outs, &tolerance_dense_decode_out)) {
        snprintf(what, sizeof what,
                 "out: %lld of %lld elements off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)outs.wrong, (long long)outs.count, outs.worst_abs, compare_cosine(&outs), first);
        report(tally, run, c->name, what);
    } else if (!compare_passed(&lses, &tolerance_decode_lse)) {
        snprintf(what, sizeof what, "lse: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; %s",
                 (long long)lses.wrong, (long long)lses.count, lses.worst_abs, compare_cosine(&lses), first);
        report(tally, run, c->name, what);
    }
}

void decode_compare_alone(struct decode_case *c, int64_t r, const struct run *run, struct tally *tally)
{
    struct guarded out, lse;
    guarded_make(&out, c->out.tensor.dtype, 4, (int64_t[]){1, c->s_q, c->h_q, D_V}, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, (int64_t[]){1, c->h_q, c->s_q}, LAYOUT_CONTIGUOUS);
    const int blocks = c->blocks.count;
    if (is_apart(c->device)) device_add_guarded(&c->blocks, &out), device_add_guarded(&c->blocks, &lse);
    struct request_view view;
    decode_case_request(c, r, &view);
    view.args.out = &out.tensor, view.args.lse = c->args.lse ? &lse.tensor : NULL;
    if (decode_case_run(c, &view.args, 0x11)) report(tally, run, c->name, fmla_last_error());
    bool same = true;
    for (int64_t j = 0; j < c->s_q; j++)
        for (int64_t h = 0; h < c->h_q; h++) {
            same &= !memcmp(guarded_at(&out, 0, j, h, 0), guarded_at(&c->out, r, j, h, 0),
                            D_V * sizeof(uint16_t));
            same &= !memcmp(guarded_at(&lse, 0, h, j, 0), guarded_at(&c->lse, r, h, j, 0), sizeof(float));
        }
    if (!same)
        report(tally, run, c->name, "batch-invariant: a request alone has other bits than in the batch");
    device_drop(&c->blocks, blocks);
    guarded_free(&out), guarded_free(&lse);
}

void decode_compare_elsewhere(struct decode_case *c, const struct run *run, struct tally *tally)
{
    const int64_t r = random_between(&c->random, 0, c->b - 1);
    const int64_t n = 1 + random_between(&c->random, 0, 1); /* requests of the new batch; the last is r */
    const int64_t first = n == 1 ? r : random_between(&c->random, 0, r);
    const bool gpu = on_gpu(run); /* whose join is launched otherwise above 16384 keys of room */
    const int64_t more =
        random_between(&c->random, 0, 3) ? random_between(&c->random, 1, gpu ? 40000 : 4500) : 0;
    const int64_t max_pages = c->max_pages + (more + c->page_size - 1) / c->page_size; /* keys more */
    const struct guarded *q = &c->q;
    int64_t q_strides[4] = {q->strides[0] * (r - first), q->strides[1], q->strides[2], q->strides[3]};
    int64_t kv_strides[4] = {c->kv_strides[0], c->kv_strides[1], c->kv_strides[2], c->kv_strides[3]};
    struct guarded out, lse, seqlens, table;
    guarded_make(&out, c->out.tensor.dtype, 4, (int64_t[]){n, c->s_q, c->h_q, D_V}, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, (int64_t[]){n, c->h_q, c->s_q}, LAYOUT_CONTIGUOUS);
    guarded_make(&seqlens, dtype_i32, 1, &n, LAYOUT_CONTIGUOUS);
    guarded_make(&table, dtype_i32, 2, (int64_t[]){n, max_pages}, LAYOUT_PADDED);
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = i ? r : first;
        /* Clamped already: to the old capacity. */
        *(int32_t *)guarded_at(&seqlens, i, 0, 0, 0) = (int32_t)c->length[from];
        memcpy(guarded_at(&table, i, 0, 0, 0), guarded_at(&c->table, from, 0, 0, 0),
               (size_t)c->max_pages * sizeof(int32_t));
    }
    const int blocks = c->blocks.count;
    struct guarded *all[] = {&out, &lse, &seqlens, &table};
    for (size_t i = 0; is_apart(c->device) && i < sizeof all / sizeof all[0]; i++)
        device_add_guarded(&c->blocks, all[i]);
    struct request_view view;
    decode_case_request(c, first, &view);
    view.q_shape[0] = n, view.q.strides = q_strides;
    if (c->paged)
        view.args.block_table = &table.tensor;
    else
        kv_strides[0] *= r - first, view.kv_shape[0] = n, view.kv.strides = kv_strides;
    view.args.seqlens = &seqlens.tensor;
    view.args.out = &out.tensor, view.args.lse = c->args.lse ? &lse.tensor : NULL;
    if (decode_case_run(c, &view.args, 0x11)) report(tally, run, c->name, fmla_last_error());
    bool same = true;
    for (int64_t j = 0; j < c->s_q; j++)
        for (int64_t h = 0; h < c->h_q; h++) {
            same &= !memcmp(guarded_at(&out, n - 1, j, h, 0), guarded_at(&c->out, r, j, h, 0),
                            D_V * sizeof(uint16_t));
            same &= !memcmp(guarded_at(&lse, n - 1, h, j, 0), guarded_at(&c->lse, r, h, j, 0), sizeof(float));
        }
    if (!same) {
        char what[160];
        snprintf(what, sizeof what,
                 "batch-invariant: request %lld has other bits as the last of %lld, with room for %lld pages",
                 (long long)r, (long long)n, (long long)max_pages);
        report(tally, run, c->name, what);
    }
    device_drop(&c->blocks, blocks);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
}

uint64_t decode_hash_inputs(const struct decode_case *c)
{
    const struct guarded *all[] = {&c->q,    &c->kv,         &c->table,     &c->seqlens,
                                   &c->sink, &c->partitions, &c->num_splits};
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t at = 0; at < all[i]->whole; at += sizeof hash) { /* whole is a multiple of 64 */
            uint64_t word;
            memcpy(&word, all[i]->memory + at, sizeof word);
            hash = (hash ^ word) * 0x100000001b3u;
        }
    return hash;
}
