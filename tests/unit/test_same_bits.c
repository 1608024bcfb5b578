/* SPDX-License-Identifier: MIT
 *
 * What docs/semantics.md ("The same bits") promises of the CPU's kernels: for every one of them the same bits on any number of
 * threads, at any alignment and strides, by a plan however it comes, and whatever pages the keys are in.
 */
#include "tensors.h"

#include "num.h"
#include "random.h"

#include <stdbool.h>

enum { B = 3, S_Q = 2, H_Q = 5, D_QK = 576, D_V = 512, KEYS = 300, ROWS = B * S_Q * H_Q };
enum { TOKENS = 30, TOPK = 150, PARTS = 4, PARTITIONS = 3, SLOTS = 320, MOST_BYTES = 8 << 20, MEMORIES = 12 };

static const int64_t lengths_of[B] = {KEYS, 1, 170};

/* How a call is made; all zeros: on one thread, everything contiguous, planned inside. */
struct way {
    const char *name;
    int32_t threads; /* 0: one; -1: a loop of the host's own */
    int64_t shift;   /* elements before each tensor, and between its rows */
    int64_t page;    /* slots of a page; 0: no block table */
    enum { PLANNED_INSIDE, BY_PLAN, BY_TABLES } plan;
    bool no_lse, invariant;
    int64_t request; /* 1 + the only one of the batch; 0: all */
};

static uint16_t q_values[TOKENS * H_Q * D_QK], key_values[B * KEYS * D_QK];
static uint8_t packed[SLOTS * 656];
static float parts_values[PARTS * ROWS * D_V], parts_lse[PARTS * ROWS];
static int32_t list_values[TOKENS * TOPK];

struct result {
    uint16_t out[TOKENS * H_Q * D_V];
    float lse[TOKENS * H_Q], most[TOKENS * H_Q];
};

/* ---- Memory of a call ------------------------------------------------------------------------ */

static unsigned char *memory[MEMORIES];
static int taken;

/* A tensor whose rows (all but the last dimension) lie `gap` elements apart, from an address `gap` elements off. */
static const fmla_tensor *lay_out(struct held *held, const void *values, fmla_dtype dtype, int64_t gap,
                                  const int64_t *shape, size_t dimensions)
{
    const int ndim = (int)dimensions;
    const size_t element = dtype.bits / 8;
    if (!memory[taken]) memory[taken] = aligned_alloc(64, MOST_BYTES);
    unsigned char *to = memory[taken++] + (size_t)gap * element;
    memset(to, 0xff, MOST_BYTES - (size_t)gap * element);
    held_set(held, to, dtype, ndim, shape);
    const int64_t row = shape[ndim - 1];
    int64_t rows = 1, stride = row + gap;
    for (int i = ndim - 2; i >= 0; i--) held->strides[i] = stride, stride *= shape[i], rows *= shape[i];
    for (int64_t i = 0; values && i < rows; i++)
        memcpy(to + (size_t)(i * (row + gap)) * element, (const char *)values + (size_t)(i * row) * element,
               (size_t)row * element);
    return &held->tensor;
}

#define LAY_OUT(held, values, dtype, gap, ...)                                                               \
    lay_out(held, values, dtype, gap, (const int64_t[]){__VA_ARGS__},                                        \
            sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))
#define LAID(...) LAY_OUT(&(struct held){0}, __VA_ARGS__)

/* The rows of a result, one behind the other. */
static void collect(const struct held *held, void *to)
{
    const int ndim = held->tensor.ndim;
    const size_t row = (size_t)held->shape[ndim - 1] * held->tensor.dtype.bits / 8;
    const size_t stride = ndim > 1 ? (size_t)held->strides[ndim - 2] * held->tensor.dtype.bits / 8 : row;
    int64_t rows = 1;
    for (int i = 0; i < ndim - 1; i++) rows *= held->shape[i];
    for (int64_t i = 0; i < rows; i++)
        memcpy((char *)to + (size_t)i * row, (const char *)held->tensor.data + (size_t)i * stride, row);
}

static void one_after_the_other(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    for (int64_t i = count; i-- > 0;) task(task_data, i, (int32_t)(i % 2));
}

