/* SPDX-License-Identifier: MIT
 *
 * flashmla bench: times the kernels of a device, and measures in the same run what it can do at best. The method is
 * described in docs/performance.md.
 */
#include "bench_cache.h"
#include "bench_session.h"
#include "bench_stream.h"
#include "call.h"
#include "commands.h"
#include "gpu_call.h"
#include "kernels.h"

#include "elements.h"
#include "gpu.h"
#include "outfile.h"
#include "progress.h"
#include "timing.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command bench = {
    "bench",
    NULL,
    "time the kernels of this machine beside its measured peaks",
    "\n"
    "Grids: cpu (the default), h20, latency, peers and varlen (shapes of server GPUs), quick (three small "
    "rows, warm "
    "caches). A list replaces that axis of the grid. Before each run the caches are emptied by reading "
    "memory larger "
    "than they are. floor is the longer of bytes / read bandwidth and FLOP / peak, both measured in this run "
    "on as many "
    "threads. A row that takes over 2 s is run 3 times. On a GPU a call is captured in a graph, the plan is "
    "made before "
    "and timed apart, and the caches are its L2; stream is what a bare kernel takes to read the row's keys "
    "and nothing "
    "else, timed in turns with the call. --fixed times a batch of varying lengths in turns with one of fixed "
    "length with "
    "as many keys, and tells var / fixed; the grid varlen (the large batches of peers) always does. "
    "sparse_decode and "
    "sparse_prefill have the grids cpu, peers and quick, with formats of keys of their own; --d-qk and "
    "--kv-heads are for "
    "keys that are no bytes.\n"
    "\n"
    "--json writes a line a row, as soon as the row is timed: what has been timed stays, even if the rest is "
    "stopped.\n"
    "\n"
    "Examples\n"
    "  flashmla bench\n"
    "  flashmla bench --heads 128 --seq-len 4096,16384 --batch 1 --threads 1 --kernel cpu-avx2\n"
    "  flashmla bench --grid quick --json quick.jsonl\n"
    "  flashmla bench --op merge --parts 2,8\n"
    "  flashmla bench --op sparse_decode --grid quick --heads 16,128\n"
    "  flashmla bench --op sparse_prefill --device cuda:0 --grid peers --json sparse_prefill.jsonl\n"
    "  flashmla bench --op cache_append --device cuda:0 --tokens 128,65536\n"
    "  flashmla bench --device cuda:0 --grid peers --json dense_decode.jsonl\n"
    "  flashmla bench --device cuda:0 --grid varlen --seq-len 4096,8192 --no-stream\n",
    OPERAND_WORD,
    NULL};

/* ---- Timing --------------------------------------------------------------------------------- */

static fmla_status call_decode(const void *args)
{
    return fmla_dense_decode(args);
}

static fmla_status call_plan(const void *call)
{
    return gpu_call_plan(call);
}

/* Sorts them. */
static double median_of(double *seconds, int64_t runs)
{
    qsort(seconds, (size_t)runs, sizeof *seconds, call_by_value);
    return seconds[runs / 2];
}

/* `seconds` become the row's figures. */
static void take_times(const struct session *s, double *seconds, struct bench_row *row)
{
    const bool gpu = device_is_gpu(s->device);
    row->median = median_of(seconds, row->runs), row->least = seconds[0], row->most = seconds[row->runs - 1];
    row->peak = gpu ? s->gpu.flops : s->machine.flops[bench_cpu_unit(row->kernel)];
    row->bandwidth = gpu ? s->gpu.bandwidth : s->machine.bandwidth;
    const double of_memory = row->bytes / row->bandwidth, of_arithmetic = row->flop / row->peak;
    row->floor = of_memory > of_arithmetic ? of_memory : of_arithmetic;
}

/* Room for the times of all that is timed; freed by its first one's. */
static bool make_times(struct bench_timed *timed, int count, int64_t runs)
{
    double *seconds = calloc((size_t)(runs * count), sizeof *seconds);
    for (int t = 0; t < count; t++) timed[t].seconds = seconds ? seconds + t * runs : NULL;
    return seconds != NULL;
}

