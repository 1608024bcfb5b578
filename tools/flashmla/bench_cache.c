/* SPDX-License-Identifier: MIT */
#include "bench_cache.h"

#include "batch.h"
#include "bench_cpu.h"
#include "bench_gpu.h"
#include "bench_report.h"
#include "call.h"
#include "gpu_call.h"
#include "json_line.h"

#include "elements.h"
#include "gpu.h"
#include "gpu_copy.h"
#include "outfile.h"
#include "progress.h"
#include "random.h"
#include "timing.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FORMATS = 5, TENSORS = 4, D_ROPE = 64 };

static const struct {
    const char *name;
    int32_t kv_format, d_qk, bytes; /* bytes: of a token */
} formats[FORMATS] = {{"BF16", FMLA_KV_BF16, 576, 1152},
                      {"FP16", FMLA_KV_FP16, 576, 1152},
                      {"FP8_656", FMLA_KV_FP8_656, 576, 656},
                      {"FP8_584", FMLA_KV_FP8_584, 512, 584},
                      {"FP8_576", FMLA_KV_FP8_576, 576, 576}};

struct session {
    const struct bench_cache *asked;
    struct bench_cpu cpu;
    struct bench_gpu gpu;
    double copy; /* bytes/s: on a GPU of a copy, read and written; on the CPU of a read */
    struct outfile *json;
    struct progress progress;
    int64_t timed;
    struct fault passed_over; /* why the first such row was */
};

/* The tensors of a call, in host memory, or in a GPU's with copies of it. */
enum { LATENT /* gather: out */, ROPE, CACHE, SLOTS };
struct cache_tensors {
    fmla_tensor tensor[TENSORS];
    int64_t shape[TENSORS][4];
    size_t bytes[TENSORS];
    void *host[TENSORS];
};

struct row {
    int format;
    int64_t tokens;
    bool fp16;
    const char *kernel;
    double median, least, most, bytes;
};

static fmla_status call_append(const void *args)
{
    return fmla_cache_append(args);
}

static fmla_status call_gather(const void *args)
{
    return fmla_cache_gather(args);
}

/* ---- A call ---------------------------------------------------------------------------------- */

static bool make_tensor(struct cache_tensors *t, int which, fmla_dtype dtype, int ndim, const int64_t *shape)
{
    size_t bytes = dtype.bits / 8;
    for (int i = 0; i < ndim; i++) t->shape[which][i] = shape[i], bytes *= (size_t)shape[i];
    t->bytes[which] = bytes;
    t->host[which] = calloc(bytes + 1, 1);
    t->tensor[which] = (fmla_tensor){.data = t->host[which],
                                     .device = {FMLA_DEVICE_CPU, 0},
                                     .ndim = ndim,
                                     .dtype = dtype,
                                     .shape = t->shape[which]};
    return t->host[which] != NULL;
}

/* Tokens follow each other within a page, and pages are shuffled, as an engine hands them out. */
static bool fill_slots(int64_t *slots, int64_t tokens, int64_t pages, int64_t page_size,
                       struct random_state *random)
{
    int32_t *order = malloc((size_t)pages * sizeof *order);
    if (!order) return false;
    for (int64_t i = 0; i < pages; i++) order[i] = (int32_t)i;
    random_shuffle(random, order, pages);
    for (int64_t t = 0; t < tokens; t++) slots[t] = order[t / page_size] * page_size + t % page_size;
    free(order);
    return true;
}

