/* SPDX-License-Identifier: MIT
 *
 * Tests the promises of docs/semantics.md ("The same bits") for CPU kernels: each gives the same bits with
 * any number of threads, at any alignment and strides, with a plan in any form, and with keys in any
 * pages.
 */
#include "filled.h"

enum { KEYS = 300, SLOTS = 320, LONG_KEYS = 8300, TOKENS = 30, PARTITIONS = 3 };
enum {
    MOST_BYTES = 3 << 20,
    MEMORIES = MAX_TENSORS + 1 /* one for a plan */,
    CACHE = TENSOR_dense_decode_kv_cache
};

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};

/* The way to make a call; all zeros: one thread, everything contiguous, the call makes its plan. */
struct way {
    const char *name;
    int32_t threads; /* 0: one; -1: the host's own loop */
    int64_t shift;   /* elements before each tensor and between its rows */
    int64_t page;    /* slots of a page; 0: as made (dense decode: no block table) */
    enum { PLANNED_INSIDE, BY_PLAN, BY_TABLES } plan;
    bool no_lse, invariant;
    int64_t request; /* 1 + the only request or token; 0: all */
};

static const struct way everywhere[] = {
    {.name = "again"},
    {.name = "two threads", .threads = 2},
    {.name = "three threads", .threads = 3},
    {.name = "a loop of the host's own", .threads = -1},
    {.name = "unaligned", .shift = 1},
    {.name = "another alignment, three threads", .shift = 3, .threads = 3},
    {.name = "without lse", .no_lse = true}};
enum { EVERYWHERE = sizeof everywhere / sizeof everywhere[0] };

/* Slots are still consecutive, except in formats whose pages are contiguous. */
static const struct way in_pages[] = {{.name = "pages of one", .page = 1},
                                      {.name = "pages of 64", .page = 64},
                                      {.name = "one page, unaligned", .page = SLOTS, .shift = 1}};

/* Only dense decode has these ways. */
static const struct way of_dense[] = {{.name = "by a plan", .plan = BY_PLAN, .threads = 3},
                                      {.name = "by tables", .plan = BY_TABLES},
                                      {.name = "pages of one", .page = 1},
                                      {.name = "pages of 16", .page = 16},
                                      {.name = "pages of 61, unaligned", .page = 61, .shift = 1},
                                      {.name = "pages of 64", .page = 64}};

/* Formats of the caches, ordered so that operations that support only some support the first ones; 0: no
 * extra cache. */
static const int32_t formats[][2] = {{FMLA_KV_BF16, 0},
                                     {FMLA_KV_FP8_656, 0},
                                     {FMLA_KV_FP8_584, 0},
                                     {FMLA_KV_FP8_528, 0},
                                     {FMLA_KV_FP8_528_SPLIT, 0},
                                     {FMLA_KV_FP4_288, 0},
                                     {FMLA_KV_FP4_288_SPLIT, 0},
                                     {FMLA_KV_FP8_528_F32, 0},
                                     {FMLA_KV_FP8_656, FMLA_KV_FP8_656},
                                     {FMLA_KV_FP8_528, FMLA_KV_FP4_288},
                                     {FMLA_KV_FP4_288_SPLIT, FMLA_KV_FP8_584},
                                     {FMLA_KV_FP8_528_F32, FMLA_KV_BF16}};
enum { FORMATS = sizeof formats / sizeof formats[0], FORMATS_OF_ONE = 8 };

/* An operation: its calls, and its ways beyond those common to all, which give the bits of the plainest
 * one. */
