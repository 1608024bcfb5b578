/* SPDX-License-Identifier: MIT */
#include "bench_report.h"

#include "json_line.h"

#include "json_memory.h"

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
        printf("\n%-13s %8s %5s %-13s %5s %-12s %10s %10s %10s %8s %10s %7s\n", "operation", "tokens", "type",
               "cache", "page", "kernel", "us", "min", "max", "GB/s", "floor us", "x floor");
        return;
    }
    printf("\n%5s %4s %6s %5s %5s %5s %7s %5s %-13s %-15s %10s %10s %10s %8s %7s %10s",
           report->op == OP_MERGE ? "parts" : "", "b", "s_k", "s_q", "h_q", "h_kv",
           operation_is_mha(report->op) ? "qk/v" : "d_qk", "type", "options", "kernel", "us", "min", "max",
           "GFLOP/s", "GB/s", "floor us");
    if (report->stream) printf(" %10s", "stream us");
    printf(" %7s %6s\n", "x floor", "% peak");
}

/* Returns the tokens of a request; with varying lengths those of the longest. */
static int64_t tokens_of(const struct shape *s)
{
    return operation_is_mha(s->op) && !s->s_q ? s->s_k : s->s_q;
}

static const char *pairs_name(int32_t turns)
{
    return turns == FMLA_ROPE_HALVES ? "halves" : "interleaved";
}

static void print_shape(const struct bench_row *row)
{
    const struct shape *s = row->shape;
    char options[40] = "", width[48], number[24] = "", b[24] = "-"; /* prefill has no batch */
    if (bench_only_copies(s->op)) {
        printf("%-13s %8" PRId64 " %5s %-13s ", descriptors[s->op].name, s->tokens, element_name(s->type),
               s->format ? format_name(s->format) : "-");
        return;
    }
    const char *const extra = s->extra_topk && s->extra_format ? format_name(s->extra_format) : "";
    const char *const words[] = {s->causal ? "causal" : "", s->varlen ? "var" : "",
                                 s->topk || cache_formats[s->format].token ? format_name(s->format) : "",
                                 extra, s->products ? products_name(s->products) : ""};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const size_t used = strlen(options);
        snprintf(options + used, sizeof options - used, "%s%s", used && *words[i] ? "," : "", words[i]);
    }
    if (s->b) snprintf(b, sizeof b, "%" PRId64, s->b);
    if (s->parts) snprintf(number, sizeof number, "%" PRId64, s->parts);
    snprintf(width, sizeof width, "%" PRId64, s->d_qk);
    if (s->d_v) snprintf(width, sizeof width, "%" PRId64 "/%" PRId64, s->d_qk, s->d_v);
    printf("%5s %4s %6" PRId64 " %5" PRId64 " %5" PRId64 " %5" PRId64 " %7s %5s %-13s ", number, b, s->s_k,
           tokens_of(s), s->h_q, s->h_kv, width, element_name(s->type), *options ? options : "-");
}

