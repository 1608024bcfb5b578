/* SPDX-License-Identifier: MIT */
#include "decode_case.h"

#include "num.h"
#include "queries.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DLPACK_E4M3 = 10 /* kDLFloat8_e4m3fn */ };

/* Values are drawn once and copied from random offsets. */
enum { DRAWN = 1 << 18 };
static uint16_t drawn[2][DRAWN]; /* [dtype] */

static void draw(uint64_t seed)
{
    struct random_state random = {seed};
    draw_numbers(&random, 0.0f, 0.1f, DRAWN, drawn[0], drawn[1]);
    sparse_pool_draw(&random, 0.0f);
}

/* Puts a vector of a case: copied, and spiked or with values that make scores of +inf. */
static void put_vector(struct decode_case *d, void *to, bool spike, bool of_key, bool special)
{
    struct test_case *c = &d->c;
    const bool fp16 = c->v[A_DTYPE] == 1;
    const size_t bytes = (size_t)c->d_qk * sizeof(uint16_t);
    memcpy(to, drawn[fp16] + random_between(&c->random, 0, DRAWN - c->d_qk), bytes);
    if (spike) case_spike((uint8_t *)to + bytes, fp16);
    if (c->v[A_INPUTS] == INPUTS_INFINITE) case_infinite((uint8_t *)to + bytes, fp16, of_key, special);
}

/* Keys next to the border of a page count as well. */
static bool is_spiked(const struct decode_case *d, int64_t key, int64_t length)
{
    return d->c.v[A_INPUTS] == INPUTS_SPIKED &&
           (is_border(key, length) || key % d->c.page_size == 0 || (key + 1) % d->c.page_size == 0);
}

static void make_lengths(struct decode_case *d)
{
    const int64_t capacity = d->c.max_pages * d->c.page_size;
    d->length = d->c.owned[0] = calloc((size_t)d->c.b + 1, sizeof *d->length);
    for (int64_t r = 0; r < d->c.b; r++) {
        int64_t length = d->s_k;
        if (d->c.v[A_LENGTHS] == LENGTHS_VARIED)
            length = random_between(&d->c.random, 0, 3) ? random_between(&d->c.random, 0, d->s_k) : 0;
        if (d->c.v[A_LENGTHS] == LENGTHS_BEYOND && r % 2)
            length = r % 4 == 1 ? -7 : 2147483647; /* is clamped */
        *(int32_t *)guarded_at(&d->c.tensor[DENSE(seqlens)], r, 0, 0, 0) = (int32_t)length;
        d->length[r] = length < 0 ? 0 : length > capacity ? capacity : length;
    }
}

/* Gives every request its pages: the last page is its own (so that its tail can be poisoned), the others
 * come from a pool that requests share if the batch would need much memory. Unused table entries hold
 * garbage. */
static void make_table(struct decode_case *d, int64_t shared)
{
    int32_t *own = malloc(sizeof(int32_t) * (size_t)(d->c.b + 1));
    for (int64_t r = 0; r < d->c.b; r++) own[r] = (int32_t)(shared + r);
    random_shuffle(&d->c.random, own, d->c.b);
    int64_t next = 0;
    for (int64_t r = 0; r < d->c.b; r++) {
        const int64_t used = (d->length[r] + d->c.page_size - 1) / d->c.page_size;
        for (int64_t i = 0; i < d->c.max_pages; i++) {
            static const int32_t garbage[] = {-1, 2147480000, -2147483647 - 1};
            int32_t page = garbage[(r + i) % 3];
            if (i + 1 < used) page = (int32_t)(next++ * 7919 % shared);
            if (i + 1 == used) page = own[r];
            *(int32_t *)guarded_at(&d->c.tensor[DENSE(block_table)], r, i, 0, 0) = page;
        }
    }
    free(own);
}

static int64_t page_of(const struct decode_case *d, int64_t request, int64_t key)
{
    return d->paged ? *(const int32_t *)guarded_at(&d->c.tensor[DENSE(block_table)], request,
                                                   key / d->c.page_size, 0, 0)
                    : request;
}

int64_t decode_slot(const struct decode_case *d, int64_t request, int64_t key)
{
    return page_of(d, request, key) * d->c.page_size + key % d->c.page_size;
}

