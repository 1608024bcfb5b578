/* SPDX-License-Identifier: MIT */
#include "bench_report.h"

#include "gpu_call.h"
#include "input.h"
#include "json_line.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The table ------------------------------------------------------------------------------ */

void bench_report_head(const struct bench_report *report)
{
    printf("\n%5s %4s %6s %4s %5s %5s %5s %5s %-9s %-15s %10s %10s %10s %8s %7s %10s",
           report->merge ? "parts" : "", "b", "s_k", "s_q", "h_q", "h_kv", "d_qk", "type", "options",
           "kernel", "us", "min", "max", "GFLOP/s", "GB/s", "floor us");
    if (report->stream) printf(" %10s", "stream us");
    printf(" %7s %6s\n", "x floor", "% peak");
}

static void print_shape(const struct bench_row *row)
{
    const struct batch_shape *shape = row->shape;
    const int64_t parts = row->parts;
    char options[32], number[24] = "", b[24] = "-"; /* a prompt has no batch */
    snprintf(options, sizeof options, "%s%s%s", shape->causal ? "causal" : "",
             shape->causal && shape->varlen ? "," : "", shape->varlen ? "var" : "");
    if (row->sparse) snprintf(options, sizeof options, "%s", input_format_name(row->sparse->format));
    if (row->prefill) snprintf(options, sizeof options, "%s", input_format_name(row->prefill->format));
    if (shape->b) snprintf(b, sizeof b, "%" PRId64, shape->b);
    if (parts) snprintf(number, sizeof number, "%" PRId64, parts);
    printf("%5s %4s %6" PRId64 " %4" PRId64 " %5" PRId64 " %5" PRId64 " %5" PRId64 " %5s %-9s ", number, b,
           shape->s_k, shape->s_q, shape->h_q, shape->h_kv, shape->d_qk, shape->fp16 ? "fp16" : "bf16",
           *options ? options : "-");
}

void bench_report_row(const struct bench_report *report, const struct bench_row *row)
{
    print_shape(row);
    printf("%-15s %10.1f %10.1f %10.1f %8.1f %7.2f %10.1f", row->kernel, 1e6 * row->median, 1e6 * row->least,
           1e6 * row->most, 1e-9 * row->flop / row->median, 1e-9 * row->bytes / row->median,
           1e6 * row->floor);
    if (report->stream) printf(" %10.1f", 1e6 * row->stream);
    printf(" %7.2f %6.1f", row->median / row->floor, 100.0 * row->flop / row->median / row->peak);
    if (row->plan > 0.0) printf(" plan %.1f us", 1e6 * row->plan);
    if (row->fixed > 0.0)
        printf(" fixed %.1f us, var / fixed %.3f", 1e6 * row->fixed, row->median / row->fixed);
    if (row->sparse) printf(" topk %" PRId64, row->sparse->cache[0].topk);
    if (row->sparse && row->sparse->cache[1].topk) printf(" + %" PRId64, row->sparse->cache[1].topk);
    if (row->sparse && row->sparse->extra_varlen) printf(" varlen");
    if (row->prefill) printf(" topk %" PRId64, row->prefill->topk);
    if (row->runs < report->repeat) printf(" (%" PRId64 " runs)", row->runs);
    putchar('\n');
    fflush(stdout);
}

void bench_report_skipped(const struct bench_row *row, const char *why)
{
    print_shape(row);
    printf("skipped: %s\n", why);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void source_of_sparse(const char *kernel, struct bench_sources *sources)
{
    static const struct {
        const char *kernel;
        struct bench_sources sources;
    } all[] = {
        {"cuda-sm90", /* which of the two a call takes is the library's business */
         {{"src/cuda/sm90/sparse_decode/sparse_decode_bf16.cu",
           "src/cuda/sm90/sparse_decode/small/sparse_decode_bf16.cu"}}},
        {"cuda-sm90-64", {{"src/cuda/sm90/sparse_decode/sparse_decode_bf16.cu"}}},
        {"cuda-sm90-16", {{"src/cuda/sm90/sparse_decode/small/sparse_decode_bf16.cu"}}},
        {"cuda", {{"src/cuda/any/sparse_decode.cu"}}},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (!strcmp(all[i].kernel, kernel)) *sources = all[i].sources;
}

/* The .cu files of a row's kernel. */
static struct bench_sources sources_of(const struct bench_row *row)
{
    struct bench_sources sources = {{""}};
    const char *family = strchr(row->kernel, '-'); /* cuda-sm90 */
    if (row->parts)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/any/merge.cu");
    else if (row->sparse)
        source_of_sparse(row->kernel, &sources);
    else if (row->prefill && family)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/sparse_prefill/sparse_prefill_%s.cu",
                 family + 1, row->prefill->format == FMLA_KV_BF16 ? "bf16" : "fp8");
    else if (row->prefill)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/any/sparse_prefill.cu");
    else
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/dense_decode/dense_decode_%s.cu",
                 family ? family + 1 : "", row->shape->fp16 ? "fp16" : "bf16");
    return sources;
}