fmla_status bench_time_calls(struct session *s, struct bench_timed *timed, int count, struct bench_row *row)
{
    enum { LEAST_RUNS = 3 };
    const bool warm = s->options->warm;
    fmla_status status = FMLA_OK;
    double start, slowest = 0.0;
    for (int t = count - 1; t >= 0 && status == FMLA_OK; t--) { /* the first one is the next */
        start = timing_now();
        status = timed[t].call(timed[t].args);
        if (timing_now() - start > slowest) slowest = timing_now() - start;
    }
    row->runs = slowest > 2.0 && s->options->repeat > LEAST_RUNS ? LEAST_RUNS : s->options->repeat;
    if (status) return status;
    if (!make_times(timed, count, row->runs)) return FMLA_DEVICE_ERROR; /* a few hundred bytes */
    for (int64_t i = 0; i < row->runs * count && status == FMLA_OK; i++) {
        const int64_t t = warm ? i / row->runs : i % count, run = warm ? i % row->runs : i / count;
        if (!warm)
            peak_memory_read(&s->machine.memory, s->machine.threads);
        else if (t && !run)
            status = timed[t].call(timed[t].args);
        start = timing_now();
        if (!status) status = timed[t].call(timed[t].args);
        timed[t].seconds[run] = timing_now() - start;
        progress_update(&s->progress, i + 1, row->runs * count);
    }
    take_times(s, timed[0].seconds, row);
    if (count > 1) row->fixed = median_of(timed[1].seconds, row->runs);
    free(timed[0].seconds);
    return status;
}

bool bench_time_on_gpu(struct session *s, struct bench_timed *timed, int count, struct bench_row *row,
                       double *medians, fmla_status *status, struct fault *fault)
{
    row->runs = s->options->repeat;
    if (!make_times(timed, count, row->runs))
        return fault_set(fault, "no memory for %" PRId64 " times", row->runs * count);
    const bool good = bench_gpu_time(&s->gpu, timed, count, s->options->warm, row->runs, status, fault);
    if (good) take_times(s, timed[0].seconds, row);
    for (int t = 0; t < count; t++) medians[t] = good ? median_of(timed[t].seconds, row->runs) : 0.0;
    free(timed[0].seconds);
    return good;
}

/* ---- Rows ------------------------------------------------------------------------------------ */

bool bench_finish_row(struct session *s, const struct bench_row *row, struct fault *fault)
{
    progress_wipe(&s->progress);
    bench_report_row(&s->report, row);
    s->timed++;
    return !s->json || bench_report_json(&s->report, row, s->json, fault);
}

bool bench_pass_over(struct session *s, const struct bench_row *row, const char *why)
{
    progress_wipe(&s->progress);
    bench_report_skipped(row, why);
    if (!*s->passed_over.text) fault_set(&s->passed_over, "%s", why);
    return true;
}

bool bench_library_fault(struct session *s, const struct bench_row *row, fmla_status status,
                         struct fault *fault)
{
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, fmla_last_error());
    return fault_set(fault, "%s", fmla_last_error());
}

bool bench_too_large(const struct session *s, double bytes)
{
    if (device_is_gpu(s->device) && bytes > 0.8 * (double)s->gpu.peak.gpu.memory) return true;
    const double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return all > 0.0 && bytes > 0.5 * all;
}

/* ---- Operations ----------------------------------------------------------------------------- */

static bool open_call(struct session *s, struct gpu_call *call, const struct batch *batch,
                      fmla_status *status, struct fault *fault)
{
    return gpu_call_open(call, s->device, &batch->args, status, fault) &&
           gpu_call_plan_open(call, status, fault);
}

/* The plan, then the call in turns with the bare stream and with the batch of fixed length, where they are wanted. */
static bool time_decode_on_gpu(struct session *s, const struct gpu_call *call,
                               const struct gpu_stream_list *bare, const struct gpu_call *fixed,
                               struct bench_row *row, fmla_status *status, struct fault *fault)
{
    double medians[BENCH_TIMED] = {0.0};
    struct bench_timed plan = {.call = call_plan, .args = call, .stream = call->args.stream};
    struct bench_timed timed[BENCH_TIMED] = {
        {.call = call_decode, .args = &call->args, .stream = call->args.stream}};
    int count = 1, bare_at = 0, fixed_at = 0;
    if (bare) bare_at = count++;
    if (fixed) fixed_at = count++;
    if (bare) timed[bare_at] = (struct bench_timed){.bare = bare, .stream = call->args.stream};
    if (fixed)
        timed[fixed_at] =
            (struct bench_timed){.call = call_decode, .args = &fixed->args, .stream = fixed->args.stream};
    if (!bench_time_on_gpu(s, &plan, 1, row, &row->plan, status, fault) ||
        !bench_time_on_gpu(s, timed, count, row, medians, status, fault))
        return false;
    if (bare) row->stream = medians[bare_at];
    if (fixed) row->fixed = medians[fixed_at];
    return true;
}