static const struct tested {
    enum operation operation;
    struct layout layout;
    const struct way *more;
    int count, formats;
    enum dimension apart; /* batch-invariant: an index here alone has the same bits; none: DIM__ */
    int32_t alone;        /* runs on this many threads, so that no prefill list is split */
} all[] = {
#define ROWS  .b = 3, .s_q = 2, .h_q = 5, .h_kv = 1, .d_v = 512, .type = {FMLA_TYPE_BFLOAT, 16, 1}
#define PAGES .pages = 16, .page_size = SLOTS / 16, .one_head = 1, .topk = 150, .has = HAS_LSE | HAS_SINK
#define EXTRA .extra_pages = 4, .extra_page_size = 10, .extra_topk = 70
    {OP_DENSE_DECODE,
     DESIGNATED(ROWS, .d_qk = 576, .pages = 3, .page_size = KEYS, .max_pages = 1, .rows = PARTITIONS,
                .fields = FMLA_PARTITION_FIELDS, .splits = 4, .causal = 1, .has = HAS_LSE | HAS_SINK),
     of_dense, 6, 1, DIM_b, 3},
    {OP_SPARSE_DECODE, DESIGNATED(ROWS, PAGES, EXTRA), in_pages, 3, FORMATS, DIM_b, 3},
    /* So many tokens that no list is split. */
    {OP_SPARSE_PREFILL,
     DESIGNATED(PAGES, .s_q = TOKENS, .h_q = 5, .h_kv = 1, .d_v = 512, .type = {FMLA_TYPE_BFLOAT, 16, 1}),
     in_pages, 3, FORMATS_OF_ONE, DIM_s_q, 1},
#define HEADS(d_qk_, d_v_) .h_q = 6, .h_kv = 2, .d_qk = (d_qk_), .d_v = (d_v_), .causal = 1, .has = HAS_LSE
#define BATCH(...)                                                                                           \
    DESIGNATED(__VA_ARGS__, .b = 3, .s_q = TOKENS, .s_k = 100, .type = {FMLA_TYPE_BFLOAT, 16, 1}), NULL, 0,  \
        1, DIM_b, 3
#define FLAT(...)                                                                                            \
    DESIGNATED(__VA_ARGS__, .splits = 4, .tokens_q = 3 * TOKENS, .tokens_k = 300, .flat = true,              \
               .type = {FMLA_TYPE_BFLOAT, 16, 1}),                                                           \
        NULL, 0, 1, DIM__, 0
/* Few rows over so many keys that requests are split. */
#define LONG .h_q = 4, .h_kv = 1, .d_qk = 64, .d_v = 64, .causal = 1, .has = HAS_LSE
    {OP_MHA_FORWARD, BATCH(HEADS(192, 128))},
    {OP_MHA_FORWARD, BATCH(HEADS(96, 64))},
    {OP_MHA_FORWARD, BATCH(HEADS(128, 128), .num_splits = 2)},
    {OP_MHA_FORWARD, FLAT(HEADS(192, 128))},
    {OP_MHA_FORWARD, FLAT(HEADS(256, 256))},
    {OP_MHA_FORWARD, FLAT(HEADS(192, 128) | HAS_SINK, .num_splits = 64)},
    {OP_MHA_FORWARD, DESIGNATED(LONG, .b = 2, .s_q = 20, .s_k = LONG_KEYS, .type = {FMLA_TYPE_BFLOAT, 16, 1}),
     NULL, 0, 1, DIM_b, 3},
    {OP_MHA_FORWARD,
     DESIGNATED(LONG, .splits = 3, .tokens_q = 7, .tokens_k = 2 * LONG_KEYS, .flat = true,
                .type = {FMLA_TYPE_BFLOAT, 16, 1}),
     NULL, 0, 1, DIM__, 0},
    {OP_MHA_BACKWARD, BATCH(HEADS(192, 128))},
    {OP_MHA_BACKWARD, BATCH(HEADS(256, 256))},
    {OP_MHA_BACKWARD, FLAT(HEADS(192, 128) | HAS_SINK | HAS_DLSE)},
    {OP_MHA_BACKWARD, FLAT(HEADS(96, 64))},
    {OP_MERGE,
     DESIGNATED(.n = 4, .n_out = 4, .b = 3, .s_q = 2, .h_q = 5, .d_v = 512, .type = {FMLA_TYPE_FLOAT, 32, 1},
                .has = HAS_LSE | HAS_SINK | HAS_LAST),
     NULL, 0, 1, DIM__, 0}};

/* ---- Calls ----------------------------------------------------------------------------------- */

/* The call that the ways vary: everything contiguous. */
static struct made {
    const struct tested *tested;
    const char *kernel;
    struct layout layout;
    struct held held[MAX_TENSORS];
    _Alignas(16) char args[512];
} made;