static bool make_tensors(const struct session *s, const struct row *row, struct cache_tensors *t)
{
    struct random_state random = {2026};
    const int f = row->format;
    const bool wide = formats[f].bytes == 2 * formats[f].d_qk;
    const int64_t page_size = s->asked->page_size, pages = (row->tokens + page_size - 1) / page_size;
    const int64_t width = formats[f].d_qk, latent = s->asked->gather ? width : width - D_ROPE;
    const fmla_dtype type = dtype_of(row->fp16 ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    const fmla_dtype of_cache = !wide                                  ? dtype_of(FMLA_TYPE_UINT, 8)
                                : formats[f].kv_format == FMLA_KV_FP16 ? dtype_of(FMLA_TYPE_FLOAT, 16)
                                                                       : dtype_of(FMLA_TYPE_BFLOAT, 16);
    if (!make_tensor(t, LATENT, type, 2, (int64_t[]){row->tokens, latent}) ||
        !make_tensor(t, ROPE, type, 2, (int64_t[]){row->tokens, D_ROPE}) ||
        !make_tensor(t, CACHE, of_cache, 4,
                     (int64_t[]){pages, page_size, 1, formats[f].bytes / (wide ? 2 : 1)}) ||
        !make_tensor(t, SLOTS, dtype_of(FMLA_TYPE_INT, 64), 1, &row->tokens))
        return false;
    batch_fill(t->host[LATENT], type, row->tokens * latent, latent, &random);
    batch_fill(t->host[ROPE], type, row->tokens * D_ROPE, D_ROPE, &random);
    memset(t->host[CACHE], 0x3c,
           t->bytes[CACHE]); /* e4m3, scales and 16-bit values that are ordinary numbers */
    return fill_slots(t->host[SLOTS], row->tokens, pages, page_size, &random);
}

union cache_args {
    fmla_cache_append_args append;
    fmla_cache_gather_args gather;
};

static void make_args(const struct session *s, const struct row *row, const struct cache_tensors *t,
                      void *stream, union cache_args *args)
{
    const int32_t format = formats[row->format].kv_format;
    const float scale = format == FMLA_KV_FP8_576 ? 0.037f : 0.0f;
    if (s->asked->gather) {
        args->gather = FMLA_INIT(fmla_cache_gather_args);
        args->gather.kv_cache = &t->tensor[CACHE], args->gather.slots = &t->tensor[SLOTS];
        args->gather.out = &t->tensor[LATENT], args->gather.stream = stream;
        args->gather.kv_format = format, args->gather.cache_scale = scale;
        args->gather.kernel = s->asked->kernel;
        return;
    }
    args->append = FMLA_INIT(fmla_cache_append_args);
    args->append.latent = &t->tensor[LATENT], args->append.rope = &t->tensor[ROPE];
    args->append.kv_cache = &t->tensor[CACHE], args->append.slot_mapping = &t->tensor[SLOTS];
    args->append.stream = stream, args->append.kv_format = format, args->append.cache_scale = scale;
    args->append.kernel = s->asked->kernel;
}

/* ---- Timing ---------------------------------------------------------------------------------- */

static void take(struct row *row, double *seconds, int64_t runs)
{
    qsort(seconds, (size_t)runs, sizeof *seconds, call_by_value);
    row->median = seconds[runs / 2], row->least = seconds[0], row->most = seconds[runs - 1];
}

static bool time_on_cpu(struct session *s, struct row *row, struct cache_tensors *t, double *seconds,
                        fmla_status *status, struct fault *fault)
{
    union cache_args args;
    make_args(s, row, t, NULL, &args);
    const bench_call call = s->asked->gather ? call_gather : call_append;
    *status = call(&args);
    for (int64_t i = 0; i < s->asked->repeat && !*status; i++) {
        if (!s->asked->warm) peak_memory_read(&s->cpu.memory, s->cpu.threads);
        const double start = timing_now();
        *status = call(&args);
        seconds[i] = timing_now() - start;
        progress_update(&s->progress, i + 1, s->asked->repeat);
    }
    return !*status || fault_set(fault, "%s", fmla_last_error());
}

static bool time_on_gpu(struct session *s, struct row *row, struct cache_tensors *t, double *seconds,
                        fmla_status *status, struct fault *fault)
{
    union cache_args args;
    void *stream = NULL;
    bool good = gpu_stream_open(&stream, fault);
    for (int i = 0; i < TENSORS; i++) {
        t->tensor[i].device = s->asked->device, t->tensor[i].data = NULL;
        good = good && gpu_alloc(&t->tensor[i].data, t->bytes[i], fault) &&
               gpu_upload(t->tensor[i].data, t->host[i], t->bytes[i], fault);
    }
    make_args(s, row, t, stream, &args);
    const struct bench_timed timed = {.call = s->asked->gather ? call_gather : call_append,
                                      .args = &args,
                                      .stream = stream,
                                      .seconds = seconds};
    good = good && bench_gpu_time(&s->gpu, &timed, 1, s->asked->warm, s->asked->repeat, status, fault);
    for (int i = 0; i < TENSORS; i++) gpu_free(t->tensor[i].data);
    gpu_stream_close(stream);
    return good;
}

/* ---- Rows ------------------------------------------------------------------------------------- */

static const char *operation(const struct session *s)
{
    return s->asked->gather ? "cache_gather" : "cache_append";
}

/* What is forced, or the first that runs here. */
static const char *kernel_name(const struct session *s)
{
    if (s->asked->kernel) return s->asked->kernel;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(s->asked->device, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, operation(s)) && row.available && !row.forced_only) return row.kernel;
    return "none";
}

