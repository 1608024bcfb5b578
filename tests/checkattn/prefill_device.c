/* SPDX-License-Identifier: MIT */
#include "prefill_device.h"

#include "prefill_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDE = 4 /* prefill_shapes: 1521 keys, 512 named */, LONG = 8 /* 8192 entries */ };

static void make_case(struct prefill_case *c, const struct run *run, struct tally *tally, const char *name,
                      const int64_t v[P_AXES], uint64_t seed)
{
    prefill_case_make(c, run, v, run->seed * 7919 + seed);
    snprintf(c->name, sizeof c->name, "%s", name);
    tally->cases++;
}

/* Does the kernel take such cases? The portable one takes all. */
static bool is_taken(const struct run *run, const int64_t v[P_AXES])
{
    struct prefill_case c;
    const char *kernel;
    prefill_case_make(&c, run, v, 1);
    prefill_case_to_device(&c, NULL);
    const bool taken = prefill_case_kernel(&c, &kernel) == FMLA_OK;
    prefill_case_free(&c);
    return taken;
}

/* What every result here must pass. */
static void compare(struct prefill_case *c, const struct run *run, struct tally *tally)
{
    prefill_compare_intact(c, run, tally);
    prefill_compare(c, run, tally);
}

static size_t workspace_bytes(const fmla_sparse_prefill_args *args, const struct prefill_case *c,
                              const struct run *run, struct tally *tally)
{
    size_t bytes = 0;
    if (fmla_sparse_prefill_workspace_size(args, &bytes, NULL))
        report(tally, run, c->name, fmla_last_error());
    return bytes;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

/* A call in a graph, with the memory that it needs beside the case's. */
struct graph {
    void *graph, *stream;
    struct device_scratch workspace;
};

static void graph_capture(struct graph *g, const struct prefill_case *c, const struct run *run,
                          struct tally *tally)
{
    struct device_prefill_args call;
    device_prefill_args_make(&call, &c->blocks, &c->args);
    g->stream = call.args.stream = device_stream_open();
    device_scratch_make(&g->workspace, workspace_bytes(&call.args, c, run, tally), 0x3c);
    call.args.workspace = g->workspace.memory, call.args.workspace_size = g->workspace.bytes;
    device_capture_begin(g->stream);
    if (fmla_sparse_prefill(&call.args)) report(tally, run, c->name, fmla_last_error());
    g->graph = device_capture_end(g->stream);
}

/* Launches the graph over what is in the case's memory on the device now. */
static void graph_check(const struct graph *g, struct prefill_case *c, int fill, const struct run *run,
                        struct tally *tally)
{
    const uint64_t inputs = prefill_hash_inputs(c);
    device_scratch_fill(&g->workspace, fill);
    device_launch(g->graph, g->stream);
    device_wait(g->stream);
    prefill_case_from_device(c);
    if (prefill_hash_inputs(c) != inputs) report(tally, run, c->name, "the call changed its inputs");
    if (!device_scratch_intact(&g->workspace))
        report(tally, run, c->name, "bytes behind the workspace were written");
    compare(c, run, tally);
}

static void check_graph(const struct run *run, struct tally *tally, const int64_t like[P_AXES])
{
    static const char name[] = "a graph, replayed with other lists, lengths, keys and queries in place";
    int64_t v[P_AXES];
    struct prefill_case first;
    struct graph graph = {0};
    memcpy(v, like, sizeof v);
    v[P_LENGTHS] = S_LENGTHS_FULL;
    make_case(&first, run, tally, name, v, 1);
    prefill_case_to_device(&first, NULL);
    graph_capture(&graph, &first, run, tally);
    graph_check(&graph, &first, 0xff, run, tally);
    for (uint64_t i = 0; i < 3; i++) {
        static const int64_t indices[] = {S_INDICES_BLOCKS, S_INDICES_NONE, S_INDICES_ANY};
        struct prefill_case next;
        v[P_LENGTHS] = i ? S_LENGTHS_VARIED : S_LENGTHS_BEYOND, v[P_INDICES] = indices[i];
        make_case(&next, run, tally, name, v, 2 + i);
        prefill_case_to_device(&next, &first);
        graph_check(&graph, &next, 0x11 * (int)i, run, tally);
        prefill_case_free(&next);
    }
    device_graph_close(graph.graph), device_stream_close(graph.stream);
    device_scratch_free(&graph.workspace);
    prefill_case_free(&first);
}

/* ---- The same bits --------------------------------------------------------------------------- */

static void check_repeats(const struct run *run, struct tally *tally, const int64_t v[P_AXES], uint64_t seed)
{
    enum { RUNS = 20 };
    struct prefill_case c;
    make_case(&c, run, tally, "20 runs", v, seed);
    prefill_case_to_device(&c, NULL);
    if (prefill_case_run(&c, &c.args, 0xff)) report(tally, run, c.name, fmla_last_error());
    unsigned char *results = prefill_results_copy(&c);
    compare(&c, run, tally);
    bool same = true;
    for (int again = 1; again < RUNS; again++) {
        prefill_results_reset(&c);
        if (prefill_case_run(&c, &c.args, 13 * again)) report(tally, run, c.name, fmla_last_error());
        same &= prefill_results_same(&c, results);
    }
    if (!same) report(tally, run, c.name, "runs of the same call differ in their bits");
    free(results);
    prefill_case_free(&c);
}

/* Two streams, the same inputs, results of their own. */
static void check_streams(const struct run *run, struct tally *tally, const int64_t v[P_AXES])
{
    enum { AT_ONCE = 2, LAUNCHES = 20 };
    struct prefill_case c, other;
    struct device_prefill_args call[AT_ONCE] = {0};
    struct device_scratch workspace[AT_ONCE];
    fmla_tensor results[3];
    make_case(&c, run, tally, "two streams", v, 300);
    prefill_case_make(&other, run, v, 1);
    prefill_results_reset(&other);
    prefill_case_to_device(&c, NULL);
    device_add_guarded(&c.blocks, &other.out);
    device_add_guarded(&c.blocks, &other.max_logits), device_add_guarded(&c.blocks, &other.lse);
    for (int i = 0; i < AT_ONCE; i++) {
        fmla_sparse_prefill_args *args = &call[i].args;
        device_prefill_args_make(&call[i], &c.blocks, &c.args);
        if (i) {
            args->out = device_tensor(&c.blocks, &other.out_view, &results[0]);
            args->max_logits = device_tensor(&c.blocks, &other.max_logits.tensor, &results[1]);
            args->lse = device_tensor(&c.blocks, &other.lse.tensor, &results[2]);
        }
        device_scratch_make(&workspace[i], workspace_bytes(args, &c, run, tally), 0xff);
        args->workspace = workspace[i].memory, args->workspace_size = workspace[i].bytes;
        args->stream = device_stream_open();
    }
    for (int i = 0; i < AT_ONCE * LAUNCHES; i++)
        if (fmla_sparse_prefill(&call[i % AT_ONCE].args)) report(tally, run, c.name, fmla_last_error());
    for (int i = 0; i < AT_ONCE; i++) {
        device_wait(call[i].args.stream);
        if (!device_scratch_intact(&workspace[i]))
            report(tally, run, c.name, "bytes behind the workspace were written");
        device_stream_close(call[i].args.stream);
        device_scratch_free(&workspace[i]);
    }
    prefill_case_from_device(&c);
    compare(&c, run, tally);
    unsigned char *theirs = prefill_results_copy(&other);
    if (!prefill_results_same(&c, theirs))
        report(tally, run, c.name, "the same call on two streams has different bits");
    free(theirs);
    prefill_case_free(&c), prefill_case_free(&other);
}

/* Calls over other inputs behind one another, in one workspace: none begins to write there before the one in front has read it. */
static void check_workspace(const struct run *run, struct tally *tally, const int64_t v[P_AXES])
{
    enum { CASES = 2, LAUNCHES = 20 };
    struct prefill_case c[CASES];
    struct device_prefill_args call[CASES] = {0};
    struct device_scratch workspace;
    void *stream = device_stream_open();
    for (int i = 0; i < CASES; i++) {
        make_case(&c[i], run, tally, "one workspace, calls in turn", v, 400 + (uint64_t)i);
        prefill_case_to_device(&c[i], NULL);
        device_prefill_args_make(&call[i], &c[i].blocks, &c[i].args);
    }
    device_scratch_make(&workspace, workspace_bytes(&call[0].args, &c[0], run, tally), 0xff);
    for (int i = 0; i < CASES * LAUNCHES; i++) {
        fmla_sparse_prefill_args *args = &call[i % CASES].args;
        args->stream = stream;
        args->workspace = workspace.memory, args->workspace_size = workspace.bytes;
        if (fmla_sparse_prefill(args)) report(tally, run, c[i % CASES].name, fmla_last_error());
    }
    device_wait(stream);
    if (!device_scratch_intact(&workspace))
        report(tally, run, c[0].name, "bytes behind the workspace were written");
    for (int i = 0; i < CASES; i++) {
        prefill_case_from_device(&c[i]);
        compare(&c[i], run, tally);
        prefill_case_free(&c[i]);
    }
    device_stream_close(stream), device_scratch_free(&workspace);
}

/* ---- All ------------------------------------------------------------------------------------- */

void check_prefill_device(const struct run *run, struct tally *tally)
{
    static const int64_t sources[][P_AXES] = {
        {[P_SHAPE] = WIDE, [P_SQ] = 70, [P_HQ] = 128, [P_DQK] = 576, [P_SOURCE] = P_FLAT},
        {[P_SHAPE] = WIDE, [P_SQ] = 70, [P_HQ] = 64, [P_DQK] = 512, [P_SOURCE] = P_FLAT_GAPS},
        {[P_SHAPE] = WIDE, [P_SQ] = 70, [P_HQ] = 64, [P_DQK] = 576, [P_SOURCE] = P_FP8_656},
        {[P_SHAPE] = WIDE, [P_SQ] = 70, [P_HQ] = 128, [P_DQK] = 512, [P_SOURCE] = P_FP8_584},
        {[P_SHAPE] = WIDE, [P_SQ] = 70, [P_HQ] = 16, [P_DQK] = 576, [P_SOURCE] = P_PAGES},
    };
    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        int64_t v[P_AXES];
        memcpy(v, sources[i], sizeof v);
        if (!is_taken(run, v)) continue;
        check_graph(run, tally, v);
        v[P_LENGTHS] = S_LENGTHS_VARIED;
        check_repeats(run, tally, v, 100 + i);
        v[P_SHAPE] = LONG, v[P_INDICES] = S_INDICES_BLOCKS;
        check_repeats(run, tally, v, 200 + i);
        v[P_SHAPE] = WIDE;
        check_workspace(run, tally, v);
        v[P_SQ] = 700;
        check_streams(run, tally, v);
    }
}
