/* SPDX-License-Identifier: MIT */
#include "decode_device.h"

#include "decode_case.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void make_case(struct decode_case *c, const struct run *run, struct tally *tally, const char *name,
                      const int64_t v[AXES], uint64_t seed)
{
    int64_t values[AXES];
    memcpy(values, v, sizeof values);
    values[A_DTYPE] = strstr(run->dtypes, "bf16") ? 0 : 1;
    values[A_LSE] = 1;
    decode_case_make(c, run, values, run->seed * 7919 + seed);
    snprintf(c->name, sizeof c->name, "%s", name);
    tally->cases++;
}

/* What every result here must pass. */
static void compare(struct decode_case *c, const struct run *run, struct tally *tally)
{
    if (!guarded_intact(&c->out) || !guarded_intact(&c->lse))
        report(tally, run, c->name, "bytes outside the elements of out and lse were written");
    decode_compare_oracle(c, run, tally);
}

/* out and lse of a case, for another call to be compared with. */
struct results {
    unsigned char *out, *lse;
};

static struct results results_copy(const struct decode_case *c)
{
    struct results copy = {malloc(c->out.whole), malloc(c->lse.whole)};
    memcpy(copy.out, c->out.memory, c->out.whole);
    memcpy(copy.lse, c->lse.memory, c->lse.whole);
    return copy;
}

static bool results_same(const struct decode_case *c, const struct results *copy)
{
    return !memcmp(copy->out, c->out.memory, c->out.whole) && !memcmp(copy->lse, c->lse.memory, c->lse.whole);
}

static void results_free(struct results *copy)
{
    free(copy->out), free(copy->lse);
}

static size_t workspace_bytes(const fmla_dense_decode_args *args, const struct decode_case *c,
                              const struct run *run, struct tally *tally)
{
    size_t bytes = 0;
    if (fmla_dense_decode_workspace_size(args, &bytes, NULL)) report(tally, run, c->name, fmla_last_error());
    return bytes;
}

/* ---- Graphs --------------------------------------------------------------------------------- */

enum graph_kind {
    GRAPH_PLAN_INSIDE,
    GRAPH_PLAN_CAPTURED,
    GRAPH_TABLES_CAPTURED,
    GRAPH_TABLES_COPIED, /* made on the host and copied to where the graph reads them, before every replay */
    GRAPH_INVARIANT,
    GRAPH_KINDS
};

/* A call in a graph, with the memory that it needs beside the case's. */
struct graph {
    enum graph_kind kind;
    void *graph, *stream;
    struct device_scratch workspace, plan, splits; /* plan: or the rows of a plan in tables */
    fmla_decode_plan_args plan_args;
    fmla_tensor partitions, num_splits;
    int64_t rows_shape[2], splits_shape[1];
};

/* Memory for a plan as the graph has it, which goes to plan_args and to the call. */
static fmla_status graph_make_plan(struct graph *g, const struct decode_case *c, fmla_dense_decode_args *call)
{
    enum { FILL = 0x3c };
    fmla_decode_plan_args *args = &g->plan_args;
    fmla_status status = FMLA_OK;
    if (g->kind == GRAPH_PLAN_CAPTURED) {
        status = fmla_decode_plan_size(args, &args->plan_size);
        device_scratch_make(&g->plan, args->plan_size, FILL);
        call->plan = args->plan = g->plan.memory, call->plan_size = args->plan_size;
    } else if (g->kind == GRAPH_TABLES_CAPTURED || g->kind == GRAPH_TABLES_COPIED) {
        int32_t count = 0;
        status = fmla_decode_plan_partitions(args, &count);
        g->rows_shape[0] = count, g->rows_shape[1] = FMLA_PARTITION_FIELDS, g->splits_shape[0] = c->b + 1;
        device_scratch_make(&g->plan, (size_t)count * FMLA_PARTITION_FIELDS * sizeof(int32_t), FILL);
        device_scratch_make(&g->splits, (size_t)(c->b + 1) * sizeof(int32_t), FILL);
        g->partitions = (fmla_tensor){g->plan.memory, c->device, 2, dtype_i32, g->rows_shape, NULL, 0};
        g->num_splits = (fmla_tensor){g->splits.memory, c->device, 1, dtype_i32, g->splits_shape, NULL, 0};
        call->partitions = args->partitions = &g->partitions;
        call->num_splits = args->num_splits = &g->num_splits;
    }
    return status;
}

