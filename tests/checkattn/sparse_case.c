/* SPDX-License-Identifier: MIT */
#include "sparse_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int64_t sparse_shapes[SPARSE_SHAPES][3] = {{512, 64, 2},    {512, 64, 64},   {512, 64, 69},
                                                 {1024, 576, 61}, {2046, 2048, 2}, {2046, 2048, 576},
                                                 {650, 576, 53}};
const int64_t prefill_shapes[PREFILL_SHAPES][2] = {
    {128, 128}, {592, 128}, {1840, 256}, {1592, 384}, {1521, 512}, {95, 128},
    {153, 256}, {114, 384}, {64, 8192},  {32, 2048},  {32, 8}, /* few */
    {0, 70},                                                   /* no_keys */
    {64, 0},                                                   /* no_lists */
    {12, 12},                                                  /* far */
    {650, 576},                                                /* far_pages */
    {130, 130},                                                /* blocks: two of 64 and a part */
    {330, 330}, /* splits: five and a part; with few tokens a kernel may split the lists */
    {32, 2},    /* pair */
};

_Static_assert((int)SPARSE(q) == (int)PREFILL(q) && (int)SPARSE(kv_cache) == (int)PREFILL(kv) &&
                   (int)SPARSE(indices) == (int)PREFILL(indices) &&
                   (int)SPARSE(topk_length) == (int)PREFILL(topk_length),
               "what both have is said once");

enum { APART = 4 }; /* requests of sparse decode with their own keys; others share them */

/* ---- Drawn values ---------------------------------------------------------------------------- */

/* Queries are drawn once and copied from random offsets. */
enum { DRAWN = 1 << 16 };
static uint16_t drawn_q[2][2][DRAWN]; /* [decode, prefill][bf16, fp16] */

static void draw_decode(uint64_t seed)
{
    struct random_state random = {seed};
    draw_numbers(&random, 0.0f, 1.0f, DRAWN, drawn_q[0][0], drawn_q[0][1]);
    sparse_pool_draw(&random, 0.0f);
}

static void draw_prefill(uint64_t seed)
{
    struct random_state random = {seed};
    const float q = (float)(0.1 * random_unit(&random) - 0.05),
                keys = (float)(0.1 * random_unit(&random) - 0.05);
    draw_numbers(&random, q, 0.1f, DRAWN, drawn_q[1][0], drawn_q[1][1]);
    sparse_pool_draw(&random, keys);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

enum { EMPTY_CLASS = 1, SPIKE_EVERY = 32, SPIKED_SLOT = 5 };

/* Lengths belong to requests, or to classes of tokens. */
static int64_t class_of(const struct sparse_case *s, int64_t request, int64_t token)
{
    return s->prefill ? token % PREFILL_CLASSES : request;
}

/* Returns the number of tokens with their own lists. */
static int64_t drawn_tokens(const struct sparse_case *s)
{
    return s->prefill && s->c.s_q > PREFILL_CLASSES ? PREFILL_CLASSES : s->c.s_q;
}

int32_t *sparse_list(const struct test_case *c, int k, int64_t request, int64_t token, int64_t key_head)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const struct guarded *indices = s->pool[k].indices;
    return s->prefill ? guarded_at(indices, token, key_head, 0, 0)
                      : guarded_at(indices, request, token, 0, 0);
}

int64_t sparse_count(const struct test_case *c, int k, int64_t request, int64_t token)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const struct sparse_pool *pool = &s->pool[k];
    return pool->memory && pool->topk ? pool->count[class_of(s, request, token)] : 0;
}

static int32_t *length_at(const struct sparse_pool *pool, int64_t i)
{
    return guarded_at(pool->length, i, 0, 0, 0);
}

