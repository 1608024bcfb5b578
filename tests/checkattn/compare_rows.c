/* SPDX-License-Identifier: MIT
 *
 * Compares a case with the oracle row by row: small cases whole, large ones in chosen rows. The oracle
 * computes the rows of a token as a separate problem over the keys that they see.
 */
#include "case.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Rows by the oracle ---------------------------------------------------------------------- */

static size_t row_bytes(const struct test_case *c)
{
    return (size_t)c->d_v * (c->tensor[c->op->result[0]].tensor.dtype.bits / 8);
}

/* Computes rows over `change` keys more than they see. */
static fmla_status rows_by_oracle(const struct test_case *c, const struct rows *rows, int64_t change,
                                  void *out, float *const values[RESULTS])
{
    const struct subject *op = c->op;
    fmla_tensor results[RESULTS];
    int64_t shape[RESULTS][MAX_DIMENSIONS];
    struct view view;
    view_make(c, &view, true);
    for (int k = 0; k < op->results; k++) {
        const struct member *member = op->tensor[op->result[k]];
        for (int d = 0; d < member->rank; d++)
            shape[k][d] = member->dimensions[d] == DIM_h_q   ? rows->heads
                          : member->dimensions[d] == DIM_d_v ? c->d_v
                                                             : 1;
        results[k] = c->view[op->result[k]];
        results[k].data = k ? values[k] : out, results[k].shape = shape[k], results[k].ndim = member->rank;
        results[k].byte_offset = 0, results[k].strides = NULL;
        set_tensor(op, &view.args, op->result[k], &results[k]);
    }
    view_rows(c, &view, rows);
    if (op->maker->narrow && !op->maker->narrow(c, rows, change, &view)) return FMLA_INVALID_ARGUMENT;
    set_pointer(op, &view.args, "kernel", "ref");
    return call_on_host(op, &view.args, -1);
}

/* A result begins with numbers of a head each, those of one tensor after another; then come rows of out. */
static float *number_in(void *result, const struct rows *rows, int k)
{
    return (float *)result + (k - 1) * rows->heads;
}

static fmla_status ask_rows(const struct test_case *c, const void *item, void *result)
{
    const struct rows *rows = item;
    float *values[RESULTS] = {NULL};
    for (int k = 1; k < c->op->results; k++) values[k] = number_in(result, rows, k);
    return rows_by_oracle(c, rows, 0, number_in(result, rows, c->op->results), values);
}

struct task {
    const struct test_case *c;
    struct oracle *oracle;
    atomic_int refused;
};

static void oracle_task(void *data, int64_t i, int32_t worker)
{
    struct task *t = data;
    const struct items *of = &t->oracle->of;
    const char *item = (const char *)of->items + (size_t)i * of->bytes;
    (void)worker;
    if (of->compute(t->c, item, (char *)t->oracle->results + (size_t)i * of->of_result))
        atomic_fetch_add(&t->refused, 1);
}

void oracle_ask(struct oracle *o, const struct test_case *c, uint64_t inputs, const struct items *of)
{
    const size_t bytes = (size_t)of->count * of->bytes;
    if (o->results && o->inputs == inputs && o->of.count == of->count && o->of.of_result == of->of_result &&
        !memcmp(o->of.items, of->items, bytes))
        return;
    oracle_free(o);
    *o = (struct oracle){.inputs = inputs, .of = *of};
    void *items = must_alloc(bytes);
    o->of.items = memcpy(items, of->items, bytes);
    o->results = calloc((size_t)of->count * of->of_result + 1, 1);
    if (!o->results) exit(1);
    struct task task = {c, o, 0};
    for_rows(c->run, of->count, oracle_task, &task);
    o->refused = atomic_load(&task.refused);
}

void oracle_free(struct oracle *o)
{
    free((void *)(uintptr_t)o->of.items), free(o->results);
    memset(o, 0, sizeof *o);
}

int64_t all_rows(const struct test_case *c, struct rows *rows, int64_t heads)
{
    const int64_t of_token = c->h_q / heads, count = c->b * c->s_q * of_token;
    for (int64_t i = 0; i < count; i++)
        rows[i] = (struct rows){i / of_token / c->s_q, i / of_token % c->s_q, i % of_token * heads, 1, heads};
    return count;
}

