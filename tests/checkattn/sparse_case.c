/* SPDX-License-Identifier: MIT */
#include "sparse_case.h"

#include "num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int64_t sparse_shapes[SPARSE_SHAPES][3] = {{512, 64, 2},    {512, 64, 64},   {512, 64, 69},
                                                 {1024, 576, 61}, {2046, 2048, 2}, {2046, 2048, 576},
                                                 {650, 576, 53}};

/* Requests share keys: as many as these have keys of their own. */
enum { APART = 4 };

/* ---- Drawn values ---------------------------------------------------------------------------- */

/* Queries are N(0, 1), clamped to ±1; drawn once and copied from random places. */
enum { DRAWN = 1 << 16 };
static uint16_t drawn_q[2][DRAWN]; /* [bf16, fp16] */

static void draw(uint64_t seed)
{
    struct random_state random = {seed};
    for (int i = 0; i < DRAWN; i++) {
        const float q = random_input(&random, 0.0f, 1.0f);
        drawn_q[0][i] = num_to_bf16(q), drawn_q[1][i] = num_to_fp16(q);
    }
    sparse_pool_draw(&random, 0.0f);
}

static bool is_fp16(const struct sparse_case *s)
{
    return s->c.v[S_FORMAT] == S_FP16 || s->c.v[S_FORMAT] == S_FP8_656_Q16;
}

static int64_t from_place(struct sparse_case *s)
{
    return random_between(&s->c.random, 0, DRAWN - s->c.d_qk);
}

