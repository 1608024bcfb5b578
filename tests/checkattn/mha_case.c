/* SPDX-License-Identifier: MIT */
#include "mha_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t shapes[][2] = {{0, 5},       {1, 1},      {1, 4096},   {63, 65},       {128, 128},
                                    {1000, 1000}, {300, 2000}, {2000, 300}, {16384, 16384}, {150, 70},
                                    {12, 9},      {70, 0},     {5, 20000},  {4200, 8400}};
static const int64_t heads_of[][2] = {{5, 5}, {16, 1}, {32, 4}, {128, 128}, {2, 1}};
static const int64_t sizes_of[][2] = {{192, 128}, {128, 128}, {64, 64}, {64, 128}, {256, 256}, {96, 64}};

/* Without requests or tokens no axis matters, nor does a NaN that every row sees. */
bool mha_counts(const int64_t *v, int i, int j)
{
    const bool inputs = i == H_INPUTS || j == H_INPUTS;
    if (!v[H_B] && i != H_B) return false;
    if (!shapes[v[H_SHAPE]][0] && i != H_SHAPE && j != H_SHAPE) return false;
    return !inputs || v[H_INPUTS] != INPUTS_NAN_ENDS || v[H_CAUSAL] || i == H_CAUSAL;
}

bool mha_on_tensor_cores(const char *kernel)
{
    return !strcmp(kernel, "cuda-sm90") || !strcmp(kernel, "cuda-sm80");
}

static bool possible_on_tensor_cores(const int64_t *v)
{
    return v[H_LAYOUT] != LAYOUT_ODD && v[H_SIZES] != SIZES_64_128;
}

static bool possible_in_gradients_on_hopper(const int64_t *v)
{
    const bool both = v[H_SINK] > SINK_NONE && v[H_DLSE] > 0;
    return possible_on_tensor_cores(v) &&
           !(both && (v[H_SIZES] == SIZES_192_128 || v[H_SIZES] == SIZES_256_256));
}

/* Returns what tells which cases a kernel takes; NULL: it takes all. */
static bool (*possible_by(const char *kernel, enum operation of))(const int64_t *)
{
    if (!mha_on_tensor_cores(kernel)) return NULL;
    const bool gradients_on_hopper = of == OP_MHA_BACKWARD && !strcmp(kernel, "cuda-sm90");
    return gradients_on_hopper ? possible_in_gradients_on_hopper : possible_on_tensor_cores;
}

bool mha_leaves(const struct test_case *c, bool *must)
{
    bool (*const possible)(const int64_t *) = possible_by(c->run->kernel, c->op->of);
    *must = c->v[H_B] && c->s_q && (c->s_k || c->op->of == OP_MHA_FORWARD);
    return possible && !possible(c->v);
}

/* Row-keys, plus the cost of making the tensors. */
static double cost(const int64_t *v)
{
    const int64_t *shape = shapes[v[H_SHAPE]];
    return (double)(v[H_B] * heads_of[v[H_HEADS]][0]) * (double)(shape[0] + 16) * (double)(shape[1] + 16);
}

/* The cost without the keys that a causal mask hides, for gradients, whose large cases take ten times the
 * time of making them. Random lengths count as the shape's; otherwise nearly empty cases would be
 * preferred. */
static double cost_seen(const int64_t *v)
{
    const double tokens = (double)shapes[v[H_SHAPE]][0], keys = (double)shapes[v[H_SHAPE]][1];
    const double unseen = !v[H_CAUSAL]    ? 0.0
                          : tokens < keys ? tokens * tokens / 2.0
                                          : keys * (tokens - keys / 2.0);
    return cost(v) - (double)(v[H_B] * heads_of[v[H_HEADS]][0]) * unseen;
}

bool mha_has(const struct run *run, const int64_t *v)
{
    const bool tensor_cores = mha_on_tensor_cores(run->kernel);
    if (tensor_cores && v[H_INPUTS] == INPUTS_NAN_ENDS) return false;
    if (!tensor_cores && v[H_SHAPE] == SHAPE_GROUPS) return false; /* it would take minutes */
    return v[H_LAYOUT] != LAYOUT_FAR || has_far_memory(run, 72);
}

