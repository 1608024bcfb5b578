/* SPDX-License-Identifier: MIT
 *
 * Dense MHA, forward: requests apart, or one after the other. There a case is of one request to the runner, whose tokens are those of
 * all; which of the case's own requests a token is of, and what keys that sees, is said here.
 */
#include "axes.h"

#include "num.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MHA(member) TENSOR_mha_forward_##member

enum {
    REQUESTS_APART,
    REQUESTS_RAGGED,  /* of one length */
    REQUESTS_VARIED,  /* of lengths up to the shape's, 0 too */
    REQUESTS_HOSTILE, /* starts that are negative, that fall, and that are beyond the last token */
    REQUESTS_CUT      /* of any lengths, which together are those of the shape */
};
enum {
    INPUTS_NORMAL,
    INPUTS_SPIKED, /* keys at borders weigh more */
    INPUTS_STEEP,  /* scores of ±200: without the maximum taken out, everything overflows */
    INPUTS_NAN_ENDS /* causal: the last key of a request is NaN, and rows that may not see it must not notice */
};

static const int64_t shapes[][2] = {{0, 5},         {1, 1},       {1, 4096},   {63, 65},
                                    {128, 128},     {1000, 1000}, {300, 2000}, {2000, 300},
                                    {16384, 16384}, {150, 70},    {12, 9},     {70, 0}};
static const int64_t heads_of[][2] = {{5, 5}, {16, 1}, {32, 4}, {128, 128}, {2, 1}};
static const int64_t sizes_of[][2] = {{192, 128}, {128, 128}, {64, 64}, {64, 128}};
enum { SIZES_64_128 = 3 };

struct mha_case {
    struct test_case c;
    int64_t requests;
    int64_t *first_q, *first_k;      /* [requests + 1]: where requests begin among all tokens, in order */
    int64_t strides[MAX_TENSORS][4]; /* of those that lie far apart */
};

/* ---- The grid --------------------------------------------------------------------------------- */

/* Without a request or a token nothing plays a part, nor does NaN that every row sees. */
static bool counts(const int64_t *v, int i, int j)
{
    const bool inputs = i == H_INPUTS || j == H_INPUTS;
    if (!v[H_B] && i != H_B) return false;
    if (!shapes[v[H_SHAPE]][0] && i != H_SHAPE && j != H_SHAPE) return false;
    return !inputs || v[H_INPUTS] != INPUTS_NAN_ENDS || v[H_CAUSAL] || i == H_CAUSAL;
}

/* Row-keys, and what it takes to make the tensors. */
static double cost(const int64_t *v)
{
    const int64_t *shape = shapes[v[H_SHAPE]];
    return (double)(v[H_B] * heads_of[v[H_HEADS]][0]) * (double)(shape[0] + 16) * (double)(shape[1] + 16);
}

/* Hopper's kernel wants rows at multiples of 16 bytes, and values as long as their keys, or as 128 of 192. */
static bool is_taken(const char *kernel, const int64_t *v)
{
    const bool hopper = !strcmp(kernel, "cuda-sm90");
    return !hopper || (v[H_LAYOUT] != LAYOUT_ODD && v[H_SIZES] != SIZES_64_128);
}

static bool hopper_possible(const int64_t *v)
{
    return is_taken("cuda-sm90", v);
}

static bool leaves(const struct test_case *c, const struct run *run, bool *must)
{
    *must = true;
    return !is_taken(run->kernel, c->v);
}

static void choose(struct subject *op, const struct run *run)
{
    const bool hopper = !strcmp(run->kernel, "cuda-sm90");
    struct axis *dtype = &op->axis[H_DTYPE];
    dtype->count = 0;
    if (run->types & FMLA_TAKES_BF16) dtype->values[dtype->count++] = 0;
    if (run->types & FMLA_TAKES_FP16) dtype->values[dtype->count++] = 1;
    /* Hopper's kernel multiplies values that some rows of a tile do not see by weights of 0, which NaN survives. */
    op->axis[H_INPUTS].count = hopper ? INPUTS_NAN_ENDS : INPUTS_NAN_ENDS + 1;
    op->grid.possible = hopper ? hopper_possible : NULL;
    op->grid.cost = cost, op->grid.dear = on_gpu(run) ? 2e6 : 2e5;
}

