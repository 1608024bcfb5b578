/* SPDX-License-Identifier: MIT
 *
 * flashmla bench: times the kernels of a device, and measures in the same run what it can do at best. The method is
 * described in docs/performance.md.
 */
#include "bench_cpu.h"
#include "bench_gpu.h"
#include "bench_grid.h"
#include "call.h"
#include "commands.h"
#include "gpu_call.h"

#include "elements.h"
#include "gpu.h"
#include "outfile.h"
#include "progress.h"
#include "timing.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command bench = {
    "bench", NULL, "time the kernels of this machine beside its measured peaks",
    "\n"
    "Grids: cpu (the default), h20, latency and peers (shapes of server GPUs), quick (three small rows, warm "
    "caches). "
    "A list\n"
    "replaces that axis of the grid. Before each run the caches are emptied by reading memory larger than "
    "they are.\n"
    "floor is the longer of bytes / read bandwidth and FLOP / peak, both measured in this run on as many "
    "threads.\n"
    "A row that takes over 2 s is run 3 times. On a GPU a call is captured in a graph, the plan is made "
    "before and "
    "timed\n"
    "apart, and the caches are its L2. --json writes one JSON object a row.\n"
    "\n"
    "Examples\n"
    "  flashmla bench\n"
    "  flashmla bench --heads 128 --seq-len 4096,16384 --batch 1 --threads 1 --kernel cpu-avx2\n"
    "  flashmla bench --grid quick --json quick.jsonl\n"
    "  flashmla bench --op merge --parts 2,8\n"
    "  flashmla bench --device cuda:0 --grid peers --json dense_decode.jsonl\n"};

struct bench_options {
    const char *grid, *kernel, *json, *device;
    int op, dtype, causal, varlen; /* indices of the choices */
    int64_t repeat, threads;
    bool warm;
    struct option_counts parts;
    struct bench_axes axes;
};

/* One timed row. */
struct row {
    const struct batch_shape *shape;
    int64_t parts; /* merge; 0 = dense decode */
    const char *kernel;
    double median, least, most; /* seconds */
    double plan;                /* of the plan, where it is timed apart: on a GPU */
    double flop, bytes, floor;
    int64_t runs;
};

struct session {
    const struct bench_options *options;
    fmla_device device;
    struct bench_cpu machine; /* the CPU */
    struct bench_gpu gpu;     /* where the device is one */
    struct outfile *json;
    struct progress progress;
    int64_t timed, skipped;
    int exit_code;
};

/* ---- Timing --------------------------------------------------------------------------------- */

static fmla_status call_decode(const void *args)
{
    return fmla_dense_decode(args);
}

static fmla_status call_merge(const void *args)
{
    return fmla_merge(args);
}

static fmla_status call_plan(const void *call)
{
    return gpu_call_plan(call);
}

static double flops_of(const struct session *s, const struct row *row)
{
    return device_is_gpu(s->device) ? s->gpu.flops : s->machine.flops[bench_cpu_unit(row->kernel)];
}

static double bandwidth_of(const struct session *s)
{
    return device_is_gpu(s->device) ? s->gpu.bandwidth : s->machine.bandwidth;
}

/* `seconds` become the row's figures. */
static void take_times(const struct session *s, double *seconds, struct row *row)
{
    qsort(seconds, (size_t)row->runs, sizeof *seconds, call_by_value);
    row->median = seconds[row->runs / 2], row->least = seconds[0], row->most = seconds[row->runs - 1];
    const double of_memory = row->bytes / bandwidth_of(s), of_arithmetic = row->flop / flops_of(s, row);
    row->floor = of_memory > of_arithmetic ? of_memory : of_arithmetic;
}

/* Times the call after one that is not counted. */
static fmla_status time_call(struct session *s, bench_call call, const void *args, struct row *row)
{
    enum { LEAST_RUNS = 3 };
    double start = timing_now();
    fmla_status status = call(args);
    const bool slow = timing_now() - start > 2.0;
    row->runs = slow && s->options->repeat > LEAST_RUNS ? LEAST_RUNS : s->options->repeat;
    double *seconds = calloc((size_t)row->runs, sizeof *seconds);
    if (!seconds) return FMLA_DEVICE_ERROR; /* a few hundred bytes */
    for (int64_t i = 0; i < row->runs && status == FMLA_OK; i++) {
        if (!s->options->warm) peak_memory_read(&s->machine.memory, s->machine.threads);
        start = timing_now();
        status = call(args);
        seconds[i] = timing_now() - start;
        progress_update(&s->progress, i + 1, row->runs);
    }
    take_times(s, seconds, row);
    free(seconds);
    return status;
}