void mha_choose(struct subject *op, const struct run *run)
{
    const bool tensor_cores = mha_on_tensor_cores(run->kernel), forward = op->of == OP_MHA_FORWARD;
    op->axis[H_INPUTS].count = INPUTS_NAN_ENDS + !tensor_cores;
    op->grid.possible = possible_by(run->kernel, op->of);
    op->grid.cost = forward ? cost : cost_seen, op->grid.dear = on_gpu(run) ? 2e6 : forward ? 2e5 : 3e4;
}

/* ---- A case ----------------------------------------------------------------------------------- */

int mha_tensor(const struct test_case *c, const char *name)
{
    int i = 0;
    while (strcmp(c->op->tensor[i]->name, name) != 0) i++;
    return i;
}

/* Values are drawn once and copied from random offsets. */
enum { DRAWN = 1 << 18 };
static uint16_t drawn[2][DRAWN]; /* [dtype] */

void mha_draw(uint64_t seed)
{
    struct random_state random = {seed};
    draw_numbers(&random, 0.0f, 0.1f, DRAWN, drawn[0], drawn[1]);
}

void mha_put_vector(struct test_case *c, int i, int64_t request, int64_t token, int64_t head, bool spike)
{
    const bool fp16 = c->v[H_DTYPE] == 1;
    const int64_t width = i == MHA(q) || i == MHA(k) ? c->d_qk : c->d_v;
    uint8_t *to = case_row(c, i, request, token, head);
    const size_t bytes = (size_t)width * sizeof(uint16_t);
    memcpy(to, drawn[fp16] + random_between(&c->random, 0, DRAWN - width), bytes);
    if (spike) case_spike(to + bytes, fp16);
}

static void spread_starts(struct test_case *c, int64_t *first, int64_t length)
{
    for (int64_t r = 0; r < c->v[H_B]; r++) {
        const int64_t left = c->v[H_B] * length - first[r];
        int64_t own = length;
        if (c->v[H_REQUESTS] == REQUESTS_CUT && r + 1 < c->v[H_B])
            own = random_between(&c->random, 0, left < 2 * length ? left : 2 * length);
        else if (c->v[H_REQUESTS] == REQUESTS_CUT)
            own = left;
        else if (c->v[H_REQUESTS] >= REQUESTS_VARIED)
            own = random_between(&c->random, 0, 3) ? random_between(&c->random, 0, length) : 0;
        first[r + 1] = first[r] + own;
    }
}

/* Returns the number of tokens or keys outside all requests on one side of them. */
static int64_t draw_outside(struct test_case *c)
{
    return c->v[H_REQUESTS] == REQUESTS_WITHIN ? random_between(&c->random, 0, 200) : 0;
}

/* Sets the starts of the call. Hostile ones must mean what `first` says; they change it so that every
 * token remains in some request. */
static void put_starts(struct test_case *c, int i, int64_t *first)
{
    const bool hostile = c->v[H_REQUESTS] == REQUESTS_HOSTILE;
    case_tensor(c, i, LAYOUT_CONTIGUOUS, true);
    for (int64_t r = 0; r <= c->v[H_B]; r++) {
        int64_t start = first[r];
        if (hostile && !r) start = -7;
        if (hostile && r == c->v[H_B]) start = INT32_MAX;
        if (hostile && r % 3 == 2 && r < c->v[H_B]) start = -1, first[r] = first[r - 1];
        *(int32_t *)guarded_at(&c->tensor[i], r, 0, 0, 0) = (int32_t)start;
    }
}

/* Draws the lengths in use of queries, or keys: none, some and all of them, and values that are clamped. */
static void put_used(struct test_case *c, int k)
{
    const int i = mha_tensor(c, k ? "seqused_k" : "seqused_q");
    const int64_t b = c->b;
    c->b = c->v[H_B]; /* also where the runner sees one request */
    case_tensor(c, i, LAYOUT_CONTIGUOUS, true);
    c->b = b;
    for (int64_t r = 0; r < c->v[H_B]; r++) {
        const int64_t all = mha_extent(c, k, r);
        int64_t used = random_between(&c->random, 0, all);
        switch (random_between(&c->random, 0, 7)) {
        case 0: used = 0; break;
        case 1: used = all; break;
        case 2: used = random_between(&c->random, 0, 1) ? INT32_MAX : all + 1; break;
        case 3: used = random_between(&c->random, 0, 1) ? INT32_MIN : -1; break;
        default: break;
        }
        *(int32_t *)guarded_at(&c->tensor[i], r, 0, 0, 0) = (int32_t)used;
        ((struct mha_case *)c)->used[k][r] = used < 0 ? 0 : used < all ? used : all;
    }
}

