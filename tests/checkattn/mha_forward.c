/* SPDX-License-Identifier: MIT
 *
 * Tests dense MHA, forward: rows by the oracle, its faults and its promises on a GPU.
 */
#include "mha_case.h"

#include <stdio.h>
#include <string.h>

/* ---- The grid --------------------------------------------------------------------------------- */

static bool possible_on_tensor_cores(const int64_t *v)
{
    return mha_is_taken("cuda-sm90", v);
}

/* Without requests or tokens a kernel may take any layout. */
static bool leaves(const struct test_case *c, const struct run *run, bool *must)
{
    *must = c->b && c->s_q;
    return !mha_is_taken(run->kernel, c->v);
}

static void choose(struct subject *op, const struct run *run)
{
    const bool tensor_cores = mha_on_tensor_cores(run->kernel);
    mha_choose_types(op, run);
    /* Tensor core kernels multiply values hidden from some rows of a tile by weights of 0, which NaN
     * survives. */
    op->axis[H_INPUTS].count = tensor_cores ? INPUTS_NAN_ENDS : INPUTS_NAN_ENDS + 1;
    op->grid.possible = tensor_cores ? possible_on_tensor_cores : NULL;
    op->grid.cost = mha_cost, op->grid.dear = on_gpu(run) ? 2e6 : 2e5;
}

/* ---- A case ----------------------------------------------------------------------------------- */

static void make(struct test_case *c, const struct run *run)
{
    const enum layout layout = near_layout(c->v[H_LAYOUT]);
    (void)run;
    mha_make(c);
    case_tensor(c, MHA(out), layout, true);
    case_tensor(c, MHA(lse), layout, c->v[H_LSE] != 0);
    for (int i = MHA(q); c->v[H_LAYOUT] == LAYOUT_FAR && i <= MHA(out); i++)
        if (i != MHA(cu_seqlens_q) && i != MHA(cu_seqlens_k)) mha_spread(c, i);
    c->tolerance[0] = tolerance_mha_out, c->tolerance[1] = tolerance_prefill_lse;
}

/* ---- Rows of it ------------------------------------------------------------------------------- */

/* Makes a row a separate problem over the first keys of its request, without a mask. */
static void narrow_to(const struct test_case *c, const struct mha_place *at, int64_t seen, struct view *view)
{
    fmla_mha_forward_args *args = &view->args.mha_forward;
    for (int i = MHA(k); i <= MHA(v); i++) view_narrow(view, i, c->flat ? 0 : 1, at->first_key, seen);
    for (int i = MHA(q); c->flat && i <= MHA(v); i++) mha_set_apart(view, i);
    args->cu_seqlens_q = args->cu_seqlens_k = NULL, args->causal = 0;
}

static void narrow(const struct test_case *c, const struct rows *rows, struct view *view)
{
    const struct mha_place at = mha_place_of(c, rows->request, rows->token);
    narrow_to(c, &at, at.seen, view);
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    enum { WIDEST = 192 };
    const struct guarded *g = &c->tensor[MHA(q)];
    const struct mha_place at = mha_place_of(c, request, token);
    const int64_t key_head = head / (c->h_q / c->h_kv);
    const uint16_t *row = mha_row_of(c, MHA(q), request, token, head);
    float q[WIDEST], key[WIDEST], value[WIDEST];
    for (int64_t d = 0; d < c->d_qk; d++) q[d] = (float)guarded_value(g, row + d);
    for (int64_t t = at.first_key; t < at.first_key + at.seen; t++) {
        const uint16_t *k = mha_row_of(c, MHA(k), request, t, key_head),
                       *v = mha_row_of(c, MHA(v), request, t, key_head);
        for (int64_t d = 0; d < c->d_qk; d++) key[d] = (float)guarded_value(g, k + d);
        for (int64_t d = 0; d < c->d_v; d++) value[d] = (float)guarded_value(g, v + d);
        magnitude_add(magnitude, (double)c->args.mha_forward.softmax_scale, q, key, c->d_qk, value, c->d_v);
    }
}