static void print_copy(const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    printf("%5" PRId64 " %-12s %10.1f %10.1f %10.1f %8.1f %10.1f %7.2f", row->shape->page_size, row->kernel,
           1e6 * t->median, 1e6 * t->least, 1e6 * t->most, 1e-9 * row->work.bytes / t->median,
           1e6 * row->floor, t->median / row->floor);
    if (row->shape->op == OP_CACHE_CONVERT) printf(" to %s", format_name(row->shape->extra_format));
    if (row->shape->norm) printf(" norm");
    if (row->shape->turns) printf(" rope %s", pairs_name(row->shape->turns));
    putchar('\n');
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
    if (row->stream > 0.0)
        printf(" %10.1f", 1e6 * row->stream);
    else if (report->stream)
        printf(" %10s", "-");
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

/* The .cu files of a kernel; "" after the last one. */
struct bench_sources {
    char file[BENCH_SOURCES][80];
};

/* Hopper's kernels over lists have a file for caches of the queries' type and, over bytes, one for formats
 * with rope values and one for those without. In sparse decode over bytes `cuda-sm90` chooses one of two. */
static void source_of_hopper_lists(const char *kernel, const struct shape *s, struct bench_sources *sources)
{
    enum { SIZE = sizeof sources->file[0] };
    static const char folder[] = "src/cuda/sm90/sparse_decode/", prefill[] = "src/cuda/sm90/sparse_prefill/";
    const bool bytes = cache_formats[s->format].token != 0;
    const char *type = element_name(s->type),
               *rope = s->format == FMLA_KV_FP8_656 || s->format == FMLA_KV_FP8_584 ? "rope" : "no_rope";
    if (s->op == OP_SPARSE_PREFILL) {
        snprintf(sources->file[0], SIZE, "%ssparse_prefill_%s.cu", prefill, bytes ? rope : type);
        return;
    }
    if (!bytes) {
        snprintf(sources->file[0], SIZE, "%splain/sparse_decode_%s.cu", folder, type);
        return;
    }
    int count = 0;
    if (strcmp(kernel, "cuda-sm90-16") != 0)
        snprintf(sources->file[count++], SIZE, "%ssparse_decode_%s.cu", folder, rope);
    if (strcmp(kernel, "cuda-sm90-64") != 0)
        snprintf(sources->file[count++], SIZE, "%ssmall/sparse_decode_%s.cu", folder, rope);
}

/* Returns the name of the formats that share a file of the portable sparse kernels. */
static const char *kind_of_list(const struct shape *s, int32_t format)
{
    switch (format) {
    case FMLA_KV_FP8_656:
    case FMLA_KV_FP8_528_F32: return "f32";
    case FMLA_KV_FP8_584: return "fp8_584";
    case FMLA_KV_FP8_528:
    case FMLA_KV_FP8_528_SPLIT: return "fp8_528";
    case FMLA_KV_FP4_288:
    case FMLA_KV_FP4_288_SPLIT: return "fp4";
    default: return element_name(s->type);
    }
}

/* Sparse prefill uses the kernels of sparse decode. */
static void source_of_lists(const struct shape *s, struct bench_sources *sources)
{
    const char *kind = kind_of_list(s, s->format);
    if (s->extra_topk && s->extra_format && strcmp(kind, kind_of_list(s, s->extra_format)) != 0) kind = "any";
    snprintf(sources->file[0], sizeof sources->file[0], "src/cuda/%s/sparse_decode/sparse_decode_%s.cu",
             "sm80", kind);
}

static struct bench_sources sources_of(const struct bench_row *row)
{
    struct bench_sources sources = {{""}};
    const struct shape *s = row->shape;
    const char *family = strchr(row->kernel, '-'); /* cuda-sm90 */
    const bool fp8_on_hopper = s->op == OP_DENSE_DECODE && !strcmp(row->kernel, "cuda-sm90-fp8");
    const bool lists = s->op == OP_SPARSE_DECODE || s->op == OP_SPARSE_PREFILL;
    if (lists && !strcmp(row->kernel, "cuda-sm80"))
        source_of_lists(s, &sources);
    else if (lists && !strncmp(row->kernel, "cuda-sm90", strlen("cuda-sm90")))
        source_of_hopper_lists(row->kernel, s, &sources);
    else if (lists && strcmp(row->kernel, "cuda") != 0)
        return sources; /* not known here */
    else if (fp8_on_hopper)
        snprintf(sources.file[0], sizeof sources.file[0],
                 "src/cuda/sm90/dense_decode_fp8/dense_decode_fp8.cu");
    else if (s->op == OP_DENSE_DECODE)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/dense_decode/dense_decode_%s.cu",
                 family ? family + 1 : "", cache_formats[s->format].token ? "bytes" : element_name(s->type));
    else if (operation_is_mha(s->op) && family)
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/%s/%s/%s_%s.cu", family + 1,
                 descriptors[s->op].name, descriptors[s->op].name, element_name(s->type));
    else
        snprintf(sources.file[0], sizeof sources.file[0], "src/cuda/any/%s.cu", descriptors[s->op].name);
    if (s->op == OP_DENSE_DECODE && s->products && !fp8_on_hopper)
        snprintf(sources.file[1], sizeof sources.file[1], "src/cuda/any/quantise_queries.cu");
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

/* Sets the hashes of all sources, or none. */
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

/* Reads the list next to the program. */
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

/* Members that do not apply to a row are 0 and omitted: json_pack skips NULL for "s:o*". */
static json_t *count(int64_t value)
{
    return value ? json_integer((json_int_t)value) : NULL;
}

static json_t *real(double value)
{
    return value > 0.0 ? json_real(value) : NULL;
}

static json_t *pack_extra(const struct shape *s)
{
    if (!s->extra_topk) return NULL;
    return json_pack("{s:I, s:I, s:I, s:b, s:s*}", "s_k", (json_int_t)s->s_k, "topk",
                     (json_int_t)s->extra_topk, "page_size", (json_int_t)s->extra_page_size, "varlen",
                     (int)s->extra_varlen, "cache", s->extra_format ? format_name(s->extra_format) : NULL);
}