/* The tables of the case's lengths, made on the host, to the device. */
static fmla_status graph_copy_tables(const struct graph *g, const struct decode_case *c)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    fmla_tensor partitions = g->partitions, num_splits = g->num_splits;
    fmla_decode_plan_args args = g->plan_args;
    partitions.data = aligned_alloc(64, (g->plan.bytes + 63) / 64 * 64);
    num_splits.data = malloc(g->splits.bytes);
    if (!partitions.data || !num_splits.data) exit(1);
    partitions.device = num_splits.device = cpu;
    args.seqlens = &c->seqlens.tensor, args.target = c->device, args.stream = NULL;
    args.partitions = &partitions, args.num_splits = &num_splits;
    const fmla_status status = fmla_decode_plan(&args);
    device_scratch_write(&g->plan, 0, partitions.data, g->plan.bytes);
    device_scratch_write(&g->splits, 0, num_splits.data, g->splits.bytes);
    free(partitions.data), free(num_splits.data);
    return status;
}

static void graph_capture(struct graph *g, const struct decode_case *c, enum graph_kind kind,
                          const struct run *run, struct tally *tally)
{
    struct device_decode_args call;
    fmla_decode_plan_args *plan = &g->plan_args;
    device_decode_args_make(&call, &c->blocks, &c->args);
    g->kind = kind;
    g->stream = call.args.stream = device_stream_open();
    *plan = FMLA_INIT(fmla_decode_plan_args);
    plan->seqlens = call.args.seqlens, plan->stream = g->stream;
    plan->s_q = c->s_q, plan->h_q = c->h_q, plan->h_kv = c->h_kv;
    plan->capacity = c->max_pages * c->page_size;
    fmla_status status = graph_make_plan(g, c, &call.args);
    device_scratch_make(&g->workspace, workspace_bytes(&call.args, c, run, tally), 0x3c);
    call.args.workspace = g->workspace.memory, call.args.workspace_size = g->workspace.bytes;

    device_capture_begin(g->stream);
    if (!status && (kind == GRAPH_PLAN_CAPTURED || kind == GRAPH_TABLES_CAPTURED))
        status = fmla_decode_plan(plan);
    if (!status) status = fmla_dense_decode(&call.args);
    if (status) report(tally, run, c->name, fmla_last_error());
    g->graph = device_capture_end(g->stream);
}

/* Launches the graph over what is in the case's memory on the device now. */
static void graph_check(const struct graph *g, struct decode_case *c, int fill, const struct run *run,
                        struct tally *tally)
{
    const uint64_t inputs = decode_hash_inputs(c);
    device_scratch_fill(&g->workspace, fill);
    if (g->plan.memory) device_scratch_fill(&g->plan, fill);
    if (g->splits.memory) device_scratch_fill(&g->splits, fill);
    if (g->kind == GRAPH_TABLES_COPIED && graph_copy_tables(g, c))
        report(tally, run, c->name, fmla_last_error());
    device_launch(g->graph, g->stream);
    device_wait(g->stream);
    device_down(&c->blocks, NULL);
    if (decode_hash_inputs(c) != inputs) report(tally, run, c->name, "the call changed its inputs");
    if (!device_scratch_intact(&g->workspace) || (g->plan.memory && !device_scratch_intact(&g->plan)) ||
        (g->splits.memory && !device_scratch_intact(&g->splits)))
        report(tally, run, c->name, "bytes behind the workspace or the plan were written");
    compare(c, run, tally);
}

