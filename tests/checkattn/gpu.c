/* SPDX-License-Identifier: MIT
 *
 * Tests the promises of a GPU kernel beyond the values of one call, on the cases that its operation names
 * for this.
 */
#include "case.h"
#include "pthread_loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 2, LAUNCHES = 20 };

/* The source of a check's cases. */
struct gpu {
    const struct subject *op;
    const struct run *run;
    struct tally *tally;
    const char *base; /* beginning of their texts */
};

static void read_values(const struct gpu *g, const char *text, const char *more, int64_t v[GRID_AXES])
{
    case_values(g->op, g->base, v);
    axes_read(g->op->axis, g->op->axes, text, v);
    axes_read(g->op->axis, g->op->axes, more, v);
}

static struct test_case *make_case(const struct gpu *g, const char *name, const char *text, const char *more,
                                   uint64_t seed)
{
    int64_t v[GRID_AXES];
    read_values(g, text, more, v);
    struct test_case *c = case_make(g->op, g->run, g->tally, v, g->run->seed * 7919 + seed);
    snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}

/* ---- Calls that are sent ---------------------------------------------------------------------- */

/* A call with its own workspace and stream, launched repeatedly. */
struct sender {
    const struct subject *op;
    struct device_args call;
    struct device_scratch workspace;
    void *stream;
    bool bare; /* launches from a thread without a context: the library has to find one */
    char refusal[256];
};

static void sender_make(struct sender *s, const struct test_case *c)
{
    const struct op_functions *functions = &op_functions[c->op->of];
    size_t bytes = 0;
    memset(s, 0, sizeof *s);
    s->op = c->op;
    device_args_make(&s->call, c, &c->args);
    s->stream = device_stream_open();
    set_pointer(c->op, &s->call.args, "stream", s->stream);
    if (!functions->workspace) return;
    must(c, functions->workspace(&s->call.args, &bytes, NULL));
    device_scratch_make(&s->workspace, bytes, 0xff);
    set_pointer(c->op, &s->call.args, "workspace", s->workspace.memory);
    set_size(c->op, &s->call.args, "workspace_size", bytes);
}

static void sender_launch(struct sender *s)
{
    if (op_functions[s->op->of].run(&s->call.args))
        snprintf(s->refusal, sizeof s->refusal, "%s", fmla_last_error());
}

static void sender_end(struct sender *s, const struct test_case *c)
{
    device_wait(s->stream);
    if (*s->refusal) failed(c, "%s", s->refusal);
    if (s->workspace.memory && !device_scratch_intact(&s->workspace))
        failed(c, "bytes behind the workspace were written");
    gpu_stream_close(s->stream);
    device_scratch_free(&s->workspace);
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

enum graph_kind {
    GRAPH_PLAN_INSIDE,
    GRAPH_INVARIANT,
    GRAPH_PLAN_CAPTURED,
    GRAPH_TABLES_CAPTURED,
    GRAPH_TABLES_COPIED, /* made on the host and copied to the graph's memory before every replay */
    GRAPH_KINDS
};

/* A call in a graph, with the memory it needs beside the case's. */
struct graph {
    enum graph_kind kind;
    void *graph;
    struct sender call;
    struct device_scratch plan;
    struct device_tables tables;
    struct plan_call plan_args;
};

/* Makes the memory for the graph's kind of plan and sets it in plan_args and in the call. */
static void graph_make_plan(struct graph *graph, const struct test_case *c)
{
    enum { FILL = 0x3c };
    const struct subject *op = c->op;
    union call_args *call = &graph->call.call.args;
    struct plan_call *args = &graph->plan_args;
    case_plan_args(c, call, args);
    args->stream = graph->call.stream, args->capacity = c->capacity;
    if (graph->kind == GRAPH_PLAN_CAPTURED) {
        must(c, plan_call_size(args, &args->plan_size));
        device_scratch_make(&graph->plan, args->plan_size, FILL);
        args->plan = graph->plan.memory;
        set_pointer(op, call, "plan", args->plan), set_size(op, call, "plan_size", args->plan_size);
    } else if (graph->kind >= GRAPH_TABLES_CAPTURED) {
        int32_t count = 0;
        must(c, plan_call_partitions(args, &count));
        device_tables_make(&graph->tables, count, c->b, FILL);
        args->partitions = &graph->tables.tensor[0], args->num_splits = &graph->tables.tensor[1];
        for (int i = 0; i < 2; i++) set_tensor(op, call, op->tables + i, &graph->tables.tensor[i]);
    }
}

/* Makes the tables of the case's lengths on the host and copies them to the device. */
static void graph_copy_tables(const struct graph *graph, const struct test_case *c)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    fmla_tensor partitions = graph->tables.tensor[0], num_splits = graph->tables.tensor[1];
    struct plan_call args;
    case_plan_args(c, &c->args, &args);
    args.capacity = c->capacity;
    partitions.data = must_alloc(graph->tables.rows.bytes),
    num_splits.data = must_alloc(graph->tables.splits.bytes);
    partitions.device = num_splits.device = cpu;
    args.partitions = &partitions, args.num_splits = &num_splits;
    must(c, plan_call_run(&args));
    device_scratch_write(&graph->tables.rows, 0, partitions.data, graph->tables.rows.bytes);
    device_scratch_write(&graph->tables.splits, 0, num_splits.data, graph->tables.splits.bytes);
    free(partitions.data), free(num_splits.data);
}

