/* SPDX-License-Identifier: MIT
 *
 * A small call of each operation on the CPU, for tests of how calls run: from many threads at once, after
 * a fork, without allocation. A program includes this once.
 */
#ifndef FMLA_CALLS_H
#define FMLA_CALLS_H

#include "filled.h"

enum { PLAN_PARTITIONS = 4, PLAN_BYTES = 32 + 32 * PLAN_PARTITIONS + 4 * 4, RESULT_BYTES = 1 << 20 };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};

#define REQUESTS                                                                                             \
    .b = 3, .s_q = 2, .h_q = 5, .h_kv = 1, .d_qk = 576, .d_v = 512, .pages = 24, .page_size = 16,            \
    .max_pages = 8, .topk = 150, .extra_topk = 40, .n = 3, .n_out = 3
#define ANY_BF16 .type = {FMLA_TYPE_BFLOAT, 16, 1}
#define ANY_F32  .type = {FMLA_TYPE_FLOAT, 32, 1}

/* The keys are FP8, which each worker unpacks into its own memory. Sparse prefill has so many tokens that
 * no list is split, whatever the number of workers. Each call may follow the one before in this order:
 * gather reads what append wrote. Operations without a row follow (list_calls). */
static const struct small_call {
    enum operation operation;
    struct layout layout;
} listed[] = {
    {OP_DECODE_PLAN, DESIGNATED(REQUESTS)},
    {OP_SPARSE_PLAN, DESIGNATED(REQUESTS, .has = HAS_LENGTHS)},
    {OP_DENSE_DECODE, DESIGNATED(REQUESTS, ANY_BF16, .causal = 1, .has = HAS_TABLE | HAS_LSE)},
    {OP_SPARSE_DECODE, DESIGNATED(REQUESTS, ANY_BF16, .one_head = 1, .extra_pages = 24, .extra_page_size = 16,
                                  .format = FMLA_KV_FP8_656, .has = HAS_LENGTHS | HAS_EXTRA | HAS_LSE)},
    {OP_SPARSE_PREFILL, DESIGNATED(ANY_BF16, .s_q = 28, .h_q = 5, .h_kv = 1, .d_qk = 576, .d_v = 512,
                                   .s_kv = 384, .topk = 30, .flat = true, .has = HAS_LSE)},
    {OP_MHA_FORWARD, DESIGNATED(ANY_BF16, .splits = 4, .tokens_q = 90, .tokens_k = 150, .h_q = 4, .h_kv = 2,
                                .d_qk = 192, .d_v = 128, .flat = true, .causal = 1, .has = HAS_LSE)},
    {OP_MHA_BACKWARD, DESIGNATED(ANY_BF16, .splits = 4, .tokens_q = 90, .tokens_k = 150, .h_q = 4, .h_kv = 2,
                                 .d_qk = 64, .d_v = 64, .flat = true, .causal = 1, .has = HAS_LSE)},
/* NOLINTBEGIN(bugprone-macro-parentheses): initialisers */
#define CACHES(name, size)                                                                                   \
    {OP_CACHE_APPEND, DESIGNATED(ANY_F32, .tokens = 12, .width = size, .pages = 1, .page_size = 8,           \
                                 .one_head = 1, .format = name)},                                            \
    {                                                                                                        \
        OP_CACHE_GATHER, DESIGNATED(ANY_F32, .tokens = 12, .d_qk = size, .pages = 1, .page_size = 8,         \
                                    .one_head = 1, .format = name)                                           \
    }
    CACHES(FMLA_KV_FP8_656, 576),
    CACHES(FMLA_KV_FP8_584, 512),
    CACHES(FMLA_KV_FP8_528_SPLIT, 512),
    CACHES(FMLA_KV_FP4_288, 512),
    {OP_CACHE_APPEND, DESIGNATED(ANY_BF16, .tokens = 12, .width = 448, .rope = 64, .pages = 1, .page_size = 8,
                                 .one_head = 1, .normed = 512, .max_positions = 9, .turned = 64,
                                 .format = FMLA_KV_FP8_528, .has = HAS_ROPE | HAS_NORM | HAS_TURNS)},
    {OP_CACHE_CONVERT,
     DESIGNATED(ANY_BF16, .tokens = 12, .pages = 2, .page_size = 8, .extra_pages = 2, .extra_page_size = 8,
                .one_head = 1, .format = FMLA_KV_FP8_528, .extra_format = FMLA_KV_FP4_288)},
};
/* NOLINTEND(bugprone-macro-parentheses) */
enum { SPARSE_DECODE = 3, LISTED = sizeof listed / sizeof listed[0], MOST_CALLS = LISTED + OPERATIONS };

static struct small_call small_calls[MOST_CALLS];
static int calls;

/* Lists the calls: the rows above, then one call of each operation without a row. */
static void list_calls(void)
{
    bool has_row[OPERATIONS] = {false};
    memcpy(small_calls, listed, sizeof listed);
    for (calls = 0; calls < LISTED; calls++) has_row[listed[calls].operation] = true;
    for (enum operation op = 0; op < OPERATIONS; op++) {
        const unsigned types = described_tensor(op, 0)->allowed & ALLOW_FLOATS;
        if (has_row[op]) continue;
        struct layout layout = DESIGNATED(REQUESTS, ANY_F32, .has = HAS_TABLE | HAS_LSE);
        if (!(types & ALLOW_F32)) layout.type = (fmla_dtype){FMLA_TYPE_BFLOAT, 16, 1};
        described_fit(op, &layout);
        small_calls[calls++] = (struct small_call){op, layout};
    }
}

