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

void sparse_case_draw(uint64_t seed)
{
    struct random_state random = {seed};
    for (int i = 0; i < DRAWN; i++) {
        const float q = random_input(&random, 0.0f, 1.0f);
        drawn_q[0][i] = num_to_bf16(q), drawn_q[1][i] = num_to_fp16(q);
    }
    sparse_pool_draw(&random, 0.0f);
}

static bool is_fp16(const struct sparse_case *c)
{
    return c->v[S_FORMAT] == S_FP16 || c->v[S_FORMAT] == S_FP8_656_Q16;
}

static int64_t from_place(struct sparse_case *c)
{
    return random_between(&c->random, 0, DRAWN - c->d_qk);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

int32_t *sparse_case_entry(const struct sparse_pool *pool, int64_t request, int64_t token, int64_t i)
{
    return guarded_at(&pool->indices, request, token, i, 0);
}

bool sparse_case_sees_none(const struct sparse_case *c, int64_t request, int64_t token)
{
    for (int k = 0; k < S_CACHES; k++)
        for (int64_t i = 0; c->pool[k].topk && i < c->pool[k].count[request]; i++)
            if (sparse_pool_is_key(&c->pool[k], *sparse_case_entry(&c->pool[k], request, token, i)))
                return false;
    return true;
}

static void make_lengths(struct sparse_case *c, struct sparse_pool *pool, int64_t kind)
{
    pool->has_length = kind != S_LENGTHS_NONE;
    guarded_make(&pool->length, dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
    pool->count = calloc((size_t)c->b + 1, sizeof *pool->count);
    for (int64_t r = 0; r < c->b; r++) {
        int64_t length = pool->topk;
        if (kind == S_LENGTHS_VARIED)
            length = random_between(&c->random, 0, 3) ? random_between(&c->random, 0, pool->topk) : 0;
        if (kind == S_LENGTHS_ZERO) length = 0;
        if (kind == S_LENGTHS_BEYOND) length = r % 3 == 1 ? -7 : 2147483647 - r; /* to be clamped */
        *(int32_t *)guarded_at(&pool->length, r, 0, 0, 0) = (int32_t)length;
        pool->count[r] = length < 0 ? 0 : length > pool->topk ? pool->topk : length;
    }
}

static int32_t no_key(struct sparse_case *c, const struct sparse_pool *pool)
{
    const int32_t none[] = {-1, 2147480000, -2147483647 - 1, (int32_t)sparse_pool_slots(pool),
                            (int32_t)sparse_pool_slots(pool) + 3};
    return none[random_between(&c->random, 0, 4)];
}

/* A token's list: keys of its request in an order of its own, each once, and what else the case asks for. Entries that do
 * not count are sound indices, or none. */
static void make_list(struct sparse_case *c, struct sparse_pool *pool, int64_t request, int64_t token)
{
    static const int64_t steps[] = {1,   7,   61,
                                    101, 211, 509}; /* without a factor in common with any s_k but 1 */
    const int64_t first = request % APART * pool->s_k, step = steps[random_between(&c->random, 0, 5)];
    const int64_t modulus = pool->s_k ? pool->s_k : 1; /* without keys no index is used */
    const int64_t start = random_between(&c->random, 0, modulus - 1), kind = c->v[S_INDICES];
    for (int64_t i = 0; i < pool->topk; i++) {
        int64_t index = i < pool->s_k ? first + (start + i * step) % modulus : -1;
        const bool none =
            kind == S_INDICES_NONE || (kind == S_INDICES_SOME && !random_between(&c->random, 0, 7));
        if (kind == S_INDICES_TWICE && pool->s_k) index = first + (start + i / 2 * step) % modulus;
        if (i >= pool->count[request] && sparse_pool_slots(pool))
            index = random_between(&c->random, 0, sparse_pool_slots(pool) - 1);
        *sparse_case_entry(pool, request, token, i) = none || index < 0 ? no_key(c, pool) : (int32_t)index;
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
static void fill_cache(struct sparse_case *c, struct sparse_pool *pool)
{
    enum { NAMED = 1, BORDER = 2 };
    unsigned char *named = calloc((size_t)sparse_pool_slots(pool) + 1, 1);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t i = 0; i < pool->count[r]; i++) {
                const int32_t index = *sparse_case_entry(pool, r, j, i);
                if (!sparse_pool_is_key(pool, index)) continue;
                named[index] |= is_border(pool, r, i) ? NAMED | BORDER : NAMED;
            }
    for (int64_t slot = 0; slot < sparse_pool_slots(pool); slot++) {
        if (!named[slot]) continue;
        sparse_pool_put(pool, &c->random, c->v[S_CODES], slot,
                        c->v[S_INPUTS] == S_SPIKED && (named[slot] & BORDER));
        if (c->v[S_INPUTS] == S_INFINITE)
            sparse_pool_infinite(sparse_pool_end(pool, sparse_pool_token(pool, slot)),
                                 pool->format == KV_FP16, true, slot == pool->s_k / 2);
    }
    for (int64_t i = 0; c->v[S_CODES] == S_CODES_NAN && i < pool->count[0]; i++) {
        const int32_t index = *sparse_case_entry(pool, 0, 0, i); /* of the token that is always compared */
        if (!sparse_pool_is_key(pool, index)) continue;
        sparse_pool_put_nan(pool, &c->random, sparse_pool_token(pool, index),
                            sparse_pool_scales(pool, index));
        break;
    }
    free(named);
}

static void make_pool(struct sparse_case *c, int k, int64_t shape, int64_t lengths)
{
    struct sparse_pool *pool = &c->pool[k];
    const bool far = c->v[S_LAYOUT] == S_LAYOUT_FAR;
    const enum layout layout = far ? LAYOUT_CONTIGUOUS : (enum layout)c->v[S_LAYOUT];
    pool->format = c->format, pool->layout = c->layout, pool->d_qk = c->d_qk;
    int64_t sizes[3];
    sparse_shape_take(shape, sparse_shapes[0], 3, sizes);
    pool->s_k = sizes[0], pool->topk = sizes[1], pool->page_size = sizes[2];
    pool->pages = ((c->b < APART ? c->b : APART) * pool->s_k + pool->page_size - 1) / pool->page_size;
    guarded_make(&pool->indices, dtype_i32, 3, (int64_t[]){c->b, c->s_q, pool->topk}, layout);
    make_lengths(c, pool, lengths);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++) make_list(c, pool, r, j);
    sparse_pool_make(pool, &c->random, layout);
    fill_cache(c, pool);
    if (far) sparse_pool_spread(pool);
}

/* ---- The case -------------------------------------------------------------------------------- */

static void make_sink(struct sparse_case *c)
{
    guarded_make(&c->sink, dtype_f32, 1, &c->h_q, LAYOUT_CONTIGUOUS);
    for (int64_t h = 0; h < c->h_q; h++) {
        float sink = random_normal(&c->random) * 3.0f;
        if (c->v[S_SINK] == S_SINK_INFINITE && h % 3 < 2) sink = h % 3 ? INFINITY : -INFINITY;
        *(float *)guarded_at(&c->sink, h, 0, 0, 0) = sink;
    }
}

static void make_q(struct sparse_case *c)
{
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                uint8_t *row = guarded_at(&c->q, r, j, h, 0);
                memcpy(row, drawn_q[is_fp16(c)] + from_place(c), (size_t)c->d_qk * 2);
                if (c->v[S_INPUTS] == S_SPIKED) sparse_pool_spike(row + c->d_qk * 2, is_fp16(c));
                if (c->v[S_INPUTS] == S_INFINITE)
                    sparse_pool_infinite(row + c->d_qk * 2, is_fp16(c), false, (j + h) % 3 == 0);
                if (c->v[S_CODES] == S_CODES_BEYOND && c->layout.element == KV_ELEMENT_E4M3) {
                    memset(row + 2 * (c->d_qk - c->layout.rope), 0, 2); /* what the large rope value meets */
                    if (r % 4 == 3 && h % 61 == 60 && !is_fp16(c))
                        memcpy(row, &(uint16_t){SPARSE_LARGE_BF16}, sizeof(uint16_t));
                }
            }
}

void sparse_case_make(struct sparse_case *c, const struct run *run, const int64_t v[S_AXES], uint64_t seed)
{
    static const enum kv_format formats[S_FORMATS] = {KV_BF16,    KV_BF16, KV_FP8_656,
                                                      KV_FP8_584, KV_FP16, KV_FP8_656};
    static const int32_t names[S_FORMATS] = {
        0, FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP16, FMLA_KV_FP8_656};
    memset(c, 0, sizeof *c);
    memcpy(c->v, v, sizeof c->v);
    c->random.state = seed, c->device = run->device;
    c->b = v[S_B], c->s_q = v[S_SQ], c->h_q = v[S_HQ];
    c->d_qk = v[S_FORMAT] == S_BF16_512 || v[S_FORMAT] == S_FP8_584 ? 512 : 576;
    c->format = formats[v[S_FORMAT]];
    c->layout = kv_layout_of(c->format, (int32_t)c->d_qk);
    const fmla_dtype dtype = is_fp16(c) ? dtype_fp16 : dtype_bf16;
    const enum layout layout = v[S_LAYOUT] == S_LAYOUT_FAR ? LAYOUT_CONTIGUOUS : (enum layout)v[S_LAYOUT];
    guarded_make(&c->q, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, c->d_qk}, layout);
    guarded_make(&c->out, dtype, 4, (int64_t[]){c->b, c->s_q, c->h_q, S_D_V}, layout);
    guarded_make(&c->lse, dtype_f32, 3, (int64_t[]){c->b, c->h_q, c->s_q}, layout);
    make_q(c);
    make_pool(c, 0, v[S_SHAPE], v[S_LENGTHS]);
    if (v[S_EXTRA]) make_pool(c, 1, v[S_EXTRA] - 1, v[S_EXTRA_LENGTHS]);

    fmla_sparse_decode_args *args = &c->args;
    *args = FMLA_INIT(fmla_sparse_decode_args);
    args->q = &c->q.tensor, args->kv_cache = &c->pool[0].view, args->indices = &c->pool[0].indices.tensor;
    args->topk_length = c->pool[0].has_length ? &c->pool[0].length.tensor : NULL;
    if (v[S_EXTRA]) {
        args->extra_kv_cache = &c->pool[1].view, args->extra_indices = &c->pool[1].indices.tensor;
        args->extra_topk_length = c->pool[1].has_length ? &c->pool[1].length.tensor : NULL;
    }
    args->out = &c->out.tensor, args->lse = v[S_LSE] ? &c->lse.tensor : NULL;
    if (v[S_SINK] != S_SINK_NONE) {
        make_sink(c);
        args->attn_sink = &c->sink.tensor;
    }
    args->kernel = forced_kernel(run);
    args->kv_format = names[v[S_FORMAT]];
    args->softmax_scale = v[S_INPUTS] == S_SPIKED   ? 0.5f
                          : v[S_INPUTS] == S_STEEP  ? 60.0f
                          : v[S_INPUTS] == S_BEYOND ? 3e38f
                                                    : (float)pow((double)c->d_qk, -0.55);
    args->lse_empty = (int32_t)v[S_EMPTY], args->log_base = (int32_t)v[S_BASE];
    args->batch_invariant = (int32_t)v[S_INVARIANT];
    args->num_partitions = (int32_t)v[S_PARTITIONS];
}