static void check_graph(enum graph_kind kind, const struct run *run, struct tally *tally)
{
    static const char *const names[GRAPH_KINDS] = {
        "a graph, planned inside the call", "a graph, its plan captured too",
        "a graph, its plan captured as tables", "a graph, tables copied before it",
        "a graph, batch-invariant"};
    int64_t v[AXES] = {[A_B] = 6,
                       [A_SQ] = 2,
                       [A_SK] = 5000,
                       [A_HQ] = 16,
                       [A_HKV] = 1,
                       [A_PAGE] = 64,
                       [A_CAUSAL] = 1,
                       [A_DQK] = 576,
                       [A_LENGTHS] = LENGTHS_FIXED, /* the most pages */
                       [A_INVARIANT] = kind == GRAPH_INVARIANT,
                       [A_LAYOUT] = LAYOUT_PADDED};
    struct decode_case first;
    struct graph graph = {0};
    make_case(&first, run, tally, names[kind], v, 1);
    decode_case_to_device(&first, NULL);
    graph_capture(&graph, &first, kind, run, tally);
    graph_check(&graph, &first, 0xff, run, tally);
    v[A_LENGTHS] = LENGTHS_VARIED;
    for (uint64_t i = 0; i < 3; i++) {
        struct decode_case next;
        make_case(&next, run, tally, names[kind], v, 2 + i);
        decode_case_to_device(&next, &first); /* lengths, table, cache, queries */
        graph_check(&graph, &next, 0x11 * (int)i, run, tally);
        decode_case_free(&next);
    }
    guarded_reset(&first.out), guarded_reset(&first.lse);
    device_up(&first.blocks, NULL);
    graph_check(&graph, &first, 0x7f, run, tally);
    device_graph_close(graph.graph), device_stream_close(graph.stream);
    device_scratch_free(&graph.workspace), device_scratch_free(&graph.plan);
    device_scratch_free(&graph.splits);
    decode_case_free(&first);
}

void check_device_first_use(const struct run *run, struct tally *tally)
{
    for (int kind = 0; kind < GRAPH_KINDS; kind++) check_graph((enum graph_kind)kind, run, tally);
}

/* ---- The same bits -------------------------------------------------------------------------- */

static void check_repeats(const struct run *run, struct tally *tally)
{
    static const int64_t cases[][AXES] = {
        {[A_B] = 6,
         [A_SQ] = 2,
         [A_SK] = 4096,
         [A_HQ] = 16,
         [A_HKV] = 1,
         [A_PAGE] = 64,
         [A_CAUSAL] = 1,
         [A_DQK] = 576,
         [A_LENGTHS] = LENGTHS_VARIED},
        {[A_B] = 128, [A_SQ] = 1, [A_SK] = 1000, [A_HQ] = 128, [A_HKV] = 1, [A_PAGE] = 64, [A_DQK] = 512},
        {[A_B] = 7,
         [A_SQ] = 3,
         [A_SK] = 9000,
         [A_HQ] = 11,
         [A_HKV] = 1,
         [A_PAGE] = 61,
         [A_DQK] = 576,
         [A_LAYOUT] = LAYOUT_ODD,
         [A_INVARIANT] = 1},
    };
    enum { RUNS = 20 };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct decode_case c;
        make_case(&c, run, tally, "20 runs", cases[i], 100 + i);
        if (!decode_case_taken(run->kernel, c.v)) {
            decode_case_refused(&c, run, tally);
            decode_case_free(&c);
            continue;
        }
        decode_case_to_device(&c, NULL);
        if (decode_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        struct results first = results_copy(&c);
        compare(&c, run, tally);
        bool same = true;
        for (int again = 1; again < RUNS; again++) {
            guarded_reset(&c.out), guarded_reset(&c.lse);
            if (decode_case_run(&c, &c.args, 13 * again)) report(tally, run, c.name, fmla_last_error());
            same &= results_same(&c, &first);
        }
        if (!same) report(tally, run, c.name, "runs of the same call differ in their bits");
        results_free(&first);
        decode_case_free(&c);
    }
}

/* Any position of a batch of 128. */
static void check_positions(const struct run *run, struct tally *tally)
{
    static const int64_t heads[][2] = {{16, 2}, {128, 1}}; /* h_q, s_q */
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        const int64_t v[AXES] = {[A_B] = 128,          [A_SQ] = heads[i][1], [A_SK] = 5000,
                                 [A_HQ] = heads[i][0], [A_HKV] = 1,          [A_PAGE] = 64,
                                 [A_CAUSAL] = 1,       [A_DQK] = 576,        [A_LENGTHS] = LENGTHS_VARIED,
                                 [A_INVARIANT] = 1};
        struct decode_case c;
        make_case(&c, run, tally, "every request of a batch of 128 alone", v, 200 + i);
        decode_case_to_device(&c, NULL);
        if (decode_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        compare(&c, run, tally);
        for (int64_t r = 0; r < c.b; r++) decode_compare_alone(&c, r, run, tally);
        decode_case_free(&c);
    }
}