/* Padding keeps the NaN that memory is filled with. */
static void fill_request(struct test_case *c, int64_t r)
{
    const int64_t length = mha_length(c, true, r), queries = mha_length(c, false, r);
    const int64_t first_q = mha_begin(c, false, r), first_k = mha_begin(c, true, r);
    const uint16_t nan = 0x7fff; /* NaN in both types; differs from the fill of outputs */
    for (int64_t t = 0; t < queries; t++)
        for (int64_t h = 0; h < c->h_q; h++)
            mha_put_vector(c, MHA(q), r, first_q + t, h, c->v[H_INPUTS] == INPUTS_SPIKED);
    for (int64_t t = 0; t < length; t++)
        for (int64_t h = 0; h < c->h_kv; h++) {
            mha_put_vector(c, MHA(k), r, first_k + t, h,
                           c->v[H_INPUTS] == INPUTS_SPIKED && is_border(t, length));
            mha_put_vector(c, MHA(v), r, first_k + t, h, false);
            if (c->v[H_INPUTS] != INPUTS_NAN_ENDS || !c->v[H_CAUSAL] || queries < 2 || t + 1 < length)
                continue;
            uint16_t *key = case_row(c, MHA(k), r, first_k + t, h),
                     *value = case_row(c, MHA(v), r, first_k + t, h);
            for (int64_t d = 0; d < c->d_qk; d++) key[d] = nan;
            for (int64_t d = 0; d < c->d_v; d++) value[d] = nan;
        }
}

void mha_spread(struct test_case *c)
{
    for (int i = 0; c->v[H_LAYOUT] == LAYOUT_FAR && i < c->op->tensors; i++) {
        const int64_t pages = c->tensor[i].shape[0],
                      between = ((INT64_C(1) << 32) / (pages > 1 ? pages - 1 : 1) / 64 + 1) * 64;
        if (c->tensor[i].tensor.dtype.bits == 16)
            case_spread(c, i, sizeof(uint16_t) << 31, (size_t)between * sizeof(uint16_t));
    }
}

void mha_make(struct test_case *c)
{
    struct mha_case *m = (struct mha_case *)c;
    const int64_t *v = c->v;
    int64_t shape[3], heads[3];
    const enum layout layout = near_layout(v[H_LAYOUT]);
    axis_shape_take(v[H_SHAPE], shapes[0], 2, shape), axis_shape_take(v[H_HEADS], heads_of[0], 2, heads);
    c->h_q = heads[0], c->h_kv = heads[1];
    c->d_qk = sizes_of[v[H_SIZES]][0], c->d_v = sizes_of[v[H_SIZES]][1];
    c->dtype = v[H_DTYPE] ? dtype_fp16 : dtype_bf16, c->flat = v[H_REQUESTS] != REQUESTS_APART;
    c->s_q = shape[0], c->s_k = shape[1];
    for (int k = 0; k < 2; k++) {
        m->first[k] = c->owned[k] = must_alloc((2 * (size_t)v[H_B] + 1) * sizeof *m->first[k]);
        m->used[k] = m->first[k] + v[H_B] + 1;
        m->first[k][0] = draw_outside(c);
    }
    for (int k = 0; k < 2; k++) spread_starts(c, m->first[k], shape[k]);
    if (c->flat) {
        c->b = 1, c->splits = c->v[H_B] + 1;
        c->s_q = c->tokens_q = m->first[0][c->v[H_B]] + draw_outside(c);
        c->tokens_k = m->first[1][c->v[H_B]] + draw_outside(c);
        for (int k = 0; k < 2; k++) put_starts(c, MHA(cu_seqlens_q) + k, m->first[k]);
        const bool known = v[H_REQUESTS] == REQUESTS_RAGGED;
        *(int64_t *)op_option(c->op->of, &c->args, "max_s_q") = known ? shape[0] : 0;
        *(int64_t *)op_option(c->op->of, &c->args, "max_s_k") = known ? shape[1] : 0;
    }
    for (int k = 0; k < 2; k++) {
        for (int64_t r = 0; r < v[H_B]; r++) m->used[k][r] = mha_extent(c, k, r);
        if (v[H_USED] >> k & 1) put_used(c, k);
    }
    case_tensor(c, MHA(q), layout, true), case_tensor(c, MHA(k), layout, true);
    case_tensor(c, MHA(v), layout, true);
    for (int64_t r = 0; r < c->v[H_B]; r++) fill_request(c, r);
    *(float *)op_option(c->op->of, &c->args, "softmax_scale") = v[H_INPUTS] == INPUTS_SPIKED ? 0.5f
                                                                : v[H_INPUTS] == INPUTS_STEEP
                                                                    ? 300.0f
                                                                    : 1.0f / sqrtf((float)c->d_qk + 100.0f);
    c->other = v[H_INPUTS] == INPUTS_SPIKED || v[H_INPUTS] == INPUTS_STEEP;
}