static bool has(const struct run *run, const int64_t *v)
{
    return v[H_LAYOUT] != LAYOUT_FAR || has_far_memory(run, 72);
}

/* ---- A case ----------------------------------------------------------------------------------- */

/* Values are drawn once and copied from random places. */
enum { DRAWN = 1 << 18 };
static uint16_t drawn[2][DRAWN]; /* [dtype] */

static void draw(uint64_t seed)
{
    struct random_state random = {seed};
    for (int i = 0; i < DRAWN; i++) {
        const float x = random_input(&random, 0.0f, 0.1f);
        drawn[0][i] = num_to_bf16(x), drawn[1][i] = num_to_fp16(x);
    }
}

static void put_vector(struct test_case *c, int i, int64_t request, int64_t token, int64_t head, bool spike)
{
    const bool fp16 = c->v[H_DTYPE] == 1;
    const int64_t width = i == MHA(v) ? c->d_v : c->d_qk;
    uint8_t *to = c->flat ? guarded_at(&c->tensor[i], token, head, 0, 0)
                          : guarded_at(&c->tensor[i], request, token, head, 0);
    const size_t bytes = (size_t)width * sizeof(uint16_t);
    memcpy(to, drawn[fp16] + random_between(&c->random, 0, DRAWN - width), bytes);
    if (spike) case_spike(to + bytes, fp16);
}

static void spread_starts(struct test_case *c, int64_t *first, int64_t length)
{
    const struct mha_case *m = (const struct mha_case *)c;
    for (int64_t r = 0; r < m->requests; r++) {
        const int64_t left = m->requests * length - first[r];
        int64_t own = length;
        if (c->v[H_REQUESTS] == REQUESTS_CUT && r + 1 < m->requests)
            own = random_between(&c->random, 0, left < 2 * length ? left : 2 * length);
        else if (c->v[H_REQUESTS] == REQUESTS_CUT)
            own = left;
        else if (c->v[H_REQUESTS] >= REQUESTS_VARIED)
            own = random_between(&c->random, 0, 3) ? random_between(&c->random, 0, length) : 0;
        first[r + 1] = first[r] + own;
    }
}

/* The starts as the call has them. Hostile ones must mean what is in `first`, which they change: every token stays one of some request. */
static void put_starts(struct test_case *c, int i, int64_t *first)
{
    const struct mha_case *m = (const struct mha_case *)c;
    const bool hostile = c->v[H_REQUESTS] == REQUESTS_HOSTILE;
    case_tensor(c, i, LAYOUT_CONTIGUOUS, true);
    for (int64_t r = 0; r <= m->requests; r++) {
        int64_t start = first[r];
        if (hostile && !r) start = -7;
        if (hostile && r == m->requests) start = INT32_MAX;
        if (hostile && r % 3 == 2 && r < m->requests) start = -1, first[r] = first[r - 1];
        *(int32_t *)guarded_at(&c->tensor[i], r, 0, 0, 0) = (int32_t)start;
    }
}

/* Keys beside a border of a block of 64 or of the request weigh more, so that losing one shows even among thousands. */
static bool is_border(const struct test_case *c, int64_t key, int64_t length)
{
    return c->v[H_INPUTS] == INPUTS_SPIKED && (key % 64 == 0 || key % 64 == 63 || key + 1 == length);
}