void sparse_case_leave_one(struct sparse_case *c)
{
    for (int64_t r = 0; r < c->b; r++) {
        if (c->pool[0].count[r] <= 1) continue;
        c->pool[0].count[r] = 1;
        *(int32_t *)guarded_at(&c->pool[0].length, r, 0, 0, 0) = 1;
    }
}

void sparse_case_free(struct sparse_case *c)
{
    device_free(&c->blocks);
    for (int k = 0; k < S_CACHES; k++) {
        sparse_pool_free(&c->pool[k]);
    }
    struct guarded *all[] = {&c->q, &c->sink, &c->out, &c->lse, &c->partitions, &c->num_splits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) guarded_free(all[i]);
    free(c->plan);
}

/* ---- Plan and call --------------------------------------------------------------------------- */

static void *aligned_bytes(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory) exit(1);
    return memory;
}

static bool holds(const struct guarded *guarded, const void *bytes)
{
    return !memcmp(guarded->memory + GUARDED_FRONT, bytes, guarded->bytes) && guarded_intact(guarded);
}

/* The plan that the device makes of these lengths; is it the host's, bit by bit? The case has a copy of that there from now
 * on. `args` are the host's but for the lengths, which are those of `lengths` on the device. */
static fmla_status plan_on_device(struct sparse_case *c, fmla_decode_plan_args args,
                                  const struct guarded lengths[S_CACHES], bool *same)
{
    struct device_blocks blocks = {0};
    struct device_scratch plan;
    fmla_tensor tensor[S_CACHES];
    const fmla_tensor **to[S_CACHES] = {&args.topk_length, &args.extra_topk_length};
    for (int k = 0; k < S_CACHES; k++) {
        if (!*to[k]) continue;
        device_add_guarded(&blocks, &lengths[k]);
        *to[k] = device_tensor(&blocks, *to[k], &tensor[k]);
    }
    device_scratch_make(&plan, args.plan_size, 0xa7);
    args.target = c->device, args.plan = plan.memory;
    args.num_partitions = (int32_t)c->v[S_PARTITIONS];
    const fmla_status status = fmla_decode_plan(&args);
    if (!status) {
        device_wait(NULL);
        *same = device_scratch_is(&plan, c->plan) && device_scratch_intact(&plan);
    }
    device_free(&blocks), device_scratch_free(&plan);
    device_add(&c->blocks, c->plan, args.plan_size);
    return status;
}