static void print_row(const struct session *s, const struct row *row)
{
    const double floor = row->bytes / s->copy;
    printf("%-13s %8" PRId64 " %5s %-8s %5" PRId64 " %-12s %10.1f %10.1f %10.1f %8.1f %10.1f %7.2f\n",
           operation(s), row->tokens, row->fp16 ? "fp16" : "bf16", formats[row->format].name,
           s->asked->page_size, row->kernel, 1e6 * row->median, 1e6 * row->least, 1e6 * row->most,
           1e-9 * row->bytes / row->median, 1e6 * floor, row->median / floor);
    fflush(stdout);
}

static bool write_row(const struct session *s, const struct row *row, struct fault *fault)
{
    static const struct bench_sources sources[] = {{{"src/cuda/any/cache_append.cu"}},
                                                   {{"src/cuda/any/cache_gather.cu"}}};
    const bool gpu = device_is_gpu(s->asked->device);
    json_t *line = json_pack("{s:s, s:s, s:I, s:s, s:s, s:I, s:I}", "op", operation(s), "kernel", row->kernel,
                             "tokens", (json_int_t)row->tokens, "dtype", row->fp16 ? "fp16" : "bf16", "cache",
                             formats[row->format].name, "d_qk", (json_int_t)formats[row->format].d_qk,
                             "page_size", (json_int_t)s->asked->page_size);
    json_t *figures = json_pack("{s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:b, s:s}", "us", 1e6 * row->median,
                                "us_min", 1e6 * row->least, "us_max", 1e6 * row->most, "gbs",
                                1e-9 * row->bytes / row->median, "floor_us", 1e6 * row->bytes / s->copy,
                                "runs", (json_int_t)s->asked->repeat, gpu ? "copy_gbs" : "read_gbs",
                                1e-9 * s->copy, "warm", s->asked->warm, "version", fmla_version_string());
    json_t *machine = gpu ? bench_report_gpu(&s->gpu.peak.gpu, s->asked->device, &sources[s->asked->gather])
                          : json_pack("{s:s, s:i}", "cpu", s->cpu.cpu, "threads", s->cpu.threads);
    const bool good = line && figures && machine && !json_object_update(line, figures) &&
                      !json_object_update(line, machine);
    json_decref(figures), json_decref(machine);
    if (good) return json_line(s->json, line, fault);
    json_decref(line);
    return fault_set(fault, "out of memory for JSON");
}