/* The first of its tensors. */
static int pool_tensor(const struct sparse_case *s, const struct sparse_pool *pool)
{
    return pool == &s->pool[0] ? SPARSE(kv_cache) : SPARSE(extra_kv_cache);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

static int32_t *entry_of(const struct sparse_pool *pool, int64_t request, int64_t token, int64_t i)
{
    return guarded_at(pool->indices, request, token, i, 0);
}

static void make_lengths(struct sparse_case *s, struct sparse_pool *pool, int64_t kind)
{
    pool->has_length = kind != S_LENGTHS_NONE;
    case_tensor(&s->c, pool_tensor(s, pool) + 2, LAYOUT_CONTIGUOUS, pool->has_length);
    pool->count = calloc((size_t)s->c.b + 1, sizeof *pool->count);
    for (int64_t r = 0; r < s->c.b; r++) {
        int64_t length = pool->topk;
        if (kind == S_LENGTHS_VARIED)
            length = random_between(&s->c.random, 0, 3) ? random_between(&s->c.random, 0, pool->topk) : 0;
        if (kind == S_LENGTHS_ZERO) length = 0;
        if (kind == S_LENGTHS_BEYOND) length = r % 3 == 1 ? -7 : 2147483647 - r; /* to be clamped */
        *(int32_t *)guarded_at(pool->length, r, 0, 0, 0) = (int32_t)length;
        pool->count[r] = length < 0 ? 0 : length > pool->topk ? pool->topk : length;
    }
}

static int32_t no_key(struct sparse_case *s, const struct sparse_pool *pool)
{
    const int32_t none[] = {-1, 2147480000, -2147483647 - 1, (int32_t)sparse_pool_slots(pool),
                            (int32_t)sparse_pool_slots(pool) + 3};
    return none[random_between(&s->c.random, 0, 4)];
}

/* A token's list: keys of its request in an order of its own, each once, and what else the case asks for. Entries that do
 * not count are sound indices, or none. */
static void make_list(struct sparse_case *s, struct sparse_pool *pool, int64_t request, int64_t token)
{
    static const int64_t steps[] = {1,   7,   61,
                                    101, 211, 509}; /* without a factor in common with any s_k but 1 */
    const int64_t first = request % APART * pool->s_k, step = steps[random_between(&s->c.random, 0, 5)];
    const int64_t modulus = pool->s_k ? pool->s_k : 1; /* without keys no index is used */
    const int64_t start = random_between(&s->c.random, 0, modulus - 1), kind = s->c.v[S_INDICES];
    for (int64_t i = 0; i < pool->topk; i++) {
        int64_t index = i < pool->s_k ? first + (start + i * step) % modulus : -1;
        const bool none =
            kind == S_INDICES_NONE || (kind == S_INDICES_SOME && !random_between(&s->c.random, 0, 7));
        if (kind == S_INDICES_TWICE && pool->s_k) index = first + (start + i / 2 * step) % modulus;
        if (i >= pool->count[request] && sparse_pool_slots(pool))
            index = random_between(&s->c.random, 0, sparse_pool_slots(pool) - 1);
        *entry_of(pool, request, token, i) = none || index < 0 ? no_key(s, pool) : (int32_t)index;
    }
}

/* ---- Caches ---------------------------------------------------------------------------------- */

/* With spiked inputs, entries beside a border of a block of 64 and the last ones weigh more than others, so that losing one
 * shows even among thousands. */
static bool is_border(const struct sparse_pool *pool, int64_t request, int64_t i)
{
    return i % 64 == 0 || i % 64 == 63 || i + 1 == pool->count[request];
}

/* Writes every slot that a counted index names. */
static void fill_cache(struct sparse_case *s, struct sparse_pool *pool)
{
    enum { NAMED = 1, BORDER = 2 };
    unsigned char *named = calloc((size_t)sparse_pool_slots(pool) + 1, 1);
    for (int64_t r = 0; r < s->c.b; r++)
        for (int64_t j = 0; j < s->c.s_q; j++)
            for (int64_t i = 0; i < pool->count[r]; i++) {
                const int32_t index = *entry_of(pool, r, j, i);
                if (!sparse_pool_is_key(pool, index)) continue;
                named[index] |= is_border(pool, r, i) ? NAMED | BORDER : NAMED;
            }
    for (int64_t slot = 0; slot < sparse_pool_slots(pool); slot++) {
        if (!named[slot]) continue;
        sparse_pool_put(pool, &s->c.random, s->c.v[S_CODES], slot,
                        s->c.v[S_INPUTS] == S_SPIKED && (named[slot] & BORDER));
        if (s->c.v[S_INPUTS] == S_INFINITE)
            case_infinite(sparse_pool_end(pool, sparse_pool_token(pool, slot)), pool->format == KV_FP16, true,
                          slot == pool->s_k / 2);
    }
    for (int64_t i = 0; s->c.v[S_CODES] == S_CODES_NAN && i < pool->count[0]; i++) {
        const int32_t index = *entry_of(pool, 0, 0, i); /* of the token that is always compared */
        if (!sparse_pool_is_key(pool, index)) continue;
        sparse_pool_put_nan(pool, &s->c.random, sparse_pool_token(pool, index),
                            sparse_pool_scales(pool, index));
        break;
    }
    free(named);
}

static void make_pool(struct sparse_case *s, int k, int64_t shape, int64_t lengths)
{
    struct sparse_pool *pool = &s->pool[k];
    struct test_case *c = &s->c;
    const int first = pool_tensor(s, pool);
    const bool far = c->v[S_LAYOUT] == S_LAYOUT_FAR;
    const enum layout layout = far ? LAYOUT_CONTIGUOUS : (enum layout)c->v[S_LAYOUT];
    sparse_pool_in(pool, c, first);
    pool->format = s->format, pool->layout = s->layout, pool->d_qk = c->d_qk;
    int64_t sizes[3];
    sparse_shape_take(shape, sparse_shapes[0], 3, sizes);
    pool->s_k = sizes[0], pool->topk = sizes[1], pool->page_size = sizes[2];
    pool->pages = ((c->b < APART ? c->b : APART) * pool->s_k + pool->page_size - 1) / pool->page_size;
    c->topk = c->extra_topk = pool->topk;
    case_tensor(c, first + 1, layout, true);
    make_lengths(s, pool, lengths);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++) make_list(s, pool, r, j);
    sparse_pool_make(pool, &c->random, layout);
    case_name(c, first);
    fill_cache(s, pool);
    if (far) c->strides[first] = sparse_pool_spread(pool);
}

/* ---- The case -------------------------------------------------------------------------------- */

static void make_q(struct sparse_case *s)
{
    for (int64_t r = 0; r < s->c.b; r++)
        for (int64_t j = 0; j < s->c.s_q; j++)
            for (int64_t h = 0; h < s->c.h_q; h++) {
                uint8_t *row = guarded_at(&s->c.tensor[SPARSE(q)], r, j, h, 0);
                memcpy(row, drawn_q[is_fp16(s)] + from_place(s), (size_t)s->c.d_qk * 2);
                if (s->c.v[S_INPUTS] == S_SPIKED) case_spike(row + s->c.d_qk * 2, is_fp16(s));
                if (s->c.v[S_INPUTS] == S_INFINITE)
                    case_infinite(row + s->c.d_qk * 2, is_fp16(s), false, (j + h) % 3 == 0);
                if (s->c.v[S_CODES] == S_CODES_BEYOND && s->layout.element == KV_ELEMENT_E4M3) {
                    memset(row + 2 * (s->c.d_qk - s->layout.rope), 0,
                           2); /* what the large rope value meets */
                    if (r % 4 == 3 && h % 61 == 60 && !is_fp16(s))
                        memcpy(row, &(uint16_t){SPARSE_LARGE_BF16}, sizeof(uint16_t));
                }
            }
}

