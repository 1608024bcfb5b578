/* SPDX-License-Identifier: MIT */
#include "batch.h"

#include "elements.h"

#include <stdlib.h>
#include <string.h>

enum { POOL = 1 << 17, LONGEST = 4096 };

void batch_fill_around(float mean, void *to, fmla_dtype dtype, int64_t count, int64_t length,
                       struct random_state *random)
{
    static float pool[POOL]; /* as large as the widest type asks */
    const int64_t bytes = dtype.bits / 8;
    for (int i = 0; i < POOL; i++) element_store(pool, dtype, i, random_input(random, mean, 0.1f));
    for (int64_t done = 0; done < count; done += length) {
        const int64_t now = count - done < length ? count - done : length;
        const int64_t from = random_between(random, 0, POOL - LONGEST);
        memcpy((char *)to + done * bytes, (const char *)pool + from * bytes, (size_t)(now * bytes));
    }
}

void batch_fill(void *to, fmla_dtype dtype, int64_t count, int64_t length, struct random_state *random)
{
    batch_fill_around(0.0f, to, dtype, count, length, random);
}

double batch_bytes(const struct batch_shape *s)
{
    const double keys = (double)s->b * ((double)s->s_k + (double)s->page_size);
    return 2.0 * (keys * (double)s->h_kv * (double)s->d_qk +
                  (double)s->b * (double)s->s_q * (double)s->h_q * (double)(s->d_qk + BATCH_D_V));
}

void batch_fixed_lengths(const int32_t *lengths, int64_t b, int32_t *fixed)
{
    int64_t keys = 0;
    for (int64_t r = 0; r < b; r++) keys += lengths[r];
    for (int64_t r = 0; r < b; r++) fixed[r] = (int32_t)(keys / b + (r < keys % b));
}

static bool make_lengths(struct batch *batch, const struct batch_shape *s, struct random_state *random)
{
    batch->lengths = malloc((size_t)(s->b + 1) * sizeof *batch->lengths);
    if (!batch->lengths) return false;
    for (int64_t r = 0; r < s->b; r++) {
        double length = (double)s->s_k;
        if (s->varlen) length += 0.5 * length * (double)random_normal(random);
        if (length < (double)s->s_q) length = (double)s->s_q;
        if (length > 2.0 * (double)s->s_k) length = 2.0 * (double)s->s_k;
        batch->lengths[r] = s->lengths ? s->lengths[r] : (int32_t)(s->varlen ? length : (double)s->s_k);
    }
    return true;
}

static fmla_tensor tensor(void *data, fmla_dtype dtype, int32_t ndim, const int64_t *shape)
{
    return (fmla_tensor){
        .data = data, .device = {FMLA_DEVICE_CPU, 0}, .ndim = ndim, .dtype = dtype, .shape = shape};
}

static void make_args(struct batch *batch, const struct batch_shape *s)
{
    const fmla_dtype type = dtype_of(s->fp16 ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    const fmla_dtype int32 = dtype_of(FMLA_TYPE_INT, 32), fp32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    batch->q = tensor(batch->memory[0], type, 4, batch->q_shape);
    batch->cache = tensor(batch->memory[1], type, 4, batch->cache_shape);
    batch->out = tensor(batch->memory[2], type, 4, batch->out_shape);
    batch->lse = tensor(batch->memory[3], fp32, 3, batch->lse_shape);
    batch->table = tensor(batch->pages.block_table, int32, 2, batch->table_shape);
    batch->seqlens = tensor(batch->lengths, int32, 1, batch->b);
    batch->sink = tensor(batch->sink_values, fp32, 1, batch->h_q);
    batch->args = FMLA_INIT(fmla_dense_decode_args);
    batch->args.q = &batch->q, batch->args.kv_cache = &batch->cache, batch->args.seqlens = &batch->seqlens;
    batch->args.out = &batch->out, batch->args.lse = &batch->lse, batch->args.causal = s->causal;
    if (!s->contiguous) batch->args.block_table = &batch->table;
    if (s->sink) batch->args.attn_sink = &batch->sink;
}

bool batch_make(struct batch *batch, const struct batch_shape *s, struct fault *fault)
{
    struct random_state random = {2025};
    memset(batch, 0, sizeof *batch);
    batch->pages.page_size = s->page_size;
    if (!make_lengths(batch, s, &random)) return fault_set(fault, "no memory for the lengths");
    if (!s->contiguous && !pages_deal(&batch->pages, batch->lengths, s->b, &random, fault)) return false;
    const int64_t pages = s->contiguous ? s->b : batch->pages.count;
    const int64_t page_size = s->contiguous ? s->s_k : s->page_size;
    const int64_t q_shape[4] = {s->b, s->s_q, s->h_q, s->d_qk};
    const int64_t cache_shape[4] = {pages, page_size, s->h_kv, s->d_qk};
    const int64_t out_shape[4] = {s->b, s->s_q, s->h_q, BATCH_D_V};
    const int64_t lse_shape[3] = {s->b, s->h_q, s->s_q};
    memcpy(batch->q_shape, q_shape, sizeof q_shape);
    memcpy(batch->cache_shape, cache_shape, sizeof cache_shape);
    memcpy(batch->out_shape, out_shape, sizeof out_shape);
    memcpy(batch->lse_shape, lse_shape, sizeof lse_shape);
    batch->table_shape[0] = s->b, batch->table_shape[1] = batch->pages.max_pages;
    batch->b[0] = s->b, batch->h_q[0] = s->h_q;

    const int64_t rows = s->b * s->s_q * s->h_q, slots = pages * page_size * s->h_kv;
    const int64_t bytes[4] = {rows * s->d_qk * 2, slots * s->d_qk * 2, rows * BATCH_D_V * 2,
                              rows * (int64_t)sizeof(float)};
    for (int i = 0; i < 4; i++) { /* lines of 64 bytes, one more so that nothing is empty */
        batch->memory[i] = aligned_alloc(64, (size_t)(bytes[i] / 64 + 1) * 64);
        if (!batch->memory[i])
            return fault_set(fault, "no memory for a tensor of %lld bytes", (long long)bytes[i]);
    }
    batch->sink_values = malloc((size_t)s->h_q * sizeof *batch->sink_values);
    if (!batch->sink_values) return fault_set(fault, "no memory for attn_sink");
    make_args(batch, s);
    batch_fill(batch->memory[0], batch->q.dtype, rows * s->d_qk, s->d_qk, &random);
    batch_fill(batch->memory[1], batch->q.dtype, slots * s->d_qk, s->d_qk, &random);
    batch_fill(batch->sink_values, batch->sink.dtype, s->h_q, LONGEST, &random);
    memset(batch->memory[2], 0, (size_t)bytes[2]);
    memset(batch->memory[3], 0, (size_t)bytes[3]);
    return true;
}

void batch_free(struct batch *batch)
{
    for (int i = 0; i < 4; i++) free(batch->memory[i]);
    free(batch->args.workspace), free(batch->lengths), free(batch->sink_values);
    pages_free(&batch->pages);
    memset(batch, 0, sizeof *batch);
}