static void begin(const struct way *way)
{
    taken = 0;
    fmla_set_parallel_for(way->threads < 0 ? one_after_the_other : NULL, NULL, 2);
    fmla_set_num_threads(way->threads < 0 ? 0 : way->threads ? way->threads : 1);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

typedef void call(const char *kernel, const struct way *way, int32_t format, struct result *result);

static void dense(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    (void)format;
    struct held kv, out, lse;
    const int64_t b = way->request ? 1 : B, first = way->request ? way->request - 1 : 0;
    const int64_t page = way->page ? way->page : KEYS, pages = (KEYS + page - 1) / page;
    int32_t lengths[B], entries[B * KEYS];
    begin(way);
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)lengths_of[first + r];
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    args.q = LAID(q_values + first * S_Q * H_Q * D_QK, bf16, way->shift, b, S_Q, H_Q, D_QK);
    args.seqlens = plan.seqlens = LAID(lengths, i32, 0, b);
    args.out = LAY_OUT(&out, NULL, bf16, way->shift, b, S_Q, H_Q, D_V);
    args.lse = LAY_OUT(&lse, NULL, f32, 0, b, H_Q, S_Q);
    args.lse = way->no_lse ? NULL : args.lse;
    /* Pages in reverse order. */
    args.kv_cache = LAY_OUT(&kv, NULL, bf16, way->shift, b * pages, page, 1, D_QK);
    for (int64_t r = 0; r < b; r++)
        for (int64_t t = 0; t < KEYS; t++) {
            const int64_t at = way->page ? b * pages - 1 - (r * pages + t / page) : r;
            entries[r * pages + t / page] = (int32_t)at;
            memcpy((uint16_t *)kv.tensor.data + at * kv.strides[0] + t % page * kv.strides[1],
                   key_values + ((first + r) * KEYS + t) * D_QK, D_QK * sizeof(uint16_t));
        }
    args.block_table = way->page ? LAID(entries, i32, 0, b, pages) : NULL;
    args.kernel = kernel, args.causal = 1, args.batch_invariant = way->invariant;
    args.num_partitions = plan.num_partitions = PARTITIONS;
    plan.s_q = S_Q, plan.h_q = H_Q, plan.h_kv = 1;
    const bool tables = way->plan == BY_TABLES;
    if (way->plan == BY_PLAN) {
        CHECK_OK(fmla_decode_plan_size(&plan, &plan.plan_size));
        args.plan = plan.plan = aligned_alloc(64, (plan.plan_size + 63) / 64 * 64);
        args.plan_size = plan.plan_size;
    }
    args.partitions = plan.partitions = tables ? LAID(NULL, i32, 0, PARTITIONS, 8) : NULL;
    args.num_splits = plan.num_splits = tables ? LAID(NULL, i32, 0, b + 1) : NULL;
    if (way->plan != PLANNED_INSIDE) CHECK_OK(fmla_decode_plan(&plan));
    CHECK(!run_dense_decode(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse);
    free(plan.plan);
}

/* Bytes lie apart by what their scales are aligned to. */
static const fmla_tensor *lay_out_cache(struct held *kv, int32_t format, const struct way *way)
{
    enum { PAGE = 20 };
    const int64_t page = way->page ? way->page : PAGE, slots = SLOTS;
    if (format == FMLA_KV_BF16) return LAY_OUT(kv, key_values, bf16, way->shift, slots / page, page, 1, D_QK);
    if (format == FMLA_KV_FP8_656) return LAY_OUT(kv, packed, u8, 4 * way->shift, slots / page, page, 1, 656);
    struct held pages; /* in one piece each */
    LAY_OUT(&pages, packed, u8, 2 * way->shift, slots / PAGE, PAGE * 584);
    HELD(kv, pages.tensor.data, u8, 4, slots / PAGE, PAGE, 1, 584);
    kv->strides[0] = pages.strides[0];
    return &kv->tensor;
}

static void sparse(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    struct held kv, out, lse;
    begin(way);
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = LAID(q_values, bf16, way->shift, B, S_Q, H_Q, format == FMLA_KV_FP8_584 ? 512 : D_QK);
    args.indices = LAID(list_values, i32, way->shift, B, S_Q, TOPK);
    args.out = LAY_OUT(&out, NULL, bf16, way->shift, B, S_Q, H_Q, D_V);
    args.lse = LAY_OUT(&lse, NULL, f32, 0, B, H_Q, S_Q);
    args.lse = way->no_lse ? NULL : args.lse;
    args.kv_cache = lay_out_cache(&kv, format, way);
    args.kernel = kernel, args.kv_format = format, args.num_partitions = PARTITIONS;
    args.batch_invariant = way->invariant;
    CHECK(!run_sparse_decode(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse);
}

/* So many tokens that no list is cut, or one of them on one thread. */
static void prefill(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    struct held kv, out, lse, most;
    const int64_t d_qk = format == FMLA_KV_FP8_584 ? 512 : D_QK;
    const int64_t tokens = way->request ? 1 : TOKENS, first = way->request ? way->request - 1 : 0;
    begin(way);
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = LAID(q_values + first * H_Q * d_qk, bf16, way->shift, tokens, H_Q, d_qk);
    args.indices = LAID(list_values + first * TOPK, i32, way->shift, tokens, 1, TOPK);
    args.out = LAY_OUT(&out, NULL, bf16, way->shift, tokens, H_Q, D_V);
    args.lse = LAY_OUT(&lse, NULL, f32, way->shift, tokens, H_Q);
    args.max_logits = LAY_OUT(&most, NULL, f32, way->shift, tokens, H_Q);
    if (way->no_lse) args.lse = args.max_logits = NULL;
    args.kv = lay_out_cache(&kv, format, way), args.kernel = kernel, args.kv_format = format;
    CHECK(!run_sparse_prefill(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse), collect(&most, result->most);
}

static void merge(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    (void)format;
    struct held out, lse;
    begin(way);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = LAID(parts_values, f32, way->shift, PARTS, B, S_Q, H_Q, D_V);
    args.lse_parts = LAID(parts_lse, f32, 0, PARTS, B, H_Q, S_Q);
    args.out = LAY_OUT(&out, NULL, bf16, way->shift, B, S_Q, H_Q, D_V);
    args.lse = LAY_OUT(&lse, NULL, f32, 0, B, H_Q, S_Q);
    args.lse = way->no_lse ? NULL : args.lse, args.kernel = kernel;
    CHECK(!fmla_merge(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse);
}

/* ---- Which are the same ---------------------------------------------------------------------- */

static struct result base, other;

/* `rows` rows of `other` against those of `base` from `first` on. */
static void compare(const char *operation, const char *kernel, int32_t format, const struct way *way,
                    int64_t first, int64_t rows)
{
    CHECK(!memcmp(base.out + first * D_V, other.out, (size_t)rows * D_V * sizeof *base.out),
          "%s %s, format %d, %s: out has other bits", operation, kernel, format, way->name);
    if (way->no_lse) return;
    CHECK(!memcmp(base.lse + first, other.lse, (size_t)rows * sizeof *base.lse),
          "%s %s, format %d, %s: lse has other bits", operation, kernel, format, way->name);
    CHECK(!memcmp(base.most + first, other.most, (size_t)rows * sizeof *base.most),
          "%s %s, format %d, %s: max_logits has other bits", operation, kernel, format, way->name);
}

static const struct way everywhere[] = {
    {.name = "again"},
    {.name = "two threads", .threads = 2},
    {.name = "three threads", .threads = 3},
    {.name = "a loop of the host's own", .threads = -1},
    {.name = "unaligned", .shift = 1},
    {.name = "another alignment, three threads", .shift = 3, .threads = 3},
    {.name = "without lse", .no_lse = true}};
enum { EVERYWHERE = sizeof everywhere / sizeof everywhere[0] };

/* Slots follow each other all the same, but in FP8_584. */
static const struct way in_pages[] = {{.name = "pages of one", .page = 1},
                                      {.name = "pages of 64", .page = 64},
                                      {.name = "one page, unaligned", .page = SLOTS, .shift = 1}};

/* Dense decode alone has these ways. */
static const struct way of_dense[] = {{.name = "by a plan", .plan = BY_PLAN, .threads = 3},
                                      {.name = "by tables", .plan = BY_TABLES},
                                      {.name = "pages of one", .page = 1},
                                      {.name = "pages of 16", .page = 16},
                                      {.name = "pages of 61, unaligned", .page = 61, .shift = 1},
                                      {.name = "pages of 64", .page = 64}};

/* Of caches, in an order in which operations that have some have the first ones. */
static const int32_t formats[] = {FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* An operation: which ways give the bits of the plainest one, in how many rows. */
static const struct operation {
    const char *name;
    call *call;
    const struct way *more;
    int count, formats;
    int64_t rows;
} operations[] = {{"dense_decode", dense, of_dense, 6, 1, ROWS},
                  {"sparse_decode", sparse, in_pages, 3, FORMATS, ROWS},
                  {"sparse_prefill", prefill, in_pages, 3, FORMATS, TOKENS *H_Q},
                  {"merge", merge, NULL, 0, 1, ROWS}};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

static void check_way(const struct operation *o, const char *kernel, int32_t format, struct way way,
                      int64_t first, int64_t rows)
{
    o->call(kernel, &way, format, &other);
    compare(o->name, kernel, format, &way, first, rows);
}

static void check_ways(const struct operation *o, const char *kernel, int32_t format, bool invariant)
{
    o->call(kernel, &(struct way){.name = "first", .invariant = invariant}, format, &base);
    for (int i = 0; i < EVERYWHERE + (format == FMLA_KV_FP8_584 ? 0 : o->count); i++) {
        struct way way = i < EVERYWHERE ? everywhere[i] : o->more[i - EVERYWHERE];
        way.invariant = invariant;
        check_way(o, kernel, format, way, 0, o->rows);
    }
}

static void check_operation(const struct operation *o, const char *kernel, int32_t format)
{
    memset(&base, 0, sizeof base), memset(&other, 0, sizeof other);
    check_ways(o, kernel, format, false);
    if (o->call == sparse) check_ways(o, kernel, format, true);
    if (o->call == prefill)
        for (int64_t token = 1; token <= TOKENS; token += 7)
            check_way(o, kernel, format, (struct way){.name = "a token alone", .request = token, .shift = 1},
                      (token - 1) * H_Q, H_Q);
    if (o->call != dense) return;
    dense(kernel, &(struct way){.name = "batch-invariant", .invariant = true}, 0, &base);
    struct way alone = {
        .name = "batch-invariant, alone, three threads", .invariant = true, .threads = 3, .shift = 1};
    for (alone.request = 1; alone.request <= B; alone.request++)
        check_way(o, kernel, 0, alone, (alone.request - 1) * S_Q * H_Q, S_Q * H_Q);
}

static void draw(void)
{
    struct random_state random = {7};
    for (size_t i = 0; i < sizeof q_values / sizeof *q_values; i++)
        q_values[i] = num_to_bf16(random_input(&random, 0.0f, 0.5f));
    for (size_t i = 0; i < sizeof key_values / sizeof *key_values; i++)
        key_values[i] = num_to_bf16(random_input(&random, 0.0f, 0.5f));
    /* Codes and values that are finite, and fp32 scales of 0.01; scales of FP8_584 are what these bytes make of them. */
    for (size_t i = 0; i < sizeof packed; i++) packed[i] = (uint8_t)random_between(&random, 0x20, 0x3d);
    for (int64_t slot = 0; slot < SLOTS; slot++)
        for (int64_t g = 0; g < 4; g++)
            memcpy(packed + slot * 656 + 512 + 4 * g, &(float){0.01f}, sizeof(float));
    for (size_t i = 0; i < sizeof parts_values / sizeof *parts_values; i++)
        parts_values[i] = random_input(&random, 0.0f, 0.3f);
    for (size_t i = 0; i < sizeof parts_lse / sizeof *parts_lse; i++) parts_lse[i] = random_normal(&random);
    for (size_t i = 0; i < sizeof list_values / sizeof *list_values; i++)
        list_values[i] = (int32_t)random_between(&random, -20, SLOTS - 1);
}

int main(void)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    draw();
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (!row.kernel || !row.available || row.forced_only) continue;
        for (int k = 0; k < OPERATIONS; k++)
            for (int f = 0; f < operations[k].formats && !strcmp(row.operation, operations[k].name); f++)
                check_operation(&operations[k], row.kernel, formats[f]);
    }
    for (int i = 0; i < MEMORIES; i++) free(memory[i]);
    return check_done("same_bits");
}