/* A request alone, in the same form; if requests are concatenated, it alone bounds the tokens. */
static void part(struct test_case *c, int64_t r, const struct run *run, struct part *p)
{
    const struct mha_case *m = (const struct mha_case *)c;
    const int64_t keys = m->first_k[r + 1] - m->first_k[r];
    struct view *view = &p->view;
    (void)run;
    snprintf(p->what, sizeof p->what, "request %lld alone has other bits than in the batch", (long long)r);
    p->request = c->flat ? 0 : r, p->n = 1;
    if (!c->flat) {
        view_narrow_all(c, view, DIM_b, r, 1);
        return;
    }
    p->first = m->first_q[r], p->tokens = m->first_q[r + 1] - p->first;
    view_narrow_all(c, view, DIM_tokens_q, p->first, p->tokens);
    view_narrow_all(c, view, DIM_tokens_k, m->first_k[r], keys);
    view->args.mha_forward.max_s_q = p->tokens, view->args.mha_forward.max_s_k = keys;
    for (int k = 0; k < 2; k++) {
        const int i = MHA(cu_seqlens_q) + k;
        p->own[k].bytes = 2 * sizeof(int32_t);
        int32_t *starts = p->own[k].memory = must_alloc(p->own[k].bytes);
        starts[0] = 0, starts[1] = (int32_t)(k ? keys : p->tokens);
        view->tensor[i].data = starts, view->tensor[i].byte_offset = 0, view->shape[i][0] = 2;
    }
}

/* Chooses every row of a small case; of a large one those at both ends of requests, and random ones. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    enum { CHOSEN = 84, DRAWN_ROWS = 64, SMALL = 40000 };
    const struct mha_case *m = (const struct mha_case *)c;
    const int64_t all = c->b * c->s_q * c->h_q;
    int64_t count = 0;
    if (all <= CHOSEN || (all * c->s_k <= SMALL && all <= MOST_ROWS))
        return all_rows(c, rows, c->h_q / c->h_kv);
    for (int64_t r = 0; r < m->requests && count < CHOSEN - DRAWN_ROWS - 1; r++) {
        const int64_t first = c->flat ? m->first_q[r] : 0, tokens = m->first_q[r + 1] - m->first_q[r];
        if (!tokens) continue;
        rows[count++] = (struct rows){c->flat ? 0 : r, first, r % c->h_q, 1, 1};
        rows[count++] = (struct rows){c->flat ? 0 : r, first + tokens - 1, c->h_q - 1 - r % c->h_q, 1, 1};
    }
    while (count < CHOSEN) {
        const int64_t r = random_between(&c->random, 0, c->b - 1),
                      j = random_between(&c->random, 0, c->s_q - 1);
        rows[count++] = (struct rows){r, j, random_between(&c->random, 0, c->h_q - 1), 1, 1};
    }
    return count;
}

/* ---- Faults ----------------------------------------------------------------------------------- */

/* Recomputes a row over `change` keys more or fewer than it sees: the output of a kernel with that defect. */
static bool plant_row(struct test_case *c, int64_t change)
{
    for (int64_t i = 0; i < c->b * c->s_q; i++) {
        const struct rows rows = {i / c->s_q, i % c->s_q, 0, 1, 1};
        const struct mha_place at = mha_place_of(c, rows.request, rows.token);
        const int64_t out_shape[] = {1, 1, 1, c->d_v}, one[] = {1, 1, 1};
        struct view view;
        if (at.seen + change < 1 || at.seen + change > at.length) continue;
        fmla_tensor out = c->view[MHA(out)], lse = c->view[MHA(lse)];
        view_make(c, &view, true), view_rows(c, &view, &rows);
        narrow_to(c, &at, at.seen + change, &view);
        out.data = case_row(c, MHA(out), rows.request, rows.token, 0), out.shape = out_shape, out.ndim = 4;
        lse.data = case_row(c, MHA(lse), rows.request, rows.token, 0), lse.shape = one, lse.ndim = 3;
        out.byte_offset = lse.byte_offset = 0, out.strides = lse.strides = NULL;
        view.args.mha_forward.out = &out, view.args.mha_forward.lse = &lse;
        view.args.mha_forward.kernel = "ref";
        return call_on_host(c->op, &view.args, 0xff) == FMLA_OK;
    }
    return false;
}

