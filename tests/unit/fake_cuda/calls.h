/* SPDX-License-Identifier: MIT
 *
 * Calls on tensors of a GPU that is not there: their memory is the test's own, and nobody touches it.
 */
#ifndef FMLA_FAKE_CALLS_H
#define FMLA_FAKE_CALLS_H

#include "scenarios.h"

#include "cuda/params.h"

enum { MEMORY = 1 << 20 };

static _Alignas(4096) char memory[8][MEMORY];

struct decode_call {
    fmla_dense_decode_args args;
    struct held q, kv, table, seqlens, sink, out, lse;
    size_t bytes;
};

struct decode_shape {
    int64_t b, s_q, h_q, h_kv, pages, page_size, max_pages;
    fmla_dtype dtype;
};

static inline void decode_call(struct decode_call *c, const struct decode_shape *s, int32_t device)
{
    memset(c, 0, sizeof *c);
    HELD(&c->q, memory[0], s->dtype, 4, s->b, s->s_q, s->h_q, 576);
    HELD(&c->kv, memory[1], s->dtype, 4, s->pages, s->page_size, s->h_kv, 576);
    HELD(&c->table, memory[2], i32, 2, s->b, s->max_pages);
    HELD(&c->seqlens, memory[3], i32, 1, s->b);
    HELD(&c->sink, memory[4], f32, 1, s->h_q);
    HELD(&c->out, memory[5], s->dtype, 4, s->b, s->s_q, s->h_q, 512);
    HELD(&c->lse, memory[6], f32, 3, s->b, s->h_q, s->s_q);
    struct held *all[] = {&c->q, &c->kv, &c->table, &c->seqlens, &c->sink, &c->out, &c->lse};
    for (int i = 0; i < 7; i++) all[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, device};
    c->args = FMLA_INIT(fmla_dense_decode_args);
    c->args.q = &c->q.tensor, c->args.kv_cache = &c->kv.tensor, c->args.block_table = &c->table.tensor;
    c->args.seqlens = &c->seqlens.tensor, c->args.attn_sink = &c->sink.tensor;
    c->args.out = &c->out.tensor, c->args.lse = &c->lse.tensor;
    c->args.workspace = memory[7];
}

static const struct decode_shape small_shape = {2, 1, 16, 1, 64, 64, 32, {FMLA_TYPE_BFLOAT, 16, 1}};

/* Sizes the workspace (of which only the address is real) and calls. */
static inline fmla_status decode_run(struct decode_call *c)
{
    size_t alignment;
    const fmla_status status = fmla_dense_decode_workspace_size(&c->args, &c->bytes, &alignment);
    if (status) return status;
    CHECK_EQ(alignment, 256);
    c->args.workspace_size = c->bytes;
    return fmla_dense_decode(&c->args);
}

static inline fmla_status decode_small(int32_t device)
{
    struct decode_call call;
    decode_call(&call, &small_shape, device);
    return decode_run(&call);
}

/* What the driver was told of a map that it made. */
static inline const struct fake_tensor *told_of(const struct tensor_map *map)
{
    int number;
    memcpy(&number, map, sizeof number);
    return &fake->tensor[number % FAKE_TENSORS];
}

static inline fmla_status merge_small(int32_t device)
{
    struct held parts, lse, out;
    HELD(&parts, memory[0], bf16, 5, 3, 2, 1, 16, 512);
    HELD(&lse, memory[1], f32, 4, 3, 2, 16, 1);
    HELD(&out, memory[2], bf16, 4, 2, 1, 16, 512);
    parts.tensor.device = lse.tensor.device = out.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, device};
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse.tensor, args.out = &out.tensor;
    return fmla_merge(&args);
}

/* Sparse prefill: 70 indices a token and key head, over 100 keys. */
struct prefill_call {
    fmla_sparse_prefill_args args;
    struct held q, kv, indices, length, sink, out, max_logits, lse;
};

static inline void prefill_call(struct prefill_call *c, int64_t s_q, int64_t h_q, int64_t h_kv,
                                int32_t device)
{
    memset(c, 0, sizeof *c);
    HELD(&c->q, memory[0], bf16, 3, s_q, h_q, 576);
    HELD(&c->kv, memory[1], bf16, 3, 100, h_kv, 576);
    HELD(&c->indices, memory[2], i32, 3, s_q, h_kv, 70);
    HELD(&c->length, memory[3], i32, 1, s_q);
    HELD(&c->sink, memory[4], f32, 1, h_q);
    HELD(&c->out, memory[5], bf16, 3, s_q, h_q, 512);
    HELD(&c->max_logits, memory[6], f32, 2, s_q, h_q);
    HELD(&c->lse, memory[7], f32, 2, s_q, h_q);
    struct held *all[] = {&c->q, &c->kv, &c->indices, &c->length, &c->sink, &c->out, &c->max_logits, &c->lse};
    for (int i = 0; i < 8; i++) all[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, device};
    c->args = FMLA_INIT(fmla_sparse_prefill_args);
    c->args.q = &c->q.tensor, c->args.kv = &c->kv.tensor, c->args.indices = &c->indices.tensor;
    c->args.topk_length = &c->length.tensor, c->args.attn_sink = &c->sink.tensor;
    c->args.out = &c->out.tensor, c->args.max_logits = &c->max_logits.tensor;
    c->args.lse = &c->lse.tensor;
}