/* A parallel loop of the host on `workers` workers, all in the calling thread. */
static inline void in_order(void *workers, int64_t count, fmla_task task, void *task_data)
{
    for (int64_t i = 0; i < count; i++) task(task_data, i, (int32_t)(i % *(const int32_t *)workers));
}

/* Outputs of all calls, and plans, concatenated. */
struct result {
    _Alignas(64) char bytes[RESULT_BYTES];
};

/* The template of every call, and the offset of its outputs in a result. */
static struct {
    _Alignas(16) char args[512];
    struct held held[MAX_TENSORS];
    size_t at[MAX_TENSORS], plan;
} made[MOST_CALLS];

static void draw(void)
{
    const struct member *m;
    size_t at = 0;
    list_calls();
    for (int i = 0; i < calls; i++) {
        const enum operation operation = small_calls[i].operation;
        named_make(operation, made[i].args, made[i].held, &small_calls[i].layout, place_filled);
        put_number(operation, made[i].args, "num_partitions",
                   described_is_plan(operation) ? PLAN_PARTITIONS : 0);
        for (int which = 0; (m = described_tensor(operation, which)); which++)
            if (m->allowed & IS_OUTPUT)
                made[i].at[which] = at, at += bytes_of(&made[i].held[which]) / 64 * 64 + 64;
        if (described_is_plan(operation)) made[i].plan = at, at += PLAN_BYTES / 64 * 64 + 64;
    }
    if (at > RESULT_BYTES) abort();
}

/* The way to make a call. */
struct way {
    const char *kernel;
    const struct result *planned; /* NULL: the call makes its own plan */
    int32_t batch_invariant;
    void *workspace;
    size_t workspace_size, *wanted; /* if set, a call queries its workspace size instead */
};

static fmla_status call_small(int i, struct result *result, const struct way *way)
{
    const enum operation operation = small_calls[i].operation;
    const struct member *m;
    struct held held[MAX_TENSORS];
    _Alignas(16) char args[sizeof made[i].args];
    struct answer answer = {0};
    memcpy(args, made[i].args, sizeof args), memcpy(held, made[i].held, sizeof held);
    for (int which = 0; (m = described_tensor(operation, which)); which++) {
        const fmla_tensor **const tensor = (const fmla_tensor **)(void *)(args + m->offset);
        const bool gathered = operation == OP_CACHE_GATHER && (m->allowed & IS_CACHE);
        held[which].tensor.shape = held[which].shape, held[which].tensor.strides = held[which].strides;
        if (m->allowed & IS_OUTPUT) held[which].tensor.data = result->bytes + made[i].at[which];
        if (gathered) held[which].tensor.data = result->bytes + made[i - 1].at[TENSOR_cache_append_kv_cache];
        if ((operation == OP_CACHE_APPEND || operation == OP_CACHE_CONVERT) && (m->allowed & IS_OUTPUT) &&
            !way->wanted)
            memset(held[which].tensor.data, 0,
                   bytes_of(&held[which])); /* skipped slots keep their contents */
        if (*tensor) *tensor = &held[which].tensor;
    }
    const void **const plan = option_at(operation, args, "plan");
    if (plan && described_is_plan(operation))
        *plan = result->bytes + made[i].plan, *(size_t *)option_at(operation, args, "plan_size") = PLAN_BYTES;
    else if (plan && way->planned) /* made by the call two before */
        *plan = way->planned->bytes + made[i - 2].plan,
        *(size_t *)option_at(operation, args, "plan_size") = PLAN_BYTES;
    put_number(operation, args, "batch_invariant", way->batch_invariant);
    if (option_at(operation, args, "kernel"))
        *(const char **)option_at(operation, args, "kernel") = way->kernel;
    if (!described_member(operation, "workspace")) {
        if (way->wanted) return *way->wanted = 0, FMLA_OK;
    } else if (way->wanted) {
        const fmla_status status = described_ask(operation, ASK_BYTES, args, &answer);
        return *way->wanted = answer.bytes, status;
    } else {
        *(void **)option_at(operation, args, "workspace") = way->workspace;
        *(size_t *)option_at(operation, args, "workspace_size") = way->workspace_size;
    }
    return described_run(operation, args);
}

/* Makes both plans, which come first. */
static inline fmla_status make_plans(struct result *result)
{
    const struct way way = {0};
    const fmla_status status = call_small(0, result, &way);
    return status ? status : call_small(1, result, &way);
}

/* Makes all calls, each in a workspace of arbitrary bytes; returns the first that fails, or NULL. */
static inline const char *call_all(struct result *result, const struct way *way)
{
    memset(result, 0xff, sizeof *result);
    for (int i = 0; i < calls; i++) {
        if (described_member(small_calls[i].operation, "workspace"))
            memset(way->workspace, 0xff, way->workspace_size);
        if (call_small(i, result, way)) return descriptors[small_calls[i].operation].name;
    }
    return NULL;
}

/* Allocates a workspace large enough for each call with the current number of workers. */
static inline struct way way_of_all(const struct result *planned)
{
    struct way way = {.planned = planned};
    size_t bytes = 0;
    for (int i = 0; i < calls; i++) {
        struct way asking = {.planned = planned, .wanted = &bytes};
        static struct result none;
        CHECK_OK(call_small(i, &none, &asking));
        if (bytes > way.workspace_size) way.workspace_size = bytes;
    }
    if (!way.workspace_size) abort();
    way.workspace = room_for(way.workspace_size);
    return way;
}

#endif
