/* SPDX-License-Identifier: MIT
 *
 * A small call of each operation on the CPU, for tests of how calls run: from many threads at once, after a fork, without an
 * allocation. A program includes this once.
 */
#ifndef FMLA_CALLS_H
#define FMLA_CALLS_H

#include "tensors.h"

#include "num.h"
#include "random.h"

#include <stdbool.h>

enum {
    B = 3,
    S_Q = 2,
    H_Q = 5,
    D_QK = 576,
    D_V = 512,
    PAGE = 16,
    PAGES = 24,
    TABLE = 8,
    TOPK = 150,
    EXTRA = 40
};
enum { PARTS = 3, PLAN_PARTITIONS = 4 };

static uint16_t q_data[B * S_Q * H_Q * D_QK], kv_data[PAGES * PAGE * D_QK];
static int32_t table_data[B * TABLE], lengths[B] = {128, 1, 77};
static float parts_data[PARTS * B * S_Q * H_Q * D_V], lse_parts_data[PARTS * B * H_Q * S_Q];
static uint8_t fp8_data[PAGES * PAGE * 656];
static int32_t indices_data[B * S_Q * TOPK], extra_indices_data[B * S_Q * EXTRA],
    topk_lengths[B] = {TOPK, 0, 77};

/* Tokens of sparse prefill: enough that no list is cut, whatever the number of workers. */
enum { PREFILL = 28, PREFILL_TOPK = 30 };

enum {
    TOKENS = 12,
    CACHE_SLOTS = 8
}; /* of the cache operations: slots occur twice, and the last token stays */

enum { PLAN_BYTES = 32 + 32 * PLAN_PARTITIONS + 4 * (B + 1) };

struct result {
    _Alignas(16) char plan[PLAN_BYTES], sparse_plan[PLAN_BYTES];
    uint16_t out[B * S_Q * H_Q * D_V];
    uint16_t sparse_out[B * S_Q * H_Q * D_V];
    uint16_t prefill_out[PREFILL * H_Q * D_V];
    float max_logits[PREFILL * H_Q];
    float lse[B * H_Q * S_Q], sparse_lse[B * H_Q * S_Q], merged[B * S_Q * H_Q * D_V],
        merged_lse[B * H_Q * S_Q];
    uint8_t cache[CACHE_SLOTS * 656];
    float rows[TOKENS * 576];
};

static void draw(void)
{
    struct random_state random = {5};
    for (size_t i = 0; i < sizeof q_data / sizeof *q_data; i++)
        q_data[i] = num_to_bf16(random_input(&random, 0.0f, 0.3f));
    for (size_t i = 0; i < sizeof kv_data / sizeof *kv_data; i++)
        kv_data[i] = num_to_bf16(random_input(&random, 0.0f, 0.3f));
    for (int i = 0; i < B * TABLE; i++) table_data[i] = i % PAGES;
    for (size_t i = 0; i < sizeof parts_data / sizeof *parts_data; i++)
        parts_data[i] = random_normal(&random);
    for (size_t i = 0; i < sizeof lse_parts_data / sizeof *lse_parts_data; i++)
        lse_parts_data[i] = random_normal(&random);
    for (int i = 0; i < PAGES * PAGE; i++) {
        uint8_t *token = fp8_data + (size_t)i * 656;
        const float scales[4] = {0.02f, 0.01f, 0.03f, 0.04f};
        for (int d = 0; d < 512; d++) token[d] = (uint8_t)random_between(&random, 0, 0x3f);
        memcpy(token + 512, scales, sizeof scales);
        memcpy(token + 528, kv_data + (size_t)i * D_QK, 128);
    }
    for (int i = 0; i < B * S_Q * TOPK; i++) /* some name no key */
        indices_data[i] = (int32_t)random_between(&random, -20, PAGES * PAGE - 1);
    for (int i = 0; i < B * S_Q * EXTRA; i++)
        extra_indices_data[i] = (int32_t)random_between(&random, -20, PAGES * PAGE - 1);
}

/* How a call is made. */
struct way {
    const char *kernel;
    const struct result *planned; /* NULL: a plan is made inside */
    int32_t batch_invariant, cache_format /* of the cache operations; 0: FP8_656 */;
    void *workspace;
    size_t workspace_size, *wanted; /* asked for a workspace, a call answers its size instead */
};

