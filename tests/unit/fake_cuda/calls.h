/* SPDX-License-Identifier: MIT
 *
 * Calls on tensors of an absent GPU: small ones of every operation, and calls of a given shape with the
 * options that tests use most.
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

/* Returns the arguments that the driver got for a tensor map. */
static inline const struct fake_tensor *passed_of(const struct tensor_map *map)
{
    int number;
    memcpy(&number, map, sizeof number);
    return &fake->tensor[number % FAKE_TENSORS];
}

/* ---- Dense decode and sparse prefill, with all that is optional --------------------------------------- */

static inline struct layout dense_layout(int64_t b, int64_t s_q, int64_t h_q, int64_t h_kv, int64_t pages,
                                         int64_t page_size, int64_t max_pages)
{
    return SHAPE_OF(layout, .b = b, .s_q = s_q, .h_q = h_q, .h_kv = h_kv, .pages = pages,
                    .page_size = page_size, .max_pages = max_pages, .has = HAS_TABLE | HAS_SINK | HAS_LSE);
}

static inline void decode_call(struct dense_decode_call *c, struct layout layout)
{
    dense_decode_make(c, &layout, gpu_number(0));
}

#define DECODE_CALL(c, ...)                                                                                  \
    struct dense_decode_call c;                                                                              \
    decode_call(&(c), dense_layout(__VA_ARGS__))

#define SMALL_SIZES   2, 1, 16, 1, 64, 64, 32
#define SMALL_CALL(c) DECODE_CALL(c, SMALL_SIZES)

/* 70 indices per token and key head, over 100 keys. */
static inline void prefill_call(struct sparse_prefill_call *c, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    const struct layout layout = SHAPE_OF(layout, .s_q = s_q, .h_q = h_q, .h_kv = h_kv, .topk = 70,
                                          .flat = true, .has = HAS_LENGTHS | HAS_SINK | HAS_LSE);
    sparse_prefill_make(c, &layout, gpu_number(0));
}

/* ---- A small call of every operation -------------------------------------------------------------------- */

/* A small call of each operation; small_of fills in what is 0. Prefill: one launch per key head, two in all,
 * and with bf16 keys on Hopper the join of each. Caches: two tokens, 4 pages. */
static const struct small {
    int launches;         /* on Hopper; 0: one, of a layout for any operation */
    const char *argument; /* whose device defines the call's; NULL: the first tensor */
    struct layout layout;
} small_calls[OPERATIONS] = {
    [OP_DECODE_PLAN] = {1, NULL, DESIGNATED(.b = 5, .s_q = 1, .h_q = 16, .h_kv = 1)},
    [OP_DENSE_DECODE] = {1, NULL,
                         DESIGNATED(.b = 2, .s_q = 1, .h_q = 16, .h_kv = 1, .pages = 64, .page_size = 64,
                                    .max_pages = 32, .has = HAS_TABLE | HAS_SINK | HAS_LSE)},
    [OP_SPARSE_DECODE] = {3, NULL,
                          DESIGNATED(.b = 5, .s_q = 2, .h_q = 96, .topk = 4000, .page_size = 64,
                                     .format = FMLA_KV_FP8_656, .has = HAS_LENGTHS)},
    [OP_SPARSE_PREFILL] = {4, NULL,
                           DESIGNATED(.s_q = 5, .h_q = 128, .h_kv = 2, .topk = 2048, .format = FMLA_KV_BF16,
                                      .flat = true)},
    [OP_CACHE_APPEND] = {1, "kv_cache",
                         DESIGNATED(.tokens = 2, .width = 512, .rope = 64, .pages = 4, .page_size = 64,
                                    .format = FMLA_KV_FP8_656, .has = HAS_ROPE)},
    [OP_CACHE_GATHER] = {1, "kv_cache",
                         DESIGNATED(.tokens = 2, .pages = 4, .page_size = 64, .format = FMLA_KV_FP8_656,
                                    .type = {FMLA_TYPE_FLOAT, 32, 1})},
    [OP_CACHE_CONVERT] = {1, "dst_cache",
                          DESIGNATED(.tokens = 2, .pages = 4, .page_size = 64, .format = FMLA_KV_FP8_656)},
    [OP_MHA_FORWARD] = {1, NULL,
                        DESIGNATED(.b = 2, .s_q = 300, .s_k = 300, .h_q = 4, .h_kv = 2, .d_qk = 192,
                                   .d_v = 128, .has = HAS_LSE)},
    [OP_MHA_BACKWARD] = {3, NULL,
                         DESIGNATED(.b = 2, .s_q = 300, .s_k = 300, .h_q = 4, .h_kv = 2, .d_qk = 192,
                                    .d_v = 128, .has = HAS_LSE)}};

static inline struct small small_of(enum operation operation)
{
    static const struct layout any =
        DESIGNATED(.b = 2, .s_q = 1, .h_q = 16, .h_kv = 1, .d_v = 512, .n = 3, .n_out = 3, .pages = 64,
                   .page_size = 64, .max_pages = 32, .topk = 64, .tokens = 2, .has = HAS_TABLE | HAS_LENGTHS);
    struct small small = small_calls[operation];
    if (!small.launches) {
        small.launches = 1, small.layout = any;
        described_fit(operation, &small.layout);
    }
    if (!small.argument) small.argument = described_tensor(operation, 0)->name;
    return small;
}

static inline fmla_status small_call(enum operation operation, int32_t device)
{
    struct held held[MAX_TENSORS];
    _Alignas(16) char args[MOST_ARGS];
    size_t bytes;
    make_call(operation, args, held, &(struct shape){.of = small_of(operation).layout}, gpu_number(device));
    if (described_is_plan(operation)) {
        void **const at = option_at(operation, args, "plan");
        *at = region(REGION_OF_PLAN), *(size_t *)(at + 1) = MEMORY;
    }
    return run_call(operation, args, &bytes);
}

#define SMALL(name, operation)                                                                               \
    static inline fmla_status name##_small(int32_t device)                                                   \
    {                                                                                                        \
        return small_call(operation, device);                                                                \
    }
SMALL(plan, OP_DECODE_PLAN)
SMALL(decode, OP_DENSE_DECODE)
SMALL(merge, OP_MERGE)
SMALL(append, OP_CACHE_APPEND)
SMALL(gather, OP_CACHE_GATHER)

/* Checks that every operation and prepare fail with these words on an unusable GPU. */
static inline void check_unusable(int32_t device, const char *words)
{
    for (enum operation i = 0; i < OPERATIONS; i++)
        check_rejected(words, small_call(i, device), FMLA_UNSUPPORTED, descriptors[i].name,
                       small_of(i).argument, words);
    check_rejected("prepare", fmla_prepare(gpu_number(device)), FMLA_UNSUPPORTED, "prepare", "device", words);
    int64_t rows = 0;
    for (;; rows++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(gpu_number(device), rows, &row) != FMLA_OK) break;
        const char *reason =
            row.kernel ? strchr(words, '|') + 1 : "no kernel of this operation"; /* for any GPU */
        CHECK(!row.available && has_words(row.reason, reason), "%s %s: %s", row.operation,
              row.kernel ? row.kernel : "on no kernel", row.reason);
    }
    CHECK(rows >= 6, "%" PRId64 " rows", rows);
    fmla_device_info info = FMLA_INIT(fmla_device_info);
    CHECK(fmla_device_describe(gpu_number(device), &info) == FMLA_OK, "%s", fmla_last_error());
    CHECK(has_words(info.reason, strchr(words, '|') + 1), "described: %s", info.reason);
}

#endif