static void fill_request(struct test_case *c, int64_t r)
{
    const struct mha_case *m = (const struct mha_case *)c;
    const int64_t length = m->first_k[r + 1] - m->first_k[r], queries = m->first_q[r + 1] - m->first_q[r];
    const int64_t first_q = c->flat ? m->first_q[r] : 0, first_k = c->flat ? m->first_k[r] : 0;
    const uint16_t nan = 0x7fff; /* in both types; not what outputs are filled with */
    for (int64_t t = 0; t < queries; t++)
        for (int64_t h = 0; h < c->h_q; h++)
            put_vector(c, MHA(q), r, first_q + t, h, c->v[H_INPUTS] == INPUTS_SPIKED);
    for (int64_t t = 0; t < length; t++)
        for (int64_t h = 0; h < c->h_kv; h++) {
            put_vector(c, MHA(k), r, first_k + t, h, is_border(c, t, length));
            put_vector(c, MHA(v), r, first_k + t, h, false);
            if (c->v[H_INPUTS] != INPUTS_NAN_ENDS || !c->v[H_CAUSAL] || queries < 2 || t + 1 < length)
                continue;
            const int64_t at[] = {c->flat ? first_k + t : r, c->flat ? h : t, c->flat ? 0 : h};
            uint16_t *key = guarded_at(&c->tensor[MHA(k)], at[0], at[1], at[2], 0),
                     *value = guarded_at(&c->tensor[MHA(v)], at[0], at[1], at[2], 0);
            for (int64_t d = 0; d < c->d_qk; d++) key[d] = nan;
            for (int64_t d = 0; d < c->d_v; d++) value[d] = nan;
        }
}

/* Requests, or tokens where these follow each other, so far apart that the last is more than 2^32 elements from the first. */
static void spread(struct test_case *c, int i)
{
    struct guarded *g = &c->tensor[i];
    const int64_t pages = g->shape[0],
                  between = ((INT64_C(1) << 32) / (pages > 1 ? pages - 1 : 1) / 64 + 1) * 64;
    int64_t *strides = ((struct mha_case *)c)->strides[i];
    const size_t element = sizeof(uint16_t), front = element << 31;
    guarded_spread(g, pages, (size_t)g->strides[0] * element, front, (size_t)between * element,
                   is_result(c->op, i));
    fmla_tensor *view = &c->view[i];
    memcpy(strides, g->strides, 4 * sizeof *strides);
    c->strides[i] = strides[0], strides[0] = between;
    view->data = g->far + front, view->byte_offset = 0, view->strides = strides;
}

static void make(struct test_case *c, const struct run *run)
{
    struct mha_case *m = (struct mha_case *)c;
    const int64_t *v = c->v;
    int64_t shape[3], heads[3];
    const enum layout layout = near_layout(v[H_LAYOUT]);
    fmla_mha_forward_args *args = &c->args.mha_forward;
    (void)run;
    axis_shape_take(v[H_SHAPE], shapes[0], 2, shape), axis_shape_take(v[H_HEADS], heads_of[0], 2, heads);
    c->h_q = heads[0], c->h_kv = heads[1];
    c->d_qk = sizes_of[v[H_SIZES]][0], c->d_v = sizes_of[v[H_SIZES]][1];
    c->dtype = v[H_DTYPE] ? dtype_fp16 : dtype_bf16, c->flat = v[H_REQUESTS] != REQUESTS_APART;
    m->requests = v[H_B], c->s_q = shape[0], c->s_k = shape[1];
    m->first_q = c->owned[0] = calloc((size_t)m->requests + 1, sizeof *m->first_q);
    m->first_k = c->owned[1] = calloc((size_t)m->requests + 1, sizeof *m->first_k);
    if (!m->first_q || !m->first_k) exit(1);
    spread_starts(c, m->first_q, shape[0]), spread_starts(c, m->first_k, shape[1]);
    if (c->flat) {
        c->b = 1, c->splits = m->requests + 1;
        c->s_q = c->tokens_q = m->first_q[m->requests], c->tokens_k = m->first_k[m->requests];
        put_starts(c, MHA(cu_seqlens_q), m->first_q), put_starts(c, MHA(cu_seqlens_k), m->first_k);
        args->max_s_q = v[H_REQUESTS] == REQUESTS_RAGGED ? shape[0] : 0;
        args->max_s_k = v[H_REQUESTS] == REQUESTS_RAGGED ? shape[1] : 0;
    }
    case_tensor(c, MHA(q), layout, true), case_tensor(c, MHA(k), layout, true);
    case_tensor(c, MHA(v), layout, true), case_tensor(c, MHA(out), layout, true);
    case_tensor(c, MHA(lse), layout, v[H_LSE] != 0);
    for (int64_t r = 0; r < m->requests; r++) fill_request(c, r);
    if (v[H_LAYOUT] == LAYOUT_FAR)
        spread(c, MHA(q)), spread(c, MHA(k)), spread(c, MHA(v)), spread(c, MHA(out));
    args->softmax_scale = v[H_INPUTS] == INPUTS_SPIKED  ? 0.5f
                          : v[H_INPUTS] == INPUTS_STEEP ? 300.0f
                                                        : 1.0f / sqrtf((float)c->d_qk + 100.0f);
    c->tolerance[0] = tolerance_mha_out, c->tolerance[1] = tolerance_prefill_lse;
    c->other = v[H_INPUTS] == INPUTS_SPIKED || v[H_INPUTS] == INPUTS_STEEP;
}