static void make_lengths(struct sparse_case *s, struct sparse_pool *pool, int64_t kind)
{
    static const int32_t below[] = {-1, -7, INT32_MIN};
    const int64_t all = s->prefill ? s->c.s_q : s->c.b, classes = s->prefill ? drawn_tokens(s) : all;
    pool->has_length = kind != S_LENGTHS_NONE;
    case_tensor(&s->c, (int)(pool->length - s->c.tensor), LAYOUT_CONTIGUOUS, pool->has_length);
    pool->count = s->c.owned[pool - s->pool] = calloc((size_t)classes + 1, sizeof *pool->count);
    for (int64_t i = 0; i < classes; i++) {
        int64_t count = pool->topk;
        if (kind == S_LENGTHS_VARIED)
            count = random_between(&s->c.random, 0, s->prefill ? 5 : 3)
                        ? random_between(&s->c.random, 0, pool->topk)
                        : 0;
        if (kind == S_LENGTHS_ZERO || (kind == S_LENGTHS_BEYOND && i % 3 == 1)) count = 0;
        pool->count[i] = count;
    }
    for (int64_t i = 0; i < all; i++) {
        int32_t length = (int32_t)pool->count[i % classes];
        if (kind == S_LENGTHS_BEYOND) /* is clamped */
            length = !length ? below[i % 3]
                     : i % 2 ? (int32_t)pool->topk + 1
                             : INT32_MAX - (int32_t)(i % 100);
        *length_at(pool, i) = length;
    }
}

static int32_t no_key(struct sparse_case *s, const struct sparse_pool *pool)
{
    const int32_t slots = (int32_t)sparse_pool_slots(pool),
                  none[] = {-1, INT32_MIN, INT32_MAX, slots, slots + 3, 2147480000};
    return none[random_between(&s->c.random, 0, 5)];
}

/* Makes a list: distinct keys in an order of its own, and the case's special entries. Entries that do not
 * count are random. With spiked inputs, keys named by entries at borders weigh more, so that losing one is
 * visible even among thousands: in prefill, whose tokens share keys, such entries name certain keys. */
static void make_list(struct sparse_case *s, struct sparse_pool *pool, int64_t request, int64_t token,
                      int64_t key_head)
{
    static const int64_t steps[2][7] = {{1, 7, 61, 101, 211, 509}, /* coprime to every s_k */
                                        {1, 7, 11, 29, 31, 61, 101}};
    struct random_state *random = &s->c.random;
    const int64_t step = steps[s->prefill][random_between(random, 0, s->prefill ? 6 : 5)], kind = s->indices;
    const int64_t keys = pool->s_k, start = random_between(random, 0, keys ? keys - 1 : 0),
                  first = request % APART * keys, slots = sparse_pool_slots(pool),
                  count = pool->count[class_of(s, request, token)];
    const bool some = kind != S_INDICES_ALL && kind != S_INDICES_TWICE;
    int32_t *list = sparse_list(&s->c, (int)(pool - s->pool), request, token, key_head);
    bool none_here = false;
    for (int64_t i = 0; i < pool->topk; i++) {
        if (i % 64 == 0) none_here = kind == S_INDICES_BLOCKS && random_between(random, 0, 1);
        const int64_t place = kind == S_INDICES_TWICE ? i / 2 : i;
        const bool late = i >= count && slots, empty = s->prefill && token == EMPTY_CLASS;
        bool none = kind == S_INDICES_NONE || (kind == S_INDICES_SOME && empty) || none_here ||
                    (some && !random_between(random, 0, 7));
        int64_t slot = first + (start + place * step) % (keys ? keys : 1);
        if (late) slot = random_between(random, 0, slots - 1);
        const int64_t heavy = slot - slot % SPIKE_EVERY + SPIKED_SLOT;
        if (!late && s->prefill && s->inputs == S_SPIKED && is_border(i, count))
            slot = heavy < keys ? heavy : SPIKED_SLOT;
        none |= place >= keys && (s->prefill || !late);
        list[i] = none ? no_key(s, pool) : (int32_t)slot;
        if (kind == S_INDICES_ANY && random_between(random, 0, 1))
            list[i] = (int32_t)(uint32_t)random_u64(random);
    }
}