/* Both kinds of plan. */
static fmla_status decode_plan(struct result *result, const struct way *way)
{
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    fmla_sparse_plan_args sparse = FMLA_INIT(fmla_sparse_plan_args);
    args.seqlens = TENSOR_OF(lengths, i32, B), args.h_kv = 1;
    sparse.topk_length = TENSOR_OF(topk_lengths, i32, B);
    sparse.topk = TOPK, sparse.extra_topk = EXTRA;
    args.s_q = sparse.s_q = S_Q, args.h_q = sparse.h_q = H_Q;
    args.num_partitions = sparse.num_partitions = PLAN_PARTITIONS;
    args.plan = result->plan, sparse.plan = result->sparse_plan;
    args.plan_size = sparse.plan_size = PLAN_BYTES;
    if (way->wanted) return *way->wanted = 0, FMLA_OK;
    const fmla_status status = fmla_decode_plan(&args);
    return status ? status : fmla_sparse_plan(&sparse);
}

/* What the arguments of all operations with a workspace have, and the call. */
#define CALL_WITH_WORKSPACE(operation)                                                                       \
    args.kernel = way->kernel, args.workspace = way->workspace, args.workspace_size = way->workspace_size;   \
    return way->wanted ? fmla_##operation##_workspace_size(&args, way->wanted, NULL) : fmla_##operation(&args)

static fmla_status dense_decode(struct result *result, const struct way *way)
{
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q_data, bf16, B, S_Q, H_Q, D_QK);
    args.kv_cache = TENSOR_OF(kv_data, bf16, PAGES, PAGE, 1, D_QK);
    args.block_table = TENSOR_OF(table_data, i32, B, TABLE), args.seqlens = TENSOR_OF(lengths, i32, B);
    args.out = TENSOR_OF(result->out, bf16, B, S_Q, H_Q, D_V);
    args.lse = TENSOR_OF(result->lse, f32, B, H_Q, S_Q);
    if (way->planned) args.plan = way->planned->plan, args.plan_size = PLAN_BYTES;
    args.causal = 1, args.batch_invariant = way->batch_invariant;
    CALL_WITH_WORKSPACE(dense_decode);
}

/* Over FP8 keys, which each worker unpacks into memory of its own; the second cache is the first one again. */
static fmla_status sparse_decode(struct result *result, const struct way *way)
{
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = TENSOR_OF(q_data, bf16, B, S_Q, H_Q, D_QK);
    args.kv_cache = args.extra_kv_cache = TENSOR_OF(fp8_data, u8, PAGES, PAGE, 1, 656);
    args.indices = TENSOR_OF(indices_data, i32, B, S_Q, TOPK),
    args.topk_length = TENSOR_OF(topk_lengths, i32, B);
    args.extra_indices = TENSOR_OF(extra_indices_data, i32, B, S_Q, EXTRA), args.kv_format = FMLA_KV_FP8_656;
    args.out = TENSOR_OF(result->sparse_out, bf16, B, S_Q, H_Q, D_V);
    args.lse = TENSOR_OF(result->sparse_lse, f32, B, H_Q, S_Q);
    if (way->planned) args.plan = way->planned->sparse_plan, args.plan_size = PLAN_BYTES;
    args.batch_invariant = way->batch_invariant;
    CALL_WITH_WORKSPACE(sparse_decode);
}

/* The tokens' lists are parts of those of sparse decode; keys serve as queries too. */
static fmla_status sparse_prefill(struct result *result, const struct way *way)
{
    _Static_assert(PREFILL * PREFILL_TOPK <= B * S_Q * TOPK && PREFILL * H_Q <= PAGES * PAGE,
                   "indices and queries for all tokens");
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = TENSOR_OF(kv_data, bf16, PREFILL, H_Q, D_QK),
    args.kv = TENSOR_OF(kv_data, bf16, PAGES * PAGE, 1, D_QK);
    args.indices = TENSOR_OF(indices_data, i32, PREFILL, 1, PREFILL_TOPK);
    args.out = TENSOR_OF(result->prefill_out, bf16, PREFILL, H_Q, D_V);
    args.max_logits = TENSOR_OF(result->max_logits, f32, PREFILL, H_Q);
    CALL_WITH_WORKSPACE(sparse_prefill);
}

