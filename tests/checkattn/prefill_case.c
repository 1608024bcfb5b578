/* SPDX-License-Identifier: MIT */
#include "prefill_case.h"

#include "num.h"
#include "prefill_extreme.h"

#include <math.h>
#include <stdio.h>
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

void prefill_case_draw(uint64_t seed)
{
    struct random_state random = {seed};
    const float q = draw_mean(&random), keys = draw_mean(&random);
    for (int i = 0; i < DRAWN; i++) drawn_q[i] = num_to_bf16(random_input(&random, q, 0.1f));
    sparse_pool_draw(&random, keys);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

enum { EMPTY_CLASS = 1, SPIKE_EVERY = 32, SPIKED_SLOT = 5 };

static int64_t classes_of(const struct prefill_case *c)
{
    return c->s_q < PREFILL_CLASSES ? c->s_q : PREFILL_CLASSES;
}

int64_t prefill_case_count(const struct prefill_case *c, int64_t token)
{
    return c->pool.count[token % PREFILL_CLASSES];
}

int32_t *prefill_case_entry(const struct prefill_case *c, int64_t token, int64_t key_head, int64_t i)
{
    return guarded_at(&c->pool.indices, 0, token, key_head, i);
}

int64_t prefill_case_first_key(const struct prefill_case *c, int64_t token, int64_t key_head)
{
    for (int64_t i = 0; i < prefill_case_count(c, token); i++)
        if (sparse_pool_is_key(&c->pool, *prefill_case_entry(c, token, key_head, i))) return i;
    return -1;
}

static void make_lengths(struct prefill_case *c)
{
    struct sparse_pool *pool = &c->pool;
    const int64_t kind = c->v[P_LENGTHS];
    pool->has_length = kind != S_LENGTHS_NONE;
    guarded_make(&pool->length, dtype_i32, 1, &c->s_q, LAYOUT_CONTIGUOUS);
    pool->count = calloc(PREFILL_CLASSES, sizeof *pool->count);
    for (int64_t class = 0; class < classes_of(c); class ++) {
        int64_t count = pool->topk;
        if (kind == S_LENGTHS_VARIED)
            count = random_between(&c->random, 0, 5) ? random_between(&c->random, 0, pool->topk) : 0;
        if (kind == S_LENGTHS_BEYOND && class % 3 == 1) count = 0;
        pool->count[class] = count;
    }
    static const int32_t below[] = {-1, -7, INT32_MIN};
    for (int64_t token = 0; token < c->s_q; token++) {
        int32_t length = (int32_t)prefill_case_count(c, token);
        if (kind == S_LENGTHS_BEYOND) /* to be clamped */
            length = !length     ? below[token % 3]
                     : token % 2 ? (int32_t)pool->topk + 1
                                 : INT32_MAX - (int32_t)(token % 100);
        *(int32_t *)guarded_at(&pool->length, token, 0, 0, 0) = length;
    }
}

static int32_t no_key(struct prefill_case *c)
{
    const int64_t slots = sparse_pool_slots(&c->pool);
    const int32_t none[] = {-1, INT32_MIN, INT32_MAX, (int32_t)slots, (int32_t)slots + 3, 2147480000};
    return none[random_between(&c->random, 0, 5)];
}

/* Beside borders of blocks of 64, and at the end. */
static bool is_border(int64_t count, int64_t i)
{
    return i % 64 == 0 || i % 64 == 63 || i + 1 == count;
}

/* The list of a class: keys in an order of its own, each once, and what else the case asks for. With spiked inputs, entries at
 * borders name keys that weigh more, so that losing one shows even among thousands. Entries that do not count are anything. */
static void make_list(struct prefill_case *c, int64_t class, int64_t key_head)
{
    static const int64_t steps[] = {1,  7,  11, 29,
                                    31, 61, 101}; /* without a factor in common with any s_kv but 1 */
    struct sparse_pool *pool = &c->pool;
    const int64_t step = steps[random_between(&c->random, 0, 6)], kind = c->v[P_INDICES];
    const int64_t start = pool->s_k ? random_between(&c->random, 0, pool->s_k - 1) : 0;
    const int64_t count = pool->count[class];
    int32_t *list = prefill_case_entry(c, class, key_head, 0);
    bool none_here = false;
    for (int64_t i = 0; i < pool->topk; i++) {
        if (i % 64 == 0) none_here = kind == S_INDICES_BLOCKS && random_between(&c->random, 0, 1);
        const int64_t place = kind == S_INDICES_TWICE ? i / 2 : i;
        bool none = kind == S_INDICES_NONE || (kind == S_INDICES_SOME && class == EMPTY_CLASS) || none_here ||
                    (kind != S_INDICES_ALL && kind != S_INDICES_TWICE && !random_between(&c->random, 0, 7));
        int64_t slot = 0;
        if (place < pool->s_k)
            slot = (start + place * step) % pool->s_k;
        else
            none = true;
        if (i >= count && sparse_pool_slots(pool)) {
            slot = random_between(&c->random, 0, sparse_pool_slots(pool) - 1);
        } else if (c->v[P_INPUTS] == S_SPIKED && is_border(count, i)) {
            slot = slot - slot % SPIKE_EVERY + SPIKED_SLOT;
            if (slot >= pool->s_k) slot = SPIKED_SLOT;
        }
        list[i] = none ? no_key(c) : (int32_t)slot;
        if (kind == S_INDICES_ANY && random_between(&c->random, 0, 1))
            list[i] = (int32_t)(uint32_t)random_u64(&c->random);
    }
    if (c->v[P_INPUTS] == P_EXTREME) prefill_extreme_list(c, class, key_head);
}

static void make_lists(struct prefill_case *c)
{
    struct sparse_pool *pool = &c->pool;
    for (int64_t token = 0; token < c->s_q; token++)
        for (int64_t k = 0; k < c->h_kv; k++) {
            const int64_t class = token % PREFILL_CLASSES;
            if (class == token)
                make_list(c, token, k);
            else
                memcpy(prefill_case_entry(c, token, k, 0), prefill_case_entry(c, class, k, 0),
                       (size_t)pool->topk * sizeof(int32_t));
        }
}

/* ---- Keys ------------------------------------------------------------------------------------ */

static bool is_flat(const struct prefill_case *c)
{
    return c->v[P_SOURCE] == P_FLAT || c->v[P_SOURCE] == P_FLAT_GAPS;
}

/* Memory of flat keys, NaN everywhere, and the view of it that is the argument. */
static void make_flat(struct prefill_case *c, enum layout layout)
{
    struct sparse_pool *pool = &c->pool;
    struct guarded *g = &pool->memory;
    guarded_make(g, dtype_bf16, 4, (int64_t[]){1, pool->s_k, c->h_kv, c->d_qk}, layout);
    pool->page_bytes = pool->slot_bytes = 2 * g->strides[1], c->head_bytes = 2 * g->strides[2];
    memcpy(pool->shape, g->shape + 1, 3 * sizeof *pool->shape);
    memcpy(pool->strides, g->strides + 1, 3 * sizeof *pool->strides);
    pool->view = g->tensor;
    pool->view.ndim = 3, pool->view.shape = pool->shape;
    if (pool->view.strides) pool->view.strides = pool->strides;
}

static enum layout keys_layout(const struct prefill_case *c)
{
    const bool gaps = c->v[P_LAYOUT] == LAYOUT_CONTIGUOUS && c->v[P_SOURCE] == P_FLAT_GAPS;
    const bool none = c->v[P_LAYOUT] != LAYOUT_ODD && c->v[P_SOURCE] == P_FLAT;
    return c->v[P_LAYOUT] == P_LAYOUT_FAR || none ? LAYOUT_CONTIGUOUS
           : gaps                                 ? LAYOUT_PADDED
                                                  : (enum layout)c->v[P_LAYOUT];
}

/* Writes every key that a counted index names. */
static void fill_keys(struct prefill_case *c)
{
    struct sparse_pool *pool = &c->pool;
    unsigned char *named = calloc((size_t)(sparse_pool_slots(pool) * c->h_kv) + 1, 1);
    for (int64_t class = 0; class < classes_of(c); class ++)
        for (int64_t k = 0; k < c->h_kv; k++)
            for (int64_t i = 0; i < pool->count[class]; i++) {
                const int32_t index = *prefill_case_entry(c, class, k, i);
                if (sparse_pool_is_key(pool, index)) named[index * c->h_kv + k] = 1;
            }
    for (int64_t slot = 0; slot < sparse_pool_slots(pool); slot++)
        for (int64_t k = 0; k < c->h_kv; k++) {
            const bool spike = c->v[P_INPUTS] == S_SPIKED && slot % SPIKE_EVERY == SPIKED_SLOT;
            if (!named[slot * c->h_kv + k]) continue;
            uint8_t *token = sparse_pool_token(pool, slot) + k * c->head_bytes;
            if (is_flat(c))
                sparse_pool_put_16(pool, &c->random, token, spike);
            else
                sparse_pool_put(pool, &c->random, c->v[P_CODES], slot, spike);
            if (c->v[P_INPUTS] == P_EXTREME) prefill_extreme_key(c, token, slot);
        }
    const int64_t nan =
        c->v[P_CODES] == S_CODES_NAN && c->s_q ? prefill_case_first_key(c, 0, c->h_kv - 1) : -1;
    if (nan >= 0) {
        const int32_t slot = *prefill_case_entry(c, 0, c->h_kv - 1, nan);
        sparse_pool_put_nan(pool, &c->random, sparse_pool_token(pool, slot) + (c->h_kv - 1) * c->head_bytes,
                            sparse_pool_scales(pool, slot));
    }
    free(named);
}

static void make_keys(struct prefill_case *c)
{
    static const enum kv_format formats[P_SOURCES] = {KV_BF16, KV_BF16, KV_FP8_656, KV_FP8_584, KV_BF16};
    struct sparse_pool *pool = &c->pool;
    pool->format = formats[c->v[P_SOURCE]], pool->d_qk = c->d_qk;
    pool->layout = kv_layout_of(pool->format, (int32_t)c->d_qk);
    int64_t sizes[3];
    sparse_shape_take(c->v[P_SHAPE], prefill_shapes[0], 2, sizes);
    pool->s_k = sizes[0], pool->topk = sizes[1];
    pool->page_size = is_flat(c) ? 1 : c->v[P_PAGE];
    pool->pages = (pool->s_k + pool->page_size - 1) / pool->page_size;
    const bool far = c->v[P_LAYOUT] == P_LAYOUT_FAR;
    guarded_make(&pool->indices, dtype_i32, 4, (int64_t[]){1, c->s_q, c->h_kv, pool->topk},
                 far ? LAYOUT_CONTIGUOUS : (enum layout)c->v[P_LAYOUT]);
    make_lengths(c);
    make_lists(c);
    if (is_flat(c))
        make_flat(c, keys_layout(c));
    else
        sparse_pool_make(pool, &c->random, keys_layout(c));
    fill_keys(c);
    if (!far) return;
    sparse_pool_spread(pool);
    pool->view.strides = pool->strides;
}

/* ---- The case -------------------------------------------------------------------------------- */

/* The tensor without the dimension of 1 in front, which lets LAYOUT_SWAPPED change tokens and heads. */
static fmla_tensor inner(const struct guarded *g)
{
    fmla_tensor tensor = g->tensor;
    tensor.ndim--, tensor.shape++;
    if (tensor.strides) tensor.strides++;
    return tensor;
}

static void make_sink(struct prefill_case *c)
{
    guarded_make(&c->sink, dtype_f32, 1, &c->h_q, LAYOUT_CONTIGUOUS);
    for (int64_t h = 0; h < c->h_q; h++) {
        float sink = random_normal(&c->random) * 3.0f;
        if (c->v[P_SINK] == S_SINK_INFINITE && h % 3 < 2) sink = h % 3 ? INFINITY : -INFINITY;
        *(float *)guarded_at(&c->sink, h, 0, 0, 0) = sink;
    }
}

static void make_q(struct prefill_case *c)
{
    for (int64_t t = 0; t < c->s_q; t++)
        for (int64_t h = 0; h < c->h_q; h++) {
            uint8_t *row = guarded_at(&c->q, 0, t, h, 0);
            memcpy(row, drawn_q + random_between(&c->random, 0, DRAWN - c->d_qk), (size_t)c->d_qk * 2);
            if (c->v[P_INPUTS] == S_SPIKED) sparse_pool_spike(row + c->d_qk * 2, false);
            if (c->v[P_INPUTS] == P_EXTREME) prefill_extreme_query(c, row, t, h);
        }
}

void prefill_case_complete(int64_t v[P_AXES])
{
    if (!v[P_HQ]) v[P_HQ] = 16;
    if (!v[P_HKV]) v[P_HKV] = 1;
    if (!v[P_DQK]) v[P_DQK] = 576;
    if (!v[P_PAGE]) v[P_PAGE] = 64;
}

void prefill_case_make(struct prefill_case *c, const struct run *run, const int64_t v[P_AXES], uint64_t seed)
{
    static const int32_t names[P_SOURCES] = {0, FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_BF16};
    memset(c, 0, sizeof *c);
    memcpy(c->v, v, sizeof c->v);
    prefill_case_complete(c->v);
    v = c->v;
    c->random.state = seed, c->device = run->device;
    c->s_q = v[P_SQ], c->h_q = v[P_HQ], c->h_kv = v[P_HKV], c->d_qk = v[P_DQK];
    const enum layout layout = v[P_LAYOUT] == P_LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)v[P_LAYOUT];
    guarded_make(&c->q, dtype_bf16, 4, (int64_t[]){1, c->s_q, c->h_q, c->d_qk}, layout);
    guarded_make(&c->out, dtype_bf16, 4, (int64_t[]){1, c->s_q, c->h_q, S_D_V}, layout);
    guarded_make(&c->max_logits, dtype_f32, 2, (int64_t[]){c->s_q, c->h_q}, layout);
    guarded_make(&c->lse, dtype_f32, 2, (int64_t[]){c->s_q, c->h_q}, layout);
    fmla_sparse_prefill_args *args = &c->args;
    *args = FMLA_INIT(fmla_sparse_prefill_args);
    args->softmax_scale = v[P_INPUTS] == S_STEEP ? 400.0f : v[P_INPUTS] == S_BEYOND ? 3e38f : 0.5f;
    make_q(c);
    make_keys(c);
    c->q_view = inner(&c->q), c->out_view = inner(&c->out), c->indices_view = inner(&c->pool.indices);
    args->q = &c->q_view, args->kv = &c->pool.view, args->indices = &c->indices_view,
    args->out = &c->out_view;
    args->topk_length = c->pool.has_length ? &c->pool.length.tensor : NULL;
    if (v[P_RESULTS] == P_RESULTS_BOTH || v[P_RESULTS] == P_RESULTS_LSE) args->lse = &c->lse.tensor;
    if (v[P_RESULTS] == P_RESULTS_BOTH || v[P_RESULTS] == P_RESULTS_MAX)
        args->max_logits = &c->max_logits.tensor;
    if (v[P_SINK] != S_SINK_NONE) {
        make_sink(c);
        args->attn_sink = &c->sink.tensor;
    }
    args->kernel = forced_kernel(run);
    args->kv_format = names[v[P_SOURCE]];
    args->lse_empty = (int32_t)v[P_EMPTY], args->log_base = (int32_t)v[P_BASE];
}