/* ---- Rows of it ------------------------------------------------------------------------------- */

/* What a row sees: `seen` keys of its request, the first of which is first_key where requests are one after the other. */
struct place {
    int64_t request, first_key, length, seen;
};

static struct place place_of(const struct test_case *c, int64_t request, int64_t token)
{
    const struct mha_case *m = (const struct mha_case *)c;
    struct place at = {.request = request};
    while (c->flat && token >= m->first_q[at.request + 1]) at.request++;
    const int64_t tokens = m->first_q[at.request + 1] - m->first_q[at.request];
    const int64_t own = c->flat ? token - m->first_q[at.request] : token;
    at.first_key = c->flat ? m->first_k[at.request] : 0;
    at.length = m->first_k[at.request + 1] - m->first_k[at.request];
    at.seen = c->v[H_CAUSAL] ? at.length - tokens + own + 1 : at.length;
    if (at.seen < 0) at.seen = 0;
    return at;
}

static bool sees(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    (void)head;
    return place_of(c, request, token).seen > 0;
}

/* Gives a tensor of a view, of which one request is left, the dimension b again. */
static void set_apart(struct view *view, int i)
{
    memmove(view->shape[i] + 1, view->shape[i], 3 * sizeof *view->shape[i]);
    memmove(view->strides[i] + 1, view->strides[i], 3 * sizeof *view->strides[i]);
    view->shape[i][0] = 1, view->tensor[i].ndim = 4;
}

/* A row as a problem of its own over the first keys of its request, apart and without a mask. */
static void narrow_to(const struct test_case *c, const struct place *at, int64_t seen, struct view *view)
{
    fmla_mha_forward_args *args = &view->args.mha_forward;
    for (int i = MHA(k); i <= MHA(v); i++) view_narrow(view, i, c->flat ? 0 : 1, at->first_key, seen);
    for (int i = MHA(q); c->flat && i <= MHA(v); i++) set_apart(view, i);
    args->cu_seqlens_q = args->cu_seqlens_k = NULL, args->causal = 0;
}

static void narrow(const struct test_case *c, const struct rows *rows, struct view *view)
{
    const struct place at = place_of(c, rows->request, rows->token);
    narrow_to(c, &at, at.seen, view);
}

