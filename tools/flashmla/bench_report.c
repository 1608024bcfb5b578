/* SPDX-License-Identifier: MIT */
#include "bench_report.h"

#include "json_line.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

bool bench_only_copies(enum operation op)
{
    return policies[op].rows[0] == DIM_tokens;
}

/* ---- The table ------------------------------------------------------------------------------ */

void bench_report_head(const struct bench_report *report)
{
    if (bench_only_copies(report->op)) {
        printf("\n%-13s %8s %5s %-8s %5s %-12s %10s %10s %10s %8s %10s %7s\n", "operation", "tokens", "type",
               "cache", "page", "kernel", "us", "min", "max", "GB/s", "floor us", "x floor");
        return;
    }
    printf("\n%5s %4s %6s %4s %5s %5s %5s %5s %-9s %-15s %10s %10s %10s %8s %7s %10s",
           report->op == OP_MERGE ? "parts" : "", "b", "s_k", "s_q", "h_q", "h_kv", "d_qk", "type", "options",
           "kernel", "us", "min", "max", "GFLOP/s", "GB/s", "floor us");
    if (report->stream) printf(" %10s", "stream us");
    printf(" %7s %6s\n", "x floor", "% peak");
}

static void print_shape(const struct bench_row *row)
{
    const struct shape *s = row->shape;
    char options[32], number[24] = "", b[24] = "-"; /* a prompt has no batch */
    if (bench_only_copies(s->op)) {
        printf("%-13s %8" PRId64 " %5s %-8s ", descriptors[s->op].name, s->tokens, element_name(s->type),
               s->format ? format_name(s->format) : "-");
        return;
    }
    snprintf(options, sizeof options, "%s%s%s", s->causal ? "causal" : "", s->causal && s->varlen ? "," : "",
             s->varlen ? "var" : "");
    if (s->topk) snprintf(options, sizeof options, "%s", format_name(s->format));
    if (s->b) snprintf(b, sizeof b, "%" PRId64, s->b);
    if (s->parts) snprintf(number, sizeof number, "%" PRId64, s->parts);
    printf("%5s %4s %6" PRId64 " %4" PRId64 " %5" PRId64 " %5" PRId64 " %5" PRId64 " %5s %-9s ", number, b,
           s->s_k, s->s_q, s->h_q, s->h_kv, s->d_qk, element_name(s->type), *options ? options : "-");
}

static void print_copy(const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    printf("%5" PRId64 " %-12s %10.1f %10.1f %10.1f %8.1f %10.1f %7.2f\n", row->shape->page_size, row->kernel,
           1e6 * t->median, 1e6 * t->least, 1e6 * t->most, 1e-9 * row->work.bytes / t->median,
           1e6 * row->floor, t->median / row->floor);
}

void bench_report_row(const struct bench_report *report, const struct bench_row *row)
{
    const struct shape *s = row->shape;
    const struct bench_timed *t = &row->timed;
    print_shape(row);
    if (bench_only_copies(s->op)) {
        print_copy(row);
        fflush(stdout);
        return;
    }
    printf("%-15s %10.1f %10.1f %10.1f %8.1f %7.2f %10.1f", row->kernel, 1e6 * t->median, 1e6 * t->least,
           1e6 * t->most, 1e-9 * row->work.flop / t->median, 1e-9 * row->work.bytes / t->median,
           1e6 * row->floor);
    if (report->stream) printf(" %10.1f", 1e6 * row->stream);
    printf(" %7.2f %6.1f", t->median / row->floor,
           100.0 * row->work.flop / t->median / bench_peak(report->timer, row->kernel));
    if (row->plan > 0.0) printf(" plan %.1f us", 1e6 * row->plan);
    if (row->fixed > 0.0)
        printf(" fixed %.1f us, var / fixed %.3f", 1e6 * row->fixed, t->median / row->fixed);
    if (s->topk) printf(" topk %" PRId64, s->topk);
    if (s->extra_topk) printf(" + %" PRId64, s->extra_topk);
    if (s->extra_varlen) printf(" varlen");
    if (t->runs < report->timer->repeat) printf(" (%" PRId64 " runs)", t->runs);
    putchar('\n');
    fflush(stdout);
}

void bench_report_skipped(const struct bench_row *row, const char *why)
{
    print_shape(row);
    printf("skipped: %s\n", why);
}

/* ---- The code of a kernel -------------------------------------------------------------------- */

/* The .cu files that a kernel is made of; "" after the last one. */
struct bench_sources {
    char file[BENCH_SOURCES][80];
};

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

static struct bench_sources sources_of(const struct bench_row *row)
{
    struct bench_sources sources = {{""}};
    const struct shape *s = row->shape;
    const char *family = strchr(row->kernel, '-'); /* cuda-sm90 */
    if (s->op == OP_SPARSE_DECODE)
        source_of_sparse(row->kernel, &sources);
    else if (s->op == OP_DENSE_DECODE)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/dense_decode/dense_decode_%s.cu",
                 family ? family + 1 : "", element_name(s->type));
    else if (s->op == OP_SPARSE_PREFILL && family)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/sparse_prefill/sparse_prefill_%s.cu",
                 family + 1, s->format == FMLA_KV_BF16 ? "bf16" : "fp8");
    else
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/any/%s.cu", descriptors[s->op].name);
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
bool bench_report_code(const char *path, const struct bench_row *row, int major, int minor,
                       char code[BENCH_CODE])
{
    const struct bench_sources sources = sources_of(row);
    char hash[65];
    int at = 0;
    for (int i = 0; i < BENCH_SOURCES && (!i || *sources.file[i]); i++) {
        if (!find_code(path, sources.file[i], major, minor, hash)) return false;
        at += snprintf(code + at, (size_t)(BENCH_CODE - at), "%s%s", i ? " " : "", hash);
    }
    return true;
}