/* The same on a GPU. *status is the library's; false where it or the GPU refused. */
static bool time_on_gpu(struct session *s, bench_call call, const void *args, void *stream, struct row *row,
                        fmla_status *status, struct fault *fault)
{
    row->runs = s->options->repeat;
    double *seconds = calloc((size_t)row->runs, sizeof *seconds);
    if (!seconds) return fault_set(fault, "no memory for %" PRId64 " times", row->runs);
    const bool good =
        bench_gpu_time(&s->gpu, call, args, stream, s->options->warm, row->runs, seconds, status, fault);
    if (good) take_times(s, seconds, row);
    free(seconds);
    return good;
}

/* ---- Report --------------------------------------------------------------------------------- */

static void print_head(bool merge)
{
    printf("\n%5s %4s %6s %4s %5s %5s %5s %5s %-9s %-15s %10s %10s %10s %8s %7s %10s %7s %6s\n",
           merge ? "parts" : "", "b", "s_k", "s_q", "h_q", "h_kv", "d_qk", "type", "options", "kernel", "us",
           "min", "max", "GFLOP/s", "GB/s", "floor us", "x floor", "% peak");
}

static void print_shape(const struct batch_shape *shape, int64_t parts)
{
    char options[32], number[24] = "";
    snprintf(options, sizeof options, "%s%s%s", shape->causal ? "causal" : "",
             shape->causal && shape->varlen ? "," : "", shape->varlen ? "var" : "");
    if (parts) snprintf(number, sizeof number, "%" PRId64, parts);
    printf("%5s %4" PRId64 " %6" PRId64 " %4" PRId64 " %5" PRId64 " %5" PRId64 " %5" PRId64 " %5s %-9s ",
           number, shape->b, shape->s_k, shape->s_q, shape->h_q, shape->h_kv, shape->d_qk,
           shape->fp16 ? "fp16" : "bf16", *options ? options : "-");
}

static void print_row(const struct session *s, const struct row *row)
{
    print_shape(row->shape, row->parts);
    printf("%-15s %10.1f %10.1f %10.1f %8.1f %7.2f %10.1f %7.2f %6.1f", row->kernel, 1e6 * row->median,
           1e6 * row->least, 1e6 * row->most, 1e-9 * row->flop / row->median, 1e-9 * row->bytes / row->median,
           1e6 * row->floor, row->median / row->floor, 100.0 * row->flop / row->median / flops_of(s, row));
    if (row->plan > 0.0) printf(" plan %.1f us", 1e6 * row->plan);
    if (row->runs < s->options->repeat) printf(" (%" PRId64 " runs)", row->runs);
    putchar('\n');
    fflush(stdout);
}

/* A row as a line of JSON; what does not apply to the operation is left out. */
static bool write_json(const struct session *s, const struct row *row, struct fault *fault)
{
    const struct batch_shape *shape = row->shape;
    const struct bench_cpu *m = &s->machine;
    json_t *line = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:s}", "op", row->parts ? "merge" : "dense_decode", "kernel",
        row->kernel, "b", (json_int_t)shape->b, "s_q", (json_int_t)shape->s_q, "h_q", (json_int_t)shape->h_q,
        "d_v", (json_int_t)BATCH_D_V, "dtype", shape->fp16 ? "fp16" : "bf16");
    json_t *of_op = row->parts
                        ? json_pack("{s:I}", "parts", (json_int_t)row->parts)
                        : json_pack("{s:I, s:I, s:I, s:s, s:I, s:b, s:b}", "s_k", (json_int_t)shape->s_k,
                                    "h_kv", (json_int_t)shape->h_kv, "d_qk", (json_int_t)shape->d_qk, "cache",
                                    shape->fp16 ? "FP16" : "BF16", "page_size", (json_int_t)shape->page_size,
                                    "causal", shape->causal, "varlen", shape->varlen);
    json_t *figures = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:b, s:s}", "us", 1e6 * row->median, "us_min",
        1e6 * row->least, "us_max", 1e6 * row->most, "tflops", 1e-12 * row->flop / row->median, "gbs",
        1e-9 * row->bytes / row->median, "floor_us", 1e6 * row->floor, "runs", (json_int_t)row->runs,
        "peak_tflops", 1e-12 * flops_of(s, row), "read_gbs", 1e-9 * bandwidth_of(s), "warm", s->options->warm,
        "version", fmla_version_string());
    const struct gpu_description *gpu = &s->gpu.peak.gpu;
    json_t *machine = device_is_gpu(s->device)
                          ? json_pack("{s:s, s:s, s:i}", "gpu", gpu->name, "driver", gpu->driver, "sm_mhz",
                                      gpu_sm_mhz(s->device.id))
                          : json_pack("{s:s, s:i}", "cpu", m->cpu, "threads", m->threads);
    if (row->plan > 0.0) json_object_set_new(machine, "plan_us", json_real(1e6 * row->plan));
    char *text = NULL;
    if (line && of_op && figures && machine && !json_object_update(line, of_op) &&
        !json_object_update(line, figures) && !json_object_update(line, machine))
        text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(line), json_decref(of_op), json_decref(figures), json_decref(machine);
    const bool good =
        text ? outfile_printf(s->json, fault, "%s\n", text) : fault_set(fault, "out of memory for JSON");
    free(text);
    return good;
}