static void make(struct test_case *c, const struct run *run)
{
    static const enum kv_format formats[S_FORMATS] = {KV_BF16,    KV_BF16, KV_FP8_656,
                                                      KV_FP8_584, KV_FP16, KV_FP8_656};
    static const int32_t names[S_FORMATS] = {
        0, FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP16, FMLA_KV_FP8_656};
    struct sparse_case *s = (struct sparse_case *)c;
    const int64_t *v = c->v;
    c->d_qk = v[S_FORMAT] == S_BF16_512 || v[S_FORMAT] == S_FP8_584 ? 512 : 576;
    s->format = formats[v[S_FORMAT]];
    s->layout = kv_layout_of(s->format, (int32_t)c->d_qk);
    c->d_v = S_D_V, c->dtype = is_fp16(s) ? dtype_fp16 : dtype_bf16;
    const enum layout layout = v[S_LAYOUT] == S_LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)v[S_LAYOUT];
    case_tensor(c, SPARSE(q), layout, true), case_tensor(c, SPARSE(out), layout, true);
    case_tensor(c, SPARSE(lse), layout, v[S_LSE] != 0);
    make_q(s);
    make_pool(s, 0, v[S_SHAPE], v[S_LENGTHS]);
    if (v[S_EXTRA]) make_pool(s, 1, v[S_EXTRA] - 1, v[S_EXTRA_LENGTHS]);
    case_sinks(c, v[S_SINK]);

    fmla_sparse_decode_args *args = &c->args.sparse_decode;
    args->kv_format = names[v[S_FORMAT]];
    args->softmax_scale = v[S_INPUTS] == S_SPIKED   ? 0.5f
                          : v[S_INPUTS] == S_STEEP  ? 60.0f
                          : v[S_INPUTS] == S_BEYOND ? 3e38f
                                                    : (float)pow((double)c->d_qk, -0.55);
    c->tolerance[0] = tolerance_sparse_decode_out;
    c->tolerance[1] = tolerance_decode_lse;
    /* Only a GPU's kernels round scales. */
    c->rounded = on_gpu(run) && v[S_CODES] == S_CODES_SCALES ? rounded_scale_lse : 0.0;
    c->other = v[S_INPUTS] != S_NORMAL || (v[S_CODES] != S_CODES_WRITTEN && v[S_CODES] != S_CODES_NAN);
    c->infinite = v[S_INPUTS] == S_INFINITE, c->beyond = v[S_INPUTS] == S_BEYOND, c->large_apart = true;
    if (run->fault != FAULT_LSE_CANCELLED) return;
    for (int64_t r = 0; r < c->b; r++) { /* one key stands alone in each list */
        if (s->pool[0].count[r] <= 1) continue;
        s->pool[0].count[r] = 1;
        *(int32_t *)guarded_at(s->pool[0].length, r, 0, 0, 0) = 1;
    }
}

static void free_counts(struct test_case *c)
{
    for (int k = 0; k < S_CACHES; k++) free(((struct sparse_case *)c)->pool[k].count);
}

/* ---- Plans ----------------------------------------------------------------------------------- */

static void plan_shape(const struct test_case *c, struct plan_call *args)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    args->sparse = true, args->b = c->b, args->num_partitions = (int32_t)c->v[S_PARTITIONS];
    args->topk = s->pool[0].topk, args->extra_topk = s->pool[1].topk;
}

static bool plan_lengths(struct test_case *c, int k, bool stale, int32_t *lengths)
{
    const struct sparse_pool *pool = &((const struct sparse_case *)c)->pool[k];
    if (!pool->memory || (!stale && !pool->has_length)) return false;
    for (int64_t r = 0; r < c->b; r++)
        lengths[r] = stale ? (int32_t)random_between(&c->random, 0, pool->topk)
                           : *(const int32_t *)guarded_at(pool->length, r, 0, 0, 0);
    return true;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

int32_t *sparse_list(const struct test_case *c, int k, int64_t request, int64_t token)
{
    return entry_of(&((const struct sparse_case *)c)->pool[k], request, token, 0);
}

int64_t sparse_count(const struct test_case *c, int k, int64_t request)
{
    const struct sparse_pool *pool = &((const struct sparse_case *)c)->pool[k];
    return pool->memory && pool->topk ? pool->count[request] : 0;
}

static bool sees(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    (void)head;
    for (int k = 0; k < S_CACHES; k++) {
        const int64_t count = sparse_count(c, k, request);
        if (count && sparse_pool_first(&((const struct sparse_case *)c)->pool[k],
                                       sparse_list(c, k, request, token), count) >= 0)
            return true;
    }
    return false;
}

/* The lists of a request are given the lengths that count. */
static void narrow_lists(const struct test_case *c, int64_t request, struct view *v)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    for (int k = 0; k < S_CACHES; k++) {
        const int first = pool_tensor(s, &s->pool[k]);
        if (!s->pool[k].memory) continue;
        v->count[k] = (int32_t)s->pool[k].count[request];
        v->shape[first + 2][0] = 1, v->strides[first + 2][0] = 1;
        v->tensor[first + 2] = (fmla_tensor){&v->count[k],        {FMLA_DEVICE_CPU, 0},  1, dtype_i32,
                                             v->shape[first + 2], v->strides[first + 2], 0};
        set_tensor(c->op, &v->args, first + 2, &v->tensor[first + 2]);
    }
}