static json_t *pack_shape(const struct shape *s)
{
    const char *dtype = element_name(s->type), *cache = s->format ? format_name(s->format) : NULL;
    const bool masks = s->op == OP_DENSE_DECODE || operation_is_mha(s->op);
    if (bench_only_copies(s->op))
        return json_pack("{s:I, s:s, s:s*, s:I, s:I, s:o*, s:s*, s:s*}", "tokens", (json_int_t)s->tokens,
                         "dtype", dtype, "cache", cache, "d_qk", (json_int_t)s->d_qk, "page_size",
                         (json_int_t)s->page_size, "norm", s->norm ? json_true() : NULL, "rope",
                         s->turns ? pairs_name(s->turns) : NULL, "to",
                         s->op == OP_CACHE_CONVERT ? format_name(s->extra_format) : NULL);
    json_t *shape =
        json_pack("{s:o*, s:I, s:I, s:I, s:s, s:o*}", "b", count(s->b), "s_q", (json_int_t)tokens_of(s),
                  "h_q", (json_int_t)s->h_q, "d_v", (json_int_t)(s->d_v ? s->d_v : CALL_D_V), "dtype", dtype,
                  "parts", count(s->parts));
    if (s->parts) return shape;
    json_t *keys =
        json_pack("{s:I, s:I, s:I, s:s*, s:s*, s:o*, s:o*, s:o*, s:o*, s:o*}", "s_k", (json_int_t)s->s_k,
                  "h_kv", (json_int_t)s->h_kv, "d_qk", (json_int_t)s->d_qk, "cache", cache, "products",
                  s->products ? products_name(s->products) : NULL, "page_size", count(s->page_size), "topk",
                  count(s->topk), "extra", pack_extra(s), "causal", masks ? json_boolean(s->causal) : NULL,
                  "varlen", masks ? json_boolean(s->varlen) : NULL);
    json_object_update(shape, keys);
    json_decref(keys);
    return shape;
}

static json_t *pack_figures(const struct bench_timer *timer, const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    const bool copies = bench_only_copies(row->shape->op), gpu = device_is_gpu(timer->device);
    return json_pack(
        "{s:f, s:f, s:f, s:o*, s:f, s:f, s:I, s:o*, s:f, s:b, s:s, s:s}", "us", 1e6 * t->median, "us_min",
        1e6 * t->least, "us_max", 1e6 * t->most, "tflops",
        copies ? NULL : json_real(1e-12 * row->work.flop / t->median), "gbs",
        1e-9 * row->work.bytes / t->median, "floor_us", 1e6 * row->floor, "runs", (json_int_t)t->runs,
        "peak_tflops", copies ? NULL : json_real(1e-12 * bench_peak(timer, row->kernel)),
        copies && gpu ? "copy_gbs" : "read_gbs", 1e-9 * (copies ? timer->copy : bench_bandwidth(timer)),
        "warm", timer->between == BENCH_NOTHING, "between", bench_between_name(timer->between), "version",
        fmla_version_string());
}

/* Packs the machine that the row was timed on. */
static json_t *pack_machine(const struct bench_timer *timer, const struct bench_row *row)
{
    const struct gpu_description *gpu = &timer->gpu.peak.gpu;
    char code[BENCH_CODE];
    if (!device_is_gpu(timer->device))
        return json_pack("{s:s, s:i}", "cpu", timer->cpu.cpu, "threads", timer->cpu.threads);
    return json_pack("{s:s, s:s, s:i, s:s*}", "gpu", gpu->name, "driver", gpu->driver, "sm_mhz",
                     (int)gpu_sm_mhz(timer->device.id), "code_sha", code_here(gpu, row, code) ? code : NULL);
}

bool bench_report_json(const struct bench_report *report, const struct bench_row *row, struct outfile *file,
                       struct fault *fault)
{
    const struct bench_timer *timer = report->timer;
    json_memory_watch();
    json_t *line = json_pack("{s:s, s:s}", "op", descriptors[row->shape->op].name, "kernel", row->kernel);
    enum { PARTS = 4 };
    json_t *const parts[PARTS] = {pack_shape(row->shape), pack_figures(timer, row), pack_machine(timer, row),
                                  json_pack("{s:o*, s:o*, s:o*, s:o*}", "plan_us", real(1e6 * row->plan),
                                            "stream_us", real(1e6 * row->stream), "fixed_us",
                                            real(1e6 * row->fixed), "varlen_over_fixed",
                                            real(row->fixed > 0.0 ? row->timed.median / row->fixed : 0.0))};
    for (int i = 0; i < PARTS; i++) {
        json_object_update(line, parts[i]);
        json_decref(parts[i]);
    }
    return json_line(file, line, fault);
}
