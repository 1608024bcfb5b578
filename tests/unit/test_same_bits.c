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
enum { TOKENS = 30, TOPK = 150, PARTS = 4, PARTITIONS = 3, SLOTS = 320, MOST_BYTES = 8 << 20 };

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

static unsigned char *memory[12];
static int taken;

/* A tensor whose rows (all but the last dimension) lie `gap` elements apart, from an address `gap` elements off. */
static void lay_out(struct held *held, const void *values, fmla_dtype dtype, int ndim, const int64_t *shape,
                    int64_t gap)
{
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
}

#define LAY_OUT(held, values, dtype, gap, ndim, ...)                                                         \
    lay_out(held, values, dtype, ndim, (const int64_t[]){__VA_ARGS__}, gap)

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

static void *workspace_of(size_t bytes)
{
    void *workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!workspace) exit(1);
    return workspace;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static void dense(const char *kernel, const struct way *way, struct result *result)
{
    struct held q, kv, table, seqlens, out, lse, partitions, num_splits;
    const int64_t b = way->request ? 1 : B, first = way->request ? way->request - 1 : 0;
    const int64_t page = way->page ? way->page : KEYS, pages = (KEYS + page - 1) / page;
    int32_t lengths[B], entries[B * KEYS];
    begin(way);
    for (int64_t r = 0; r < b; r++) lengths[r] = (int32_t)lengths_of[first + r];
    LAY_OUT(&q, q_values + first * S_Q * H_Q * D_QK, bf16, way->shift, 4, b, S_Q, H_Q, D_QK);
    LAY_OUT(&seqlens, lengths, i32, 0, 1, b);
    LAY_OUT(&out, NULL, bf16, way->shift, 4, b, S_Q, H_Q, D_V);
    LAY_OUT(&lse, NULL, f32, 0, 3, b, H_Q, S_Q);
    /* Pages in reverse order. */
    LAY_OUT(&kv, NULL, bf16, way->shift, 4, b * pages, page, 1, D_QK);
    for (int64_t r = 0; r < b; r++)
        for (int64_t t = 0; t < KEYS; t++) {
            const int64_t at = way->page ? b * pages - 1 - (r * pages + t / page) : r;
            entries[r * pages + t / page] = (int32_t)at;
            memcpy((uint16_t *)kv.tensor.data + at * kv.strides[0] + t % page * kv.strides[1],
                   key_values + ((first + r) * KEYS + t) * D_QK, D_QK * sizeof(uint16_t));
        }
    LAY_OUT(&table, entries, i32, 0, 2, b, pages);

    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &q.tensor, args.kv_cache = &kv.tensor, args.seqlens = &seqlens.tensor, args.out = &out.tensor;
    args.block_table = way->page ? &table.tensor : NULL;
    args.lse = way->no_lse ? NULL : &lse.tensor;
    args.kernel = kernel, args.causal = 1, args.batch_invariant = way->invariant;
    args.num_partitions = PARTITIONS;
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    plan.seqlens = &seqlens.tensor, plan.s_q = S_Q, plan.h_q = H_Q, plan.h_kv = 1;
    plan.num_partitions = PARTITIONS;
    if (way->plan == BY_PLAN) {
        CHECK_OK(fmla_decode_plan_size(&plan, &plan.plan_size));
        args.plan = plan.plan = workspace_of(plan.plan_size), args.plan_size = plan.plan_size;
    } else if (way->plan == BY_TABLES) {
        LAY_OUT(&partitions, NULL, i32, 0, 2, PARTITIONS, 8);
        LAY_OUT(&num_splits, NULL, i32, 0, 1, b + 1);
        args.partitions = plan.partitions = &partitions.tensor;
        args.num_splits = plan.num_splits = &num_splits.tensor;
    }
    if (way->plan != PLANNED_INSIDE) CHECK_OK(fmla_decode_plan(&plan));
    CHECK(!fmla_dense_decode_workspace_size(&args, &args.workspace_size, NULL), "%s: %s", way->name,
          fmla_last_error());
    args.workspace = workspace_of(args.workspace_size);
    CHECK(!fmla_dense_decode(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse);
    free(args.workspace), free(plan.plan);
}

/* Bytes lie apart by what their scales are aligned to. */
static void lay_out_cache(struct held *kv, int32_t format, const struct way *way)
{
    static const fmla_dtype bytes = {FMLA_TYPE_UINT, 8, 1};
    enum { PAGE = 20 };
    const int64_t page = way->page ? way->page : PAGE, slots = SLOTS;
    if (format == FMLA_KV_BF16) {
        LAY_OUT(kv, key_values, bf16, way->shift, 4, slots / page, page, 1, D_QK);
    } else if (format == FMLA_KV_FP8_656) {
        LAY_OUT(kv, packed, bytes, 4 * way->shift, 4, slots / page, page, 1, 656);
    } else { /* pages in one piece each */
        struct held pages;
        LAY_OUT(&pages, packed, bytes, 2 * way->shift, 2, slots / PAGE, PAGE * 584);
        HELD(kv, pages.tensor.data, bytes, 4, slots / PAGE, PAGE, 1, 584);
        kv->strides[0] = pages.strides[0];
    }
}

static void sparse(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    struct held q, kv, indices, out, lse;
    const int64_t d_qk = format == FMLA_KV_FP8_584 ? 512 : D_QK;
    begin(way);
    LAY_OUT(&q, q_values, bf16, way->shift, 4, B, S_Q, H_Q, d_qk);
    LAY_OUT(&indices, list_values, i32, way->shift, 3, B, S_Q, TOPK);
    LAY_OUT(&out, NULL, bf16, way->shift, 4, B, S_Q, H_Q, D_V);
    LAY_OUT(&lse, NULL, f32, 0, 3, B, H_Q, S_Q);
    lay_out_cache(&kv, format, way);
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = &q.tensor, args.kv_cache = &kv.tensor, args.indices = &indices.tensor, args.out = &out.tensor;
    args.lse = way->no_lse ? NULL : &lse.tensor;
    args.kernel = kernel, args.kv_format = format, args.num_partitions = PARTITIONS;
    args.batch_invariant = way->invariant;
    CHECK(!fmla_sparse_decode_workspace_size(&args, &args.workspace_size, NULL), "%s: %s", way->name,
          fmla_last_error());
    args.workspace = workspace_of(args.workspace_size);
    CHECK(!fmla_sparse_decode(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse);
    free(args.workspace);
}

/* So many tokens that no list is cut, or one of them on one thread. */
static void prefill(const char *kernel, const struct way *way, int32_t format, struct result *result)
{
    struct held q, kv, indices, out, lse, most;
    const int64_t d_qk = format == FMLA_KV_FP8_584 ? 512 : D_QK;
    const int64_t tokens = way->request ? 1 : TOKENS, first = way->request ? way->request - 1 : 0;
    begin(way);
    LAY_OUT(&q, q_values + first * H_Q * d_qk, bf16, way->shift, 3, tokens, H_Q, d_qk);
    LAY_OUT(&indices, list_values + first * TOPK, i32, way->shift, 3, tokens, 1, TOPK);
    LAY_OUT(&out, NULL, bf16, way->shift, 3, tokens, H_Q, D_V);
    LAY_OUT(&lse, NULL, f32, way->shift, 2, tokens, H_Q);
    LAY_OUT(&most, NULL, f32, way->shift, 2, tokens, H_Q);
    lay_out_cache(&kv, format, way);
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = &q.tensor, args.kv = &kv.tensor, args.indices = &indices.tensor, args.out = &out.tensor;
    if (!way->no_lse) args.lse = &lse.tensor, args.max_logits = &most.tensor;
    args.kernel = kernel, args.kv_format = format;
    CHECK(!fmla_sparse_prefill_workspace_size(&args, &args.workspace_size, NULL), "%s: %s", way->name,
          fmla_last_error());
    args.workspace = workspace_of(args.workspace_size);
    CHECK(!fmla_sparse_prefill(&args), "%s: %s", way->name, fmla_last_error());
    collect(&out, result->out), collect(&lse, result->lse), collect(&most, result->most);
    free(args.workspace);
}

static void merge(const char *kernel, const struct way *way, struct result *result)
{
    struct held parts, lse_parts, out, lse;
    begin(way);
    LAY_OUT(&parts, parts_values, f32, way->shift, 5, PARTS, B, S_Q, H_Q, D_V);
    LAY_OUT(&lse_parts, parts_lse, f32, 0, 4, PARTS, B, H_Q, S_Q);
    LAY_OUT(&out, NULL, bf16, way->shift, 4, B, S_Q, H_Q, D_V);
    LAY_OUT(&lse, NULL, f32, 0, 3, B, H_Q, S_Q);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse_parts.tensor, args.out = &out.tensor;
    args.lse = way->no_lse ? NULL : &lse.tensor, args.kernel = kernel;
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

static void check_dense(const char *kernel)
{
    static const struct way more[] = {{.name = "by a plan", .plan = BY_PLAN, .threads = 3},
                                      {.name = "by tables", .plan = BY_TABLES},
                                      {.name = "pages of one", .page = 1},
                                      {.name = "pages of 16", .page = 16},
                                      {.name = "pages of 61, unaligned", .page = 61, .shift = 1},
                                      {.name = "pages of 64", .page = 64}};
    const struct way none = {.name = "first"};
    memset(&base, 0, sizeof base), memset(&other, 0, sizeof other);
    dense(kernel, &none, &base);
    for (int i = 0; i < EVERYWHERE; i++) {
        dense(kernel, &everywhere[i], &other);
        compare("dense_decode", kernel, 0, &everywhere[i], 0, ROWS);
    }
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        dense(kernel, &more[i], &other);
        compare("dense_decode", kernel, 0, &more[i], 0, ROWS);
    }
    const struct way invariant = {.name = "batch-invariant", .invariant = true};
    dense(kernel, &invariant, &base);
    for (int64_t request = 1; request <= B; request++) {
        const struct way alone = {.name = "batch-invariant, alone, three threads",
                                  .invariant = true,
                                  .request = request,
                                  .threads = 3,
                                  .shift = 1};
        dense(kernel, &alone, &other);
        compare("dense_decode", kernel, 0, &alone, (request - 1) * S_Q * H_Q, S_Q * H_Q);
    }
}

static void check_sparse(const char *kernel, int32_t format)
{
    const struct way none = {.name = "first"}, invariant = {.name = "batch-invariant", .invariant = true};
    memset(&base, 0, sizeof base), memset(&other, 0, sizeof other);
    for (int mode = 0; mode < 2; mode++) {
        sparse(kernel, mode ? &invariant : &none, format, &base);
        for (int i = 0; i < EVERYWHERE; i++) {
            struct way way = everywhere[i];
            way.invariant = mode;
            sparse(kernel, &way, format, &other);
            compare("sparse_decode", kernel, format, &way, 0, ROWS);
        }
        for (size_t i = 0; format != FMLA_KV_FP8_584 && i < sizeof in_pages / sizeof in_pages[0]; i++) {
            struct way way = in_pages[i];
            way.invariant = mode;
            sparse(kernel, &way, format, &other);
            compare("sparse_decode", kernel, format, &way, 0, ROWS);
        }
    }
}

static void check_prefill(const char *kernel, int32_t format)
{
    const struct way none = {.name = "first"};
    memset(&base, 0, sizeof base), memset(&other, 0, sizeof other);
    prefill(kernel, &none, format, &base);
    for (int i = 0; i < EVERYWHERE; i++) {
        prefill(kernel, &everywhere[i], format, &other);
        compare("sparse_prefill", kernel, format, &everywhere[i], 0, TOKENS * H_Q);
    }
    for (size_t i = 0; format != FMLA_KV_FP8_584 && i < sizeof in_pages / sizeof in_pages[0]; i++) {
        prefill(kernel, &in_pages[i], format, &other);
        compare("sparse_prefill", kernel, format, &in_pages[i], 0, TOKENS * H_Q);
    }
    for (int64_t token = 1; token <= TOKENS; token += 7) {
        const struct way alone = {.name = "a token alone", .request = token, .shift = 1};
        prefill(kernel, &alone, format, &other);
        compare("sparse_prefill", kernel, format, &alone, (token - 1) * H_Q, H_Q);
    }
}

static void check_merge(const char *kernel)
{
    const struct way none = {.name = "first"};
    memset(&base, 0, sizeof base), memset(&other, 0, sizeof other);
    merge(kernel, &none, &base);
    for (int i = 0; i < EVERYWHERE; i++) {
        merge(kernel, &everywhere[i], &other);
        compare("merge", kernel, 0, &everywhere[i], 0, ROWS);
    }
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
    static const int32_t formats[] = {FMLA_KV_BF16, FMLA_KV_FP8_656, FMLA_KV_FP8_584};
    fmla_capability row = FMLA_INIT(fmla_capability);
    draw();
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (!row.kernel || !row.available || row.forced_only) continue;
        if (!strcmp(row.operation, "dense_decode")) check_dense(row.kernel);
        if (!strcmp(row.operation, "merge")) check_merge(row.kernel);
        for (int f = 0; f < 3; f++) {
            if (!strcmp(row.operation, "sparse_decode")) check_sparse(row.kernel, formats[f]);
            if (!strcmp(row.operation, "sparse_prefill")) check_prefill(row.kernel, formats[f]);
        }
    }
    for (int i = 0; i < 12; i++) free(memory[i]);
    return check_done("same_bits");
}