static void narrow(const struct test_case *c, const struct rows *rows, struct view *v)
{
    narrow_lists(c, rows->request, v);
    v->args.sparse_decode.batch_invariant = 0, v->args.sparse_decode.num_partitions = 0;
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    for (int k = 0; k < S_CACHES; k++) {
        const int64_t count = sparse_count(c, k, request);
        if (count)
            sparse_pool_magnitude(&((const struct sparse_case *)c)->pool[k],
                                  sparse_list(c, k, request, token), count, 0,
                                  (double)c->args.sparse_decode.softmax_scale, &c->tensor[SPARSE(q)],
                                  guarded_at(&c->tensor[SPARSE(q)], request, token, head, 0), magnitude);
    }
}

/* A request alone, its lists cut where they end to count, in room for more entries of anything. */
static void part(struct test_case *c, int64_t request, const struct run *run, struct part *p)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const int64_t r = p->request = request >= 0 ? request : random_between(&c->random, 0, c->b - 1);
    const int64_t more = random_between(&c->random, 0, 2) ? random_between(&c->random, 1, 4500) : 0;
    (void)run;
    p->n = 1;
    view_cut(c, &p->view, DIM_b, r, 1), narrow_lists(c, r, &p->view);
    for (int k = 0; k < S_CACHES; k++) {
        const int indices = pool_tensor(s, &s->pool[k]) + 1;
        if (!s->pool[k].memory) continue;
        const int64_t count = s->pool[k].count[r], room = count + more;
        p->own[k].bytes = (size_t)(c->s_q * room) * sizeof(int32_t);
        int32_t *lists = p->own[k].memory = must_alloc(p->own[k].bytes);
        memset(lists, 0, p->own[k].bytes); /* what does not count is key 0 */
        for (int64_t j = 0; j < c->s_q && count; j++)
            memcpy(lists + j * room, entry_of(&s->pool[k], r, j, 0), (size_t)count * sizeof *lists);
        p->view.shape[indices][2] = room, p->view.strides[indices][0] = c->s_q * room;
        p->view.strides[indices][1] = room;
        p->view.tensor[indices].data = lists, p->view.tensor[indices].byte_offset = 0;
    }
    snprintf(p->what, sizeof p->what,
             "batch-invariant: request %lld alone, with room for %lld entries more, has other bits",
             (long long)r, (long long)more);
}

/* All of a small case. Of a large one the first and the last token, tokens that see nothing, and drawn ones, with four heads
 * each, of all tiles of heads: 64 rows and more. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    enum { DRAWN_ROWS = 16, ROLES = 4, HEADS = 4, SMALL = 60000, MOST_TOKENS = 1024 };
    const struct sparse_case *s = (const struct sparse_case *)c;
    const int64_t tokens = c->b * c->s_q, keys = s->pool[0].topk + s->pool[1].topk;
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
        if (!sees(c, r, c->s_q - 1, 0)) rows[count++] = (struct rows){r, c->s_q - 1, 0, step, heads};
    for (int i = 0; i < (c->h_q < HEADS ? DRAWN_ROWS * HEADS / (int)c->h_q : DRAWN_ROWS); i++) {
        const int64_t r = random_between(&c->random, 0, c->b - 1),
                      j = random_between(&c->random, 0, c->s_q - 1);
        rows[count++] = (struct rows){r, j, random_between(&c->random, 0, step - 1), step, heads};
    }
    return count;
}

const struct maker sparse_maker = {
    .size = sizeof(struct sparse_case),
    .draw = draw,
    .make = make,
    .free = free_counts,
    .plan_shape = plan_shape,
    .plan_lengths = plan_lengths,
    .plan_length = {{SPARSE(topk_length), offsetof(struct plan_call, topk_length)},
                    {SPARSE(extra_topk_length), offsetof(struct plan_call, extra_topk_length)}},
    .choose_rows = choose_rows,
    .narrow = narrow,
    .sees = sees,
    .magnitude = magnitude_of,
    .bounds_out = true,
    .part = part};
