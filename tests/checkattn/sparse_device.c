/* SPDX-License-Identifier: MIT */
#include "sparse_device.h"

#include "sparse_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUSY = 3 /* sparse_shapes: 1024 keys, 576 named */, WIDE = 5 /* 2048 named */ };

/* FP8 is what every kernel takes, so that most cases are of it. */
static void make_case(struct sparse_case *c, const struct run *run, struct tally *tally, const char *name,
                      const int64_t v[S_AXES], uint64_t seed)
{
    int64_t values[S_AXES];
    memcpy(values, v, sizeof values);
    values[S_LSE] = 1;
    sparse_case_make(c, run, values, run->seed * 7919 + seed);
    snprintf(c->name, sizeof c->name, "%s", name);
    tally->cases++;
}

/* What every result here must pass. */
static void compare(struct sparse_case *c, const struct run *run, struct tally *tally)
{
    if (!guarded_intact(&c->out) || !guarded_intact(&c->lse))
        report(tally, run, c->name, "bytes outside the elements of out and lse were written");
    sparse_compare_oracle(c, run, tally);
}

static size_t workspace_bytes(const fmla_sparse_decode_args *args, const struct sparse_case *c,
                              const struct run *run, struct tally *tally)
{
    size_t bytes = 0;
    if (fmla_sparse_decode_workspace_size(args, &bytes, NULL)) report(tally, run, c->name, fmla_last_error());
    return bytes;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

enum graph_kind { GRAPH_PLAN_INSIDE, GRAPH_PLAN_CAPTURED, GRAPH_INVARIANT, GRAPH_KINDS };

/* A call in a graph, with the memory that it needs beside the case's. */
struct graph {
    void *graph, *stream;
    struct device_scratch workspace, plan;
};

static void graph_capture(struct graph *g, const struct sparse_case *c, enum graph_kind kind,
                          const struct run *run, struct tally *tally)
{
    struct device_sparse_args call;
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    fmla_status status = FMLA_OK;
    device_sparse_args_make(&call, &c->blocks, &c->args);
    g->stream = call.args.stream = plan.stream = device_stream_open();
    plan.sparse = 1, plan.b = (int32_t)c->b, plan.s_q = c->s_q, plan.h_q = c->h_q, plan.target = c->device;
    plan.topk = c->pool[0].topk, plan.extra_topk = c->pool[1].topk;
    plan.topk_length = call.args.topk_length, plan.extra_topk_length = call.args.extra_topk_length;
    if (kind == GRAPH_PLAN_CAPTURED) {
        status = fmla_decode_plan_size(&plan, &plan.plan_size);
        device_scratch_make(&g->plan, plan.plan_size, 0x3c);
        call.args.plan = plan.plan = g->plan.memory, call.args.plan_size = plan.plan_size;
    }
    device_scratch_make(&g->workspace, workspace_bytes(&call.args, c, run, tally), 0x3c);
    call.args.workspace = g->workspace.memory, call.args.workspace_size = g->workspace.bytes;
    device_capture_begin(g->stream);
    if (!status && kind == GRAPH_PLAN_CAPTURED) status = fmla_decode_plan(&plan);
    if (!status) status = fmla_sparse_decode(&call.args);
    if (status) report(tally, run, c->name, fmla_last_error());
    g->graph = device_capture_end(g->stream);
}

/* Launches the graph over what is in the case's memory on the device now. */
static void graph_check(const struct graph *g, struct sparse_case *c, int fill, const struct run *run,
                        struct tally *tally)
{
    const uint64_t inputs = sparse_hash_inputs(c);
    device_scratch_fill(&g->workspace, fill);
    if (g->plan.memory) device_scratch_fill(&g->plan, fill);
    device_launch(g->graph, g->stream);
    device_wait(g->stream);
    sparse_case_from_device(c);
    if (sparse_hash_inputs(c) != inputs) report(tally, run, c->name, "the call changed its inputs");
    if (!device_scratch_intact(&g->workspace) || (g->plan.memory && !device_scratch_intact(&g->plan)))
        report(tally, run, c->name, "bytes behind the workspace or the plan were written");
    compare(c, run, tally);
}

static void check_graph(enum graph_kind kind, const struct run *run, struct tally *tally)
{
    static const char *const names[GRAPH_KINDS] = {
        "a graph, planned inside the call", "a graph, its plan captured too", "a graph, batch-invariant"};
    int64_t v[S_AXES] = {[S_SHAPE] = WIDE,
                         [S_B] = 6,
                         [S_SQ] = 2,
                         [S_HQ] = 16,
                         [S_FORMAT] = S_FP8_656,
                         [S_LENGTHS] = S_LENGTHS_FULL,
                         [S_EXTRA] = 1 + BUSY,
                         [S_EXTRA_LENGTHS] = S_LENGTHS_VARIED,
                         [S_INVARIANT] = kind == GRAPH_INVARIANT,
                         [S_LAYOUT] = LAYOUT_PADDED};
    struct sparse_case first;
    struct graph graph = {0};
    make_case(&first, run, tally, names[kind], v, 1);
    sparse_case_to_device(&first, NULL);
    graph_capture(&graph, &first, kind, run, tally);
    graph_check(&graph, &first, 0xff, run, tally);
    v[S_LENGTHS] = S_LENGTHS_VARIED;
    for (uint64_t i = 0; i < 3; i++) {
        struct sparse_case next;
        make_case(&next, run, tally, names[kind], v, 2 + i);
        sparse_case_to_device(&next, &first); /* lengths, indices, caches, queries */
        graph_check(&graph, &next, 0x11 * (int)i, run, tally);
        sparse_case_free(&next);
    }
    device_graph_close(graph.graph), device_stream_close(graph.stream);
    device_scratch_free(&graph.workspace), device_scratch_free(&graph.plan);
    sparse_case_free(&first);
}

/* ---- The same bits --------------------------------------------------------------------------- */

static void check_repeats(const struct run *run, struct tally *tally)
{
    static const int64_t cases[][S_AXES] = {
        {[S_SHAPE] = WIDE,
         [S_B] = 6,
         [S_SQ] = 2,
         [S_HQ] = 64,
         [S_FORMAT] = S_FP8_656,
         [S_LENGTHS] = S_LENGTHS_VARIED,
         [S_CODES] = S_CODES_SCALES},
        {[S_SHAPE] = 1, [S_B] = 128, [S_SQ] = 1, [S_HQ] = 128, [S_FORMAT] = S_FP8_584, [S_EXTRA] = 1 + WIDE},
        {[S_SHAPE] = WIDE,
         [S_B] = 7,
         [S_SQ] = 3,
         [S_HQ] = 11,
         [S_FORMAT] = S_FP8_656,
         [S_EXTRA] = 1 + WIDE,
         [S_INVARIANT] = 1},
        {[S_SHAPE] = WIDE,
         [S_B] = 20,
         [S_SQ] = 2,
         [S_HQ] = 96,
         [S_FORMAT] = S_BF16,
         [S_LENGTHS] = S_LENGTHS_VARIED,
         [S_EXTRA] = 1 + BUSY},
    };
    enum { RUNS = 20 };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i][S_FORMAT] == S_BF16 && !strcmp(run->kernel, "cuda-sm90-16")) continue;
        struct sparse_case c;
        make_case(&c, run, tally, "20 runs", cases[i], 100 + i);
        sparse_case_to_device(&c, NULL);
        if (sparse_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        unsigned char *out = malloc(c.out.whole), *lse = malloc(c.lse.whole);
        if (!out || !lse) exit(1);
        memcpy(out, c.out.memory, c.out.whole), memcpy(lse, c.lse.memory, c.lse.whole);
        compare(&c, run, tally);
        bool same = true;
        for (int again = 1; again < RUNS; again++) {
            guarded_reset(&c.out), guarded_reset(&c.lse);
            if (sparse_case_run(&c, &c.args, 13 * again)) report(tally, run, c.name, fmla_last_error());
            same &= !memcmp(out, c.out.memory, c.out.whole) && !memcmp(lse, c.lse.memory, c.lse.whole);
        }
        if (!same) report(tally, run, c.name, "runs of the same call differ in their bits");
        free(out), free(lse);
        sparse_case_free(&c);
    }
}