fmla_status sparse_case_plan(struct sparse_case *c, bool *same)
{
    struct guarded other[S_CACHES] = {0};
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    const bool stale = c->v[S_PLAN] == S_PLAN_STALE;
    const fmla_tensor *lengths[S_CACHES] = {NULL, NULL};
    for (int k = 0; k < S_CACHES; k++) {
        const struct sparse_pool *pool = &c->pool[k];
        if (!sparse_pool_given(pool) || (!stale && !pool->has_length)) continue;
        guarded_make(&other[k], dtype_i32, 1, &c->b, LAYOUT_CONTIGUOUS);
        for (int64_t r = 0; r < c->b; r++)
            *(int32_t *)guarded_at(&other[k], r, 0, 0, 0) =
                stale ? (int32_t)random_between(&c->random, 0, pool->topk)
                      : *(const int32_t *)guarded_at(&pool->length, r, 0, 0, 0);
        lengths[k] = &other[k].tensor;
    }
    args.sparse = 1, args.b = (int32_t)c->b, args.s_q = c->s_q, args.h_q = c->h_q;
    args.topk = c->pool[0].topk, args.extra_topk = c->pool[1].topk;
    args.topk_length = lengths[0], args.extra_topk_length = lengths[1];
    args.num_partitions = (int32_t)c->v[S_PARTITIONS];
    const bool apart = is_apart(c->device);
    fmla_status status = FMLA_OK;
    if (apart) { /* its number of partitions; the plan is made on the host all the same */
        args.target = c->device;
        status = fmla_decode_plan_partitions(&args, &args.num_partitions);
        args.target = (fmla_device){0, 0};
    }
    if (!status) status = fmla_decode_plan_size(&args, &args.plan_size);
    c->plan = args.plan = aligned_bytes(args.plan_size);
    if (!status) status = fmla_decode_plan(&args);
    c->args.plan = c->plan, c->args.plan_size = args.plan_size;

    fmla_plan_view view = FMLA_INIT(fmla_plan_view);
    if (!status) status = fmla_plan_describe(args.plan, args.plan_size, &view);
    if (!status) {
        guarded_make(&c->partitions, dtype_i32, 2, (int64_t[]){view.num_partitions, FMLA_PARTITION_FIELDS},
                     LAYOUT_CONTIGUOUS);
        guarded_make(&c->num_splits, dtype_i32, 1, (int64_t[]){c->b + 1}, LAYOUT_CONTIGUOUS);
        args.plan = NULL, args.plan_size = 0;
        args.partitions = &c->partitions.tensor, args.num_splits = &c->num_splits.tensor;
        status = fmla_decode_plan(&args);
        *same = status || (holds(&c->partitions, view.partitions) && holds(&c->num_splits, view.num_splits));
    }
    if (apart && !status) {
        bool same_there = true;
        args.partitions = args.num_splits = NULL, args.plan_size = c->args.plan_size;
        status = plan_on_device(c, args, other, &same_there);
        *same &= same_there;
    }
    for (int k = 0; k < S_CACHES; k++) guarded_free(&other[k]);
    return status;
}