static uint8_t *key_at(const struct decode_case *d, int64_t request, int64_t key, int64_t head)
{
    return sparse_pool_token(&d->pool, decode_slot(d, request, key)) + head * d->pool.head_bytes;
}

static void put_key(struct decode_case *d, int64_t request, int64_t key, int64_t head, bool spike,
                    bool special)
{
    uint8_t *to = key_at(d, request, key, head);
    if (d->c.v[A_CACHE] == CACHE_OF_Q) {
        put_vector(d, to, spike, true, special);
        return;
    }
    sparse_pool_put(&d->pool, &d->c.random, d->c.v[A_CODES], decode_slot(d, request, key), head, spike);
    if (d->c.v[A_INPUTS] == INPUTS_INFINITE)
        case_infinite(sparse_pool_end(&d->pool, to), false, true, special);
}

/* Writes every slot that a request reads, once: shared pages and memory belong to the first request. */
static void fill_cache(struct decode_case *d, bool aliased)
{
    unsigned char *filled = calloc((size_t)d->c.pages + 1, 1);
    int64_t shared = 0; /* keys already in the aliased cache */
    for (int64_t r = 0; r < d->c.b; r++) {
        for (int64_t t = aliased ? shared : 0; t < d->length[r]; t++) {
            const int64_t page = page_of(d, r, t);
            if (d->paged && t % d->c.page_size == 0 && filled[page]) {
                t += d->c.page_size - 1; /* shared, so a full page */
                continue;
            }
            filled[page] = 1;
            for (int64_t h = 0; h < d->c.h_kv; h++)
                put_key(d, r, t, h, is_spiked(d, t, d->length[r]), r % 2 && t == d->length[r] / 2);
        }
        if (d->length[r] > shared) shared = d->length[r];
    }
    free(filled);
}

/* Fills the slots after the keys of every other request with numbers whose values are infinite: codes of
 * 448, scales near the end of fp32. */
static void put_large_tails(struct decode_case *d)
{
    enum { LARGE = 0x7e };
    for (int64_t r = 0; r < d->c.b; r += 2) {
        const int64_t page = d->c.page_size, end = (d->length[r] + page - 1) / page * page;
        for (int64_t t = d->length[r]; t < end; t++)
            memset(key_at(d, r, t, 0), LARGE, (size_t)d->pool.layout.token_bytes);
    }
}

/* Makes the memory of the cache, NaN everywhere, and the view that is the argument. */
static void make_pool(struct decode_case *d, enum layout layout)
{
    static const int32_t names[CACHE_KINDS] = {0, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP8_576};
    struct test_case *c = &d->c;
    struct sparse_pool *pool = &d->pool;
    const int32_t name = c->args.dense_decode.kv_format = names[c->v[A_CACHE]];
    pool->format = name ? (enum kv_format)(name - FMLA_KV_BF16) : c->v[A_DTYPE] == 1 ? KV_FP16 : KV_BF16;
    pool->layout = kv_layout_of(pool->format, (int32_t)c->d_qk), pool->d_qk = c->d_qk;
    pool->pages = c->pages, pool->page_size = c->page_size;
    pool->memory = &c->tensor[DENSE(kv_cache)], pool->view = &c->view[DENSE(kv_cache)];
    if (name) {
        sparse_pool_make(pool, &c->random, layout);
        case_name(c, DENSE(kv_cache));
    } else {
        case_tensor(c, DENSE(kv_cache), layout, true);
        const int64_t *strides = pool->memory->strides;
        const int64_t bytes = sizeof(uint16_t);
        memcpy(pool->strides, strides, sizeof pool->strides);
        pool->page_bytes = bytes * strides[0], pool->slot_bytes = bytes * strides[1];
        pool->head_bytes = bytes * strides[2];
    }
    if (pool->layout.scale != KV_SCALE_OF_CACHE) return;
    pool->scale = sparse_pool_scale(&c->random, c->v[A_CODES]);
    case_tensor(c, DENSE(kv_scale), LAYOUT_CONTIGUOUS, pool->scale != 1.0f);
    *(float *)guarded_at(&c->tensor[DENSE(kv_scale)], 0, 0, 0, 0) = pool->scale;
}

