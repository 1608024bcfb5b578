/* SPDX-License-Identifier: MIT
 *
 * One small call of each operation, for tests of how calls run: from many threads at once, after a fork, on a busy machine.
 * A program includes this once.
 */
#ifndef FMLA_CALLS_H
#define FMLA_CALLS_H

#include "arguments.h"

#include "num.h"
#include "random.h"

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
static void *plan, *sparse_plan;
static size_t plan_size, sparse_plan_size;

/* Tokens of sparse prefill: enough that no list is cut, whatever the number of workers. */
enum { PREFILL = 28, PREFILL_TOPK = 30 };

enum {
    TOKENS = 12,
    CACHE_SLOTS = 8
}; /* of the cache operations: slots occur twice, and the last token stays */

struct result {
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

static fmla_status make_plan(void)
{
    struct held seqlens;
    HELD(&seqlens, lengths, i32, 1, B);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = S_Q, args.h_q = H_Q, args.h_kv = 1;
    args.num_partitions = PLAN_PARTITIONS;
    fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    if (status) return status;
    plan = args.plan = aligned_alloc(64, (args.plan_size + 63) / 64 * 64), plan_size = args.plan_size;
    return plan ? fmla_decode_plan(&args) : FMLA_BUFFER_TOO_SMALL;
}

static fmla_status make_sparse_plan(void)
{
    struct held length;
    HELD(&length, topk_lengths, i32, 1, B);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.sparse = 1, args.topk_length = &length.tensor, args.topk = TOPK, args.extra_topk = EXTRA;
    args.s_q = S_Q, args.h_q = H_Q, args.num_partitions = PLAN_PARTITIONS;
    fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    if (status) return status;
    sparse_plan = args.plan = aligned_alloc(64, (args.plan_size + 63) / 64 * 64);
    sparse_plan_size = args.plan_size;
    return sparse_plan ? fmla_decode_plan(&args) : FMLA_BUFFER_TOO_SMALL;
}

/* The workspace serves any number of workers up to MOST_WORKERS: it grows with them. */
static fmla_status decode(struct result *result, void *workspace, size_t workspace_size, size_t *wanted)
{
    struct held q, kv, table, seqlens, out, lse;
    HELD(&q, q_data, bf16, 4, B, S_Q, H_Q, D_QK);
    HELD(&kv, kv_data, bf16, 4, PAGES, PAGE, 1, D_QK);
    HELD(&table, table_data, i32, 2, B, TABLE);
    HELD(&seqlens, lengths, i32, 1, B);
    HELD(&out, result->out, bf16, 4, B, S_Q, H_Q, D_V);
    HELD(&lse, result->lse, f32, 3, B, H_Q, S_Q);
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &q.tensor, args.kv_cache = &kv.tensor, args.block_table = &table.tensor;
    args.seqlens = &seqlens.tensor, args.out = &out.tensor, args.lse = &lse.tensor;
    args.plan = plan, args.plan_size = plan_size, args.causal = 1;
    args.workspace = workspace, args.workspace_size = workspace_size;
    return wanted ? fmla_dense_decode_workspace_size(&args, wanted, NULL) : fmla_dense_decode(&args);
}

/* Over FP8 keys, which each worker unpacks into memory of its own; the second cache is the first one again. */
static fmla_status decode_sparse(struct result *result, void *workspace, size_t workspace_size,
                                 size_t *wanted)
{
    static const fmla_dtype u8 = {FMLA_TYPE_UINT, 8, 1};
    struct held q, kv, indices, length, extra_indices, out, lse;
    HELD(&q, q_data, bf16, 4, B, S_Q, H_Q, D_QK);
    HELD(&kv, fp8_data, u8, 4, PAGES, PAGE, 1, 656);
    HELD(&indices, indices_data, i32, 3, B, S_Q, TOPK);
    HELD(&length, topk_lengths, i32, 1, B);
    HELD(&extra_indices, extra_indices_data, i32, 3, B, S_Q, EXTRA);
    HELD(&out, result->sparse_out, bf16, 4, B, S_Q, H_Q, D_V);
    HELD(&lse, result->sparse_lse, f32, 3, B, H_Q, S_Q);
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = &q.tensor, args.kv_cache = args.extra_kv_cache = &kv.tensor, args.kv_format = FMLA_KV_FP8_656;
    args.indices = &indices.tensor, args.topk_length = &length.tensor;
    args.extra_indices = &extra_indices.tensor, args.out = &out.tensor, args.lse = &lse.tensor;
    args.plan = sparse_plan, args.plan_size = sparse_plan_size;
    args.workspace = workspace, args.workspace_size = workspace_size;
    return wanted ? fmla_sparse_decode_workspace_size(&args, wanted, NULL) : fmla_sparse_decode(&args);
}

/* The tokens' lists are parts of those of sparse decode. */
static fmla_status prefill(struct result *result, void *workspace, size_t workspace_size, size_t *wanted)
{
    _Static_assert(PREFILL * PREFILL_TOPK <= B * S_Q * TOPK && PREFILL * H_Q <= PAGES * PAGE,
                   "indices and queries for all tokens");
    struct held q, kv, indices, out, max_logits;
    HELD(&q, kv_data, bf16, 3, PREFILL, H_Q, D_QK); /* keys serve as queries too */
    HELD(&kv, kv_data, bf16, 3, PAGES * PAGE, 1, D_QK);
    HELD(&indices, indices_data, i32, 3, PREFILL, 1, PREFILL_TOPK);
    HELD(&out, result->prefill_out, bf16, 3, PREFILL, H_Q, D_V);
    HELD(&max_logits, result->max_logits, f32, 2, PREFILL, H_Q);
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = &q.tensor, args.kv = &kv.tensor, args.indices = &indices.tensor, args.out = &out.tensor;
    args.max_logits = &max_logits.tensor;
    args.workspace = workspace, args.workspace_size = workspace_size;
    return wanted ? fmla_sparse_prefill_workspace_size(&args, wanted, NULL) : fmla_sparse_prefill(&args);
}

static fmla_status merge(struct result *result)
{
    struct held parts, lse_parts, out, lse;
    HELD(&parts, parts_data, f32, 5, PARTS, B, S_Q, H_Q, D_V);
    HELD(&lse_parts, lse_parts_data, f32, 4, PARTS, B, H_Q, S_Q);
    HELD(&out, result->merged, f32, 4, B, S_Q, H_Q, D_V);
    HELD(&lse, result->merged_lse, f32, 3, B, H_Q, S_Q);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse_parts.tensor;
    args.out = &out.tensor, args.lse = &lse.tensor;
    return fmla_merge(&args);
}

/* The parts are vectors too. */
static fmla_status append_and_gather(struct result *result)
{
    static const fmla_dtype i64 = {FMLA_TYPE_INT, 64, 1}, u8 = {FMLA_TYPE_UINT, 8, 1};
    _Static_assert(sizeof parts_data >= sizeof result->rows, "vectors for all tokens");
    int64_t list[TOKENS];
    for (int t = 0; t < TOKENS; t++) list[t] = t % 5 == 4 ? -1 : t * 3 % CACHE_SLOTS;
    struct held vectors, cache, slots, rows;
    memset(result->cache, 0, sizeof result->cache); /* one slot stays as it was */
    HELD(&vectors, parts_data, f32, 2, TOKENS, 576);
    HELD(&cache, result->cache, u8, 4, 1, CACHE_SLOTS, 1, 656);
    HELD(&slots, list, i64, 1, TOKENS);
    HELD(&rows, result->rows, f32, 2, TOKENS, 576);
    fmla_cache_append_args append = FMLA_INIT(fmla_cache_append_args);
    append.latent = &vectors.tensor, append.kv_cache = &cache.tensor, append.slot_mapping = &slots.tensor;
    append.kv_format = FMLA_KV_FP8_656;
    fmla_cache_gather_args gather = FMLA_INIT(fmla_cache_gather_args);
    gather.kv_cache = &cache.tensor, gather.slots = &slots.tensor, gather.out = &rows.tensor;
    gather.kv_format = FMLA_KV_FP8_656;
    const fmla_status status = fmla_cache_append(&append);
    return status ? status : fmla_cache_gather(&gather);
}

#endif