bool all_are_compared(const struct test_case *c, int64_t keys)
{
    enum { SMALL = 40000 };
    const int64_t all = c->b * c->s_q * c->h_q;
    return all <= CHOSEN_ROWS || (all * keys <= SMALL && all <= MOST_ROWS);
}

int64_t draw_rows(struct test_case *c, struct rows *rows, int64_t count)
{
    for (; count < CHOSEN_ROWS; count++) {
        const int64_t r = random_between(&c->random, 0, c->b - 1),
                      j = random_between(&c->random, 0, c->s_q - 1);
        rows[count] = (struct rows){r, j, random_between(&c->random, 0, c->h_q - 1), 1, 1};
    }
    return count;
}

bool plant_key(struct test_case *c, enum defect fault)
{
    const bool causal = *(const int32_t *)op_option(c->op->of, &c->args, "causal") != 0;
    const int64_t change = fault == FAULT_DROPPED_KEY ? -1 : fault == FAULT_MASK && causal;
    for (int64_t i = 0; change && i < c->b * c->s_q; i++) {
        const struct rows row = {i / c->s_q, i % c->s_q, 0, 1, 1};
        float *values[RESULTS] = {NULL, case_row(c, c->op->result[1], row.request, row.token, 0)};
        if (!rows_by_oracle(c, &row, change, case_row(c, c->op->result[0], row.request, row.token, 0),
                            values))
            return true;
    }
    return false;
}

/* Rows are chosen for each kernel, because the choice draws from the case's random state. */
static void ask(struct oracle *o, struct test_case *c, uint64_t inputs)
{
    struct rows *rows = must_alloc(MOST_ROWS * sizeof *rows);
    const struct maker *maker = c->op->maker;
    const int64_t count = maker->choose_rows ? maker->choose_rows(c, rows) : all_rows(c, rows, c->h_q);
    int64_t heads = 0; /* the most of a result */
    for (int64_t i = 0; i < count; i++) heads = rows[i].heads > heads ? rows[i].heads : heads;
    const size_t of_head = row_bytes(c) + (size_t)(c->op->results - 1) * sizeof(float);
    const size_t of_result = ((size_t)heads * of_head + 63) / 64 * 64;
    oracle_ask(o, c, inputs, &(struct items){rows, count, sizeof *rows, of_result, ask_rows});
    free(rows);
}

/* ---- Comparing ------------------------------------------------------------------------------- */

double compare_bound(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    struct magnitude magnitude = {0};
    if (!c->op->maker->magnitude) return 0.0;
    c->op->maker->magnitude(c, request, token, head, &magnitude);
    return (1.0 + c->of_product * 0x1p20) *
           magnitude_bound(&magnitude, *(const int32_t *)op_option(c->op->of, &c->args, "log_base"));
}

/* Returns the factor on an element's error from rounding weights to bf16: errors of scores change the
 * weights and their sum. */
static double of_weights(const struct test_case *c, const struct magnitude *magnitude)
{
    return 1.0 + 0x1p8 * expm1(2.0 * c->of_product * magnitude->sum);
}

/* Adds a row of out. For other inputs an element may deviate by the rounding of its summands. There, an
 * element above 1, from a key with a value of 1e5, is left out of the cosine, which would otherwise depend
 * on the few such elements: its weight is as uncertain as the rounding of a score with such products. */