static bool bench_decode_on_gpu(struct session *s, const struct batch *batch, const struct batch *fixed,
                                struct bench_row *row, struct fault *fault)
{
    struct gpu_call call = {0}, other = {0};
    struct gpu_stream_list list = {0};
    struct fault why;
    fmla_status status = FMLA_OK;
    const bool bare = s->report.stream;
    bool good =
        open_call(s, &call, batch, &status, &why) && (!fixed || open_call(s, &other, fixed, &status, &why)) &&
        (!bare || bench_stream_open(&list, &s->gpu.bare, &batch->args, call.args.kv_cache->data, &why));
    if (good) fmla_dense_decode_kernel(&call.args, &row->kernel);
    good =
        good && time_decode_on_gpu(s, &call, bare ? &list : NULL, fixed ? &other : NULL, row, &status, &why);
    gpu_free(list.chunks);
    gpu_call_close(&call), gpu_call_close(&other);
    if (good) return bench_finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, why.text);
    return fault_set(fault, "%s", why.text);
}

static bool bench_decode_on_cpu(struct session *s, struct batch *batch, struct batch *fixed,
                                struct bench_row *row, struct fault *fault)
{
    fmla_dense_decode_args *args[] = {&batch->args, fixed ? &fixed->args : NULL};
    struct bench_timed timed[2] = {{.call = call_decode, .args = args[0]},
                                   {.call = call_decode, .args = args[1]}};
    fmla_status status = fmla_dense_decode_kernel(args[0], &row->kernel);
    for (int i = 0; i < (fixed ? 2 : 1) && !status; i++) {
        status = call_workspace(args[i]);
        if (!status && !args[i]->workspace) return bench_pass_over(s, row, "no memory for its workspace");
    }
    if (!status) status = bench_time_calls(s, timed, fixed ? 2 : 1, row);
    return status ? bench_library_fault(s, row, status, fault) : bench_finish_row(s, row, fault);
}

/* As many keys as in the batch of this shape, spread evenly. */
static bool make_fixed(struct batch *fixed, const struct batch_shape *shape, const int32_t *lengths,
                       struct fault *fault)
{
    struct batch_shape even = *shape;
    int32_t *same = malloc((size_t)shape->b * sizeof *same);
    if (!same) return fault_set(fault, "no memory for the lengths");
    batch_fixed_lengths(lengths, shape->b, same);
    even.varlen = false, even.lengths = same;
    const bool made = batch_make(fixed, &even, fault);
    free(same);
    return made;
}

static bool bench_decode(struct session *s, const struct batch_shape *shape, struct fault *fault)
{
    struct bench_row row = {.shape = shape};
    struct batch batch, even = {0}, *fixed = s->options->fixed && shape->varlen ? &even : NULL;
    if (bench_too_large(s, batch_bytes(shape) * (fixed ? 2.0 : 1.0)))
        return bench_pass_over(s, &row, "too large for this machine's memory");
    struct fault why = {""};
    bool good;
    if (batch_make(&batch, shape, &why) && (!fixed || make_fixed(fixed, shape, batch.lengths, &why))) {
        const struct call_work work = call_work(&batch.args);
        row.flop = work.flop, row.bytes = work.bytes;
        batch.args.kernel = even.args.kernel = s->options->kernel;
        good = device_is_gpu(s->device) ? bench_decode_on_gpu(s, &batch, fixed, &row, fault)
                                        : bench_decode_on_cpu(s, &batch, fixed, &row, fault);
    } else {
        good = bench_pass_over(s, &row, why.text);
    }
    batch_free(&batch), batch_free(&even);
    return good;
}