static fmla_status merge(struct result *result, const struct way *way)
{
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = TENSOR_OF(parts_data, f32, PARTS, B, S_Q, H_Q, D_V);
    args.lse_parts = TENSOR_OF(lse_parts_data, f32, PARTS, B, H_Q, S_Q);
    args.out = TENSOR_OF(result->merged, f32, B, S_Q, H_Q, D_V);
    args.lse = TENSOR_OF(result->merged_lse, f32, B, H_Q, S_Q), args.kernel = way->kernel;
    return way->wanted ? *way->wanted = 0, FMLA_OK : fmla_merge(&args);
}

static const fmla_tensor *cache_slots(struct held *held)
{
    static _Thread_local int64_t list[TOKENS];
    for (int t = 0; t < TOKENS; t++) list[t] = t % 5 == 4 ? -1 : t * 3 % CACHE_SLOTS;
    return tensor_of(held, list, i64, &(int64_t){TOKENS}, 1);
}

/* The parts are vectors too; one slot stays as it was. */
static fmla_status cache_append(struct result *result, const struct way *way)
{
    _Static_assert(sizeof parts_data >= sizeof result->rows, "vectors for all tokens");
    const bool pieces = way->cache_format == FMLA_KV_FP8_584;
    fmla_cache_append_args args = FMLA_INIT(fmla_cache_append_args);
    args.latent = TENSOR_OF(parts_data, f32, TOKENS, pieces ? 512 : 576), args.kernel = way->kernel;
    args.kv_cache = TENSOR_OF(result->cache, u8, 1, CACHE_SLOTS, 1, pieces ? 584 : 656);
    args.slot_mapping = cache_slots(&(struct held){0});
    args.kv_format = way->cache_format ? way->cache_format : FMLA_KV_FP8_656;
    if (way->wanted) return *way->wanted = 0, FMLA_OK;
    memset(result->cache, 0, sizeof result->cache);
    return fmla_cache_append(&args);
}

static fmla_status cache_gather(struct result *result, const struct way *way)
{
    const bool pieces = way->cache_format == FMLA_KV_FP8_584;
    fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
    args.kv_cache = TENSOR_OF(result->cache, u8, 1, CACHE_SLOTS, 1, pieces ? 584 : 656);
    args.slots = cache_slots(&(struct held){0}), args.kernel = way->kernel;
    args.out = TENSOR_OF(result->rows, f32, TOKENS, pieces ? 512 : 576);
    args.kv_format = way->cache_format ? way->cache_format : FMLA_KV_FP8_656;
    return way->wanted ? *way->wanted = 0, FMLA_OK : fmla_cache_gather(&args);
}

/* In an order in which each may follow the one before: what is gathered was appended. */
static const struct operation {
    const char *name;
    fmla_status (*call)(struct result *result, const struct way *way);
    bool workspace;
} operations[] = {{"decode_plan", decode_plan, false},
                  {"dense_decode", dense_decode, true},
                  {"sparse_decode", sparse_decode, true},
                  {"sparse_prefill", sparse_prefill, true},
                  {"merge", merge, false},
                  {"cache_append", cache_append, false},
                  {"cache_gather", cache_gather, false}};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

/* All of them, each in a workspace whose bytes are nothing's; the first that fails, or NULL. */
static inline const char *call_all(struct result *result, const struct way *way)
{
    memset(result, 0xff, sizeof *result);
    for (int i = 0; i < OPERATIONS; i++) {
        if (operations[i].workspace) memset(way->workspace, 0xff, way->workspace_size);
        if (operations[i].call(result, way)) return operations[i].name;
    }
    return NULL;
}

/* Memory for a workspace that is enough for each of them, with as many workers as there are now. */
static inline struct way way_of_all(const struct result *planned)
{
    struct way way = {.planned = planned};
    size_t bytes = 0;
    for (int i = 0; i < OPERATIONS; i++) {
        struct way asking = {.planned = planned, .wanted = &bytes};
        static struct result none;
        CHECK_OK(operations[i].call(&none, &asking));
        if (bytes > way.workspace_size) way.workspace_size = bytes;
    }
    way.workspace = aligned_alloc(64, (way.workspace_size + 63) / 64 * 64);
    if (!way.workspace_size || !way.workspace) abort();
    return way;
}

#endif
