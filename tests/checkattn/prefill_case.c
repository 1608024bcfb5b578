/* SPDX-License-Identifier: MIT */
#include "prefill_case.h"

#include "num.h"
#include "prefill_extreme.h"

#include <stdlib.h>
#include <string.h>

const int64_t prefill_shapes[PREFILL_ALL_SHAPES][2] = {
    {128, 128},
    {592, 128},
    {1840, 256},
    {1592, 384},
    {1521, 512},
    {95, 128},
    {153, 256},
    {114, 384},
    {64, 8192},
    {32, 2048},
    [P_SHAPE_FEW] = {32, 8},
    [P_SHAPE_NO_KEYS] = {0, 70},
    [P_SHAPE_NO_LISTS] = {64, 0},
    [P_SHAPE_FAR] = {12, 12},
    [P_SHAPE_FAR_PAGES] = {650, 576},
    [P_SHAPE_BLOCKS] = {130, 130},
    [P_SHAPE_PIECES] = {330, 330},
};

/* ---- Drawn values ---------------------------------------------------------------------------- */

enum { DRAWN = 1 << 16 };
static uint16_t drawn_q[DRAWN];

static float draw_mean(struct random_state *random)
{
    return (float)(0.1 * random_unit(random) - 0.05);
}

static void draw(uint64_t seed)
{
    struct random_state random = {seed};
    const float q = draw_mean(&random), keys = draw_mean(&random);
    for (int i = 0; i < DRAWN; i++) drawn_q[i] = num_to_bf16(random_input(&random, q, 0.1f));
    sparse_pool_draw(&random, keys);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

enum { EMPTY_CLASS = 1, SPIKE_EVERY = 32, SPIKED_SLOT = 5 };

static int64_t classes_of(const struct prefill_case *p)
{
    return p->c.s_q < PREFILL_CLASSES ? p->c.s_q : PREFILL_CLASSES;
}

int64_t prefill_case_count(const struct prefill_case *p, int64_t token)
{
    return p->pool.count[token % PREFILL_CLASSES];
}

int32_t *prefill_case_entry(const struct prefill_case *p, int64_t token, int64_t key_head, int64_t i)
{
    return guarded_at(p->pool.indices, token, key_head, i, 0);
}

static void make_lengths(struct prefill_case *p)
{
    struct sparse_pool *pool = &p->pool;
    const int64_t kind = p->c.v[P_LENGTHS];
    pool->has_length = kind != S_LENGTHS_NONE;
    case_tensor(&p->c, PREFILL(topk_length), LAYOUT_CONTIGUOUS, pool->has_length);
    pool->count = calloc(PREFILL_CLASSES, sizeof *pool->count);
    for (int64_t class = 0; class < classes_of(p); class ++) {
        int64_t count = pool->topk;
        if (kind == S_LENGTHS_VARIED)
            count = random_between(&p->c.random, 0, 5) ? random_between(&p->c.random, 0, pool->topk) : 0;
        if (kind == S_LENGTHS_BEYOND && class % 3 == 1) count = 0;
        pool->count[class] = count;
    }
    static const int32_t below[] = {-1, -7, INT32_MIN};
    for (int64_t token = 0; token < p->c.s_q; token++) {
        int32_t length = (int32_t)prefill_case_count(p, token);
        if (kind == S_LENGTHS_BEYOND) /* to be clamped */
            length = !length     ? below[token % 3]
                     : token % 2 ? (int32_t)pool->topk + 1
                                 : INT32_MAX - (int32_t)(token % 100);
        *(int32_t *)guarded_at(pool->length, token, 0, 0, 0) = length;
    }
}

static int32_t no_key(struct prefill_case *p)
{
    const int64_t slots = sparse_pool_slots(&p->pool);
    const int32_t none[] = {-1, INT32_MIN, INT32_MAX, (int32_t)slots, (int32_t)slots + 3, 2147480000};
    return none[random_between(&p->c.random, 0, 5)];
}

/* Beside borders of blocks of 64, and at the end. */
static bool is_border(int64_t count, int64_t i)
{
    return i % 64 == 0 || i % 64 == 63 || i + 1 == count;
}

/* The list of a class: keys in an order of its own, each once, and what else the case asks for. With spiked inputs, entries at
 * borders name keys that weigh more, so that losing one shows even among thousands. Entries that do not count are anything. */
static void make_list(struct prefill_case *p, int64_t class, int64_t key_head)
{
    static const int64_t steps[] = {1,  7,  11, 29,
                                    31, 61, 101}; /* without a factor in common with any s_kv but 1 */
    struct sparse_pool *pool = &p->pool;
    const int64_t step = steps[random_between(&p->c.random, 0, 6)], kind = p->c.v[P_INDICES];
    const int64_t start = pool->s_k ? random_between(&p->c.random, 0, pool->s_k - 1) : 0;
    const int64_t count = pool->count[class];
    int32_t *list = prefill_case_entry(p, class, key_head, 0);
    bool none_here = false;
    for (int64_t i = 0; i < pool->topk; i++) {
        if (i % 64 == 0) none_here = kind == S_INDICES_BLOCKS && random_between(&p->c.random, 0, 1);
        const int64_t place = kind == S_INDICES_TWICE ? i / 2 : i;
        bool none = kind == S_INDICES_NONE || (kind == S_INDICES_SOME && class == EMPTY_CLASS) || none_here ||
                    (kind != S_INDICES_ALL && kind != S_INDICES_TWICE && !random_between(&p->c.random, 0, 7));
        int64_t slot = 0;
        if (place < pool->s_k)
            slot = (start + place * step) % pool->s_k;
        else
            none = true;
        if (i >= count && sparse_pool_slots(pool)) {
            slot = random_between(&p->c.random, 0, sparse_pool_slots(pool) - 1);
        } else if (p->c.v[P_INPUTS] == S_SPIKED && is_border(count, i)) {
            slot = slot - slot % SPIKE_EVERY + SPIKED_SLOT;
            if (slot >= pool->s_k) slot = SPIKED_SLOT;
        }
        list[i] = none ? no_key(p) : (int32_t)slot;
        if (kind == S_INDICES_ANY && random_between(&p->c.random, 0, 1))
            list[i] = (int32_t)(uint32_t)random_u64(&p->c.random);
    }
    if (p->c.v[P_INPUTS] == P_EXTREME) prefill_extreme_list(p, class, key_head);
}

static void make_lists(struct prefill_case *p)
{
    struct sparse_pool *pool = &p->pool;
    for (int64_t token = 0; token < p->c.s_q; token++)
        for (int64_t k = 0; k < p->c.h_kv; k++) {
            const int64_t class = token % PREFILL_CLASSES;
            if (class == token)
                make_list(p, token, k);
            else
                memcpy(prefill_case_entry(p, token, k, 0), prefill_case_entry(p, class, k, 0),
                       (size_t)pool->topk * sizeof(int32_t));
        }
}

/* ---- Keys ------------------------------------------------------------------------------------ */

static bool is_flat(const struct prefill_case *p)
{
    return p->c.v[P_SOURCE] == P_FLAT || p->c.v[P_SOURCE] == P_FLAT_GAPS;
}

/* Memory of flat keys, NaN everywhere, and the view of it that is the argument. */
static void make_flat(struct prefill_case *p, enum layout layout)
{
    struct sparse_pool *pool = &p->pool;
    struct guarded *g = pool->memory;
    guarded_make(g, dtype_bf16, 3, (int64_t[]){pool->s_k, p->c.h_kv, p->c.d_qk},
                 layout == LAYOUT_SWAPPED ? LAYOUT_SWAPPED_FIRST : layout);
    pool->page_bytes = pool->slot_bytes = 2 * g->strides[0], pool->head_bytes = 2 * g->strides[1];
    memcpy(pool->strides, g->strides, 3 * sizeof *pool->strides);
    *pool->view = g->tensor;
}

static enum layout keys_layout(const struct prefill_case *p)
{
    const bool gaps = p->c.v[P_LAYOUT] == LAYOUT_CONTIGUOUS && p->c.v[P_SOURCE] == P_FLAT_GAPS;
    const bool none = p->c.v[P_LAYOUT] != LAYOUT_ODD && p->c.v[P_SOURCE] == P_FLAT;
    return p->c.v[P_LAYOUT] == P_LAYOUT_FAR || none ? LAYOUT_CONTIGUOUS
           : gaps                                   ? LAYOUT_PADDED
                                                    : (enum layout)p->c.v[P_LAYOUT];
}

/* Writes every key that a counted index names. */
static void fill_keys(struct prefill_case *p)
{
    struct sparse_pool *pool = &p->pool;
    unsigned char *named = calloc((size_t)(sparse_pool_slots(pool) * p->c.h_kv) + 1, 1);
    for (int64_t class = 0; class < classes_of(p); class ++)
        for (int64_t k = 0; k < p->c.h_kv; k++)
            for (int64_t i = 0; i < pool->count[class]; i++) {
                const int32_t index = *prefill_case_entry(p, class, k, i);
                if (sparse_pool_is_key(pool, index)) named[index * p->c.h_kv + k] = 1;
            }
    for (int64_t slot = 0; slot < sparse_pool_slots(pool); slot++)
        for (int64_t k = 0; k < p->c.h_kv; k++) {
            const bool spike = p->c.v[P_INPUTS] == S_SPIKED && slot % SPIKE_EVERY == SPIKED_SLOT;
            if (!named[slot * p->c.h_kv + k]) continue;
            uint8_t *token = sparse_pool_token(pool, slot) + k * p->pool.head_bytes;
            if (is_flat(p))
                sparse_pool_put_16(pool, &p->c.random, token, spike);
            else
                sparse_pool_put(pool, &p->c.random, p->c.v[P_CODES], slot, spike);
            if (p->c.v[P_INPUTS] == P_EXTREME) prefill_extreme_key(p, token, slot);
        }
    const bool nan_wanted = p->c.v[P_CODES] == S_CODES_NAN && p->c.s_q;
    const int64_t nan = nan_wanted ? sparse_pool_first(pool, prefill_case_entry(p, 0, p->c.h_kv - 1, 0),
                                                       prefill_case_count(p, 0))
                                   : -1;
    if (nan >= 0) {
        const int32_t slot = *prefill_case_entry(p, 0, p->c.h_kv - 1, nan);
        sparse_pool_put_nan(pool, &p->c.random,
                            sparse_pool_token(pool, slot) + (p->c.h_kv - 1) * p->pool.head_bytes,
                            sparse_pool_scales(pool, slot));
    }
    free(named);
}

static void make_keys(struct prefill_case *p)
{
    static const enum kv_format formats[P_SOURCES] = {KV_BF16, KV_BF16, KV_FP8_656, KV_FP8_584, KV_BF16};
    struct sparse_pool *pool = &p->pool;
    sparse_pool_in(pool, &p->c, PREFILL(kv));
    pool->format = formats[p->c.v[P_SOURCE]], pool->d_qk = p->c.d_qk;
    pool->layout = kv_layout_of(pool->format, (int32_t)p->c.d_qk);
    int64_t sizes[3];
    sparse_shape_take(p->c.v[P_SHAPE], prefill_shapes[0], 2, sizes);
    pool->s_k = sizes[0], pool->topk = sizes[1];
    pool->page_size = is_flat(p) ? 1 : p->c.v[P_PAGE];
    pool->pages = (pool->s_k + pool->page_size - 1) / pool->page_size;
    const bool far = p->c.v[P_LAYOUT] == P_LAYOUT_FAR;
    p->c.topk = pool->topk;
    case_tensor(&p->c, PREFILL(indices), far ? LAYOUT_CONTIGUOUS : (enum layout)p->c.v[P_LAYOUT], true);
    make_lengths(p);
    make_lists(p);
    if (is_flat(p))
        make_flat(p, keys_layout(p));
    else
        sparse_pool_make(pool, &p->c.random, keys_layout(p));
    case_name(&p->c, PREFILL(kv));
    fill_keys(p);
    if (far) p->c.strides[PREFILL(kv)] = sparse_pool_spread(pool);
}

/* ---- The case -------------------------------------------------------------------------------- */

static void make_q(struct prefill_case *p)
{
    for (int64_t t = 0; t < p->c.s_q; t++)
        for (int64_t h = 0; h < p->c.h_q; h++) {
            uint8_t *row = guarded_at(&p->c.tensor[PREFILL(q)], t, h, 0, 0);
            memcpy(row, drawn_q + random_between(&p->c.random, 0, DRAWN - p->c.d_qk), (size_t)p->c.d_qk * 2);
            if (p->c.v[P_INPUTS] == S_SPIKED) case_spike(row + p->c.d_qk * 2, false);
            if (p->c.v[P_INPUTS] == P_EXTREME) prefill_extreme_query(p, row, t, h);
        }
}

static void make(struct test_case *c, const struct run *run)
{
    static const int32_t names[P_SOURCES] = {0, FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_BF16};
    struct prefill_case *p = (struct prefill_case *)c;
    const int64_t *v = c->v;
    c->d_v = S_D_V, c->dtype = dtype_bf16;
    const enum layout layout = v[P_LAYOUT] == P_LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)v[P_LAYOUT];
    const bool both = v[P_RESULTS] == P_RESULTS_BOTH;
    case_tensor(c, PREFILL(q), layout, true), case_tensor(c, PREFILL(out), layout, true);
    case_tensor(c, PREFILL(max_logits), layout, both || v[P_RESULTS] == P_RESULTS_MAX);
    case_tensor(c, PREFILL(lse), layout, both || v[P_RESULTS] == P_RESULTS_LSE);
    fmla_sparse_prefill_args *args = &c->args.sparse_prefill;
    args->softmax_scale = v[P_INPUTS] == S_STEEP ? 400.0f : v[P_INPUTS] == S_BEYOND ? 3e38f : 0.5f;
    make_q(p);
    make_keys(p);
    case_sinks(c, v[P_SINK]);
    args->kv_format = names[v[P_SOURCE]];

    /* Only a GPU's kernels round scales. The absolute bound is for a scale of 0.5: products are as exact with a larger one,
     * and scores, which may be all but 0, as much less. */
    struct tolerance row = tolerance_prefill_lse;
    c->rounded = on_gpu(run) && v[P_CODES] == S_CODES_SCALES ? rounded_scale_lse : 0.0;
    row.abs = fmax(row.abs, tolerance_prefill_lse.abs * (double)args->softmax_scale / 0.5);
    c->tolerance[0] = tolerance_sparse_prefill_out, c->tolerance[1] = c->tolerance[2] = row;
    c->other = v[P_INPUTS] != S_NORMAL || (v[P_CODES] != S_CODES_WRITTEN && v[P_CODES] != S_CODES_NAN);
    c->beyond = v[P_INPUTS] == S_BEYOND;
    if (run->fault != FAULT_LSE_CANCELLED) return;
    for (int64_t class = 0; class < classes_of(p); class ++) /* one key stands alone in each list */
        if (p->pool.count[class] > 1) p->pool.count[class] = 1;
    for (int64_t token = 0; token < c->s_q; token++)
        *(int32_t *)guarded_at(p->pool.length, token, 0, 0, 0) = (int32_t)prefill_case_count(p, token);
}