static bool plant_after(struct test_case *c, enum defect fault)
{
    if (fault == FAULT_DROPPED_KEY) return plant_row(c, -1);
    return fault == FAULT_MASK && c->v[H_CAUSAL] && plant_row(c, 1);
}

/* Cases that suit every fault: requests without keys or tokens, gaps, causal. An lse is small if a key is
 * alone. */
static const char *fault_case(const struct run *run, uint64_t i)
{
    static char text[200];
    snprintf(text, sizeof text, "b 7, heads 5_5, causal 1, layout padded, %s, %s",
             i % 2 ? "requests varied" : "requests apart",
             run->fault == FAULT_LSE_CANCELLED ? "shape one, inputs steep" : "shape few");
    return i < 8 ? text : NULL;
}

/* ---- Cases beside the grid -------------------------------------------------------------------- */

/* Compares the oracle's own masks, heads, strides and starts with problems that have none. */
static void more(struct suite *suite)
{
    static const char *const texts[] = {
        "b 3, shape rows, heads 2_1, requests varied, causal 1, layout odd",
        "b 3, shape odd, heads 16_1, sizes 64_64, requests apart, causal 1, layout swapped",
        "b 7, shape rows, heads 5_5, sizes 64_128, requests hostile"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        suite_case(suite, texts[i], suite->run[0].seed, true);
}

static const struct maker maker = {.size = sizeof(struct mha_case),
                                   .draw = mha_draw,
                                   .make = make,
                                   .choose_rows = choose_rows,
                                   .narrow = narrow,
                                   .seen = mha_seen,
                                   .magnitude = magnitude_of,
                                   .part = part};

struct subject mha_forward = {
    .of = OP_MHA_FORWARD,
    .maker = &maker,
    .values = MHA_AXES(AXIS_TEXT),
    .grid = {.counts = mha_counts},
    .choose = choose,
    .has = mha_has,
    .leaves = leaves,
    /* Cases that pairs do not cover: no keys at all, and offsets of more than 32 bits. */
    .special = {"b 3, shape no_key, heads 32_4", "b 3, shape no_key, heads 32_4, requests ragged",
                "b 3, shape rows, heads 2_1, causal 1, layout far",
                "b 3, shape rows, heads 2_1, causal 1, requests varied, layout far",
                "b 3, shape rows, sizes 64_128, inputs spiked",
                "b 7, shape even, heads 2_1, sizes 128_128, requests varied, causal 1, threads own"},
    .more = more,
    .faults = ((FAULT(MERGE_BASE) - 1) & ~FAULT(SWAPPED_PAGE)) | FAULT(BATCH),
    .fault_case = fault_case,
    .plant_after = plant_after,
    .gpu = {.bases = {"heads 16_1, requests cut", "heads 32_4, sizes 128_128, requests cut, dtype fp16",
                      "heads 16_1, sizes 64_64, requests cut"},
            .graph = "b 7, shape even, causal 1, layout padded",
            .next = {"", "", ""},
            .repeats = {"b 7, shape even, causal 1", "b 7, shape tall, inputs steep", "b 2, shape long"},
            .positions = {"b 7, shape even, causal 1", "b 100, shape few, inputs spiked",
                          "b 3, shape square, causal 1, inputs spiked"},
            .busy = "b 7, shape even, causal 1",
            .threads = {"heads 32_4", "heads 16_1, shape rows"}},
    .cpu_faults = FAULT(COUNT),
    .timed = {"b 1, shape even, heads 16_1, causal 1", "b 1, shape even, heads 5_5, sizes 128_128"},
};