static void make_cache(struct decode_case *d, enum layout layout)
{
    struct sparse_pool *pool = &d->pool;
    int64_t shared = 1;
    if (d->paged) { /* share at most 8192 slots */
        for (int64_t r = 0; r < d->c.b; r++) shared += d->length[r] / d->c.page_size;
        if (shared > 8192 / d->c.page_size + 1) shared = 8192 / d->c.page_size + 1;
        make_table(d, shared);
    }
    d->c.pages = d->paged ? shared + d->c.b : d->c.b;
    /* In a contiguous cache of many long requests, all read the same memory through a stride of 0. */
    const bool aliased = !d->paged && d->c.b * d->s_k > 65536;
    if (aliased) d->c.pages = 1;
    make_pool(d, layout);
    if (aliased) {
        pool->strides[0] = pool->page_bytes = 0;
        d->c.pages = pool->pages = pool->shape[0] = pool->memory->shape[0] = d->c.b;
        pool->view->strides = pool->strides;
    }
    fill_cache(d, aliased);
    const bool nan_ends = d->c.v[A_INPUTS] == INPUTS_NAN_ENDS && d->c.v[A_CAUSAL] && d->c.s_q > 1;
    for (int64_t r = 0; nan_ends && r < d->c.b; r++)
        for (int64_t h = 0; d->length[r] && h < d->c.h_kv; h++)
            sparse_pool_put_nans(pool, key_at(d, r, d->length[r] - 1, h));
    if (d->c.v[A_CODES] != S_CODES_NAN || !d->c.b || !d->length[0]) return;
    const int64_t nan = random_between(&d->c.random, 0, d->length[0] - 1); /* in a request that is compared */
    sparse_pool_put_nan(pool, &d->c.random, key_at(d, 0, nan, 0),
                        sparse_pool_scales(pool, decode_slot(d, 0, nan)));
}

/* Makes a query; its value that multiplies a key's large value is 0. If queries are quantised, some
 * contain no finite number. */
static void make_query(struct decode_case *d, int64_t r, int64_t j, int64_t h, uint8_t *row)
{
    const struct test_case *c = &d->c;
    const bool fp16 = c->v[A_DTYPE] == 1, beyond = c->v[A_CODES] == S_CODES_BEYOND;
    put_vector(d, row, c->v[A_INPUTS] == INPUTS_SPIKED, false, (j + h) % 3 == 0);
    if (beyond) memset(row + 2 * (c->d_qk - d->pool.layout.rope), 0, 2);
    if (beyond && r % 4 == 3 && h % 61 == 60 && !fp16)
        memcpy(row, &(uint16_t){SPARSE_LARGE_BF16}, sizeof(uint16_t));
    const uint16_t no_number = h % 2 ? 0x7fc0 : 0xff80;
    if (c->v[A_PRODUCTS] && c->v[A_CODES] == S_CODES_NAN && r % 2 && h % 7 == 2)
        memcpy(row + 2 * (37 * h % 512), &no_number, sizeof no_number);
}

/* Codes are random values quantised with one scale, some beyond the largest code. */
static void make_q(struct decode_case *d)
{
    struct test_case *c = &d->c;
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                uint16_t values[SPARSE_WIDEST];
                uint8_t *const row = guarded_at(&c->tensor[DENSE(q)], r, j, h, 0);
                if (c->v[A_PRODUCTS] != OF_CODES) {
                    make_query(d, r, j, h, row);
                    continue;
                }
                make_query(d, r, j, h, (uint8_t *)values);
                for (int64_t i = 0; i < c->d_qk; i++)
                    row[i] = num_to_e4m3(num_from_bf16(values[i]) / d->q_scale);
            }
}