static void make_lists(struct sparse_case *s, struct sparse_pool *pool)
{
    const int k = (int)(pool - s->pool);
    for (int64_t r = 0; r < s->c.b; r++)
        for (int64_t t = 0; t < s->c.s_q; t++)
            for (int64_t h = 0; h < s->c.h_kv; h++) {
                const int64_t class = t % drawn_tokens(s);
                if (class == t)
                    make_list(s, pool, r, t, h);
                else
                    memcpy(sparse_list(&s->c, k, r, t, h), sparse_list(&s->c, k, r, class, h),
                           (size_t)pool->topk * sizeof(int32_t));
                if (class == t && s->inputs == PREFILL_EXTREME) prefill_extreme_list(s, t, h);
            }
}

/* ---- Keys ------------------------------------------------------------------------------------ */

/* Makes the memory of flat keys, NaN everywhere, and the view that is the argument. */
static void make_flat(struct sparse_case *s, struct sparse_pool *pool, enum layout layout)
{
    struct guarded *g = pool->memory;
    guarded_make(g, dtype_bf16, 3, (int64_t[]){pool->s_k, s->c.h_kv, s->c.d_qk},
                 layout == LAYOUT_SWAPPED ? LAYOUT_SWAPPED_FIRST : layout);
    pool->page_bytes = pool->slot_bytes = 2 * g->strides[0], pool->head_bytes = 2 * g->strides[1];
    memcpy(pool->strides, g->strides, 3 * sizeof *pool->strides);
    *pool->view = g->tensor;
}

/* Writes every key that a counted index names. */
static void fill_keys(struct sparse_case *s, struct sparse_pool *pool)
{
    enum { NAMED = 1, BORDER = 2 };
    const int64_t slots = sparse_pool_slots(pool), heads = s->c.h_kv;
    const int k = (int)(pool - s->pool);
    const bool fp16 = pool->format == KV_FP16;
    unsigned char *named = calloc((size_t)(slots * heads) + 1, 1);
    for (int64_t r = 0; r < s->c.b; r++)
        for (int64_t t = 0; t < drawn_tokens(s); t++)
            for (int64_t h = 0; h < heads; h++) {
                const int32_t *list = sparse_list(&s->c, k, r, t, h);
                const int64_t count = sparse_count(&s->c, k, r, t);
                for (int64_t i = 0; i < count; i++)
                    if (sparse_pool_is_key(pool, list[i]))
                        named[list[i] * heads + h] |= is_border(i, count) ? NAMED | BORDER : NAMED;
            }
    for (int64_t i = 0; i < slots * heads; i++) {
        const int64_t slot = i / heads;
        const bool heavy = s->prefill ? slot % SPIKE_EVERY == SPIKED_SLOT : (named[i] & BORDER) != 0;
        if (!named[i]) continue;
        sparse_pool_put(pool, &s->c.random, s->codes, slot, i % heads, s->inputs == S_SPIKED && heavy);
        uint8_t *token = sparse_pool_token(pool, slot) + i % heads * pool->head_bytes;
        if (s->inputs == S_INFINITE && kv_is_quantised(&pool->layout) && !pool->layout.rope)
            sparse_pool_put_end(pool, slot, (float[]){0.0f, 0.5f}, 2); /* there is no infinite code */
        else if (s->inputs == S_INFINITE)
            case_infinite(sparse_pool_end(pool, token), fp16, true, slot == pool->s_k / 2);
        if (s->inputs == PREFILL_EXTREME) prefill_extreme_key(s, token, slot);
    }
    free(named);
    if (s->codes != S_CODES_NAN || !s->c.b || !s->c.s_q) return;
    const int32_t *list = sparse_list(&s->c, k, 0, 0, heads - 1); /* of the token that is always compared */
    int64_t nan = 0;                                              /* the first entry that names a key */
    while (nan < sparse_count(&s->c, k, 0, 0) && !sparse_pool_is_key(pool, list[nan])) nan++;
    if (nan < sparse_count(&s->c, k, 0, 0))
        sparse_pool_put_nan(pool, &s->c.random,
                            sparse_pool_token(pool, list[nan]) + (heads - 1) * pool->head_bytes,
                            sparse_pool_scales(pool, list[nan]));
}