/* ---- The command ---------------------------------------------------------------------------- */

static bool bench_row(struct session *s, const struct batch_shape *shape, struct fault *fault)
{
    static int64_t usual[] = {2, 8};
    const struct option_counts *given = &s->options->parts;
    const struct option_counts parts = given->count ? *given : (struct option_counts){usual, 2};
    if (s->options->op == BENCH_DENSE) return bench_decode(s, shape, fault);
    for (int64_t i = 0; i < parts.count; i++)
        if (!bench_merge(s, shape, parts.items[i], fault)) return false;
    return true;
}

/* `rows`: those of the sparse operations, in place of shapes. */
static bool work(struct session *s, const struct batch_shape *shapes, struct bench_row *rows, int64_t count,
                 struct fault *fault)
{
    const char *path = s->options->json;
    if (path && !(s->json = outfile_open_lines(path, fault))) return false;
    if (device_is_gpu(s->device)) {
        if (!bench_gpu_open(&s->gpu, s->device, s->options->warm, fault) ||
            (s->report.stream && !gpu_stream_kernel_open(&s->gpu.bare, &s->gpu.peak.gpu, fault))) {
            s->exit_code = EXIT_UNSUPPORTED;
            return false;
        }
    } else if (!bench_cpu_measure(&s->machine, s->options->warm, fault)) {
        return false;
    }
    bench_report_head(&s->report);
    progress_begin(&s->progress, "this row's runs");
    for (int64_t i = 0; rows && i < count; i++)
        if (!(rows[i].prefill ? bench_prefill : bench_sparse)(s, &rows[i], fault)) return false;
    for (int64_t i = 0; !rows && i < count; i++) {
        /* What distinguishes the shapes of a merge: keys do not. */
        if (s->options->op && i && shapes[i].b == shapes[i - 1].b && shapes[i].h_q == shapes[i - 1].h_q &&
            shapes[i].s_q == shapes[i - 1].s_q)
            continue;
        if (!bench_row(s, &shapes[i], fault)) return false;
    }
    if (!s->timed) {
        s->exit_code = EXIT_UNSUPPORTED;
        return fault_set(fault, "no row of the grid runs here: %s", s->passed_over.text);
    }
    if (!s->json) return true;
    struct outfile *json = s->json;
    s->json = NULL; /* commit frees it */
    return outfile_commit(json, fault);
}

/* A switch with the choices no, yes, both as values of an axis. */
static void choose(struct option_counts *axis, int choice, bool given, int64_t items[2])
{
    if (given) *axis = (struct option_counts){choice == 1 ? items + 1 : items, choice == 2 ? 2 : 1};
}

static bool fits(const struct batch_shape *shape)
{
    return shape->h_q % shape->h_kv == 0 && (shape->d_qk == 512 || shape->d_qk == 576);
}

static const char *const operations[] = {
    [BENCH_DENSE] = "dense_decode",        [BENCH_MERGE] = "merge",
    [BENCH_SPARSE] = "sparse_decode",      [BENCH_SPARSE_PREFILL] = "sparse_prefill",
    [BENCH_CACHE_APPEND] = "cache_append", [BENCH_CACHE_GATHER] = "cache_gather"};