static void add_out(struct comparison *outs, const struct test_case *c, int64_t request, int64_t token,
                    int64_t head, const unsigned char *theirs)
{
    const struct guarded *g = &c->tensor[c->op->result[0]];
    const struct tolerance *tolerance = &c->tolerance[0];
    const size_t element = g->tensor.dtype.bits / 8;
    const char *mine = case_row(c, c->op->result[0], request, token, head);
    const double sink = case_names(c, c->op->sink)
                            ? (double)*(const float *)guarded_at(&c->tensor[c->op->sink], head, 0, 0, 0)
                            : -INFINITY;
    struct magnitude magnitude = {0}; /* computed only if an element misses */
    for (int64_t d = 0; d < c->d_v; d++, mine += element, theirs += element) {
        const double value = guarded_value(g, mine), reference = guarded_value(g, theirs);
        const bool look = c->bounds_out && compare_misses(tolerance, value, reference);
        if (look && !magnitude.any) c->op->maker->magnitude(c, request, token, head, &magnitude);
        struct comparison alone = {0};
        const bool large = c->large_apart && isfinite(reference) && fabs(reference) > 1.0;
        compare_add_within(large ? &alone : outs, tolerance, value, reference,
                           look ? magnitude_out_bound(&magnitude, sink, (int)d) * of_weights(c, &magnitude)
                                : 0.0);
        outs->count += alone.count, outs->wrong += alone.wrong;
        outs->worst_abs = fmax(outs->worst_abs, alone.worst_abs);
    }
}

/* Adds row h of those with this result of the oracle. */
static void add_row(struct comparison results[RESULTS], const struct test_case *c, const struct rows *rows,
                    int64_t h, void *result)
{
    const unsigned char *out = (const unsigned char *)number_in(result, rows, c->op->results);
    const int64_t head = rows->head + h * rows->step;
    /* If max_logits is a result, it shows a score of +inf. */
    const bool infinite = c->op->results > 2 ? number_in(result, rows, 1)[h] == INFINITY : c->infinite;
    add_out(&results[0], c, rows->request, rows->token, head, out + (size_t)h * row_bytes(c));
    for (int k = 1; k < c->op->results; k++) {
        if (!case_names(c, c->op->result[k])) continue;
        const float theirs = number_in(result, rows, k)[h];
        const float mine = as_infinite_row(
            c->run, infinite, *(const float *)case_row(c, c->op->result[k], rows->request, rows->token, head),
            theirs);
        const bool misses = compare_misses(&c->tolerance[k], (double)mine, (double)theirs);
        compare_add_within(&results[k], &c->tolerance[k], (double)mine, (double)theirs,
                           misses ? fmax(c->rounded, compare_bound(c, rows->request, rows->token, head))
                                  : 0.0);
    }
}

static void compare_rows(const struct test_case *c, const struct oracle *o)
{
    struct comparison results[RESULTS] = {0};
    char where[200] = "";
    for (int64_t i = 0; i < o->of.count; i++) {
        const struct rows *rows = (const struct rows *)o->of.items + i;
        void *result = (char *)o->results + (size_t)i * o->of.of_result;
        for (int64_t h = 0; h < rows->heads; h++) {
            const long long head = rows->head + h * rows->step;
            if (c->beyond && c->op->maker->seen(c, rows->request, rows->token, head)) continue;
            add_row(results, c, rows, h, result);
            if (!*where && c->op->results > 1 && results[0].wrong + results[1].wrong + results[2].wrong)
                snprintf(
                    where, sizeof where, "first in request %lld, token %lld, head %lld (%s %g, oracle %g)",
                    (long long)rows->request, (long long)rows->token, head,
                    c->op->tensor[c->op->result[1]]->name,
                    (double)*(const float *)case_row(c, c->op->result[1], rows->request, rows->token, head),
                    (double)number_in(result, rows, 1)[h]);
        }
        c->tally->rows += rows->heads;
    }
    c->tally->cosine_out = fmax(c->tally->cosine_out, compare_cosine(&results[0]));
    const int last = c->op->results - 1;
    c->tally->cosine_lse = fmax(c->tally->cosine_lse, compare_cosine(&results[last]));
    for (int k = 0; k <= last; k++)
        if (!(k == 0 && c->other ? compare_passed_other : compare_passed)(&results[k], &c->tolerance[k])) {
            failed(c, "%s: %lld of %lld off, worst |Δ| %.3g, cosine difference %.3g; %s",
                   c->op->tensor[c->op->result[k]]->name, (long long)results[k].wrong,
                   (long long)results[k].count, results[k].worst_abs, compare_cosine(&results[k]), where);
            return;
        }
}