/* Requests of a batch of 64, each alone: sparse_compare_alone draws one. */
static void check_positions(const struct run *run, struct tally *tally)
{
    enum { DRAWN = 40 };
    const int64_t v[S_AXES] = {[S_SHAPE] = WIDE,
                               [S_B] = 64,
                               [S_SQ] = 2,
                               [S_HQ] = 16,
                               [S_FORMAT] = S_FP8_584,
                               [S_LENGTHS] = S_LENGTHS_VARIED,
                               [S_EXTRA] = 1 + WIDE,
                               [S_EXTRA_LENGTHS] = S_LENGTHS_VARIED,
                               [S_INVARIANT] = 1};
    struct sparse_case c;
    make_case(&c, run, tally, "requests of a batch of 64 alone", v, 200);
    sparse_case_to_device(&c, NULL);
    if (sparse_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
    compare(&c, run, tally);
    for (int i = 0; i < DRAWN; i++) sparse_compare_alone(&c, run, tally);
    sparse_case_free(&c);
}

/* Two streams, the same inputs and the same plan, results of their own. */
static void check_streams(const struct run *run, struct tally *tally)
{
    enum { AT_ONCE = 2, LAUNCHES = 20 };
    const int64_t v[S_AXES] = {[S_SHAPE] = WIDE,
                               [S_B] = 16,
                               [S_SQ] = 2,
                               [S_HQ] = 64,
                               [S_FORMAT] = S_FP8_656,
                               [S_LENGTHS] = S_LENGTHS_VARIED,
                               [S_PLAN] = S_PLAN_GIVEN};
    struct sparse_case c;
    struct guarded out, lse;
    struct device_sparse_args call[AT_ONCE] = {0};
    struct device_scratch workspace[AT_ONCE];
    fmla_tensor other[2];
    bool same_plan = true;
    make_case(&c, run, tally, "two streams", v, 300);
    if (sparse_case_plan(&c, &same_plan)) report(tally, run, c.name, fmla_last_error());
    if (!same_plan) report(tally, run, c.name, "the device's plan has other bits than the host's");
    sparse_case_to_device(&c, NULL);
    guarded_make(&out, c.out.tensor.dtype, 4, c.out.shape, LAYOUT_CONTIGUOUS);
    guarded_make(&lse, dtype_f32, 3, c.lse.shape, LAYOUT_CONTIGUOUS);
    device_add_guarded(&c.blocks, &out), device_add_guarded(&c.blocks, &lse);
    for (int i = 0; i < AT_ONCE; i++) {
        fmla_sparse_decode_args *args = &call[i].args;
        device_sparse_args_make(&call[i], &c.blocks, &c.args);
        if (i) args->out = device_tensor(&c.blocks, &out.tensor, &other[0]);
        if (i) args->lse = device_tensor(&c.blocks, &lse.tensor, &other[1]);
        device_scratch_make(&workspace[i], workspace_bytes(args, &c, run, tally), 0xff);
        args->workspace = workspace[i].memory, args->workspace_size = workspace[i].bytes;
        args->stream = device_stream_open();
    }
    for (int i = 0; i < AT_ONCE * LAUNCHES; i++)
        if (fmla_sparse_decode(&call[i % AT_ONCE].args)) report(tally, run, c.name, fmla_last_error());
    for (int i = 0; i < AT_ONCE; i++) {
        device_wait(call[i].args.stream);
        if (!device_scratch_intact(&workspace[i]))
            report(tally, run, c.name, "bytes behind the workspace were written");
        device_stream_close(call[i].args.stream);
        device_scratch_free(&workspace[i]);
    }
    sparse_case_from_device(&c);
    compare(&c, run, tally);
    if (out.whole != c.out.whole || memcmp(out.memory, c.out.memory, out.whole) ||
        memcmp(lse.memory, c.lse.memory, lse.whole))
        report(tally, run, c.name, "the same call on two streams has different bits");
    sparse_case_free(&c);
    guarded_free(&out), guarded_free(&lse);
}

/* ---- Tables that do not fit ------------------------------------------------------------------ */

/* Anything in some fields, which nobody can see on a GPU: results mean nothing then, and nothing else is written. */
static void check_foreign_tables(const struct run *run, struct tally *tally)
{
    enum { WAYS = 40 };
    static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, 8, 9, 10, 1 << 26, INT32_MAX};
    struct random_state random = {run->seed};
    const int64_t v[S_AXES] = {[S_SHAPE] = BUSY,
                               [S_B] = 9,
                               [S_SQ] = 2,
                               [S_HQ] = 64,
                               [S_FORMAT] = S_FP8_656,
                               [S_LENGTHS] = S_LENGTHS_VARIED,
                               [S_EXTRA] = 1 + BUSY,
                               [S_PLAN] = S_PLAN_GIVEN,
                               [S_PARTITIONS] = 13};
    for (int way = 0; way < WAYS; way++) {
        struct sparse_case c;
        bool same;
        make_case(&c, run, tally, "tables that do not fit", v, 270 + (uint64_t)way);
        if (sparse_case_plan(&c, &same)) report(tally, run, c.name, fmla_last_error());
        sparse_case_use_tables(&c);
        int32_t *rows = c.partitions.tensor.data, *splits = c.num_splits.tensor.data;
        const int64_t fields = c.partitions.shape[0] * FMLA_PARTITION_FIELDS;
        for (int64_t n = random_between(&random, 1, 20); n > 0; n--) {
            const int64_t at = random_between(&random, 0, fields + c.b);
            *(at < fields ? rows + at : splits + (at - fields)) = extremes[random_between(&random, 0, 8)];
        }
        sparse_case_to_device(&c, NULL);
        const uint64_t inputs = sparse_hash_inputs(&c);
        if (sparse_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
        sparse_case_from_device(&c);
        if (sparse_hash_inputs(&c) != inputs) report(tally, run, c.name, "the call changed its inputs");
        if (!guarded_intact(&c.out) || !guarded_intact(&c.lse))
            report(tally, run, c.name, "bytes outside the elements of out and lse were written");
        sparse_case_free(&c);
    }
}

void check_sparse_device(const struct run *run, struct tally *tally)
{
    for (int kind = 0; kind < GRAPH_KINDS; kind++) check_graph((enum graph_kind)kind, run, tally);
    check_repeats(run, tally);
    check_positions(run, tally);
    check_streams(run, tally);
    check_foreign_tables(run, tally);
}
