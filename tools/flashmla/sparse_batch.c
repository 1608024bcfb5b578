/* SPDX-License-Identifier: MIT */
#include "sparse_batch.h"

#include "batch.h"

#include "elements.h"
#include "tokens.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool sparse_is_bytes(int32_t format)
{
    return format == FMLA_KV_FP8_656 || format == FMLA_KV_FP8_584;
}

/* Elements of a token as the tensor's last dimension has them. */
static int64_t token_size(const struct sparse_shape *s)
{
    return sparse_is_bytes(s->format) ? tokens_size(s->format) : s->d_qk;
}

static fmla_dtype type_of(const struct sparse_shape *s)
{
    return dtype_of(s->format == FMLA_KV_FP16 ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
}

double sparse_batch_bytes(const struct sparse_shape *s)
{
    double bytes = 2.0 * (double)(s->b * s->s_q * s->h_q) * (double)(s->d_qk + SPARSE_D_V);
    for (int k = 0; k < SPARSE_CACHES; k++) {
        const double slots = (double)s->b * ((double)s->cache[k].s_k + (double)s->cache[k].page_size);
        bytes += slots * (double)token_size(s) * (sparse_is_bytes(s->format) ? 1.0 : 2.0);
        bytes += 4.0 * (double)(s->b * s->s_q) * (double)s->cache[k].topk;
    }
    return bytes;
}

fmla_tensor sparse_tensor(fmla_dtype dtype, int32_t ndim, const int64_t *shape, size_t *size)
{
    size_t bytes = dtype.bits / 8;
    bool fits = true;
    for (int i = 0; i < ndim; i++) fits = !__builtin_mul_overflow(bytes, (size_t)shape[i], &bytes) && fits;
    /* Where memory is promised freely, what is larger than all of it would be granted, and the process ended later. */
    fits = fits && bytes / (size_t)sysconf(_SC_PAGESIZE) < (size_t)sysconf(_SC_PHYS_PAGES);
    if (size) *size = fits ? bytes : SIZE_MAX;
    return (fmla_tensor){.data = fits ? aligned_alloc(64, bytes / 64 * 64 + 64) : NULL,
                         .device = {FMLA_DEVICE_CPU, 0},
                         .ndim = ndim,
                         .dtype = dtype,
                         .shape = shape};
}

/* Quantised tokens are drawn once and copied, as drawing each would take longer than computing with it. */
void sparse_fill_bytes(int32_t format, float mean, const fmla_tensor *cache, struct random_state *random)
{
    enum { TOKENS = 512 };
    static uint8_t tokens[TOKENS][TOKENS_BYTES];
    const int64_t slots = cache->shape[0] * cache->shape[1], page_size = cache->shape[1];
    float values[TOKENS_WIDTH] = {0};
    for (int t = 0; t < TOKENS; t++) {
        for (int d = 0; d < TOKENS_WIDTH; d++) values[d] = random_input(random, mean, 0.1f);
        tokens_store(format, tokens[t], 1, 0, values);
    }
    for (int64_t i = 0; i < slots; i++)
        tokens_copy(format, (uint8_t *)cache->data + i / page_size * page_size * cache->shape[3], page_size,
                    i % page_size, tokens[random_u64(random) % TOKENS]);
}

/* A token's list: keys of its request, each once, in any order; what is more than those names none. */
static void draw_list(const struct sparse_shape *s, const struct sparse_cache_shape *c, const int32_t *table,
                      int64_t pages, int32_t *order, int32_t *list, struct random_state *random)
{
    const int32_t none[] = {-1, (int32_t)(pages * c->page_size), 2147480000};
    for (int64_t i = 0; i < c->topk; i++) {
        list[i] = none[i % 3];
        if (i >= c->s_k || (s->holes && !random_between(random, 0, 7))) continue;
        const int64_t j = random_between(random, i, c->s_k - 1);
        const int32_t key = order[j];
        order[j] = order[i], order[i] = key;
        list[i] = (int32_t)(table[key / c->page_size] * c->page_size + key % c->page_size);
    }
}

static bool make_lists(const struct sparse_shape *s, const struct sparse_cache_shape *c,
                       const struct pages *pages, struct sparse_cache_memory *to, struct random_state *random)
{
    int32_t *order = malloc((size_t)(c->s_k + 1) * sizeof *order);
    if (!order) return false;
    for (int64_t i = 0; i < c->s_k; i++) order[i] = (int32_t)i;
    for (int64_t t = 0; t < s->b * s->s_q; t++)
        draw_list(s, c, pages->block_table + t / s->s_q * pages->max_pages, pages->count, order,
                  (int32_t *)to->indices.data + t * c->topk, random);
    for (int64_t r = 0; r < s->b; r++)
        ((int32_t *)to->length.data)[r] = (int32_t)random_between(random, 0, c->topk);
    free(order);
    return true;
}

bool sparse_no_indices(const fmla_tensor *indices, struct fault *fault)
{
    const int64_t *n = indices->shape;
    return fault_set(fault, "no memory for indices [%lld, %lld, %lld] of %.0f bytes", (long long)n[0],
                     (long long)n[1], (long long)n[2], 4.0 * (double)n[0] * (double)n[1] * (double)n[2]);
}

static bool make_cache(struct sparse_batch *batch, int k, const struct sparse_shape *s,
                       struct random_state *random, struct fault *fault)
{
    const struct sparse_cache_shape *c = &s->cache[k];
    struct sparse_cache_memory *to = &batch->cache[k];
    const fmla_dtype int32 = dtype_of(FMLA_TYPE_INT, 32);
    struct pages pages = {.page_size = c->page_size};
    const int64_t of_request = (c->s_k + c->page_size - 1) / c->page_size * c->page_size;
    const double slots = (double)s->b * (double)of_request;
    if (slots > INT32_MAX) return fault_set(fault, "a cache of %.0f slots is more than indices count", slots);
    int32_t *lengths = malloc((size_t)(s->b + 1) * sizeof *lengths);
    if (!lengths) return fault_set(fault, "no memory for the lengths");
    for (int64_t r = 0; r < s->b; r++) lengths[r] = (int32_t)c->s_k;
    bool good = pages_deal(&pages, lengths, s->b, random, fault);
    free(lengths);
    if (good) {
        const int64_t cache[4] = {pages.count, c->page_size, 1, token_size(s)},
                      lists[3] = {s->b, s->s_q, c->topk};
        memcpy(to->cache_shape, cache, sizeof cache), memcpy(to->indices_shape, lists, sizeof lists);
        to->cache = sparse_tensor(sparse_is_bytes(s->format) ? dtype_of(FMLA_TYPE_UINT, 8) : type_of(s), 4,
                                  to->cache_shape, &to->cache_bytes);
        to->indices = sparse_tensor(int32, 3, to->indices_shape, &to->indices_bytes);
        to->length = sparse_tensor(int32, 1, batch->b, NULL);
        good = !to->indices.data
                   ? sparse_no_indices(&to->indices, fault)
                   : (to->cache.data && to->length.data && make_lists(s, c, &pages, to, random)) ||
                         fault_set(fault, "no memory for a cache of %zu bytes", to->cache_bytes);
    }
    if (good && sparse_is_bytes(s->format))
        sparse_fill_bytes(s->format, 0.0f, &to->cache, random);
    else if (good)
        batch_fill(to->cache.data, to->cache.dtype, pages.count * c->page_size * s->d_qk, s->d_qk, random);
    pages_free(&pages);
    return good;
}

static void fill_q(const fmla_tensor *q, int64_t count, struct random_state *random)
{
    for (int64_t i = 0; i < count; i++) element_store(q->data, q->dtype, i, random_input(random, 0.0f, 1.0f));
}

static void make_args(struct sparse_batch *batch, const struct sparse_shape *s)
{
    fmla_sparse_decode_args *args = &batch->args;
    *args = FMLA_INIT(fmla_sparse_decode_args);
    args->q = &batch->q, args->kv_cache = &batch->cache[0].cache, args->indices = &batch->cache[0].indices;
    if (s->varlen) args->topk_length = &batch->cache[0].length;
    if (s->cache[1].page_size) {
        args->extra_kv_cache = &batch->cache[1].cache, args->extra_indices = &batch->cache[1].indices;
        if (s->varlen || s->extra_varlen) args->extra_topk_length = &batch->cache[1].length;
    }
    if (s->sink) args->attn_sink = &batch->sink;
    args->out = &batch->out, args->lse = &batch->lse;
    args->kv_format = s->format;
}

bool sparse_batch_make(struct sparse_batch *batch, const struct sparse_shape *s, struct fault *fault)
{
    struct random_state random = {s->seed + 2025};
    memset(batch, 0, sizeof *batch);
    const int64_t q[4] = {s->b, s->s_q, s->h_q, s->d_qk}, out[4] = {s->b, s->s_q, s->h_q, SPARSE_D_V};
    const int64_t lse[3] = {s->b, s->h_q, s->s_q};
    memcpy(batch->q_shape, q, sizeof q), memcpy(batch->out_shape, out, sizeof out);
    memcpy(batch->lse_shape, lse, sizeof lse);
    batch->b[0] = s->b, batch->h_q[0] = s->h_q;
    size_t out_bytes, lse_bytes;
    batch->q = sparse_tensor(type_of(s), 4, batch->q_shape, NULL);
    batch->out = sparse_tensor(type_of(s), 4, batch->out_shape, &out_bytes);
    batch->lse = sparse_tensor(dtype_of(FMLA_TYPE_FLOAT, 32), 3, batch->lse_shape, &lse_bytes);
    batch->sink = sparse_tensor(dtype_of(FMLA_TYPE_FLOAT, 32), 1, batch->h_q, NULL);
    if (!batch->q.data || !batch->out.data || !batch->lse.data || !batch->sink.data)
        return fault_set(fault, "no memory for %zu bytes of results", out_bytes);
    for (int k = 0; k < SPARSE_CACHES; k++)
        if (s->cache[k].page_size && !make_cache(batch, k, s, &random, fault)) return false;
    fill_q(&batch->q, s->b * s->s_q * s->h_q * s->d_qk, &random);
    for (int64_t h = 0; h < s->h_q; h++) ((float *)batch->sink.data)[h] = random_normal(&random);
    memset(batch->out.data, 0xff, out_bytes); /* what a kernel fails to write must not pass */
    memset(batch->lse.data, 0xff, lse_bytes);
    make_args(batch, s);
    return true;
}

void sparse_batch_free(struct sparse_batch *batch)
{
    free(batch->q.data), free(batch->out.data), free(batch->lse.data), free(batch->sink.data);
    for (int k = 0; k < SPARSE_CACHES; k++)
        free(batch->cache[k].cache.data), free(batch->cache[k].indices.data),
            free(batch->cache[k].length.data);
    free(batch->args.workspace);
    memset(batch, 0, sizeof *batch);
}

/* ---- A call ---------------------------------------------------------------------------------- */

fmla_status sparse_call_workspace(fmla_sparse_decode_args *args)
{
    size_t bytes = 0, alignment = 1;
    args->workspace = NULL, args->workspace_size = 0;
    const fmla_status status = fmla_sparse_decode_workspace_size(args, &bytes, &alignment);
    if (status != FMLA_OK) return status;
    const size_t unit = alignment > sizeof(void *) ? alignment : sizeof(void *);
    args->workspace = aligned_alloc(unit, (bytes / unit + 1) * unit);
    args->workspace_size = bytes;
    return FMLA_OK;
}

bool sparse_is_key(const fmla_tensor *cache, int32_t index)
{
    return index >= 0 && index < cache->shape[0] * cache->shape[1];
}

int64_t sparse_count(const fmla_tensor *indices, const fmla_tensor *length, int64_t request)
{
    if (!indices) return 0;
    const int64_t topk = indices->shape[2];
    const int64_t count = length ? ((const int32_t *)length->data)[request] : topk;
    return count < 0 ? 0 : count > topk ? topk : count;
}

struct sparse_work sparse_work(const fmla_sparse_decode_args *args)
{
    const int64_t *q = args->q->shape;
    const fmla_tensor *caches[] = {args->kv_cache, args->extra_kv_cache};
    const fmla_tensor *lists[] = {args->indices, args->extra_indices};
    const fmla_tensor *lengths[] = {args->topk_length, args->extra_topk_length};
    const double row = (double)(q[3] + args->out->shape[3]);
    struct sparse_work work = {0};
    for (int k = 0; k < SPARSE_CACHES; k++)
        for (int64_t t = 0; lists[k] && t < q[0] * q[1]; t++) {
            const int32_t *list = (const int32_t *)lists[k]->data + t * lists[k]->shape[2];
            const int64_t count = sparse_count(lists[k], lengths[k], t / q[1]);
            for (int64_t i = 0; i < count; i++) work.keys += sparse_is_key(caches[k], list[i]);
        }
    work.flop = 2.0 * work.keys * (double)q[2] * row;
    const int64_t token_bytes = args->kv_cache->shape[3] * (args->kv_cache->dtype.bits / 8);
    work.bytes = work.keys * (double)token_bytes + 2.0 * (double)(q[0] * q[1] * q[2]) * row;
    return work;
}