/* The list lies beside the program. */
static bool code_here(const struct gpu_description *gpu, const struct bench_row *row, char code[BENCH_CODE])
{
    static const char name[] = "kernels.sha256";
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof name);
    if (length <= 0) return false;
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    if (!slash) return false;
    memcpy(slash + 1, name, sizeof name);
    return bench_report_code(path, row, gpu->major, gpu->minor, code);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

/* Members of an object; what cannot be added is told once, at the end. */
struct line {
    json_t *object;
    bool good;
};

static void set(struct line *line, const char *name, json_t *value)
{
    line->good = !json_object_set_new(line->object, name, value) && line->good;
}

static void set_count(struct line *line, const char *name, int64_t value)
{
    set(line, name, json_integer((json_int_t)value));
}

static void set_text(struct line *line, const char *name, const char *text)
{
    set(line, name, json_string(text));
}

static void set_real(struct line *line, const char *name, double value)
{
    set(line, name, json_real(value));
}

/* Times that were not taken are left out. */
static void set_time(struct line *line, const char *name, double value)
{
    if (value > 0.0) set_real(line, name, value);
}

static void set_extra(struct line *line, const struct shape *s)
{
    struct line extra = {json_object(), true};
    set_count(&extra, "s_k", s->s_k), set_count(&extra, "topk", s->extra_topk);
    set_count(&extra, "page_size", s->extra_page_size);
    set(&extra, "varlen", json_boolean(s->extra_varlen));
    set(line, "extra", extra.object);
    line->good = line->good && extra.good;
}

static void set_shape(struct line *line, const struct shape *s)
{
    if (bench_only_copies(s->op)) {
        set_count(line, "tokens", s->tokens), set_text(line, "dtype", element_name(s->type));
        if (s->format) set_text(line, "cache", format_name(s->format));
        set_count(line, "d_qk", s->d_qk);
        set_count(line, "page_size", s->page_size);
        return;
    }
    if (s->b) set_count(line, "b", s->b); /* a prompt has no batch */
    set_count(line, "s_q", s->s_q), set_count(line, "h_q", s->h_q), set_count(line, "d_v", CALL_D_V);
    set_text(line, "dtype", element_name(s->type));
    if (s->parts) {
        set_count(line, "parts", s->parts);
        return;
    }
    set_count(line, "s_k", s->s_k), set_count(line, "h_kv", s->h_kv), set_count(line, "d_qk", s->d_qk);
    set_text(line, "cache", format_name(s->format));
    if (s->page_size) set_count(line, "page_size", s->page_size);
    if (s->topk) set_count(line, "topk", s->topk);
    if (s->extra_topk) set_extra(line, s);
    if (s->op != OP_DENSE_DECODE) return;
    set(line, "causal", json_boolean(s->causal)), set(line, "varlen", json_boolean(s->varlen));
}

static void set_figures(struct line *line, const struct bench_timer *timer, const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    const bool copies = bench_only_copies(row->shape->op), gpu = device_is_gpu(timer->device);
    set_real(line, "us", 1e6 * t->median), set_real(line, "us_min", 1e6 * t->least);
    set_real(line, "us_max", 1e6 * t->most);
    if (!copies) set_real(line, "tflops", 1e-12 * row->work.flop / t->median);
    set_real(line, "gbs", 1e-9 * row->work.bytes / t->median), set_real(line, "floor_us", 1e6 * row->floor);
    set_count(line, "runs", t->runs);
    if (!copies) set_real(line, "peak_tflops", 1e-12 * bench_peak(timer, row->kernel));
    set_real(line, copies && gpu ? "copy_gbs" : "read_gbs",
             1e-9 * (copies ? timer->copy : bench_bandwidth(timer)));
    set(line, "warm", json_boolean(timer->warm)), set_text(line, "version", fmla_version_string());
}

/* What the row was timed on. */
static void set_machine(struct line *line, const struct bench_timer *timer, const struct bench_row *row)
{
    const struct gpu_description *gpu = &timer->gpu.peak.gpu;
    char code[BENCH_CODE];
    if (!device_is_gpu(timer->device)) {
        set_text(line, "cpu", timer->cpu.cpu), set_count(line, "threads", timer->cpu.threads);
        return;
    }
    set_text(line, "gpu", gpu->name), set_text(line, "driver", gpu->driver);
    set_count(line, "sm_mhz", gpu_sm_mhz(timer->device.id));
    if (code_here(gpu, row, code)) set_text(line, "code_sha", code);
}

bool bench_report_json(const struct bench_report *report, const struct bench_row *row, struct outfile *file,
                       struct fault *fault)
{
    struct line line = {json_object(), true};
    set_text(&line, "op", descriptors[row->shape->op].name), set_text(&line, "kernel", row->kernel);
    set_shape(&line, row->shape);
    set_figures(&line, report->timer, row);
    set_machine(&line, report->timer, row);
    set_time(&line, "plan_us", 1e6 * row->plan), set_time(&line, "stream_us", 1e6 * row->stream);
    set_time(&line, "fixed_us", 1e6 * row->fixed);
    if (row->fixed > 0.0) set_real(&line, "varlen_over_fixed", row->timed.median / row->fixed);
    if (line.good) return json_line(file, line.object, fault);
    json_decref(line.object);
    return fault_set(fault, "out of memory for JSON");
}