static int bench_all(struct bench_options *o, const bool given[3])
{
    fmla_device device;
    struct fault fault = {""};
    if (!device_parse(o->device, &device))
        return complain(&bench, EXIT_USAGE, "--device: '%s' must be cpu or cuda:N", o->device);
    if (!kernel_exists(operations[o->op], o->kernel, &fault))
        return complain(&bench, EXIT_USAGE, "%s", fault.text);
    static int64_t no_yes[2] = {0, 1};
    int64_t count;
    choose(&o->axes.axis[AXIS_DTYPE], o->dtype, given[0], no_yes);
    choose(&o->axes.axis[AXIS_CAUSAL], o->causal, given[1], no_yes);
    choose(&o->axes.axis[AXIS_VARLEN], o->varlen, given[2], no_yes);
    struct batch_shape *shapes = NULL;
    struct bench_row *rows = NULL;
    if (o->op == BENCH_SPARSE)
        rows = bench_sparse_grid(o->grid, &o->axes, &o->topk, &count);
    else if (o->op == BENCH_SPARSE_PREFILL)
        rows = bench_prefill_grid(o->grid, &o->axes, &o->topk, &count);
    else
        shapes = bench_grid(o->grid, &o->axes, &count);
    if (count < 0)
        return complain(&bench, EXIT_USAGE, "--grid: '%s' must be one of %s", o->grid,
                        o->op == BENCH_SPARSE || o->op == BENCH_SPARSE_PREFILL ? "cpu, peers, quick"
                                                                               : bench_grid_names());
    if (!shapes && !rows) return complain(&bench, EXIT_FAILED, "no memory for so many rows");
    for (int64_t i = 0; i < count; i++)
        if (!fits(shapes ? &shapes[i] : rows[i].shape)) {
            free(shapes), bench_free_rows(rows, count);
            return complain(&bench, EXIT_USAGE, "--kv-heads must divide --heads, and --d-qk be 512 or 576");
        }
    if (o->threads) fmla_set_num_threads((int32_t)o->threads); /* in range by its option */
    struct session s = {.options = o, .device = device, .exit_code = EXIT_FAILED};
    if (!strcmp(o->grid, "quick")) o->warm = true;
    if (!strcmp(o->grid, "varlen")) o->fixed = true;
    const bool gpu = device_is_gpu(device);
    s.report = (struct bench_report){.device = device,
                                     .cpu = &s.machine,
                                     .gpu = gpu ? &s.gpu : NULL,
                                     .merge = o->op == BENCH_MERGE,
                                     .stream = gpu && o->op == BENCH_DENSE && !o->no_stream,
                                     .warm = o->warm,
                                     .repeat = o->repeat};
    const bool good = work(&s, shapes, rows, count, &fault);
    progress_wipe(&s.progress);
    outfile_abandon(s.json);
    peak_memory_close(&s.machine.memory);
    if (gpu) bench_gpu_close(&s.gpu);
    free(shapes), bench_free_rows(rows, count);
    return good ? EXIT_GOOD : complain(&bench, s.exit_code, "%s", fault.text);
}

/* Each number of tokens in every format; of the grid's axes, the types and the first page size. */
static int bench_caches(const struct bench_options *o)
{
    const struct option_counts *page_sizes = &o->axes.axis[AXIS_PAGE_SIZE];
    struct bench_cache bench_these = {.gather = o->op == BENCH_CACHE_GATHER,
                                      .warm = o->warm || !strcmp(o->grid, "quick"),
                                      .tokens = o->tokens,
                                      .bf16 = o->dtype != 1,
                                      .fp16 = o->dtype != 0,
                                      .page_size = page_sizes->count ? page_sizes->items[0] : 64,
                                      .repeat = o->repeat,
                                      .kernel = o->kernel,
                                      .json = o->json};
    struct fault fault = {""};
    int exit_code = EXIT_FAILED;
    if (!device_parse(o->device, &bench_these.device))
        return complain(&bench, EXIT_USAGE, "--device: '%s' must be cpu or cuda:N", o->device);
    if (!kernel_exists(operations[o->op], o->kernel, &fault))
        return complain(&bench, EXIT_USAGE, "%s", fault.text);
    if (o->threads) fmla_set_num_threads((int32_t)o->threads);
    return bench_cache(&bench_these, &exit_code, &fault) ? EXIT_GOOD
                                                         : complain(&bench, exit_code, "%s", fault.text);
}

#define LIST(name, which, least, most, help)                                                                 \
    {                                                                                                        \
        name, OPTION_COUNTS, &o.axes.axis[which], "A,B", help, least, most, {NULL}, NULL                     \
    }

