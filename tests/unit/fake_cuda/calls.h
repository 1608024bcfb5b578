/* SPDX-License-Identifier: MIT
 *
 * Calls on tensors of a GPU that is not there: small ones of every operation, and those of a shape by the options that
 * tests want most.
 */
#ifndef FMLA_FAKE_CALLS_H
#define FMLA_FAKE_CALLS_H

#include "drawn_calls.h"

#include "cuda/params.h"

enum { MEMORY = 1 << 20 /* between two places of a region */ };

static inline fmla_device gpu_number(int32_t id)
{
    return (fmla_device){FMLA_DEVICE_CUDA, id};
}

/* The call is bf16 or fp16 and 576 wide, and has a block table, a sink and lse. */
static inline void decode_call(struct drawn_dense *c, const struct dense_shape *shape, int32_t device)
{
    struct dense_shape s = *shape;
    s.table = s.wide = s.options.sink = s.options.lse = true;
    dense_of_shape(c, &s, gpu_number(device));
    c->args.workspace = region(7);
}

#define DECODE_CALL(c, ...)                                                                                  \
    struct drawn_dense c;                                                                                    \
    decode_call(&(c), &(struct dense_shape){__VA_ARGS__}, 0)

static const struct dense_shape small_shape = {2, 1, 16, 1, 64, 64, 32, .fp16 = false};

#define SMALL_CALL(c)                                                                                        \
    struct drawn_dense c;                                                                                    \
    decode_call(&(c), &small_shape, 0)

/* Sizes the workspace (of which only the address is real) and calls. */
#define SIZE_AND_RUN(operation, c)                                                                           \
    size_t alignment;                                                                                        \
    const fmla_status status = fmla_##operation##_workspace_size(&(c)->args, &(c)->bytes, &alignment);       \
    if (status) return status;                                                                               \
    CHECK_EQ(alignment, 256);                                                                                \
    (c)->args.workspace_size = (c)->bytes;                                                                   \
    return fmla_##operation(&(c)->args)

static inline fmla_status decode_run(struct drawn_dense *c)
{
    SIZE_AND_RUN(dense_decode, c);
}

static inline fmla_status sparse_run(struct drawn_sparse *c)
{
    SIZE_AND_RUN(sparse_decode, c);
}

static inline fmla_status decode_small(int32_t device)
{
    struct drawn_dense call;
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
    draw_device = gpu_number(device);
    REGION(&parts, 0, bf16, 5, 3, 2, 1, 16, 512);
    REGION(&lse, 1, f32, 4, 3, 2, 16, 1);
    REGION(&out, 2, bf16, 4, 2, 1, 16, 512);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse.tensor, args.out = &out.tensor;
    return fmla_merge(&args);
}

/* Sparse prefill: 70 indices a token and key head, over 100 keys; with all that is optional. */
static inline void prefill_call(struct drawn_prefill *c, int64_t s_q, int64_t h_q, int64_t h_kv,
                                int32_t device)
{
    const struct drawn_options options = {.sink = true, .lse = true};
    const struct prefill_shape shape =
        SHAPE_OF(prefill_shape, .s_q = s_q, .h_q = h_q, .h_kv = h_kv, .topk = 70, .lengths = true,
                 .wide = true, .options = options);
    prefill_of_shape(c, &shape, gpu_number(device));
}

/* Two tokens into, or out of, 4 pages of 64 slots. */
struct cache_call {
    fmla_cache_append_args append;
    fmla_cache_gather_args gather;
    struct held latent, rope, cache, slots, out;
};

static inline void cache_call(struct cache_call *c, int32_t device)
{
    memset(c, 0, sizeof *c), draw_device = gpu_number(device);
    REGION(&c->latent, 0, bf16, 2, 2, 512);
    REGION(&c->rope, 1, bf16, 2, 2, 64);
    REGION(&c->cache, 2, u8, 4, 4, 64, 1, 656);
    REGION(&c->slots, 3, i64, 1, 2);
    REGION(&c->out, 4, f32, 2, 2, 576);
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
    draw_device = gpu_number(device);
    REGION(&seqlens, 0, i32, 1, 5);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = 16, args.h_kv = 1;
    args.plan = region(1), args.plan_size = MEMORY;
    return fmla_decode_plan(&args);
}

/* By a plan that is made inside: planned, decoded, joined. */
static inline fmla_status sparse_small(int32_t device)
{
    static struct drawn_sparse c;
    const struct sparse_shape shape =
        SHAPE_OF(sparse_shape, .b = 5, .s_q = 2, .h_q = 96, .topk = 2000, .page_size = 64,
                 .format = FMLA_KV_FP8_656, .lengths = true, .wide = true);
    sparse_of_shape(&c, &shape, (fmla_device){FMLA_DEVICE_CUDA, device});
    const fmla_status status = fmla_sparse_decode_workspace_size(&c.args, &c.args.workspace_size, NULL);
    c.args.workspace = region(11);
    return status ? status : fmla_sparse_decode(&c.args);
}

/* A launch for each of two key heads, and of bf16 keys on Hopper the join of each. */
static inline fmla_status prefill_two(int32_t device)
{
    static struct drawn_prefill c;
    const struct prefill_shape shape = SHAPE_OF(prefill_shape, .s_q = 5, .h_q = 128, .h_kv = 2, .topk = 2048,
                                                .page_size = 64, .format = FMLA_KV_BF16, .wide = true);
    prefill_of_shape(&c, &shape, (fmla_device){FMLA_DEVICE_CUDA, device});
    const fmla_status status = fmla_sparse_prefill_workspace_size(&c.args, &c.args.workspace_size, NULL);
    c.args.workspace = region(11);
    return status ? status : fmla_sparse_prefill(&c.args);
}

static const struct {
    const char *name;
    fmla_status (*call)(int32_t device);
    int launches;         /* on Hopper */
    const char *argument; /* whose device is the call's */
} small_calls[] = {
    {"decode_plan", plan_small, 1, "seqlens"},    {"dense_decode", decode_small, 3, "q"},
    {"sparse_decode", sparse_small, 3, "q"},      {"sparse_prefill", prefill_two, 4, "q"},
    {"merge", merge_small, 1, "out_parts"},       {"cache_append", append_small, 1, "kv_cache"},
    {"cache_gather", gather_small, 1, "kv_cache"}};
enum { SMALL_CALLS = sizeof small_calls / sizeof small_calls[0] };

/* Every operation, on a GPU that cannot be used, fails with these words, and so does prepare. */
static inline void check_unusable(int32_t device, const char *words)
{
    for (int i = 0; i < SMALL_CALLS; i++)
        check_rejected(small_calls[i].name, small_calls[i].call(device), FMLA_UNSUPPORTED,
                       small_calls[i].name, small_calls[i].argument, words);
    check_rejected("prepare", fmla_prepare(gpu_number(device)), FMLA_UNSUPPORTED, "prepare", "device", words);
    int64_t rows = 0;
    for (;; rows++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(gpu_number(device), rows, &row) != FMLA_OK) break;
        if (!row.kernel) continue; /* an operation without a kernel for any GPU yet */
        CHECK(!row.available && has_words(row.reason, strchr(words, '|') + 1), "%s %s: %s", row.operation,
              row.kernel, row.reason);
    }
    CHECK(rows >= 6, "%" PRId64 " rows", rows);
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK(fmla_device_describe(gpu_number(device), &info) == FMLA_OK, "%s", fmla_last_error());
    CHECK(has_words(info.reason, strchr(words, '|') + 1), "described: %s", info.reason);
}

#endif