void compare_oracle(struct test_case *c, uint64_t inputs, struct oracle *oracle)
{
    struct oracle alone = {0}, *mine = oracle ? oracle : &alone;
    if (c->op->maker->compare) {
        c->op->maker->compare(c, inputs, mine);
    } else if (c->b && c->s_q) {
        ask(mine, c, inputs);
        if (mine->refused) failed(c, "the oracle refused rows");
        compare_rows(c, mine);
    }
    oracle_free(&alone);
}

void compare_whole(struct test_case *c)
{
    case_results_intact(c);
    compare_oracle(c, 0, NULL);
}

/* ---- Requests alone -------------------------------------------------------------------------- */

/* Returns true if the part's result k has the bits that it has in the case. A sum over the batch is not compared. */
static bool part_is_same(const struct test_case *c, const struct part *p, int k, const struct guarded *result)
{
    const int i = c->op->result[k];
    const struct form form = form_of(c->op->tensor[i], c->flat);
    const enum dimension last = form.dimensions[form.rank - 1];
    const bool vectors = last == DIM_d_v || last == DIM_d_qk;
    const size_t bytes = result->tensor.dtype.bits / 8 * (vectors ? (size_t)result->shape[form.rank - 1] : 1);
    int64_t count = 0, first = 0, heads = 1;
    for (int d = 0; d < form.rank; d++) {
        const enum dimension dim = form.dimensions[d];
        if (dim == DIM_s_q || dim == DIM_tokens_q) count = p->tokens, first = p->first;
        if (dim == DIM_s_k || dim == DIM_tokens_k) count = p->keys, first = p->first_key;
        if (dim == DIM_h_q || dim == DIM_h_kv) heads = result->shape[d];
    }
    bool same = true;
    for (int64_t at = 0; at < count * heads; at++)
        same &= !memcmp(row_in(c, result, i, p->n - 1, at / heads, at % heads),
                        case_row(c, i, p->request, first + at / heads, at % heads), bytes);
    return same;
}

void compare_part(struct test_case *c, int64_t request)
{
    const struct subject *op = c->op;
    const int blocks = c->blocks.count;
    struct part *p = calloc(1, sizeof *p);
    struct guarded results[RESULTS];
    if (!p) exit(1);
    view_make(c, &p->view, false);
    p->tokens = c->s_q, p->keys = c->s_k;
    op->maker->part(c, request, p);
    for (int k = 0; k < op->results; k++) {
        const int i = op->result[k];
        const struct form form = form_of(op->tensor[i], c->flat);
        int64_t shape[GUARDED_DIMS];
        for (int d = 0; d < form.rank; d++)
            shape[d] = form.dimensions[d] == DIM_b                                           ? p->n
                       : form.dimensions[d] == DIM_s_q || form.dimensions[d] == DIM_tokens_q ? p->tokens
                       : form.dimensions[d] == DIM_s_k || form.dimensions[d] == DIM_tokens_k
                           ? p->keys
                           : c->tensor[i].shape[d];
        guarded_make(&results[k], c->tensor[i].tensor.dtype, c->tensor[i].tensor.ndim, shape,
                     LAYOUT_CONTIGUOUS);
        if (is_apart(c->device)) device_add_guarded(&c->blocks, &results[k]);
        if (case_names(c, i)) set_tensor(op, &p->view.args, i, &results[k].tensor);
    }
    for (int i = 0; i < 2 && is_apart(c->device); i++)
        if (p->own[i].memory) device_add(&c->blocks, p->own[i].memory, p->own[i].bytes, 16);
    if (is_apart(c->device)) device_add(&c->blocks, p->view.count, sizeof p->view.count, 16);
    must(c, case_run(c, &p->view.args, 0x11));
    bool same = true;
    for (int k = c->unordered; k < op->results; k++) same &= part_is_same(c, p, k, &results[k]);
    if (!same) failed(c, "%s", p->what);
    device_drop(&c->blocks, blocks);
    for (int i = 0; i < op->results; i++) guarded_free(&results[i]);
    for (int i = 0; i < 2; i++) free(p->own[i].memory);
    free(p);
}