/* Makes the keys from tensor `first` on, of shape {keys to choose from, entries of a list, slots of a
 * page}. */
static void make_pool(struct sparse_case *s, int k, int first, enum kv_format format, const int64_t shape[3],
                      int64_t lengths, enum layout layout)
{
    struct sparse_pool *pool = &s->pool[k];
    struct test_case *c = &s->c;
    const bool flat =
        s->prefill && (c->v[PREFILL_SOURCE] == PREFILL_FLAT || c->v[PREFILL_SOURCE] == PREFILL_FLAT_GAPS);
    const int64_t apart = c->b < APART ? c->b : APART,
                  of_axis = c->v[s->prefill ? (int)PREFILL_LAYOUT : (int)S_LAYOUT];
    pool->memory = &c->tensor[first], pool->view = &c->view[first];
    pool->indices = &c->tensor[first + 1], pool->length = &c->tensor[first + 2];
    pool->format = format, pool->d_qk = c->d_qk, pool->layout = kv_layout_of(format, (int32_t)c->d_qk);
    pool->s_k = shape[0], pool->topk = *(k ? &c->extra_topk : &c->topk) = shape[1],
    pool->page_size = flat ? 1 : shape[2];
    pool->pages = (apart * pool->s_k + pool->page_size - 1) / pool->page_size;
    case_tensor(c, first + 1, near_layout(of_axis), true);
    make_lengths(s, pool, lengths);
    make_lists(s, pool);
    if (flat)
        make_flat(s, pool, layout);
    else
        sparse_pool_make(pool, &c->random, layout);
    case_name(c, first);
    fill_keys(s, pool);
    if (of_axis == LAYOUT_FAR) case_spread(c, first, (size_t)1 << 31, ((size_t)1 << 31) + 64);
}

/* ---- The case -------------------------------------------------------------------------------- */

static void make_q(struct sparse_case *s, bool of_codes)
{
    struct test_case *c = &s->c;
    const bool fp16 = c->dtype.code == FMLA_TYPE_FLOAT;
    const int64_t rope = kv_layout_of(KV_FP8_656, 0).rope;
    for (int64_t i = 0; i < c->b * c->s_q * c->h_q; i++) {
        const int64_t r = i / c->h_q / c->s_q, t = i / c->h_q % c->s_q, h = i % c->h_q;
        uint8_t *row = case_row(c, SPARSE(q), r, t, h);
        memcpy(row, drawn_q[s->prefill][fp16] + random_between(&c->random, 0, DRAWN - c->d_qk),
               (size_t)c->d_qk * 2);
        if (s->inputs == S_SPIKED) case_spike(row + c->d_qk * 2, fp16);
        if (s->inputs == S_INFINITE) case_infinite(row + c->d_qk * 2, fp16, false, (t + h) % 3 == 0);
        if (s->inputs == PREFILL_EXTREME) prefill_extreme_query(s, row, t, h);
        if (s->codes != S_CODES_BEYOND || !of_codes) continue;
        memset(row + 2 * (c->d_qk - rope), 0, 2); /* multiplies the large rope value */
        if (r % 4 == 3 && h % 61 == 60 && !fp16)
            memcpy(row, &(uint16_t){SPARSE_LARGE_BF16}, sizeof(uint16_t));
    }
}

void sparse_tell_left(const struct axis *axis, int axes, const int64_t *v)
{
    char text[80];
    axes_write(axis, axes, v, text, sizeof text);
    printf("  not of this kernel: %s\n", text);
}