/* Makes the query tensor; codes come with their scale, which is NULL for 1. */
static void make_q_tensor(struct decode_case *d, enum layout layout)
{
    struct test_case *c = &d->c;
    const fmla_dtype of_values = c->dtype;
    d->q_scale = 1.0f;
    if (c->v[A_PRODUCTS] == OF_CODES) {
        if (random_between(&c->random, 0, 3)) d->q_scale = 0.001f * (float)random_between(&c->random, 1, 9);
        case_tensor(c, DENSE(q_scale), LAYOUT_CONTIGUOUS, d->q_scale != 1.0f);
        *(float *)guarded_at(&c->tensor[DENSE(q_scale)], 0, 0, 0, 0) = d->q_scale;
        c->dtype = (fmla_dtype){random_between(&c->random, 0, 1) ? FMLA_TYPE_UINT : DLPACK_E4M3, 8, 1};
    }
    case_tensor(c, DENSE(q), layout, true);
    c->dtype = of_values;
    c->args.dense_decode.products = c->v[A_PRODUCTS] ? FMLA_PRODUCTS_FP8 : FMLA_PRODUCTS_BF16;
}

static void make(struct test_case *c)
{
    struct decode_case *d = (struct decode_case *)c;
    const int64_t *v = c->v;
    d->s_k = c->s_kv = v[A_SK], d->paged = v[A_PAGE] != 0;
    d->c.page_size = d->paged ? v[A_PAGE] : d->s_k + 3;
    d->c.max_pages =
        d->paged ? (d->s_k + d->c.page_size - 1) / d->c.page_size + (v[A_LENGTHS] == LENGTHS_BEYOND ? 0 : 2)
                 : 1;
    c->capacity = d->c.max_pages * d->c.page_size;
    c->d_v = D_V, c->dtype = v[A_DTYPE] ? dtype_fp16 : dtype_bf16;
    const enum layout layout = near_layout(v[A_LAYOUT]);
    make_q_tensor(d, layout), case_tensor(c, DENSE(seqlens), LAYOUT_CONTIGUOUS, true);
    case_tensor(c, DENSE(out), layout, true), case_tensor(c, DENSE(lse), layout, v[A_LSE] != 0);
    case_tensor(c, DENSE(block_table), layout, d->paged);
    make_lengths(d);
    make_cache(d, layout);
    /* Hopper's byte-cache kernel, the default on such a GPU, multiplies codes without rounding their
     * values to bf16 (docs/semantics.md). */
    const bool hopper = !strcmp(c->run->kernel, "cuda-sm90-fp8") || (c->run->by_default && on_gpu(c->run));
    if (d->pool.format == KV_FP8_656 && d->pool.page_bytes) put_large_tails(d);
    /* The third page's elements are more than 2^31 from the first, the fifth's more than 2^32. */
    const size_t element = d->pool.view->dtype.bits / 8;
    if (v[A_LAYOUT] == LAYOUT_FAR)
        case_spread(c, DENSE(kv_cache), element << 31, (((size_t)1 << 30) + 64) * element);
    make_q(d);
    case_sinks(c, v[A_SINK]);

    fmla_dense_decode_args *args = &c->args.dense_decode;
    args->softmax_scale = v[A_INPUTS] == INPUTS_SPIKED   ? 0.5f
                          : v[A_INPUTS] == INPUTS_STEEP  ? 300.0f
                          : v[A_INPUTS] == INPUTS_BEYOND ? 3e38f
                                                         : 0.0f;
    c->tolerance[0] = tolerance_dense_decode_out, c->tolerance[1] = tolerance_decode_lse;
    /* The scale of FP8_576 multiplies exactly. Only GPU kernels round scales, and only of groups. */
    const bool rounded = on_gpu(c->run) && v[A_CODES] == S_CODES_SCALES && d->pool.format != KV_FP8_576;
    const bool by_codes = hopper && v[A_PRODUCTS], rounds = hopper && rounded;
    if (by_codes) c->tolerance[0] = tolerance_fp8_products_out;
    const bool table = v[A_CODES] == S_CODES_WRITTEN || v[A_CODES] == S_CODES_NAN;
    c->other = (v[A_INPUTS] != INPUTS_NORMAL && v[A_INPUTS] != INPUTS_NAN_ENDS) || !table;
    c->bounds_out = !table || by_codes;
    /* That rounds q and k to bf16, by 2^-9 each. */
    c->of_product = by_codes ? 0x1p-8 : rounds ? 0x1p-9 : 0.0;
    c->large_apart = v[A_CODES] == S_CODES_BEYOND;
    c->rounded = by_codes || rounded ? rounded_scale_lse : 0.0;
    c->infinite = v[A_INPUTS] == INPUTS_INFINITE, c->beyond = v[A_INPUTS] == INPUTS_BEYOND;
}