static inline struct sparse_prefill_sm90_params prefill_sm90_params_of(const struct fake_launch *launch)
{
    struct sparse_prefill_sm90_params params;
    memcpy(&params, launch->parameters, sizeof params);
    return params;
}

static inline fmla_status prefill_small(int32_t device)
{
    struct prefill_call c;
    prefill_call(&c, 5, 40, 2, device);
    return fmla_sparse_prefill(&c.args);
}

/* Two tokens into, or out of, 4 pages of 64 slots. */
struct cache_call {
    fmla_cache_append_args append;
    fmla_cache_gather_args gather;
    struct held latent, rope, cache, slots, out;
};

static inline void cache_call(struct cache_call *c, int32_t device)
{
    static const fmla_dtype i64 = {FMLA_TYPE_INT, 64, 1}, u8 = {FMLA_TYPE_UINT, 8, 1};
    memset(c, 0, sizeof *c);
    HELD(&c->latent, memory[0], bf16, 2, 2, 512);
    HELD(&c->rope, memory[1], bf16, 2, 2, 64);
    HELD(&c->cache, memory[2], u8, 4, 4, 64, 1, 656);
    HELD(&c->slots, memory[3], i64, 1, 2);
    HELD(&c->out, memory[4], f32, 2, 2, 576);
    struct held *all[] = {&c->latent, &c->rope, &c->cache, &c->slots, &c->out};
    for (int i = 0; i < 5; i++) all[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, device};
    c->append = FMLA_INIT(fmla_cache_append_args), c->gather = FMLA_INIT(fmla_cache_gather_args);
    c->append.latent = &c->latent.tensor, c->append.rope = &c->rope.tensor;
    c->append.kv_cache = c->gather.kv_cache = &c->cache.tensor;
    c->append.slot_mapping = c->gather.slots = &c->slots.tensor;
    c->gather.out = &c->out.tensor;
    c->append.kv_format = c->gather.kv_format = FMLA_KV_FP8_656;
}

static inline fmla_status append_small(int32_t device)
{
    struct cache_call c;
    cache_call(&c, device);
    return fmla_cache_append(&c.append);
}

static inline fmla_status gather_small(int32_t device)
{
    struct cache_call c;
    cache_call(&c, device);
    return fmla_cache_gather(&c.gather);
}

static inline fmla_status plan_small(int32_t device)
{
    struct held seqlens;
    HELD(&seqlens, memory[0], i32, 1, 5);
    seqlens.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, device};
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = 16, args.h_kv = 1;
    args.plan = memory[1], args.plan_size = MEMORY;
    return fmla_decode_plan(&args);
}

/* Every operation, on a GPU that cannot be used, fails with these words, and so does prepare. */
static inline void check_unusable(int32_t device, const char *words)
{
    check_rejected("decode", decode_small(device), FMLA_UNSUPPORTED, "dense_decode", "q", words);
    check_rejected("prefill", prefill_small(device), FMLA_UNSUPPORTED, "sparse_prefill", "q", words);
    check_rejected("merge", merge_small(device), FMLA_UNSUPPORTED, "merge", "out_parts", words);
    check_rejected("append", append_small(device), FMLA_UNSUPPORTED, "cache_append", "kv_cache", words);
    check_rejected("gather", gather_small(device), FMLA_UNSUPPORTED, "cache_gather", "kv_cache", words);
    check_rejected("plan", plan_small(device), FMLA_UNSUPPORTED, "decode_plan", "seqlens", words);
    check_rejected("prepare", fmla_prepare((fmla_device){FMLA_DEVICE_CUDA, device}), FMLA_UNSUPPORTED,
                   "prepare", "device", words);
    int64_t rows = 0;
    for (;; rows++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities((fmla_device){FMLA_DEVICE_CUDA, device}, rows, &row) != FMLA_OK) break;
        if (!row.kernel) continue; /* an operation without a kernel for any GPU yet */
        CHECK(!row.available && has_words(row.reason, strchr(words, '|') + 1), "%s %s: %s", row.operation,
              row.kernel, row.reason);
    }
    CHECK(rows >= 6, "%" PRId64 " rows", rows);
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK(fmla_device_describe((fmla_device){FMLA_DEVICE_CUDA, device}, &info) == FMLA_OK, "%s",
          fmla_last_error());
    CHECK(has_words(info.reason, strchr(words, '|') + 1), "described: %s", info.reason);
}

#endif