static void free_counts(struct test_case *c)
{
    free(((struct prefill_case *)c)->pool.count);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* The list of a row. */
static const int32_t *list_of(const struct test_case *c, int64_t token, int64_t head)
{
    return prefill_case_entry((const struct prefill_case *)c, token, head / (c->h_q / c->h_kv), 0);
}

bool prefill_sees(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    const struct prefill_case *p = (const struct prefill_case *)c;
    (void)request;
    return sparse_pool_first(&p->pool, list_of(c, token, head), prefill_case_count(p, token)) >= 0;
}

/* Rows of one token and one key head. */
static void narrow(const struct test_case *c, const struct rows *rows, struct view *v)
{
    const struct prefill_case *p = (const struct prefill_case *)c;
    v->count[0] = (int32_t)prefill_case_count(p, rows->token);
    v->shape[PREFILL(topk_length)][0] = 1;
    v->tensor[PREFILL(topk_length)] =
        (fmla_tensor){v->count, {FMLA_DEVICE_CPU, 0}, 1, dtype_i32, v->shape[PREFILL(topk_length)], NULL, 0};
    v->args.sparse_prefill.topk_length = &v->tensor[PREFILL(topk_length)];
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    const struct prefill_case *p = (const struct prefill_case *)c;
    (void)request;
    sparse_pool_magnitude(&p->pool, list_of(c, token, head), prefill_case_count(p, token),
                          head / (c->h_q / c->h_kv), (double)c->args.sparse_prefill.softmax_scale,
                          &c->tensor[PREFILL(q)], case_row(c, PREFILL(q), 0, token, head), magnitude);
}

enum { CHOSEN = 1024 };

static void add_rows(struct rows *rows, int64_t *count, int64_t token, int64_t head, int64_t step,
                     int64_t heads)
{
    if (*count < CHOSEN) rows[(*count)++] = (struct rows){0, token, head, step, heads};
}

/* All of a small case. Of a large one the first and the last token, tokens of a special role, and drawn ones, with four
 * heads each, of all tiles of heads: 64 rows and more. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    enum { DRAWN_ROWS = 16, ROLES = 4, HEADS = 4, SMALL = 60000, EXTREME = 600000, KINDS = 16 };
    const struct sparse_pool *pool = &((const struct prefill_case *)c)->pool;
    const int64_t group = c->h_q / c->h_kv, last = c->s_q - 1;
    const int64_t keys = pool->topk < pool->s_k ? pool->topk : pool->s_k;
    const bool extreme = c->v[P_INPUTS] == P_EXTREME;
    int64_t count = 0;
    if (c->s_q * c->h_kv <= CHOSEN && c->s_q * c->h_q * keys <= (extreme ? EXTREME : SMALL)) {
        for (int64_t t = 0; t < c->s_q; t++)
            for (int64_t k = 0; k < c->h_kv; k++) add_rows(rows, &count, t, k * group, 1, group);
        return count;
    }
    const int64_t heads = group < HEADS ? group : HEADS, step = group / heads;
    add_rows(rows, &count, 0, 0, step, heads);
    add_rows(rows, &count, 0, (c->h_kv - 1) * group, step, heads);
    add_rows(rows, &count, last, c->h_q - 1 - (heads - 1) * step, step, heads);
    for (int64_t t = last, found = 0; t >= 0 && t > last - PREFILL_CLASSES && found < ROLES; t--) {
        if (prefill_sees(c, 0, t, 0)) continue;
        add_rows(rows, &count, t, 0, step, heads);
        found++;
    }
    for (int64_t t = 1; extreme && t < last && t < KINDS; t++) /* of all lists and tiles */
        add_rows(rows, &count, t, random_between(&c->random, 0, step - 1), step, heads);
    for (int64_t i = 0; i < DRAWN_ROWS * HEADS / heads; i++) {
        const int64_t key_head = random_between(&c->random, 0, c->h_kv - 1);
        const int64_t head = key_head * group + random_between(&c->random, 0, step - 1);
        add_rows(rows, &count, random_between(&c->random, 0, last), head, step, heads);
    }
    return count;
}

const struct maker prefill_maker = {.size = sizeof(struct prefill_case),
                                    .draw = draw,
                                    .cases_of_a_draw = 16,
                                    .make = make,
                                    .free = free_counts,
                                    .choose_rows = choose_rows,
                                    .narrow = narrow,
                                    .sees = prefill_sees,
                                    .magnitude = magnitude_of,
                                    .bounds_out = true};