/* Sets what both operations have besides tensors. */
static void make_rules(struct sparse_case *s, int32_t format, int64_t sink, const struct tolerance *out,
                       const struct tolerance *row)
{
    struct test_case *c = &s->c;
    struct sparse_pool *pool = &s->pool[0];
    case_sinks(c, sink);
    *(int32_t *)op_option(c->op->of, &c->args, "kv_format") = format;
    c->tolerance[0] = *out, c->tolerance[1] = c->tolerance[2] = *row;
    /* Only GPU kernels round scales. */
    c->rounded = on_gpu(c->run) && s->codes == S_CODES_SCALES ? rounded_scale_lse : 0.0;
    c->other = c->bounds_out =
        s->inputs != S_NORMAL || (s->codes != S_CODES_WRITTEN && s->codes != S_CODES_NAN);
    c->infinite = s->inputs == S_INFINITE, c->beyond = s->inputs == S_BEYOND;
    if (c->run->fault != FAULT_LSE_CANCELLED) return;
    for (int64_t i = 0; i < (s->prefill ? c->s_q : c->b); i++) { /* each list has a single key */
        int64_t *count = &pool->count[class_of(s, i, i)];
        if (*count > 1) *count = 1;
        *length_at(pool, i) = (int32_t)*count;
    }
}