static void graph_capture(struct graph *graph, const struct test_case *c)
{
    sender_make(&graph->call, c);
    if (c->op->tables) graph_make_plan(graph, c);
    device_capture_begin(graph->call.stream);
    if (graph->kind == GRAPH_PLAN_CAPTURED || graph->kind == GRAPH_TABLES_CAPTURED)
        must(c, plan_call_run(&graph->plan_args));
    sender_launch(&graph->call);
    graph->graph = device_capture_end(graph->call.stream);
}

/* Launches the graph on the current contents of the case's device memory. */
static void graph_check(const struct graph *graph, struct test_case *c, int fill)
{
    const uint64_t inputs = case_hash_inputs(c);
    const struct device_scratch *all[] = {&graph->call.workspace, &graph->plan, &graph->tables.rows,
                                          &graph->tables.splits};
    enum { ALL = sizeof all / sizeof all[0] };
    bool intact = true;
    for (int i = 0; i < ALL; i++)
        if (all[i]->memory) device_scratch_fill(all[i], fill);
    if (graph->kind == GRAPH_TABLES_COPIED) graph_copy_tables(graph, c);
    device_launch(graph->graph, graph->call.stream);
    device_wait(graph->call.stream);
    case_from_device(c);
    if (case_hash_inputs(c) != inputs) failed(c, "the call changed its inputs");
    for (int i = 0; i < ALL; i++) intact &= !all[i]->memory || device_scratch_intact(all[i]);
    if (!intact) failed(c, "bytes behind the workspace or the plan were written");
    compare_whole(c);
}

/* Captures once and replays with other inputs in place, then with the first ones again. */
static void check_graph(const struct gpu *g, const char *of, enum graph_kind kind)
{
    static const char *const names[GRAPH_KINDS] = {
        "a graph, planned inside the call", "a graph, batch-invariant", "a graph, its plan captured too",
        "a graph, its plan captured as tables", "a graph, tables copied before it"};
    const struct gpu_cases *cases = &g->op->gpu;
    struct graph graph = {.kind = kind};
    char text[400];
    int64_t v[GRID_AXES];
    snprintf(text, sizeof text, "%s%s", of, kind == GRAPH_INVARIANT ? ", batch_invariant 1" : "");
    read_values(g, text, "", v);
    if (g->op->has && !g->op->has(g->run, v)) return;
    struct test_case *first = make_case(g, names[kind], text, "", 1);
    case_to_device(first, NULL);
    graph_capture(&graph, first);
    graph_check(&graph, first, 0xff);
    for (int i = 0; i < 3; i++) {
        struct test_case *next = make_case(g, names[kind], text, cases->next[i], 2 + (uint64_t)i);
        case_to_device(next, first);
        graph_check(&graph, next, 0x11 * i);
        case_free(next);
    }
    case_results_reset(first);
    for (int i = 0; i < first->blocks.count; i++)
        device_move(&first->blocks, first->blocks.block[i].host, true);
    graph_check(&graph, first, 0x7f);
    gpu_graph_close(graph.graph);
    sender_end(&graph.call, first);
    device_scratch_free(&graph.plan), device_scratch_free(&graph.tables.rows);
    device_scratch_free(&graph.tables.splits);
    case_free(first);
}