void prefill_case_leave_one(struct prefill_case *c)
{
    for (int64_t class = 0; class < classes_of(c); class ++)
        if (c->pool.count[class] > 1) c->pool.count[class] = 1;
    for (int64_t token = 0; token < c->s_q; token++)
        *(int32_t *)guarded_at(&c->pool.length, token, 0, 0, 0) = (int32_t)prefill_case_count(c, token);
}

void prefill_case_free(struct prefill_case *c)
{
    device_free(&c->blocks);
    sparse_pool_free(&c->pool);
    struct guarded *all[] = {&c->q, &c->sink, &c->out, &c->max_logits, &c->lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
}

uint16_t *prefill_case_out(const struct prefill_case *c, int64_t token, int64_t head)
{
    return guarded_at(&c->out, 0, token, head, 0);
}

float *prefill_case_lse(const struct prefill_case *c, int64_t token, int64_t head)
{
    return guarded_at(&c->lse, token, head, 0, 0);
}

float *prefill_case_max(const struct prefill_case *c, int64_t token, int64_t head)
{
    return guarded_at(&c->max_logits, token, head, 0, 0);
}

/* ---- The call -------------------------------------------------------------------------------- */

fmla_status prefill_case_call(fmla_sparse_prefill_args *args, int fill)
{
    enum { GUARD_BYTES = 64, GUARD = 0x5a };
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_sparse_prefill_workspace_size(args, &bytes, &alignment);
    if (status) return status;
    unsigned char *memory = aligned_alloc(64, (bytes + GUARD_BYTES + 63) / 64 * 64);
    if (!memory) {
        fprintf(stderr, "checkattn: out of memory for a workspace of %zu bytes\n", bytes);
        exit(1);
    }
    memset(memory, fill, bytes);
    memset(memory + bytes, GUARD, GUARD_BYTES);
    args->workspace = memory, args->workspace_size = bytes;
    status = fmla_sparse_prefill(args);
    for (int i = 0; i < GUARD_BYTES; i++)
        if (memory[bytes + (size_t)i] != GUARD) {
            fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
            exit(1);
        }
    free(memory);
    return status;
}

static void add_to_device(struct prefill_case *c, const struct guarded *guarded,
                          const struct prefill_case *like)
{
    if (like && guarded->memory)
        device_add_in_place(&c->blocks, guarded->memory, guarded->whole, &like->blocks);
    else
        device_add_guarded(&c->blocks, guarded);
}

void prefill_case_to_device(struct prefill_case *c, const struct prefill_case *like)
{
    struct sparse_pool *pool = &c->pool;
    if (!is_apart(c->device)) return;
    struct guarded *all[] = {&c->q,   &c->sink,       &c->out,       &c->max_logits,
                             &c->lse, &pool->indices, &pool->length, &pool->memory};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) add_to_device(c, all[i], like);
    if (!pool->far) return;
    device_add_zeros(&c->blocks, pool->far, pool->far_bytes);
    const int64_t between = pool->strides[0] * (pool->layout.element == KV_ELEMENT_E4M3 ? 1 : 2);
    for (int64_t page = 0; page < pool->pages; page++)
        device_up_part(&c->blocks, (const uint8_t *)pool->view.data + page * between,
                       (size_t)pool->page_bytes);
}

void prefill_case_from_device(struct prefill_case *c)
{
    for (int i = 0; i < c->blocks.count; i++) {
        const void *host = c->blocks.block[i].host;
        if (host != c->pool.far) device_down(&c->blocks, host);
    }
}

fmla_status prefill_case_run(const struct prefill_case *c, fmla_sparse_prefill_args *args, int fill)
{
    return is_apart(c->device) ? device_prefill_call(&c->blocks, args, fill) : prefill_case_call(args, fill);
}

fmla_status prefill_case_kernel(const struct prefill_case *c, const char **name)
{
    struct device_prefill_args on_device;
    if (!is_apart(c->device)) return fmla_sparse_prefill_kernel(&c->args, name);
    device_prefill_args_make(&on_device, &c->blocks, &c->args);
    return fmla_sparse_prefill_kernel(&on_device.args, name);
}