/* ---- Rows of it ------------------------------------------------------------------------------- */

int64_t mha_request_of(const struct test_case *c, int64_t request, int64_t token)
{
    while (c->flat && token >= ((const struct mha_case *)c)->first[0][request + 1]) request++;
    return request;
}

int64_t mha_seen(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    const int64_t r = mha_request_of(c, request, token), length = mha_length(c, true, r);
    const int64_t own = token - mha_begin(c, false, r), seen = length - mha_length(c, false, r) + own + 1;
    (void)head;
    if (own >= mha_length(c, false, r)) return 0;
    return !c->v[H_CAUSAL] ? length : seen < 0 ? 0 : seen;
}

void mha_whole(const struct test_case *c, struct view *view)
{
    static const char *const names[] = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"};
    for (int i = 0; i < 4; i++) set_tensor(c->op, &view->args, mha_tensor(c, names[i]), NULL);
}

void mha_part(struct test_case *c, int64_t request, struct part *part)
{
    struct view *view = &part->view;
    snprintf(part->what, sizeof part->what, "request %lld alone has other bits than in the batch",
             (long long)request);
    part->request = c->flat ? 0 : request, part->n = 1;
    if (!c->flat) {
        view_narrow_all(c, view, DIM_b, request, 1);
        return;
    }
    part->first = mha_begin(c, false, request), part->tokens = mha_length(c, false, request);
    part->first_key = mha_begin(c, true, request), part->keys = mha_length(c, true, request);
    view_narrow_all(c, view, DIM_tokens_q, part->first, part->tokens);
    view_narrow_all(c, view, DIM_tokens_k, part->first_key, part->keys);
    /* max_s_q stays: splits, and the order in which key blocks add to dq, follow from it */
    *(int64_t *)op_option(c->op->of, &view->args, "max_s_k") = part->keys;
    for (int k = 0; k < 2; k++) {
        const int i = MHA(cu_seqlens_q) + k;
        set_tensor(c->op, &view->args, mha_tensor(c, k ? "seqused_k" : "seqused_q"), NULL);
        part->own[k].bytes = 2 * sizeof(int32_t);
        int32_t *starts = part->own[k].memory = must_alloc(part->own[k].bytes);
        starts[0] = 0, starts[1] = (int32_t)(k ? part->keys : part->tokens);
        view->tensor[i].data = starts, view->tensor[i].byte_offset = 0, view->shape[i][0] = 2;
    }
}

void mha_set_apart(struct view *view, int i)
{
    const size_t rank = (size_t)view->tensor[i].ndim++;
    memmove(view->shape[i] + 1, view->shape[i], rank * sizeof *view->shape[i]);
    memmove(view->strides[i] + 1, view->strides[i], rank * sizeof *view->strides[i]);
    view->shape[i][0] = 1;
}