#define FORMAT_ROW(word, name, type, d_qk)                                                                   \
    {(name) ? (enum kv_format)((name)-FMLA_KV_BF16) : KV_##type, name, d_qk, KV_##type == KV_FP16},
const struct sparse_format sparse_formats[S_FORMATS] = {SPARSE_FORMATS(FORMAT_ROW)};

enum kv_format sparse_extra_format(const int64_t *v)
{
    static const enum kv_format of_bytes[] = {KV_FP8_656, KV_FP8_584,       KV_FP8_528,    KV_FP8_528_SPLIT,
                                              KV_FP4_288, KV_FP4_288_SPLIT, KV_FP8_528_F32};
    const struct sparse_format *first = &sparse_formats[v[S_FORMAT]];
    switch (v[S_EXTRA_FORMAT]) {
    case S_EXTRA_SAME: return first->format;
    case S_EXTRA_HALF: return first->fp16 ? KV_FP16 : KV_BF16;
    default: return of_bytes[v[S_EXTRA_FORMAT] - S_EXTRA_BYTES];
    }
}

bool sparse_is_sound(const int64_t *v)
{
    if (v[S_FORMAT] < 0 || v[S_EXTRA_FORMAT] < 0) return true;
    const int64_t d_qk = sparse_formats[v[S_FORMAT]].d_qk;
    const struct kv_layout extra = kv_layout_of(sparse_extra_format(v), (int32_t)d_qk);
    return kv_width(&extra) == d_qk;
}

static void make_decode(struct test_case *c)
{
    struct sparse_case *s = (struct sparse_case *)c;
    const int64_t *v = c->v;
    const struct sparse_format *of = &sparse_formats[v[S_FORMAT]];
    const enum kv_format format = of->format, extra = sparse_extra_format(v);
    const enum layout layout = near_layout(v[S_LAYOUT]);
    int64_t shape[3];
    s->indices = v[S_INDICES], s->codes = v[S_CODES], s->inputs = v[S_INPUTS];
    c->d_qk = of->d_qk, c->d_v = S_D_V, c->dtype = of->fp16 ? dtype_fp16 : dtype_bf16;
    c->args.sparse_decode.softmax_scale = s->inputs == S_SPIKED   ? 0.5f
                                          : s->inputs == S_STEEP  ? 60.0f
                                          : s->inputs == S_BEYOND ? 3e38f
                                                                  : (float)pow((double)c->d_qk, -0.55);
    case_tensor(c, SPARSE(q), layout, true), case_tensor(c, SPARSE(out), layout, true);
    case_tensor(c, SPARSE(lse), layout, v[S_LSE] != 0);
    make_q(s, format >= KV_FP8_656 && extra >= KV_FP8_656);
    axis_shape_take(v[S_SHAPE], sparse_shapes[0], 3, shape);
    make_pool(s, 0, SPARSE(kv_cache), format, shape, v[S_LENGTHS], layout);
    axis_shape_take(v[S_EXTRA] ? v[S_EXTRA] - 1 : 0, sparse_shapes[0], 3, shape);
    c->extra_topk = 0;
    if (v[S_EXTRA]) make_pool(s, 1, SPARSE(extra_kv_cache), extra, shape, v[S_EXTRA_LENGTHS], layout);
    c->args.sparse_decode.extra_kv_format = v[S_EXTRA] && v[S_EXTRA_FORMAT] ? (int32_t)extra + 1 : 0;
    make_rules(s, of->name, v[S_SINK], &tolerance_sparse_decode_out, &tolerance_decode_lse);
    c->large_apart = true;
}

#define SOURCE_FORMAT(word, name) name,
const int32_t prefill_formats[PREFILL_SOURCES] = {PREFILL_SOURCES_OF(SOURCE_FORMAT)};

static void make_prefill(struct test_case *c)
{
    struct sparse_case *s = (struct sparse_case *)c;
    const int64_t *v = c->v, source = v[PREFILL_SOURCE], results = v[PREFILL_RESULTS];
    const enum layout layout = near_layout(v[PREFILL_LAYOUT]);
    float *scale = &c->args.sparse_prefill.softmax_scale;
    int64_t shape[3];
    s->prefill = true, s->indices = v[PREFILL_INDICES], s->codes = v[PREFILL_CODES],
    s->inputs = v[PREFILL_INPUTS];
    c->d_v = S_D_V, c->dtype = dtype_bf16;
    *scale = s->inputs == S_STEEP ? 400.0f : s->inputs == S_BEYOND ? 3e38f : 0.5f;
    case_tensor(c, PREFILL(q), layout, true), case_tensor(c, PREFILL(out), layout, true);
    case_tensor(c, PREFILL(max_logits), layout,
                results == PREFILL_RESULTS_BOTH || results == PREFILL_RESULTS_MAX);
    case_tensor(c, PREFILL(lse), layout, results == PREFILL_RESULTS_BOTH || results == PREFILL_RESULTS_LSE);
    make_q(s, false);
    axis_shape_take(v[PREFILL_SHAPE], prefill_shapes[0], 2, shape);
    shape[2] = v[PREFILL_PAGE];
    make_pool(s, 0, PREFILL(kv), cache_formats[prefill_formats[source]].format, shape, v[PREFILL_LENGTHS],
              source == PREFILL_FLAT && layout != LAYOUT_ODD                          ? LAYOUT_CONTIGUOUS
              : source == PREFILL_FLAT_GAPS && v[PREFILL_LAYOUT] == LAYOUT_CONTIGUOUS ? LAYOUT_PADDED
                                                                                      : layout);
    /* The absolute bound is for a scale of 0.5. A larger scale enlarges errors of scores, which may be
     * almost 0, in proportion. */
    struct tolerance row = tolerance_prefill_lse;
    row.abs = fmax(row.abs, tolerance_prefill_lse.abs * (double)*scale / 0.5);
    make_rules(s, prefill_formats[source], v[PREFILL_SINK], &tolerance_sparse_prefill_out, &row);
}

/* ---- Plans ----------------------------------------------------------------------------------- */

static bool plan_lengths(struct test_case *c, int k, bool stale, int32_t *lengths)
{
    const struct sparse_pool *pool = &((const struct sparse_case *)c)->pool[k];
    if (!pool->memory || (!stale && !pool->has_length)) return false;
    for (int64_t r = 0; r < c->b; r++)
        lengths[r] = stale ? (int32_t)random_between(&c->random, 0, pool->topk) : *length_at(pool, r);
    return true;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

int64_t sparse_seen(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    const int64_t key_head = head / (c->h_q / c->h_kv);
    int64_t seen = 0;
    for (int k = 0; k < S_CACHES; k++) {
        const int64_t count = sparse_count(c, k, request, token);
        const int32_t *list = count ? sparse_list(c, k, request, token, key_head) : NULL;
        for (int64_t i = 0; i < count; i++)
            seen += sparse_pool_is_key(&((const struct sparse_case *)c)->pool[k], list[i]);
    }
    return seen;
}

/* Narrows lists to the entries that count. */
static void narrow_lists(const struct test_case *c, int64_t request, int64_t token, struct view *v)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    for (int k = 0; k < S_CACHES; k++) {
        if (!s->pool[k].memory) continue;
        const int i = (int)(s->pool[k].length - c->tensor);
        v->count[k] = (int32_t)s->pool[k].count[class_of(s, request, token)];
        v->shape[i][0] = 1, v->strides[i][0] = 1;
        v->tensor[i] =
            (fmla_tensor){&v->count[k], {FMLA_DEVICE_CPU, 0}, 1, dtype_i32, v->shape[i], v->strides[i], 0};
        set_tensor(c->op, &v->args, i, &v->tensor[i]);
    }
}

static bool narrow(const struct test_case *c, const struct rows *rows, int64_t change, struct view *v)
{
    narrow_lists(c, rows->request, rows->token, v);
    if (!((const struct sparse_case *)c)->prefill)
        v->args.sparse_decode.batch_invariant = 0, v->args.sparse_decode.num_partitions = 0;
    return !change; /* lists have no key beyond */
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    const int64_t key_head = head / (c->h_q / c->h_kv);
    const double scale = (double)*(const float *)op_option(c->op->of, &c->args, "softmax_scale");
    const uint16_t *row = case_row(c, SPARSE(q), request, token, head);
    float q[SPARSE_WIDEST] = {0}, key[SPARSE_WIDEST] = {0};
    for (int64_t d = 0; d < c->d_qk; d++) q[d] = (float)guarded_value(&c->tensor[SPARSE(q)], row + d);
    for (int k = 0; k < S_CACHES; k++) {
        const struct sparse_pool *pool = &((const struct sparse_case *)c)->pool[k];
        const int64_t count = sparse_count(c, k, request, token);
        const int32_t *list = count ? sparse_list(c, k, request, token, key_head) : NULL;
        for (int64_t i = 0; i < count; i++) {
            if (!sparse_pool_is_key(pool, list[i])) continue;
            const uint8_t *at = sparse_pool_token(pool, list[i]) + key_head * pool->head_bytes;
            sparse_pool_values(pool, at, list[i], key);
            magnitude_add(magnitude, scale, q, key, c->d_qk, key, S_D_V);
        }
    }
}

/* A request alone, its lists cut after the entries that count, with room for more random entries. */
static void part(struct test_case *c, int64_t request, struct part *p)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const int64_t r = p->request = request >= 0 ? request : random_between(&c->random, 0, c->b - 1);
    const int64_t more = random_between(&c->random, 0, 2) ? random_between(&c->random, 1, 4500) : 0;
    p->n = 1;
    view_narrow_all(c, &p->view, DIM_b, r, 1), narrow_lists(c, r, 0, &p->view);
    for (int k = 0; k < S_CACHES; k++) {
        if (!s->pool[k].memory) continue;
        const int i = (int)(s->pool[k].indices - c->tensor);
        const int64_t count = s->pool[k].count[r], room = count + more;
        p->own[k].bytes = (size_t)(c->s_q * room) * sizeof(int32_t);
        int32_t *lists = p->own[k].memory = must_alloc(p->own[k].bytes);
        memset(lists, 0, p->own[k].bytes); /* entries that do not count are key 0 */
        for (int64_t j = 0; j < c->s_q && count; j++)
            memcpy(lists + j * room, sparse_list(c, k, r, j, 0), (size_t)count * sizeof *lists);
        p->view.shape[i][2] = room, p->view.strides[i][0] = c->s_q * room, p->view.strides[i][1] = room;
        p->view.tensor[i].data = lists, p->view.tensor[i].byte_offset = 0;
    }
    snprintf(p->what, sizeof p->what,
             "batch-invariant: request %lld alone, with room for %lld entries more, has other bits",
             (long long)r, (long long)more);
}