static bool finish_row(struct session *s, const struct row *row, struct fault *fault)
{
    progress_wipe(&s->progress);
    print_row(s, row);
    s->timed++;
    return !s->json || write_json(s, row, fault);
}

/* A row that cannot run here is told and passed over; other refusals end the command. */
static bool pass_over(struct session *s, const struct batch_shape *shape, int64_t parts, const char *why)
{
    progress_wipe(&s->progress);
    print_shape(shape, parts);
    printf("skipped: %s\n", why);
    s->skipped++;
    return true;
}

static bool library_fault(struct session *s, const struct batch_shape *shape, int64_t parts,
                          fmla_status status, struct fault *fault)
{
    if (status == FMLA_UNSUPPORTED) return pass_over(s, shape, parts, fmla_last_error());
    return fault_set(fault, "%s", fmla_last_error());
}

static bool too_large(const struct session *s, double bytes)
{
    if (device_is_gpu(s->device) && bytes > 0.8 * (double)s->gpu.peak.gpu.memory) return true;
    const double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return all > 0.0 && bytes > 0.5 * all;
}

/* ---- Operations ----------------------------------------------------------------------------- */

static bool bench_decode_on_gpu(struct session *s, const struct batch *batch, struct row *row,
                                struct fault *fault)
{
    struct gpu_call call = {0};
    struct fault why;
    fmla_status status = FMLA_OK;
    const struct call_work work = call_work(&batch->args);
    row->flop = work.flop, row->bytes = work.bytes;
    bool good = gpu_call_open(&call, s->device, &batch->args, &status, &why) &&
                gpu_call_plan_open(&call, &status, &why);
    if (good) fmla_dense_decode_kernel(&call.args, &row->kernel);
    good = good && time_on_gpu(s, call_plan, &call, call.args.stream, row, &status, &why);
    row->plan = row->median;
    good = good && time_on_gpu(s, call_decode, &call.args, call.args.stream, row, &status, &why);
    gpu_call_close(&call);
    if (good) return finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return pass_over(s, row->shape, 0, why.text);
    return fault_set(fault, "%s", why.text);
}

static bool bench_made_decode(struct session *s, struct batch *batch, struct row *row, struct fault *fault)
{
    fmla_dense_decode_args *args = &batch->args;
    args->kernel = s->options->kernel;
    if (device_is_gpu(s->device)) return bench_decode_on_gpu(s, batch, row, fault);
    fmla_status status = fmla_dense_decode_kernel(args, &row->kernel);
    if (!status) status = call_workspace(args);
    if (status) return library_fault(s, row->shape, 0, status, fault);
    if (!args->workspace) return pass_over(s, row->shape, 0, "no memory for its workspace");
    const struct call_work work = call_work(args);
    row->flop = work.flop, row->bytes = work.bytes;
    status = time_call(s, call_decode, args, row);
    return status ? library_fault(s, row->shape, 0, status, fault) : finish_row(s, row, fault);
}

static bool bench_decode(struct session *s, const struct batch_shape *shape, struct fault *fault)
{
    struct row row = {.shape = shape};
    struct batch batch;
    if (too_large(s, batch_bytes(shape)))
        return pass_over(s, shape, 0, "too large for this machine's memory");
    struct fault why = {""};
    const bool made = batch_make(&batch, shape, &why);
    const bool good = made ? bench_made_decode(s, &batch, &row, fault) : pass_over(s, shape, 0, why.text);
    batch_free(&batch);
    return good;
}

/* The library has no question for it: what is forced, or the first that runs here. */
static const char *merge_kernel(const struct session *s)
{
    if (s->options->kernel) return s->options->kernel;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(s->device, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, "merge") && row.available && !row.forced_only) return row.kernel;
    return "none";
}