static bool find_code(const char *path, const char *wanted, int major, int minor, char hash[65])
{
    char line[512], source[256], target[64], capability[32];
    const int digits = snprintf(capability, sizeof capability, "sm_%d%d", major, minor);
    FILE *list = fopen(path, "r");
    bool found = false;
    while (list && !found && fgets(line, sizeof line, list)) /* "<hash>  <file> <architecture>" */
        found = sscanf(line, "%64[0-9a-f] %255s %63s", hash, source, target) == 3 && strlen(hash) == 64 &&
                !strcmp(source, wanted) && !strncmp(target, capability, (size_t)digits) &&
                (!target[digits] || !strcmp(target + digits, "a"));
    if (list) fclose(list);
    return found;
}

/* The hashes of all of the sources, or none. */
static bool find_codes(const char *path, const struct bench_sources *sources, int major, int minor,
                       char code[BENCH_CODE])
{
    char hash[65];
    int at = 0;
    for (int i = 0; i < BENCH_SOURCES && (!i || *sources->file[i]); i++) {
        if (!find_code(path, sources->file[i], major, minor, hash)) return false;
        at += snprintf(code + at, (size_t)(BENCH_CODE - at), "%s%s", i ? " " : "", hash);
    }
    return true;
}

bool bench_report_code(const char *path, const struct bench_row *row, int major, int minor,
                       char code[BENCH_CODE])
{
    const struct bench_sources sources = sources_of(row);
    return find_codes(path, &sources, major, minor, code);
}

/* The list lies beside the program. */
static bool code_here(const struct gpu_description *gpu, const struct bench_sources *sources,
                      char code[BENCH_CODE])
{
    static const char name[] = "kernels.sha256";
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof name);
    if (length <= 0) return false;
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    if (!slash) return false;
    memcpy(slash + 1, name, sizeof name);
    return find_codes(path, sources, gpu->major, gpu->minor, code);
}

json_t *bench_report_gpu(const struct gpu_description *gpu, fmla_device device,
                         const struct bench_sources *sources)
{
    char code[BENCH_CODE];
    json_t *object = json_pack("{s:s, s:s, s:i}", "gpu", gpu->name, "driver", gpu->driver, "sm_mhz",
                               gpu_sm_mhz(device.id));
    if (object && code_here(gpu, sources, code) &&
        json_object_set_new(object, "code_sha", json_string(code))) {
        json_decref(object);
        return NULL;
    }
    return object;
}

/* What the row was timed on and beside. */
static json_t *surroundings(const struct bench_report *report, const struct bench_row *row)
{
    if (!report->gpu)
        return json_pack("{s:s, s:i}", "cpu", report->cpu->cpu, "threads", report->cpu->threads);
    const struct bench_sources sources = sources_of(row);
    return bench_report_gpu(&report->gpu->peak.gpu, report->device, &sources);
}

static bool set_time(json_t *line, const char *name, double value)
{
    return value <= 0.0 || !json_object_set_new(line, name, json_real(value));
}

static json_t *of_prefill(const struct batch_shape *shape, const struct prefill_shape *prefill)
{
    json_t *object = json_pack("{s:I, s:I, s:I, s:s, s:I}", "s_k", (json_int_t)shape->s_k, "h_kv",
                               (json_int_t)shape->h_kv, "d_qk", (json_int_t)shape->d_qk, "cache",
                               input_format_name(prefill->format), "topk", (json_int_t)prefill->topk);
    if (!object || !shape->page_size ||
        !json_object_set_new(object, "page_size", json_integer((json_int_t)shape->page_size)))
        return object;
    json_decref(object);
    return NULL;
}