/* Chooses all rows of a small case, by tokens and key heads. From a large one it chooses the first and
 * last token, tokens that see nothing, in extreme cases some of all lists and tiles, and random ones,
 * with four heads each, from all tiles of heads: at least 64 rows. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    enum { DRAWN_TOKENS = 16, ROLES = 4, HEADS = 4, KINDS = 16, MOST_LISTS = 1024 };
    enum { SMALL = 60000, EXTREME = 600000 };
    const struct sparse_case *s = (const struct sparse_case *)c;
    const struct sparse_pool *pool = s->pool;
    const bool extreme = s->inputs == PREFILL_EXTREME;
    const int64_t tokens = c->b * c->s_q, group = c->h_q / c->h_kv, last = c->s_q - 1,
                  seen = s->prefill && pool->s_k < pool->topk ? pool->s_k : pool->topk;
    int64_t count = 0, found = 0;
    if (tokens * c->h_kv <= MOST_LISTS &&
        tokens * c->h_q * (seen + pool[1].topk) <= (extreme ? EXTREME : SMALL))
        return all_rows(c, rows, group);
    const int64_t heads = group < HEADS ? group : HEADS, step = group / heads;
    rows[count++] = (struct rows){0, 0, 0, step, heads};
    if (s->prefill) rows[count++] = (struct rows){0, 0, (c->h_kv - 1) * group, step, heads};
    rows[count++] = (struct rows){c->b - 1, last, c->h_q - 1 - (heads - 1) * step, step, heads};
    for (int64_t i = 0; i < (s->prefill ? drawn_tokens(s) : c->b) && found < ROLES; i++) {
        const struct rows role = {s->prefill ? 0 : i, s->prefill ? last - i : last, 0, step, heads};
        if (!sparse_seen(c, role.request, role.token, 0)) rows[count++] = role, found++;
    }
    for (int64_t t = 1; extreme && t < last && t < KINDS; t++)
        rows[count++] = (struct rows){0, t, random_between(&c->random, 0, step - 1), step, heads};
    for (int64_t i = 0; i < DRAWN_TOKENS * HEADS / heads; i++) {
        const int64_t first = random_between(&c->random, 0, (s->prefill ? c->h_kv : c->b) - 1),
                      second = random_between(&c->random, 0, s->prefill ? step - 1 : last),
                      third = random_between(&c->random, 0, s->prefill ? last : step - 1);
        rows[count++] = s->prefill ? (struct rows){0, third, first * group + second, step, heads}
                                   : (struct rows){first, second, third, step, heads};
    }
    return count;
}

bool sparse_plant(struct test_case *c, enum defect fault, struct patch *patch)
{
    const struct sparse_case *s = (const struct sparse_case *)c;
    const struct sparse_pool *pool = &s->pool[0];
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t t = 0; t < c->s_q; t++)
            for (int64_t i = 0; i < pool->topk; i++)
                if (sparse_pool_plant(pool, fault, sparse_list(c, 0, r, t, 0), i, sparse_count(c, 0, r, t),
                                      length_at(pool, s->prefill ? t : r), patch))
                    return true;
    return false;
}

#define LISTED ROWS_BY_NAME, .size = sizeof(struct sparse_case), .seen = sparse_seen

const struct maker prefill_maker = {LISTED, .draw = draw_prefill, .cases_of_a_draw = 16,
                                    .make = make_prefill},
                   sparse_maker = {LISTED, .draw = draw_decode, .make = make_decode,
                                   .plan_lengths = plan_lengths, .part = part};