/* A plan that was made with other partitions than the call is told: the host cannot see that, and the results stand. */
static void check_foreign_plan(const struct run *run, struct tally *tally)
{
    for (int32_t told = 1; told <= 7; told += 3) {
        const int64_t v[AXES] = {[A_B] = 9,
                                 [A_SQ] = 2,
                                 [A_SK] = 700,
                                 [A_HQ] = 16,
                                 [A_HKV] = 1,
                                 [A_PAGE] = 64,
                                 [A_CAUSAL] = 1,
                                 [A_DQK] = 576,
                                 [A_PLAN] = PLAN_GIVEN,
                                 [A_PARTITIONS] = 13,
                                 [A_LENGTHS] = LENGTHS_VARIED};
        struct decode_case c;
        make_case(&c, run, tally, "a plan of other partitions", v, 250 + (uint64_t)told);
        bool same;
        if (decode_case_plan(&c, &same)) report(tally, run, c.name, fmla_last_error());
        decode_case_to_device(&c, NULL);
        c.args.num_partitions = told;
        if (decode_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        compare(&c, run, tally);
        decode_case_free(&c);
    }
}

/* Bends tables such as no header tells: all rows by some requests, as those of another batch would be, or anything in some
 * fields. */
static void bend_tables(struct decode_case *c, int how, struct random_state *random)
{
    static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, 8, 9, 10, 1 << 26, INT32_MAX};
    static const int32_t shifts[] = {-9, -4, 1, 1000};
    int32_t *rows = c->partitions.tensor.data, *splits = c->num_splits.tensor.data;
    const int64_t fields = c->partitions.shape[0] * FMLA_PARTITION_FIELDS;
    if (how < 4) {
        for (int64_t i = 0; i < fields; i += FMLA_PARTITION_FIELDS)
            rows[i] += shifts[how], rows[i + 1] += shifts[how];
        return;
    }
    for (int64_t n = random_between(random, 1, 20); n > 0; n--) {
        const int64_t at = random_between(random, 0, fields + c->b);
        *(at < fields ? rows + at : splits + (at - fields)) = extremes[random_between(random, 0, 8)];
    }
}