static const uint16_t *row_of(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head)
{
    const struct guarded *g = &c->tensor[i];
    return c->flat ? guarded_at(g, token, head, 0, 0) : guarded_at(g, request, token, head, 0);
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    enum { WIDEST = 192 };
    const struct guarded *g = &c->tensor[MHA(q)];
    const struct place at = place_of(c, request, token);
    const int64_t key_head = head / (c->h_q / c->h_kv);
    const uint16_t *row = row_of(c, MHA(q), request, token, head);
    float q[WIDEST], key[WIDEST], value[WIDEST];
    for (int64_t d = 0; d < c->d_qk; d++) q[d] = (float)guarded_value(g, row + d);
    for (int64_t t = at.first_key; t < at.first_key + at.seen; t++) {
        const uint16_t *k = row_of(c, MHA(k), request, t, key_head),
                       *v = row_of(c, MHA(v), request, t, key_head);
        for (int64_t d = 0; d < c->d_qk; d++) key[d] = (float)guarded_value(g, k + d);
        for (int64_t d = 0; d < c->d_v; d++) value[d] = (float)guarded_value(g, v + d);
        magnitude_add(magnitude, (double)c->args.mha_forward.softmax_scale, q, key, c->d_qk, value, c->d_v);
    }
}

/* A request alone, in the same form; where tokens follow each other, it alone is what bounds them. */
static void part(struct test_case *c, int64_t r, const struct run *run, struct part *p)
{
    const struct mha_case *m = (const struct mha_case *)c;
    const int64_t keys = m->first_k[r + 1] - m->first_k[r];
    struct view *view = &p->view;
    (void)run;
    snprintf(p->what, sizeof p->what, "request %lld alone has other bits than in the batch", (long long)r);
    p->request = c->flat ? 0 : r, p->n = 1;
    if (!c->flat) {
        view_cut(c, view, DIM_b, r, 1);
        return;
    }
    p->first = m->first_q[r], p->tokens = m->first_q[r + 1] - p->first;
    view_cut(c, view, DIM_tokens_q, p->first, p->tokens);
    view_cut(c, view, DIM_tokens_k, m->first_k[r], keys);
    view->args.mha_forward.max_s_q = p->tokens, view->args.mha_forward.max_s_k = keys;
    for (int k = 0; k < 2; k++) {
        const int i = MHA(cu_seqlens_q) + k;
        p->own[k].bytes = 2 * sizeof(int32_t);
        int32_t *starts = p->own[k].memory = must_alloc(p->own[k].bytes);
        starts[0] = 0, starts[1] = (int32_t)(k ? keys : p->tokens);
        view->tensor[i].data = starts, view->tensor[i].byte_offset = 0, view->shape[i][0] = 2;
    }
}

/* Every row of a small case; of a large one those at both ends of requests, and drawn ones. */
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

/* Recomputes a row over `change` keys more or fewer than it sees: what a kernel with that defect would write. */
static bool plant_row(struct test_case *c, int64_t change)
{
    for (int64_t i = 0; i < c->b * c->s_q; i++) {
        const struct rows rows = {i / c->s_q, i % c->s_q, 0, 1, 1};
        const struct place at = place_of(c, rows.request, rows.token);
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

/* Cases with room for every fault: requests without keys or tokens, gaps, causal. An lse is small where one key stands alone. */
static const char *fault_case(const struct run *run, uint64_t i)
{
    static char text[200];
    snprintf(text, sizeof text, "b 7, heads 5_5, causal 1, layout padded, %s, %s",
             i % 2 ? "requests varied" : "requests apart",
             run->fault == FAULT_LSE_CANCELLED ? "shape one, inputs steep" : "shape few");
    return i < 8 ? text : NULL;
}

/* ---- Cases beside the grid -------------------------------------------------------------------- */

/* The oracle's own masks, heads, strides and starts against problems that have none. */
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
                                   .draw = draw,
                                   .make = make,
                                   .choose_rows = choose_rows,
                                   .narrow = narrow,
                                   .sees = sees,
                                   .magnitude = magnitude_of,
                                   .part = part};

struct subject mha_forward = {
    .of = OP_MHA_FORWARD,
    .maker = &maker,
    .values = MHA_AXES(AXIS_TEXT),
    .grid = {.counts = counts},
    .choose = choose,
    .has = has,
    .leaves = leaves,
    /* What pairs do not reach: no keys at all, and offsets of more than 32 bits. */
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
    .timed = {"b 1, shape even, heads 16_1, causal 1", "b 1, shape even, heads 5_5, sizes 128_128"},
};