void sparse_case_use_tables(struct sparse_case *c)
{
    if (!c->args.plan) return;
    c->args.plan = NULL;
    c->args.partitions = &c->partitions.tensor, c->args.num_splits = &c->num_splits.tensor;
}

fmla_status sparse_case_call(fmla_sparse_decode_args *args, int fill)
{
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_sparse_decode_workspace_size(args, &bytes, &alignment);
    if (status) return status;
    char *memory = aligned_bytes(bytes + 64);
    memset(memory, fill, bytes);
    memset(memory + bytes, 0x5a, 64);
    args->workspace = memory, args->workspace_size = bytes;
    status = fmla_sparse_decode(args);
    for (int i = 0; i < 64; i++)
        if (memory[bytes + (size_t)i] != 0x5a) {
            fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
            exit(1);
        }
    free(memory);
    return status;
}

/* ---- On a device ----------------------------------------------------------------------------- */

static void add_to_device(struct sparse_case *c, const struct guarded *guarded,
                          const struct sparse_case *like)
{
    if (like && guarded->memory)
        device_add_in_place(&c->blocks, guarded->memory, guarded->whole, &like->blocks);
    else
        device_add_guarded(&c->blocks, guarded);
}

void sparse_case_to_device(struct sparse_case *c, const struct sparse_case *like)
{
    if (!is_apart(c->device)) return;
    struct guarded *all[] = {&c->q, &c->sink, &c->out, &c->lse, &c->partitions, &c->num_splits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) add_to_device(c, all[i], like);
    for (int k = 0; k < S_CACHES; k++) {
        struct sparse_pool *pool = &c->pool[k];
        if (!sparse_pool_given(pool)) continue;
        add_to_device(c, &pool->indices, like), add_to_device(c, &pool->length, like);
        add_to_device(c, &pool->memory, like);
        if (!pool->far) continue;
        device_add_zeros(&c->blocks, pool->far, pool->far_bytes);
        const int64_t between = pool->strides[0] * (c->layout.element == KV_ELEMENT_E4M3 ? 1 : 2);
        for (int64_t page = 0; page < pool->pages; page++)
            device_up_part(&c->blocks, (const uint8_t *)pool->view.data + page * between,
                           (size_t)pool->page_bytes);
    }
}