/* ---- The same bits --------------------------------------------------------------------------- */

static void check_repeats(const struct gpu *g, const char *text, uint64_t seed)
{
    enum { RUNS = 20 };
    bool same = true;
    int64_t v[GRID_AXES];
    read_values(g, text, "", v);
    if (g->op->has && !g->op->has(g->run, v)) return;
    struct test_case *c = make_case(g, "20 runs", text, "", seed);
    if (case_left(c)) {
        case_free(c);
        return;
    }
    case_to_device(c, NULL);
    must(c, case_run(c, &c->args, 0xff));
    unsigned char *results = case_results_copy(c);
    compare_whole(c);
    for (int again = 1; again < RUNS; again++) {
        case_results_reset(c);
        must(c, case_run(c, &c->args, 13 * again));
        same &= case_results_same(c, results);
    }
    if (!same) failed(c, "runs of the same call differ in their bits");
    free(results);
    case_free(c);
}

/* Checks requests at any position of a batch. */
static void check_positions(const struct gpu *g, const char *text, uint64_t seed)
{
    struct test_case *c = make_case(g, "every request of a batch alone", text,
                                    g->op->invariant ? "batch_invariant 1" : "", seed);
    case_to_device(c, NULL);
    must(c, case_run(c, &c->args, 0xff));
    compare_whole(c);
    for (int64_t r = 0; r < case_requests(c); r++) compare_part(c, r);
    case_free(c);
}

/* Makes tables that no header can reveal as wrong: all rows taken by a few requests, as in another batch's
 * tables, or random values in some fields. */
static void bend_tables(struct test_case *c, int how, struct random_state *random)
{
    static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, 8, 9, 10, 1 << 26, INT32_MAX};
    static const int32_t shifts[] = {-9, -4, 1, 1000};
    struct guarded *tables = &c->tensor[c->op->tables];
    int32_t *rows = tables[0].tensor.data, *splits = tables[1].tensor.data;
    const int64_t fields = tables[0].shape[0] * FMLA_PARTITION_FIELDS;
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

/* Checks tables that do not fit, which cannot be detected on a GPU: results are then meaningless, but
 * nothing else is written. */
static void check_foreign_tables(const struct gpu *g)
{
    enum { WAYS = 60 };
    struct random_state random = {g->run->seed};
    for (int way = 0; way < WAYS; way++) {
        struct test_case *c =
            make_case(g, "tables that do not fit", g->op->gpu.foreign, "", 270 + (uint64_t)way);
        case_plan(c);
        case_use_tables(c);
        bend_tables(c, way, &random);
        case_to_device(c, NULL);
        for (int i = 0; i < 2; i++) device_move(&c->blocks, c->tensor[g->op->tables + i].tensor.data, true);
        const uint64_t inputs = case_hash_inputs(c);
        must(c, case_run(c, &c->args, 0xff));
        case_from_device(c);
        if (case_hash_inputs(c) != inputs) failed(c, "the call changed its inputs");
        case_results_intact(c);
        case_free(c);
    }
}

/* ---- At once -------------------------------------------------------------------------------- */

static void launch_on_thread(void *senders, int number)
{
    struct sender *s = (struct sender *)senders + number;
    if (!s->bare) device_enter();
    for (int launch = 0; launch < LAUNCHES; launch++) sender_launch(s);
    if (s->bare) device_enter();
    device_wait(s->stream);
}

enum at_once {
    ON_STREAMS, /* same inputs and plan, separate results */
    ON_THREADS, /* host threads, each with its own case and stream */
    IN_TURN,    /* other inputs in one workspace: no call writes there before the previous one has read it */
    WAYS_AT_ONCE
};

