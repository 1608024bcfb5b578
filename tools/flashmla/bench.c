/* SPDX-License-Identifier: MIT
 *
 * flashmla bench: times the CPU's kernels, and measures in the same run what the machine can do at best. The method is
 * described in docs/performance.md.
 */
#include "bench_grid.h"
#include "call.h"
#include "commands.h"

#include "elements.h"
#include "outfile.h"
#include "peak.h"
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
    "Grids: cpu (the default), h20 and peers (shapes of server GPUs), quick (three small rows, warm caches). "
    "A list\n"
    "replaces that axis of the grid. Before each run the caches are emptied by reading memory larger than "
    "they are.\n"
    "floor is the longer of bytes / read bandwidth and FLOP / peak, both measured in this run on as many "
    "threads.\n"
    "A row that takes over 2 s is run 3 times. --json writes one JSON object a row.\n"
    "\n"
    "Examples\n"
    "  flashmla bench\n"
    "  flashmla bench --heads 128 --seq-len 4096,16384 --batch 1 --threads 1 --kernel cpu-avx2\n"
    "  flashmla bench --grid quick --json quick.jsonl\n"
    "  flashmla bench --op merge --parts 2,8\n"};

struct bench_options {
    const char *grid, *kernel, *json;
    int op, dtype, causal, varlen; /* indices of the choices */
    int64_t repeat, threads;
    bool warm;
    struct option_counts parts;
    struct bench_axes axes;
};

struct machine {
    char cpu[128];
    int threads;
    double flops[PEAK_UNITS], bandwidth; /* on `threads` threads */
    struct peak_memory memory;
};

/* One timed row. */
struct row {
    const struct batch_shape *shape;
    int64_t parts; /* merge; 0 = dense decode */
    const char *kernel;
    double median, least, most; /* seconds */
    double flop, bytes, floor;
    int64_t runs;
};

struct session {
    const struct bench_options *options;
    struct machine machine;
    struct outfile *json;
    struct progress progress;
    int64_t timed, skipped;
    int exit_code;
};

/* ---- The machine ---------------------------------------------------------------------------- */

/* As Linux tells it; "" elsewhere. */
static void read_cpu_name(char *name, size_t size)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    *name = '\0';
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        snprintf(name, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (file) fclose(file);
}

/* The instructions that do the work of a kernel. */
static enum peak_unit unit_of(const char *kernel)
{
    static const char *const kernels[PEAK_UNITS] = {"cpu-generic", "cpu-avx2", "cpu-avx512",
                                                    "cpu-avx512bf16"};
    for (int unit = 0; unit < PEAK_UNITS; unit++)
        if (!strcmp(kernels[unit], kernel)) return (enum peak_unit)unit;
    return PEAK_GENERIC;
}

static bool measure_machine(struct machine *machine, bool warm, struct fault *fault)
{
    machine->threads = (int)fmla_num_threads();
    read_cpu_name(machine->cpu, sizeof machine->cpu);
    printf("flashmla %s, %s, %d threads\n", fmla_version_string(),
           *machine->cpu ? machine->cpu : "unknown CPU", machine->threads);
    for (int unit = 0; unit < PEAK_UNITS; unit++) {
        if (!peak_unit_available((enum peak_unit)unit)) continue;
        const double one = peak_flops((enum peak_unit)unit, 1);
        machine->flops[unit] =
            machine->threads == 1 ? one : peak_flops((enum peak_unit)unit, machine->threads);
        printf("peak   %-27s %8.1f GFLOP/s on 1 thread, %8.1f on %d\n", peak_unit_name((enum peak_unit)unit),
               1e-9 * one, 1e-9 * machine->flops[unit], machine->threads);
    }
    if (!peak_memory_open(&machine->memory, machine->threads))
        return fault_set(fault, "no memory for %zu bytes to measure the read bandwidth",
                         machine->memory.bytes);
    const double one = peak_bandwidth(&machine->memory, 1);
    machine->bandwidth = machine->threads == 1 ? one : peak_bandwidth(&machine->memory, machine->threads);
    printf("memory %-27s %8.1f GB/s    on 1 thread, %8.1f on %d\n", "read", 1e-9 * one,
           1e-9 * machine->bandwidth, machine->threads);
    if (warm)
        puts("caches warm: not emptied between runs");
    else
        printf("caches emptied between runs by reading %zu MiB (last level: %zu MiB)\n",
               machine->memory.bytes >> 20, machine->memory.cache_bytes >> 20);
    return true;
}

/* ---- Timing --------------------------------------------------------------------------------- */