/* ---- Plans and parts -------------------------------------------------------------------------- */

static bool plan_lengths(struct test_case *c, int k, bool stale, int32_t *lengths)
{
    const struct decode_case *d = (const struct decode_case *)c;
    for (int64_t r = 0; !k && r < c->b; r++)
        lengths[r] = (int32_t)(stale ? random_between(&c->random, 0, 2 * d->s_k + 1) : d->length[r]);
    return !k;
}

static int64_t seen(const struct test_case *c, int64_t request, int64_t token, int64_t head)
{
    const int64_t length = ((const struct decode_case *)c)->length[request];
    const int64_t keys = c->v[A_CAUSAL] ? length - c->s_q + token + 1 : length;
    (void)head;
    return keys < 0 ? 0 : keys;
}

/* A contiguous cache has requests from `first` on in place of pages. */
static void narrow_cache(const struct test_case *c, struct view *v, int64_t first)
{
    if (!((const struct decode_case *)c)->paged)
        view_narrow(v, DENSE(kv_cache), 0, first, v->shape[DENSE(kv_cache)][0]);
}

/* Makes a row a separate problem over the first keys of its request, without a mask. */
static bool narrow(const struct test_case *c, const struct rows *rows, int64_t change, struct view *v)
{
    const int64_t keys = seen(c, rows->request, rows->token, 0) + change;
    narrow_cache(c, v, rows->request);
    v->count[0] = (int32_t)keys;
    v->tensor[DENSE(seqlens)].data = v->count, v->tensor[DENSE(seqlens)].byte_offset = 0;
    v->args.dense_decode.causal = 0, v->args.dense_decode.batch_invariant = 0;
    return !change || (keys > 0 && keys <= ((const struct decode_case *)c)->length[rows->request]);
}

static void magnitude_of(const struct test_case *c, int64_t request, int64_t token, int64_t head,
                         struct magnitude *magnitude)
{
    const struct decode_case *d = (const struct decode_case *)c;
    const struct guarded *q = &c->tensor[DENSE(q)];
    const float given = c->args.dense_decode.softmax_scale;
    const double scale = given == 0.0f ? 1.0 / sqrt((double)c->d_qk) : (double)given;
    const uint16_t *row = case_row(c, DENSE(q), request, token, head);
    float values[SPARSE_WIDEST] = {0}, key[SPARSE_WIDEST] = {0};
    uint16_t quantised[SPARSE_WIDEST];
    if (c->v[A_PRODUCTS] == OF_CODES)
        query_of_codes(quantised, (const uint8_t *)row, d->q_scale, (int32_t)c->d_qk);
    else if (c->v[A_PRODUCTS])
        query_quantise(quantised, row, query_quantised(d->pool.format), (int32_t)c->d_qk);
    for (int64_t i = 0; i < c->d_qk; i++)
        values[i] = c->v[A_PRODUCTS] ? num_from_bf16(quantised[i]) : (float)guarded_value(q, row + i);
    for (int64_t t = 0; t < seen(c, request, token, head); t++) {
        sparse_pool_values(&d->pool, key_at(d, request, t, head / (c->h_q / c->h_kv)),
                           decode_slot(d, request, t), key);
        magnitude_add(magnitude, scale, values, key, c->d_qk, key, c->d_v);
    }
}

/* A request alone; a random one alone or after another, with room for more keys. Strides skip the other
 * requests, so only lengths and table are copied. */