static bool time_row(struct session *s, struct row *row, struct fault *fault)
{
    const int f = row->format;
    struct cache_tensors t = {0};
    fmla_status status = FMLA_OK;
    struct fault why = {""};
    double *seconds = calloc((size_t)s->asked->repeat, sizeof *seconds);
    row->kernel = kernel_name(s);
    row->bytes = (double)row->tokens * (2.0 * formats[f].d_qk + formats[f].bytes + 8.0);
    bool good = seconds && make_tensors(s, row, &t);
    if (!good)
        fault_set(&why, "no memory for its tensors"), status = FMLA_UNSUPPORTED;
    else
        good =
            (device_is_gpu(s->asked->device) ? time_on_gpu : time_on_cpu)(s, row, &t, seconds, &status, &why);
    progress_wipe(&s->progress);
    if (good) {
        take(row, seconds, s->asked->repeat);
        print_row(s, row);
        s->timed++;
        good = !s->json || write_row(s, row, fault);
    } else if (status == FMLA_UNSUPPORTED) {
        printf("%-13s %8" PRId64 " %5s %-8s skipped: %s\n", operation(s), row->tokens,
               row->fp16 ? "fp16" : "bf16", formats[f].name, why.text);
        if (!*s->passed_over.text) s->passed_over = why;
        good = true;
    } else {
        fault_set(fault, "%s", why.text);
    }
    for (int i = 0; i < TENSORS; i++) free(t.host[i]);
    free(seconds);
    return good;
}

/* ---- The command ------------------------------------------------------------------------------ */

static bool measure(struct session *s, int *exit_code, struct fault *fault)
{
    if (!device_is_gpu(s->asked->device)) {
        if (!bench_cpu_measure(&s->cpu, s->asked->warm, fault)) return false;
        s->copy = s->cpu.bandwidth;
        return true;
    }
    *exit_code = EXIT_UNSUPPORTED;
    if (!bench_gpu_open(&s->gpu, s->asked->device, s->asked->warm, fault) ||
        !gpu_copy_bandwidth(&s->gpu.peak.gpu, &s->copy, fault))
        return false;
    *exit_code = EXIT_FAILED;
    printf("memory %-27s %8.1f GB/s\n", "copied, read and written", 1e-9 * s->copy);
    return true;
}

static bool all_rows(struct session *s, struct fault *fault)
{
    static int64_t usual[] = {128, 4096, 65536};
    const struct option_counts *given = &s->asked->tokens;
    const struct option_counts tokens = given->count ? *given : (struct option_counts){usual, 3};
    printf("\n%-13s %8s %5s %-8s %5s %-12s %10s %10s %10s %8s %10s %7s\n", "operation", "tokens", "type",
           "cache", "page", "kernel", "us", "min", "max", "GB/s", "floor us", "x floor");
    for (int64_t i = 0; i < tokens.count; i++)
        for (int fp16 = 0; fp16 < 2; fp16++)
            for (int f = 0; f < FORMATS; f++) {
                struct row row = {.format = f, .tokens = tokens.items[i], .fp16 = fp16};
                if (!(fp16 ? s->asked->fp16 : s->asked->bf16)) continue;
                if (!time_row(s, &row, fault)) return false;
            }
    return true;
}

bool bench_cache(const struct bench_cache *asked, int *exit_code, struct fault *fault)
{
    struct session s = {.asked = asked};
    *exit_code = EXIT_FAILED;
    bool good = !asked->json || (s.json = outfile_open_lines(asked->json, fault));
    good = good && measure(&s, exit_code, fault);
    progress_begin(&s.progress, "this row's runs");
    good = good && all_rows(&s, fault);
    if (good && !s.timed) {
        *exit_code = EXIT_UNSUPPORTED;
        good = fault_set(fault, "no row of the grid runs here: %s", s.passed_over.text);
    }
    progress_wipe(&s.progress);
    if (good && s.json) {
        good = outfile_commit(s.json, fault);
        s.json = NULL; /* commit freed it */
    }
    outfile_abandon(s.json);
    peak_memory_close(&s.cpu.memory);
    if (device_is_gpu(asked->device)) bench_gpu_close(&s.gpu);
    return good;
}