static void check_at_once(const struct gpu *g, enum at_once way)
{
    static const struct {
        const char *name;
        uint64_t seeds[AT_ONCE];
    } ways[WAYS_AT_ONCE] = {[ON_STREAMS] = {"two streams", {300, 300}},
                            [ON_THREADS] = {"two host threads", {310, 311}},
                            [IN_TURN] = {"one workspace, calls in turn", {400, 401}}};
    struct test_case *c[AT_ONCE];
    struct sender sender[AT_ONCE];
    fmla_tensor results[RESULTS];
    for (int i = 0; i < AT_ONCE; i++)
        c[i] = make_case(g, ways[way].name, g->op->gpu.busy, way == ON_THREADS ? g->op->gpu.threads[i] : "",
                         ways[way].seeds[i]);
    if (way == ON_STREAMS && g->op->tables) case_plan(c[0]);
    for (int i = 0; i < AT_ONCE; i++) {
        const bool shared = way == ON_STREAMS && i;
        if (!shared) case_to_device(c[i], NULL);
        sender_make(&sender[i], shared ? c[0] : c[i]);
        sender[i].bare = i == 1;
        for (int k = 0; shared && k < g->op->results; k++) {
            const int result = g->op->result[k];
            if (!case_names(c[i], result)) continue;
            device_add_guarded(&c[0]->blocks, &c[i]->tensor[result]);
            set_tensor(g->op, &sender[i].call.args, result,
                       device_tensor(&c[0]->blocks, &c[i]->view[result], &results[k]));
        }
    }
    if (way == IN_TURN) {
        set_pointer(g->op, &sender[1].call.args, "workspace", sender[0].workspace.memory);
        set_pointer(g->op, &sender[1].call.args, "stream", sender[0].stream);
    }
    for (int i = 0; way != ON_THREADS && i < AT_ONCE * LAUNCHES; i++) sender_launch(&sender[i % AT_ONCE]);
    if (way == ON_THREADS) pthread_each(AT_ONCE, launch_on_thread, sender);
    for (int i = 0; i < AT_ONCE; i++) sender_end(&sender[i], c[i]);
    for (int i = 0; i < AT_ONCE; i++) case_from_device(c[i]), compare_whole(c[i]);
    unsigned char *theirs = case_results_copy(c[1]);
    if (way == ON_STREAMS && !case_results_same(c[0], theirs))
        failed(c[0], "the same call on two streams has different bits");
    free(theirs);
    case_free(c[0]), case_free(c[1]);
}

/* ---- All ------------------------------------------------------------------------------------- */

static void check_base(const struct gpu *g, uint64_t number)
{
    const struct gpu_cases *cases = &g->op->gpu;
    for (int kind = 0; kind < (g->op->tables ? GRAPH_KINDS : GRAPH_PLAN_INSIDE + 1); kind++)
        for (int i = 0; i < 2 && cases->graph[i]; i++) check_graph(g, cases->graph[i], (enum graph_kind)kind);
    for (uint64_t i = 0; i < 4 && cases->repeats[i]; i++)
        check_repeats(g, cases->repeats[i], 100 + 10 * number + i);
    for (uint64_t i = 0; i < 3 && cases->positions[i]; i++) check_positions(g, cases->positions[i], 200 + i);
    if (cases->foreign) check_foreign_tables(g);
    for (int way = 0; way < WAYS_AT_ONCE; way++) check_at_once(g, (enum at_once)way);
}

/* Graphs first: loading the kernel in a first call must not disturb a capture. */
void gpu_check(const struct subject *op, const struct run *run, struct tally *tally)
{
    for (uint64_t i = 0; op->gpu.graph[0] && op->gpu.bases[i]; i++) {
        const struct gpu g = {op, run, tally, op->gpu.bases[i]};
        int64_t v[GRID_AXES];
        case_values(op, g.base, v);
        axes_read(op->axis, op->axes, op->gpu.busy, v);
        if (case_asked(op, run, v) == FMLA_OK) check_base(&g, i);
    }
    if (op->gpu.more) op->gpu.more(run, tally);
}