/* The call on copies of its tensors. */
static bool bench_merge_on_gpu(struct session *s, const fmla_merge_args *host, const size_t bytes[3],
                               struct row *row, struct fault *fault)
{
    fmla_merge_args args = *host;
    const fmla_tensor *from[3] = {host->out_parts, host->lse_parts, host->out};
    const fmla_tensor **to[3] = {&args.out_parts, &args.lse_parts, &args.out};
    fmla_tensor tensors[3];
    fmla_status status = FMLA_OK;
    struct fault why;
    bool good = gpu_stream_open(&args.stream, &why);
    for (int i = 0; i < 3; i++) {
        tensors[i] = *from[i], *to[i] = &tensors[i];
        tensors[i].device = s->device, tensors[i].data = NULL;
        good = good && gpu_alloc(&tensors[i].data, bytes[i], &why) &&
               gpu_upload(tensors[i].data, from[i]->data, bytes[i], &why);
    }
    good = good && time_on_gpu(s, call_merge, &args, args.stream, row, &status, &why);
    for (int i = 0; i < 3; i++) gpu_free(tensors[i].data);
    gpu_stream_close(args.stream);
    if (good) return finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return pass_over(s, row->shape, row->parts, why.text);
    return fault_set(fault, "%s", why.text);
}