void sparse_case_from_device(struct sparse_case *c)
{
    for (int i = 0; i < c->blocks.count; i++) {
        const void *host = c->blocks.block[i].host;
        if (host != c->pool[0].far && host != c->pool[1].far) device_down(&c->blocks, host);
    }
}

fmla_status sparse_case_run(const struct sparse_case *c, fmla_sparse_decode_args *args, int fill)
{
    return is_apart(c->device) ? device_sparse_call(&c->blocks, args, fill) : sparse_case_call(args, fill);
}

fmla_status sparse_case_kernel(const struct sparse_case *c, const char **name)
{
    struct device_sparse_args on_device;
    if (!is_apart(c->device)) return fmla_sparse_decode_kernel(&c->args, name);
    device_sparse_args_make(&on_device, &c->blocks, &c->args);
    return fmla_sparse_decode_kernel(&on_device.args, name);
}

bool sparse_case_taken(const struct sparse_case *c, const struct run *run)
{
    if (strncmp(run->kernel, "cuda-sm90", 9) != 0) return true;
    if (c->v[S_LAYOUT] == LAYOUT_ODD || c->v[S_FORMAT] == S_FP8_656_Q16) return false;
    const int64_t size = c->layout.element == KV_ELEMENT_E4M3 ? 1 : 2;
    for (int k = 0; k < S_CACHES;
         k++) /* FP8_584: the bytes of a page are 8 times anything; far pages are not */
        if (sparse_pool_given(&c->pool[k]) && c->pool[k].pages > 1 && c->pool[k].strides[0] * size % 16)
            return false;
    return true;
}