int command_bench(int argc, char **argv)
{
    struct bench_options o = {.grid = "cpu", .repeat = 15};
    bool given[3] = {false};
    const struct option options[] = {
        {"--op",
         OPTION_CHOICE,
         &o.op,
         "NAME",
         "dense_decode (the default), sparse_decode, sparse_prefill, merge, cache_append or cache_gather",
         0,
         0,
         {"dense_decode", "merge", "sparse_decode", "sparse_prefill", "cache_append", "cache_gather"},
         NULL},
        {"--grid",
         OPTION_TEXT,
         &o.grid,
         "NAME",
         "cpu (the default), h20, latency, peers, varlen or quick",
         0,
         0,
         {"cpu", "h20", "latency", "peers", "varlen", "quick", NULL},
         NULL},
        LIST("--batch", AXIS_BATCH, 1, 65536, "requests"),
        LIST("--query-tokens", AXIS_QUERY_TOKENS, 1, 1 << 20, "query tokens of a request, or of a prompt"),
        LIST("--seq-len", AXIS_SEQ_LEN, 1, 1 << 24, "keys of a request, or all that a prompt can name"),
        LIST("--heads", AXIS_HEADS, 1, 4096, "query heads"),
        LIST("--kv-heads", AXIS_KV_HEADS, 1, 4096, "key heads"),
        LIST("--d-qk", AXIS_D_QK, 512, 576, "head size, 512 or 576"),
        LIST("--page-size", AXIS_PAGE_SIZE, 1, 65536, "keys of a page"),
        {"--dtype",
         OPTION_CHOICE,
         &o.dtype,
         "TYPE",
         "bf16, fp16 or both",
         0,
         0,
         {"bf16", "fp16", "both"},
         &given[0]},
        {"--causal",
         OPTION_CHOICE,
         &o.causal,
         "WHEN",
         "no, yes or both",
         0,
         0,
         {"no", "yes", "both"},
         &given[1]},
        {"--varlen",
         OPTION_CHOICE,
         &o.varlen,
         "WHEN",
         "lengths around --seq-len: no, yes or both",
         0,
         0,
         {"no", "yes", "both"},
         &given[2]},
        {"--topk", OPTION_COUNTS, &o.topk, "A,B", "sparse: indices of a token", 1, 1 << 24, {NULL}, NULL},
        {"--parts", OPTION_COUNTS, &o.parts, "A,B", "parts to merge; default 2,8", 1, 1024, {NULL}, NULL},
        {"--tokens",
         OPTION_COUNTS,
         &o.tokens,
         "A,B",
         "of the cache operations; default 128,4096,65536",
         1,
         1 << 24,
         {NULL},
         NULL},
        {"--device",
         OPTION_TEXT,
         &o.device,
         "DEVICE",
         "cpu (the default) or cuda:N",
         0,
         0,
         {"cpu", "cuda:0", NULL},
         NULL},
        {"--kernel",
         OPTION_TEXT,
         &o.kernel,
         "NAME",
         "force a kernel; flashmla info lists them",
         0,
         0,
         {NULL},
         NULL},
        {"--threads",
         OPTION_COUNT,
         &o.threads,
         "N",
         "default: OMP_NUM_THREADS, else all cores",
         1,
         4096,
         {NULL},
         NULL},
        {"--repeat", OPTION_COUNT, &o.repeat, "N", "runs of a row; default 15", 1, 100000, {NULL}, NULL},
        {"--warm",
         OPTION_ON,
         &o.warm,
         NULL,
         "leave the caches as the last run left them",
         0,
         0,
         {NULL},
         NULL},
        {"--fixed",
         OPTION_ON,
         &o.fixed,
         NULL,
         "beside varying lengths a batch of fixed length with as many keys",
         0,
         0,
         {NULL},
         NULL},
        {"--no-stream",
         OPTION_ON,
         &o.no_stream,
         NULL,
         "on a GPU: no bare stream of the same keys beside each row",
         0,
         0,
         {NULL},
         NULL},
        OPTION_JSON(&o.json),
        {0}};
    int status = EXIT_GOOD;
    switch (options_parse(&bench, options, argc, argv, NULL)) {
    case OPTIONS_HELPED: break;
    case OPTIONS_WRONG: status = EXIT_USAGE; break;
    case OPTIONS_PARSED: status = o.op >= BENCH_CACHE_APPEND ? bench_caches(&o) : bench_all(&o, given); break;
    }
    for (int a = 0; a < BENCH_AXES; a++)
        if (a != AXIS_DTYPE && a != AXIS_CAUSAL && a != AXIS_VARLEN) free(o.axes.axis[a].items);
    free(o.parts.items), free(o.tokens.items), free(o.topk.items);
    return status;
}