/* Tables that do not fit, which nobody can see on a GPU: results mean nothing then, and nothing else is written. */
static void check_foreign_tables(const struct run *run, struct tally *tally)
{
    enum { WAYS = 60 };
    struct random_state random = {run->seed};
    const int64_t v[AXES] = {[A_B] = 9,
                             [A_SQ] = 2,
                             [A_SK] = 1500,
                             [A_HQ] = 64,
                             [A_HKV] = 1,
                             [A_PAGE] = 64,
                             [A_CAUSAL] = 1,
                             [A_DQK] = 576,
                             [A_PLAN] = PLAN_GIVEN,
                             [A_PARTITIONS] = 13,
                             [A_LENGTHS] = LENGTHS_VARIED};
    for (int how = 0; how < WAYS; how++) {
        struct decode_case c;
        make_case(&c, run, tally, "tables that do not fit", v, 270 + (uint64_t)how);
        bool same;
        if (decode_case_plan(&c, &same)) report(tally, run, c.name, fmla_last_error());
        decode_case_use_tables(&c);
        bend_tables(&c, how, &random);
        decode_case_to_device(&c, NULL);
        device_up(&c.blocks, NULL);
        const uint64_t inputs = decode_hash_inputs(&c);
        if (decode_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        device_down(&c.blocks, NULL);
        if (decode_hash_inputs(&c) != inputs) report(tally, run, c.name, "the call changed its inputs");
        if (!guarded_intact(&c.out) || !guarded_intact(&c.lse))
            report(tally, run, c.name, "bytes outside the elements of out and lse were written");
        decode_case_free(&c);
    }
}

/* ---- At once -------------------------------------------------------------------------------- */

enum { AT_ONCE = 2, LAUNCHES = 20 };

static const int64_t busy_case[AXES] = {[A_B] = 16,           [A_SQ] = 2,    [A_SK] = 4096,
                                        [A_HQ] = 64,          [A_HKV] = 1,   [A_PAGE] = 64,
                                        [A_CAUSAL] = 1,       [A_DQK] = 576, [A_LENGTHS] = LENGTHS_VARIED,
                                        [A_PLAN] = PLAN_GIVEN};

/* A call that is sent to a stream of its own again and again. */
struct sender {
    struct device_decode_args call;
    struct device_scratch workspace;
    bool bare; /* sends from a thread without a context: the library has to find one */
    char refusal[256];
};

static void sender_make(struct sender *s, const struct decode_case *c, const struct run *run,
                        struct tally *tally)
{
    memset(s, 0, sizeof *s);
    device_decode_args_make(&s->call, &c->blocks, &c->args);
    device_scratch_make(&s->workspace, workspace_bytes(&s->call.args, c, run, tally), 0xff);
    s->call.args.workspace = s->workspace.memory, s->call.args.workspace_size = s->workspace.bytes;
    s->call.args.stream = device_stream_open();
}

static void sender_launch(struct sender *s)
{
    if (fmla_dense_decode(&s->call.args)) snprintf(s->refusal, sizeof s->refusal, "%s", fmla_last_error());
}

static void sender_end(struct sender *s, const struct decode_case *c, const struct run *run,
                       struct tally *tally)
{
    device_wait(s->call.args.stream);
    if (*s->refusal) report(tally, run, c->name, s->refusal);
    if (!device_scratch_intact(&s->workspace))
        report(tally, run, c->name, "bytes behind the workspace were written");
    device_stream_close(s->call.args.stream);
    device_scratch_free(&s->workspace);
}

/* Two streams, the same inputs and the same plan, results of their own. */
static void check_streams(const struct run *run, struct tally *tally)
{
    struct decode_case c;
    struct guarded out, lse;
    struct sender sender[AT_ONCE];
    bool same_plan;
    make_case(&c, run, tally, "two streams", busy_case, 300);
    if (decode_case_plan(&c, &same_plan)) report(tally, run, c.name, fmla_last_error());
    if (!same_plan) report(tally, run, c.name, "the device's plan has other bits than the host's");
    decode_case_to_device(&c, NULL);
    guarded_make(&out, c.out.tensor.dtype, 4, c.out.shape, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, c.lse.shape, LAYOUT_CONTIGUOUS);
    device_add_guarded(&c.blocks, &out), device_add_guarded(&c.blocks, &lse);
    for (int i = 0; i < AT_ONCE; i++) sender_make(&sender[i], &c, run, tally);
    fmla_tensor other[2];
    sender[1].call.args.out = device_tensor(&c.blocks, &out.tensor, &other[0]);
    sender[1].call.args.lse = device_tensor(&c.blocks, &lse.tensor, &other[1]);
    for (int launch = 0; launch < LAUNCHES; launch++)
        for (int i = 0; i < AT_ONCE; i++) sender_launch(&sender[i]);
    for (int i = 0; i < AT_ONCE; i++) sender_end(&sender[i], &c, run, tally);
    device_down(&c.blocks, NULL);
    compare(&c, run, tally);
    if (out.whole != c.out.whole || memcmp(out.memory, c.out.memory, out.whole) ||
        memcmp(lse.memory, c.lse.memory, lse.whole))
        report(tally, run, c.name, "the same call on two streams has different bits");
    decode_case_free(&c);
    guarded_free(&out), guarded_free(&lse);
}

static void *thread_main(void *data)
{
    struct sender *s = data;
    if (!s->bare) device_enter();
    for (int launch = 0; launch < LAUNCHES; launch++) sender_launch(s);
    if (s->bare) device_enter();
    device_wait(s->call.args.stream);
    return NULL;
}

/* Two host threads, each with a case and a stream of its own. */
static void check_threads(const struct run *run, struct tally *tally)
{
    struct decode_case c[AT_ONCE];
    struct sender sender[AT_ONCE];
    pthread_t thread[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        int64_t v[AXES];
        memcpy(v, busy_case, sizeof v);
        v[A_PLAN] = PLAN_INSIDE, v[A_HQ] = i ? 16 : 128;
        make_case(&c[i], run, tally, "two host threads", v, 310 + (uint64_t)i);
        decode_case_to_device(&c[i], NULL);
        sender_make(&sender[i], &c[i], run, tally);
        sender[i].bare = i == 1;
    }
    bool started[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        started[i] = !pthread_create(&thread[i], NULL, thread_main, &sender[i]);
        if (!started[i]) report(tally, run, c[i].name, "no thread could be started");
    }
    for (int i = 0; i < AT_ONCE; i++)
        if (started[i]) pthread_join(thread[i], NULL);
    for (int i = 0; i < AT_ONCE; i++) {
        sender_end(&sender[i], &c[i], run, tally);
        device_down(&c[i].blocks, NULL);
        compare(&c[i], run, tally);
        decode_case_free(&c[i]);
    }
}

/* ---- A cache past 2^32 elements ------------------------------------------------------------- */

/* Where a page of the small cache on the host lies in the large one on the device: some just past 2^31 elements, the
 * others at the end. */
static int64_t large_page(int64_t page, int64_t pages, int64_t page_elements)
{
    return page % 2 ? (INT64_C(1) << 31) / page_elements + 1 + page : pages - 1 - page;
}

static void check_large_cache(const struct run *run, struct tally *tally)
{
    static const int64_t elements = INT64_C(0x130000000);
    static const int64_t v[AXES] = {[A_B] = 4,      [A_SQ] = 2,    [A_SK] = 700,
                                    [A_HQ] = 16,    [A_HKV] = 1,   [A_PAGE] = 64,
                                    [A_CAUSAL] = 1, [A_DQK] = 576, [A_INPUTS] = INPUTS_SPIKED};
    struct decode_case c;
    const size_t needed = (size_t)elements * sizeof(uint16_t);
    if (device_memory() < needed + needed / 4) {
        printf("  not on this GPU: a cache of %lld bytes\n", (long long)needed);
        return;
    }
    make_case(&c, run, tally, "a cache past 2^32 elements", v, 400);
    const int64_t page_elements = c.kv_strides[0], pages = elements / page_elements;
    const size_t page_bytes = (size_t)page_elements * sizeof(uint16_t);
    struct device_scratch cache;
    device_scratch_make(&cache, (size_t)pages * page_bytes, 0xff); /* NaN wherever no page is */
    for (int64_t page = 0; page < c.pages; page++)
        device_scratch_write(&cache, (size_t)large_page(page, pages, page_elements) * page_bytes,
                             guarded_at(&c.kv, page, 0, 0, 0), page_bytes);
    int32_t *small = malloc(c.table.whole);
    memcpy(small, c.table.memory, c.table.whole);
    for (int64_t r = 0; r < c.b; r++)
        for (int64_t i = 0; i * c.page_size < c.length[r]; i++) {
            int32_t *entry = guarded_at(&c.table, r, i, 0, 0);
            *entry = (int32_t)large_page(*entry, pages, page_elements);
        }
    decode_case_to_device(&c, NULL);
    struct device_decode_args call;
    device_decode_args_make(&call, &c.blocks, &c.args);
    fmla_tensor large = *call.args.kv_cache;
    const int64_t shape[4] = {pages, c.page_size, c.h_kv, c.d_qk};
    large.data = cache.memory, large.shape = shape;
    call.args.kv_cache = &large;
    if (device_decode_run(&call, &c.blocks, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
    memcpy(c.table.memory, small, c.table.whole); /* the oracle reads the small cache */
    compare(&c, run, tally);
    if (!device_scratch_intact(&cache)) report(tally, run, c.name, "bytes behind the cache were written");
    device_scratch_free(&cache);
    free(small);
    decode_case_free(&c);
}

void check_device_decode(const struct run *run, struct tally *tally)
{
    check_repeats(run, tally);
    check_positions(run, tally);
    check_foreign_plan(run, tally);
    check_foreign_tables(run, tally);
    check_streams(run, tally);
    check_threads(run, tally);
    check_large_cache(run, tally);
}