static void part(struct test_case *c, int64_t request, struct part *p)
{
    const struct decode_case *d = (const struct decode_case *)c;
    struct view *v = &p->view;
    snprintf(p->what, sizeof p->what, "batch-invariant: request %lld alone has other bits than in the batch",
             (long long)request);
    p->request = request, p->n = 1;
    if (request >= 0) {
        view_narrow_all(c, v, DIM_b, request, 1), narrow_cache(c, v, request);
        return;
    }
    const int64_t r = p->request = random_between(&c->random, 0, c->b - 1);
    const int64_t n = p->n = 1 + random_between(&c->random, 0, 1);
    const int64_t first = n == 1 ? r : random_between(&c->random, 0, r);
    const bool gpu = on_gpu(c->run); /* a GPU launches its join differently above 16384 keys of room */
    const int64_t more =
        random_between(&c->random, 0, 3) ? random_between(&c->random, 1, gpu ? 40000 : 4500) : 0;
    const int64_t max_pages = d->c.max_pages + (more + d->c.page_size - 1) / d->c.page_size; /* more keys */
    enum { GAP = 8 };
    view_narrow_all(c, v, DIM_b, first, n), narrow_cache(c, v, first);
    v->strides[DENSE(q)][0] *= r - first;
    if (!d->paged) v->strides[DENSE(kv_cache)][0] *= r - first, v->shape[DENSE(kv_cache)][0] = n;
    p->own[0].bytes = (size_t)n * sizeof(int32_t);
    p->own[1].bytes = (size_t)(n * (max_pages + GAP) - GAP) * sizeof(int32_t);
    int32_t *seqlens = p->own[0].memory = must_alloc(p->own[0].bytes);
    int32_t *table = p->own[1].memory = must_alloc(p->own[1].bytes);
    memset(table, 0xff, p->own[1].bytes);
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = i ? r : first;
        seqlens[i] = (int32_t)d->length[from]; /* already clamped, to the old capacity */
        memcpy(table + i * (max_pages + GAP), guarded_at(&c->tensor[DENSE(block_table)], from, 0, 0, 0),
               (size_t)d->c.max_pages * sizeof *table);
    }
    v->tensor[DENSE(seqlens)].data = seqlens, v->tensor[DENSE(seqlens)].byte_offset = 0;
    if (d->paged) {
        v->tensor[DENSE(block_table)].data = table, v->tensor[DENSE(block_table)].byte_offset = 0;
        v->shape[DENSE(block_table)][1] = max_pages, v->strides[DENSE(block_table)][0] = max_pages + GAP;
    }
    snprintf(p->what, sizeof p->what,
             "batch-invariant: request %lld has other bits as the last of %lld, with room for %lld pages",
             (long long)r, (long long)n, (long long)max_pages);
}

/* Chooses every row of a small case; of a large one the corners, rows that see no or few keys, and 64
 * random ones. If a large case has few tokens, the random rows are heads of each token, because the oracle
 * computes heads with the same keys together. */
static int64_t choose_rows(struct test_case *c, struct rows *rows)
{
    enum { FEW = 16 };
    const struct decode_case *d = (const struct decode_case *)c;
    const int64_t group = c->h_q / c->h_kv, sets = c->b * c->s_q * c->h_kv;
    int64_t count = 0;
    if (all_are_compared(c, d->s_k)) return all_rows(c, rows, group);
    rows[count++] = (struct rows){0, 0, 0, 1, 1};
    rows[count++] = (struct rows){c->b - 1, c->s_q - 1, c->h_q - 1, 1, 1};
    rows[count++] = (struct rows){0, c->s_q - 1, group - 1, 1, 1}; /* last row of a key head */
    rows[count++] = (struct rows){c->b - 1, 0, c->h_q - group, 1, 1};
    for (int64_t r = 0; r < c->b && count < CHOSEN_ROWS - DRAWN_ROWS; r++)
        if (d->length[r] < c->s_q + 1) rows[count++] = (struct rows){r, (c->s_q - 1) / 2, 0, 1, 1};
    if (sets <= FEW) {
        const int64_t most = (CHOSEN_ROWS + sets - 1) / sets, heads = group < most ? group : most,
                      step = group / heads;
        for (int64_t i = 0; i < sets; i++) {
            const int64_t first = random_between(&c->random, 0, group - 1 - (heads - 1) * step);
            rows[count++] = (struct rows){i / c->h_kv / c->s_q, i / c->h_kv % c->s_q,
                                          i % c->h_kv * group + first, step, heads};
        }
        return count;
    }
    return draw_rows(c, rows, count);
}

const struct maker decode_maker = {ROWS_BY_NAME, .size = sizeof(struct decode_case), .draw = draw,
                                   .make = make, .plan_lengths = plan_lengths,       .seen = seen,
                                   .part = part};