/* The rows of each output, concatenated. */
struct result {
    size_t bytes[MAX_TENSORS];
    char rows[MAX_TENSORS][1 << 19];
};

static struct result base, other;
static char *memory[MEMORIES];

/* Parts are fp32, and their merged result is bf16. */
static void place(struct held *held, const struct member *m, int which, const struct layout *layout)
{
    struct layout l = *layout;
    if (made.tested->operation == OP_MERGE && (m->allowed & IS_OUTPUT)) l.type = bf16;
    place_filled(held, m, which, &l);
}

static void make(const struct tested *tested, const char *kernel, int which)
{
    made.tested = tested, made.kernel = kernel, made.layout = tested->layout;
    made.layout.num_partitions = PARTITIONS;
    if (tested->formats > 1) made.layout.format = formats[which][0];
    if (formats[which][1])
        made.layout.extra_format = formats[which][1], made.layout.has |= HAS_EXTRA | HAS_EXTRA_LENGTHS;
    const int64_t of_format = cache_formats[made.layout.format].d_qk;
    if (!made.layout.d_qk) made.layout.d_qk = of_format ? of_format : 576;
    for (int i = 0; i < MAX_TENSORS; i++) free(made.held[i].tensor.data), made.held[i].tensor.data = NULL;
    named_make(tested->operation, made.args, made.held, &made.layout, place);
}

/* Puts the keys of dense decode into pages, in reverse order. */
static void put_in_pages(struct held *kv, struct held *table, int64_t page)
{
    static uint16_t paged[3 * SLOTS * 576];
    static int32_t entries[3 * KEYS];
    const uint16_t *const keys = kv->tensor.data;
    const int64_t b = kv->shape[0], pages = (KEYS + page - 1) / page;
    memset(paged, 0xff, sizeof paged);
    for (int64_t r = 0; r < b; r++)
        for (int64_t t = 0; t < KEYS; t++) {
            const int64_t at = b * pages - 1 - (r * pages + t / page);
            entries[r * pages + t / page] = (int32_t)at;
            memcpy(paged + (at * page + t % page) * 576, keys + (r * KEYS + t) * 576, 576 * sizeof *keys);
        }
    HELD(kv, paged, bf16, 4, b * pages, page, 1, 576);
    HELD(table, entries, i32, 2, b, pages);
}

static void one_after_the_other(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    for (int64_t i = count; i-- > 0;) task(task_data, i, (int32_t)(i % 2));
}

/* Gives dense decode its plan, whole or as tables. */
static void give_plan(fmla_dense_decode_args *args, const struct held *held, const struct way *way,
                      void *plan)
{
    fmla_decode_plan_args a = FMLA_INIT(fmla_decode_plan_args);
    a.seqlens = args->seqlens, a.s_q = made.layout.s_q, a.h_q = made.layout.h_q, a.h_kv = 1;
    a.num_partitions = PARTITIONS;
    if (way->plan == BY_PLAN) {
        CHECK_OK(fmla_decode_plan_size(&a, &a.plan_size));
        args->plan = a.plan = plan, args->plan_size = a.plan_size;
    } else {
        args->partitions = a.partitions = &held[TENSOR_dense_decode_partitions].tensor;
        args->num_splits = a.num_splits = &held[TENSOR_dense_decode_num_splits].tensor;
    }
    CHECK_OK(fmla_decode_plan(&a));
}