static bool bench_merge(struct session *s, const struct batch_shape *shape, int64_t parts,
                        struct fault *fault)
{
    const int64_t rows = shape->b * shape->s_q * shape->h_q, values = rows * BATCH_D_V;
    const int64_t parts_shape[] = {parts, shape->b, shape->s_q, shape->h_q, BATCH_D_V};
    const int64_t lse_shape[] = {parts, shape->b, shape->h_q, shape->s_q};
    const double bytes = 4.0 * (double)parts * (double)(values + rows) + 2.0 * (double)values;
    if (too_large(s, bytes)) return pass_over(s, shape, parts, "too large for this machine's memory");
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_dtype fp32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    const fmla_dtype type = dtype_of(shape->fp16 ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    fmla_tensor out_parts = {malloc((size_t)(parts * values) * 4 + 1), cpu, 5, fp32, parts_shape, NULL, 0};
    fmla_tensor lse_parts = {malloc((size_t)(parts * rows) * 4 + 1), cpu, 4, fp32, lse_shape, NULL, 0};
    fmla_tensor out = {malloc((size_t)values * 2 + 1), cpu, 4, type, parts_shape + 1, NULL, 0};
    bool good;
    if (out_parts.data && lse_parts.data && out.data) {
        struct random_state random = {2025};
        batch_fill(out_parts.data, fp32, parts * values, BATCH_D_V, &random);
        batch_fill(lse_parts.data, fp32, parts * rows, BATCH_D_V, &random);
        fmla_merge_args args = FMLA_INIT(fmla_merge_args);
        args.out_parts = &out_parts, args.lse_parts = &lse_parts, args.out = &out;
        args.kernel = s->options->kernel;
        struct row row = {.shape = shape, .parts = parts, .kernel = merge_kernel(s)};
        row.flop = 2.0 * (double)parts * (double)values, row.bytes = bytes;
        if (device_is_gpu(s->device)) {
            const size_t sizes[3] = {(size_t)(parts * values) * 4, (size_t)(parts * rows) * 4,
                                     (size_t)values * 2};
            good = bench_merge_on_gpu(s, &args, sizes, &row, fault);
        } else {
            const fmla_status status = time_call(s, call_merge, &args, &row);
            good = status ? library_fault(s, shape, parts, status, fault) : finish_row(s, &row, fault);
        }
    } else {
        good = pass_over(s, shape, parts, "no memory for its tensors");
    }
    free(out_parts.data), free(lse_parts.data), free(out.data);
    return good;
}

/* ---- The command ---------------------------------------------------------------------------- */

static bool bench_row(struct session *s, const struct batch_shape *shape, struct fault *fault)
{
    static int64_t usual[] = {2, 8};
    const struct option_counts *given = &s->options->parts;
    const struct option_counts parts = given->count ? *given : (struct option_counts){usual, 2};
    if (!s->options->op) return bench_decode(s, shape, fault);
    for (int64_t i = 0; i < parts.count; i++)
        if (!bench_merge(s, shape, parts.items[i], fault)) return false;
    return true;
}

static bool work(struct session *s, const struct batch_shape *shapes, int64_t count, struct fault *fault)
{
    const char *path = s->options->json;
    if (path && !(s->json = outfile_open(path, 0, fault))) return false;
    if (device_is_gpu(s->device)) {
        if (!bench_gpu_open(&s->gpu, s->device, s->options->warm, fault)) {
            s->exit_code = EXIT_UNSUPPORTED;
            return false;
        }
    } else if (!bench_cpu_measure(&s->machine, s->options->warm, fault)) {
        return false;
    }
    print_head(s->options->op);
    progress_begin(&s->progress, "this row's runs");
    for (int64_t i = 0; i < count; i++) {
        /* What distinguishes the shapes of a merge: keys do not. */
        if (s->options->op && i && shapes[i].b == shapes[i - 1].b && shapes[i].h_q == shapes[i - 1].h_q &&
            shapes[i].s_q == shapes[i - 1].s_q)
            continue;
        if (!bench_row(s, &shapes[i], fault)) return false;
    }
    if (!s->timed) {
        s->exit_code = EXIT_UNSUPPORTED;
        return fault_set(fault, "no row of the grid runs here");
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

static int bench_all(struct bench_options *o, const bool given[3])
{
    fmla_device device;
    if (!device_parse(o->device, &device))
        return complain(&bench, EXIT_USAGE, "--device: '%s' must be cpu or cuda:N", o->device);
    static int64_t no_yes[2] = {0, 1};
    int64_t count;
    struct fault fault = {""};
    choose(&o->axes.axis[AXIS_DTYPE], o->dtype, given[0], no_yes);
    choose(&o->axes.axis[AXIS_CAUSAL], o->causal, given[1], no_yes);
    choose(&o->axes.axis[AXIS_VARLEN], o->varlen, given[2], no_yes);
    struct batch_shape *shapes = bench_grid(o->grid, &o->axes, &count);
    if (count < 0)
        return complain(&bench, EXIT_USAGE, "--grid: '%s' must be one of %s", o->grid, bench_grid_names());
    if (!shapes) return complain(&bench, EXIT_FAILED, "no memory for so many rows");
    for (int64_t i = 0; i < count; i++)
        if (shapes[i].h_q % shapes[i].h_kv || (shapes[i].d_qk != 512 && shapes[i].d_qk != 576)) {
            free(shapes);
            return complain(&bench, EXIT_USAGE, "--kv-heads must divide --heads, and --d-qk be 512 or 576");
        }
    if (o->threads) fmla_set_num_threads((int32_t)o->threads); /* in range by its option */
    struct session s = {.options = o, .device = device, .exit_code = EXIT_FAILED};
    if (!strcmp(o->grid, "quick")) o->warm = true;
    const bool good = work(&s, shapes, count, &fault);
    progress_wipe(&s.progress);
    outfile_abandon(s.json);
    peak_memory_close(&s.machine.memory);
    if (device_is_gpu(device)) bench_gpu_close(&s.gpu);
    free(shapes);
    return good ? EXIT_GOOD : complain(&bench, s.exit_code, "%s", fault.text);
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
         "dense_decode (the default) or merge",
         0,
         0,
         {"dense_decode", "merge", NULL},
         NULL},
        {"--grid",
         OPTION_TEXT,
         &o.grid,
         "NAME",
         "cpu (the default), h20, latency, peers or quick",
         0,
         0,
         {NULL},
         NULL},
        LIST("--batch", AXIS_BATCH, 1, 65536, "requests"),
        LIST("--query-tokens", AXIS_QUERY_TOKENS, 1, 4096, "query tokens of a request"),
        LIST("--seq-len", AXIS_SEQ_LEN, 1, 1 << 24, "keys of a request"),
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
        {"--parts", OPTION_COUNTS, &o.parts, "A,B", "parts to merge; default 2,8", 1, 1024, {NULL}, NULL},
        {"--device", OPTION_TEXT, &o.device, "DEVICE", "cpu (the default) or cuda:N", 0, 0, {NULL}, NULL},
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
        {"--json", OPTION_TEXT, &o.json, "FILE", "write one JSON object a row there", 0, 0, {NULL}, NULL},
        {0}};
    int status = EXIT_GOOD;
    switch (options_parse(&bench, options, argc, argv, NULL)) {
    case OPTIONS_HELPED: break;
    case OPTIONS_WRONG: status = EXIT_USAGE; break;
    case OPTIONS_PARSED: status = bench_all(&o, given); break;
    }
    for (int a = 0; a < BENCH_AXES; a++)
        if (a != AXIS_DTYPE && a != AXIS_CAUSAL && a != AXIS_VARLEN) free(o.axes.axis[a].items);
    free(o.parts.items);
    return status;
}