typedef fmla_status (*bench_call)(const void *args);

static fmla_status call_decode(const void *args)
{
    return fmla_dense_decode(args);
}

static fmla_status call_merge(const void *args)
{
    return fmla_merge(args);
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
    qsort(seconds, (size_t)row->runs, sizeof *seconds, call_by_value);
    row->median = seconds[row->runs / 2], row->least = seconds[0], row->most = seconds[row->runs - 1];
    free(seconds);
    const double of_memory = row->bytes / s->machine.bandwidth;
    const double of_arithmetic = row->flop / s->machine.flops[unit_of(row->kernel)];
    row->floor = of_memory > of_arithmetic ? of_memory : of_arithmetic;
    return status;
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
           1e6 * row->floor, row->median / row->floor,
           100.0 * row->flop / row->median / s->machine.flops[unit_of(row->kernel)]);
    if (row->runs < s->options->repeat) printf(" (%" PRId64 " runs)", row->runs);
    putchar('\n');
    fflush(stdout);
}

/* A row as a line of JSON; what does not apply to the operation is left out. */
static bool write_json(const struct session *s, const struct row *row, struct fault *fault)
{
    const struct batch_shape *shape = row->shape;
    const struct machine *m = &s->machine;
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
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:s, s:i, s:f, s:f, s:b, s:s}", "us", 1e6 * row->median,
        "us_min", 1e6 * row->least, "us_max", 1e6 * row->most, "tflops", 1e-12 * row->flop / row->median,
        "gbs", 1e-9 * row->bytes / row->median, "floor_us", 1e6 * row->floor, "runs", (json_int_t)row->runs,
        "cpu", m->cpu, "threads", m->threads, "peak_tflops", 1e-12 * m->flops[unit_of(row->kernel)],
        "read_gbs", 1e-9 * m->bandwidth, "warm", s->options->warm, "version", fmla_version_string());
    char *text = NULL;
    if (line && of_op && figures && !json_object_update(line, of_op) && !json_object_update(line, figures))
        text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(line), json_decref(of_op), json_decref(figures);
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

static bool too_large(double bytes)
{
    const double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return all > 0.0 && bytes > 0.5 * all;
}

/* ---- Operations ----------------------------------------------------------------------------- */

static bool bench_made_decode(struct session *s, struct batch *batch, struct row *row, struct fault *fault)
{
    fmla_dense_decode_args *args = &batch->args;
    args->kernel = s->options->kernel;
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
    if (too_large(batch_bytes(shape))) return pass_over(s, shape, 0, "too large for this machine's memory");
    struct fault why = {""};
    const bool made = batch_make(&batch, shape, &why);
    const bool good = made ? bench_made_decode(s, &batch, &row, fault) : pass_over(s, shape, 0, why.text);
    batch_free(&batch);
    return good;
}

/* The library has no question for it: what is forced, or the first that runs here. */
static const char *merge_kernel(const struct bench_options *options)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    if (options->kernel) return options->kernel;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, "merge") && row.available && !row.forced_only) return row.kernel;
    return "none";
}

static bool bench_merge(struct session *s, const struct batch_shape *shape, int64_t parts,
                        struct fault *fault)
{
    const int64_t rows = shape->b * shape->s_q * shape->h_q, values = rows * BATCH_D_V;
    const int64_t parts_shape[] = {parts, shape->b, shape->s_q, shape->h_q, BATCH_D_V};
    const int64_t lse_shape[] = {parts, shape->b, shape->h_q, shape->s_q};
    const double bytes = 4.0 * (double)parts * (double)(values + rows) + 2.0 * (double)values;
    if (too_large(bytes)) return pass_over(s, shape, parts, "too large for this machine's memory");
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
        struct row row = {.shape = shape, .parts = parts, .kernel = merge_kernel(s->options)};
        row.flop = 2.0 * (double)parts * (double)values, row.bytes = bytes;
        const fmla_status status = time_call(s, call_merge, &args, &row);
        good = status ? library_fault(s, shape, parts, status, fault) : finish_row(s, &row, fault);
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
    if (!measure_machine(&s->machine, s->options->warm, fault)) return false;
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
    struct session s = {.options = o, .exit_code = EXIT_FAILED};
    if (!strcmp(o->grid, "quick")) o->warm = true;
    const bool good = work(&s, shapes, count, &fault);
    progress_wipe(&s.progress);
    outfile_abandon(s.json);
    peak_memory_close(&s.machine.memory);
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
         "cpu (the default), h20, peers or quick",
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