static void call(const struct way *way, struct result *result)
{
    const enum operation operation = made.tested->operation;
    const struct member *m;
    static struct held held[MAX_TENSORS];
    _Alignas(16) char args[sizeof made.args];
    memcpy(args, made.args, sizeof args);
    for (int which = 0; described_tensor(operation, which); which++) {
        struct held *const h = &held[which];
        held_set(h, made.held[which].tensor.data, made.held[which].tensor.dtype, made.held[which].tensor.ndim,
                 made.held[which].shape);
        /* No other tensor of such a call has this first size. */
        if (way->request && h->shape[0] == made.layout.size[made.tested->apart])
            h->shape[0] = 1,
            h->tensor.data = (char *)h->tensor.data + (size_t)(way->request - 1) * bytes_of(h);
    }
    if (way->page && operation == OP_DENSE_DECODE)
        put_in_pages(&held[CACHE], &held[TENSOR_dense_decode_block_table], way->page);
    else if (way->page)
        HELD(&held[CACHE], made.held[CACHE].tensor.data, held[CACHE].tensor.dtype, 4, SLOTS / way->page,
             way->page, 1, made.held[CACHE].shape[3]);
    for (int which = 0; (m = described_tensor(operation, which)); which++) {
        const fmla_tensor **const tensor = (const fmla_tensor **)(void *)(args + m->offset);
        const bool result_beside = (m->allowed & ALLOW_NULL) && (m->allowed & IS_OUTPUT);
        if (!memory[which]) memory[which] = room_for(MOST_BYTES + 64);
        lay_out_apart(&held[which], m, &made.layout, memory[which], way->shift);
        if (*tensor || (way->page && !strcmp(m->name, "block_table"))) *tensor = &held[which].tensor;
        if (way->no_lse && result_beside) *tensor = NULL;
    }
    if (!memory[MAX_TENSORS]) memory[MAX_TENSORS] = room_for(MOST_BYTES);
    if (way->plan) give_plan((fmla_dense_decode_args *)(void *)args, held, way, memory[MAX_TENSORS]);
    put_number(operation, args, "batch_invariant", way->invariant);
    *(const char **)option_at(operation, args, "kernel") = made.kernel;
    fmla_set_parallel_for(way->threads < 0 ? one_after_the_other : NULL, NULL, 2);
    fmla_set_num_threads(way->threads < 0 ? 0 : way->threads ? way->threads : 1);
    CHECK(!run_in_room(operation, args), "%s: %s", way->name, fmla_last_error());
    for (int which = 0; (m = described_tensor(operation, which)); which++) {
        result->bytes[which] = (m->allowed & IS_OUTPUT) && *(fmla_tensor **)(void *)(args + m->offset)
                                   ? bytes_of(&held[which])
                                   : 0;
        if (result->bytes[which] > sizeof result->rows[which]) abort();
        if (result->bytes[which]) copy_rows(&held[which], false, result->rows[which], true);
    }
}

/* ---- Which are the same ---------------------------------------------------------------------- */

static void check_way(const struct way *way)
{
    const enum operation operation = made.tested->operation;
    const struct member *m;
    call(way, &other);
    for (int which = 0; (m = described_tensor(operation, which)); which++) {
        const size_t bytes = other.bytes[which],
                     first = way->request ? (size_t)(way->request - 1) * bytes : 0;
        if (bytes)
            CHECK(!memcmp(base.rows[which] + first, other.rows[which], bytes),
                  "%s %s, formats %d and %d, %s, batch-invariant %d: %s has other bits",
                  descriptors[operation].name, made.kernel, made.layout.format, made.layout.extra_format,
                  way->name, way->invariant, m->name);
    }
}

static void check_operation(const struct tested *o, const char *kernel, int which)
{
    make(o, kernel, which);
    const struct member *const cache = described_tensor(o->operation, CACHE);
    const int more = cache && described_contiguous_pages(cache, &made.layout) ? 0 : o->count;
    const int modes = option_at(o->operation, made.args, "batch_invariant") ? 1 : 0;
    for (int invariant = 0; invariant <= modes; invariant++) {
        call(&(struct way){.name = "first", .invariant = invariant}, &base);
        for (int i = 0; i < EVERYWHERE + more; i++) {
            struct way way = i < EVERYWHERE ? everywhere[i] : o->more[i - EVERYWHERE];
            way.invariant = invariant;
            check_way(&way);
        }
    }
    struct way way = {.name = "alone", .invariant = true, .threads = o->alone, .shift = 1};
    for (way.request = 1; o->apart && way.request <= made.layout.size[o->apart]; way.request++)
        check_way(&way);
}

int main(void)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (!row.kernel || !row.available || row.forced_only) continue;
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            for (int f = 0; f < all[k].formats && !strcmp(row.operation, descriptors[all[k].operation].name);
                 f++)
                check_operation(&all[k], row.kernel, f);
    }
    for (int i = 0; i < MEMORIES; i++) free(memory[i]);
    for (int i = 0; i < MAX_TENSORS; i++) free(made.held[i].tensor.data);
    return check_done("same_bits");
}