void sparse_case_refused(struct sparse_case *c, const struct run *run, struct tally *tally)
{
    const char *kernel;
    sparse_case_to_device(c, NULL);
    const fmla_status status = sparse_case_kernel(c, &kernel);
    if (status != FMLA_UNSUPPORTED || !strstr(fmla_last_error(), run->kernel))
        report(tally, run, c->name, "the kernel should refuse this case, by its name");
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* What requests and rows have in common; indices are still to be set. */
static void make_view(const struct sparse_case *c, int64_t request, struct sparse_view *v)
{
    memset(v, 0, sizeof *v);
    v->args = c->args;
    v->args.plan = NULL, v->args.partitions = v->args.num_splits = NULL;
    v->q = c->q.tensor, v->sink = c->sink.tensor;
    v->q_shape[0] = 1, v->q_shape[1] = c->s_q, v->q_shape[2] = c->h_q, v->q_shape[3] = c->d_qk;
    memcpy(v->q_strides, c->q.strides, sizeof v->q_strides);
    v->q.shape = v->q_shape, v->q.strides = v->q_strides;
    v->q.data = guarded_at(&c->q, request, 0, 0, 0), v->q.byte_offset = 0;
    v->args.q = &v->q;
    v->length_shape[0] = 1;
    for (int k = 0; k < S_CACHES; k++) {
        const struct sparse_pool *pool = &c->pool[k];
        if (!sparse_pool_given(pool)) continue;
        v->kv[k] = pool->view;
        v->count[k] = (int32_t)pool->count[request];
        v->length[k] =
            (fmla_tensor){&v->count[k], {FMLA_DEVICE_CPU, 0}, 1, dtype_i32, v->length_shape, NULL, 0};
        v->indices[k] = pool->indices.tensor;
        v->indices[k].shape = v->indices_shape[k], v->indices[k].byte_offset = 0;
    }
    v->args.kv_cache = &v->kv[0], v->args.indices = &v->indices[0], v->args.topk_length = &v->length[0];
    if (sparse_pool_given(&c->pool[1]))
        v->args.extra_kv_cache = &v->kv[1], v->args.extra_indices = &v->indices[1],
        v->args.extra_topk_length = &v->length[1];
}

size_t sparse_case_request(const struct sparse_case *c, int64_t request, int64_t more, struct sparse_view *v,
                           int32_t **memory)
{
    make_view(c, request, v);
    int64_t entries = 0;
    for (int k = 0; k < S_CACHES; k++)
        entries += c->s_q * (c->pool[k].count ? c->pool[k].count[request] + more : 0);
    int32_t *at = *memory = calloc((size_t)entries + 1, sizeof *at); /* what does not count is key 0 */
    for (int k = 0; k < S_CACHES; k++) {
        if (!sparse_pool_given(&c->pool[k])) continue;
        const int64_t count = c->pool[k].count[request];
        v->indices_shape[k][0] = 1, v->indices_shape[k][1] = c->s_q, v->indices_shape[k][2] = count + more;
        v->indices[k].data = at, v->indices[k].strides = NULL;
        for (int64_t j = 0; j < c->s_q; j++, at += count + more)
            if (count) memcpy(at, sparse_case_entry(&c->pool[k], request, j, 0), (size_t)count * sizeof *at);
    }
    return ((size_t)entries + 1) * sizeof *at;
}

fmla_status sparse_case_rows(const struct sparse_case *c, const char *kernel, int64_t request, int64_t token,
                             int64_t head, int64_t step, int64_t heads, uint16_t *out, float *lse)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const int64_t out_shape[4] = {1, 1, heads, S_D_V}, lse_shape[3] = {1, heads, 1};
    const fmla_tensor out_tensor = {out, cpu, 4, c->q.tensor.dtype, out_shape, NULL, 0};
    const fmla_tensor lse_tensor = {lse, cpu, 3, dtype_f32, lse_shape, NULL, 0};
    struct sparse_view v;
    make_view(c, request, &v);
    v.q.data = guarded_at(&c->q, request, token, head, 0);
    v.q_shape[1] = 1, v.q_shape[2] = heads, v.q_strides[2] *= step;
    for (int k = 0; k < S_CACHES; k++) {
        if (!sparse_pool_given(&c->pool[k])) continue;
        v.indices_shape[k][0] = v.indices_shape[k][1] = 1, v.indices_shape[k][2] = c->pool[k].topk;
        v.indices[k].data = sparse_case_entry(&c->pool[k], request, token, 0);
        /* Rows are taken from pages where they were made, so that no kernel and oracle share a defect of far ones. */
        if (!c->pool[k].far) continue;
        v.kv[k].data = c->pool[k].memory.tensor.data;
        v.kv[k].strides = NULL;
    }
    if (c->args.attn_sink) {
        for (int64_t i = 0; i < heads; i++)
            v.sinks[i] = *(const float *)guarded_at(&c->sink, head + i * step, 0, 0, 0);
        v.sink_shape[0] = heads;
        v.sink.data = v.sinks, v.sink.byte_offset = 0, v.sink.shape = v.sink_shape;
        v.args.attn_sink = &v.sink;
    }
    v.args.out = &out_tensor, v.args.lse = &lse_tensor;
    v.args.kernel = kernel, v.args.batch_invariant = 0, v.args.num_partitions = 0;
    return sparse_case_call(&v.args, 0xff);
}