/* What only rows of this operation have. */
static json_t *of_operation(const struct bench_row *row)
{
    const struct batch_shape *shape = row->shape;
    const struct sparse_shape *sparse = row->sparse;
    if (row->parts) return json_pack("{s:I}", "parts", (json_int_t)row->parts);
    if (row->prefill) return of_prefill(shape, row->prefill);
    if (!sparse)
        return json_pack("{s:I, s:I, s:I, s:s, s:I, s:b, s:b}", "s_k", (json_int_t)shape->s_k, "h_kv",
                         (json_int_t)shape->h_kv, "d_qk", (json_int_t)shape->d_qk, "cache",
                         shape->fp16 ? "FP16" : "BF16", "page_size", (json_int_t)shape->page_size, "causal",
                         shape->causal, "varlen", shape->varlen);
    json_t *object = json_pack("{s:I, s:I, s:I, s:s, s:I, s:I}", "s_k", (json_int_t)shape->s_k, "h_kv",
                               (json_int_t)shape->h_kv, "d_qk", (json_int_t)shape->d_qk, "cache",
                               input_format_name(sparse->format), "page_size", (json_int_t)shape->page_size,
                               "topk", (json_int_t)sparse->cache[0].topk);
    const struct sparse_cache_shape *extra = &sparse->cache[1];
    json_t *second = extra->topk
                         ? json_pack("{s:I, s:I, s:I, s:b}", "s_k", (json_int_t)extra->s_k, "topk",
                                     (json_int_t)extra->topk, "page_size", (json_int_t)extra->page_size,
                                     "varlen", (int)sparse->extra_varlen)
                         : NULL;
    if (!extra->topk || (object && second && !json_object_set(object, "extra", second))) {
        json_decref(second);
        return object;
    }
    json_decref(object), json_decref(second);
    return NULL;
}

/* What rows of every operation have; a prompt has no batch. */
static json_t *of_all(const struct bench_row *row)
{
    const struct batch_shape *shape = row->shape;
    const char *op = row->parts     ? "merge"
                     : row->sparse  ? "sparse_decode"
                     : row->prefill ? "sparse_prefill"
                                    : "dense_decode";
    json_t *line = json_pack("{s:s, s:s}", "op", op, "kernel", row->kernel);
    json_t *rest =
        json_pack("{s:I, s:I, s:I, s:s}", "s_q", (json_int_t)shape->s_q, "h_q", (json_int_t)shape->h_q, "d_v",
                  (json_int_t)BATCH_D_V, "dtype", shape->fp16 ? "fp16" : "bf16");
    const bool good = line && rest &&
                      (!shape->b || !json_object_set_new(line, "b", json_integer((json_int_t)shape->b))) &&
                      !json_object_update(line, rest);
    json_decref(rest);
    if (good) return line;
    json_decref(line);
    return NULL;
}

bool bench_report_json(const struct bench_report *report, const struct bench_row *row, struct outfile *file,
                       struct fault *fault)
{
    json_t *line = of_all(row);
    json_t *of_op = of_operation(row);
    json_t *figures =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:b, s:s}", "us", 1e6 * row->median,
                  "us_min", 1e6 * row->least, "us_max", 1e6 * row->most, "tflops",
                  1e-12 * row->flop / row->median, "gbs", 1e-9 * row->bytes / row->median, "floor_us",
                  1e6 * row->floor, "runs", (json_int_t)row->runs, "peak_tflops", 1e-12 * row->peak,
                  "read_gbs", 1e-9 * row->bandwidth, "warm", report->warm, "version", fmla_version_string());
    json_t *machine = surroundings(report, row);
    const bool good = line && of_op && figures && machine && !json_object_update(line, of_op) &&
                      !json_object_update(line, figures) && !json_object_update(line, machine) &&
                      set_time(line, "plan_us", 1e6 * row->plan) &&
                      set_time(line, "stream_us", 1e6 * row->stream) &&
                      set_time(line, "fixed_us", 1e6 * row->fixed) &&
                      set_time(line, "varlen_over_fixed", row->fixed > 0.0 ? row->median / row->fixed : 0.0);
    json_decref(of_op), json_decref(figures), json_decref(machine);
    if (good) return json_line(file, line, fault);
    json_decref(line);
    return fault_set(fault, "out of memory for JSON");
}
