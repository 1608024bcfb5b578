/* SPDX-License-Identifier: MIT */
#include "bench_report.h"
#include "fill.h"
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

/* A row is its numbers and then words, the kernel first; words that pass the width go to a second line. */
enum { WIDTH = 100, INDENT = 8, WORDS = 256 };

/* The head sizes of MHA are two. */
static int width_of_head(enum operation op)
{
    return operation_is_mha(op) ? 7 : 4;
}

void bench_report_head(enum operation op)
{
    putchar('\n');
    if (bench_only_copies(op))
        printf("%-13s %8s %4s %-13s %5s %7s %7s %6s %7s", "operation", "tokens", "type", "cache", "page",
               "us", "min", "GB/s", "x floor");
    else
        printf("%s%4s %6s %5s %3s %4s %*s %4s %7s %7s %7s %6s %7s %6s", op == OP_MERGE ? "parts " : "", "b",
               "s_k", "s_q", "h_q", "h_kv", width_of_head(op), operation_is_mha(op) ? "qk/v" : "d_qk", "type",
               "us", "min", "TFLOP/s", "GB/s", "x floor", "% peak");
    puts(" kernel");
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

/* Prints the numbers of a shape and returns their width. */
static size_t print_shape(const struct shape *s)
{
    char width[48], number[24] = "", b[24] = "-"; /* prefill has no batch */
    if (bench_only_copies(s->op))
        return (size_t)printf("%-13s %8" PRId64 " %4s %-13s %5" PRId64, descriptors[s->op].name, s->tokens,
                              element_name(s->type), s->format ? format_name(s->format) : "-", s->page_size);
    if (s->b) snprintf(b, sizeof b, "%" PRId64, s->b);
    if (s->parts) snprintf(number, sizeof number, "%5" PRId64 " ", s->parts);
    snprintf(width, sizeof width, "%" PRId64, s->d_qk);
    if (s->d_v) snprintf(width, sizeof width, "%" PRId64 "/%" PRId64, s->d_qk, s->d_v);
    return (size_t)printf("%s%4s %6" PRId64 " %5" PRId64 " %3" PRId64 " %4" PRId64 " %*s %4s", number, b,
                          s->s_k, tokens_of(s), s->h_q, s->h_kv, width_of_head(s->op), width,
                          element_name(s->type));
}

/* Appends to words[WORDS]. */
#define SAY(words, ...) snprintf((words) + strlen(words), WORDS - strlen(words), __VA_ARGS__)

/* Appends what the numbers of a shape do not say. */
static void say_options(char *words, const struct shape *s)
{
    if (s->op == OP_CACHE_CONVERT) SAY(words, " to %s", format_name(s->extra_format));
    if (s->norm) SAY(words, " norm");
    if (s->turns) SAY(words, " rope %s", pairs_name(s->turns));
    if (bench_only_copies(s->op)) return;
    const char *const options[] = {s->causal ? "causal" : "",
                                   s->varlen ? "var" : "",
                                   s->used ? "used" : "",
                                   s->sink ? "sink" : "",
                                   s->last ? "last" : "",
                                   s->topk || cache_formats[s->format].token ? format_name(s->format) : "",
                                   s->extra_topk && s->extra_format ? format_name(s->extra_format) : "",
                                   s->products ? products_name(s->products) : ""};
    const char *before = " ";
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (*options[i]) SAY(words, "%s%s", before, options[i]), before = ",";
    if (s->topk) SAY(words, " topk %" PRId64, s->topk);
    if (s->extra_topk) SAY(words, " + %" PRId64, s->extra_topk);
    if (s->extra_varlen) SAY(words, " varlen");
}

static void say_times(char *words, const struct bench_timer *timer, const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    if (row->stream > 0.0) SAY(words, " stream %.1f us", 1e6 * row->stream);
    if (row->plan > 0.0) SAY(words, " plan %.1f us", 1e6 * row->plan);
    if (row->fixed > 0.0)
        SAY(words, " fixed %.1f us, var / fixed %.3f", 1e6 * row->fixed, t->median / row->fixed);
    if (t->runs < timer->repeat) SAY(words, " (%" PRId64 " runs)", t->runs);
}

/* Prints a number with at most four digits before a point, at least three in all, and returns its width. */
static size_t print_number(int width, double value)
{
    return (size_t)printf(" %*.*f", width, value < 10.0 ? 3 : value < 99999.95 ? 1 : 0, value);
}

void bench_report_row(const struct bench_timer *timer, const struct bench_row *row)
{
    const struct bench_timed *t = &row->timed;
    const bool copies = bench_only_copies(row->shape->op);
    char words[WORDS] = "";
    size_t at = print_shape(row->shape);
    at += print_number(7, 1e6 * t->median), at += print_number(7, 1e6 * t->least);
    if (!copies) at += print_number(7, 1e-12 * row->work.flop / t->median);
    at += print_number(6, 1e-9 * row->work.bytes / t->median);
    at += (size_t)printf(" %7.2f", t->median / row->floor);
    if (!copies)
        at += (size_t)printf(" %6.1f", 100.0 * row->work.flop / t->median / bench_peak(timer, row->kernel));
    at += (size_t)printf(" ");
    SAY(words, "%s", row->kernel);
    say_options(words, row->shape);
    say_times(words, timer, row);
    fill_words(words, strlen(words), at, INDENT, WIDTH);
    fflush(stdout);
}

void bench_report_skipped(const struct bench_row *row, const char *why)
{
    char words[WORDS + sizeof(struct reason)] = "";
    const size_t at = print_shape(row->shape) + (size_t)printf(" ");
    say_options(words, row->shape);
    const size_t used = strlen(words);
    snprintf(words + used, sizeof words - used, " skipped: %s", why);
    fill_words(words, strlen(words), at, INDENT, WIDTH);
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
    json_t *shape = json_pack("{s:o*, s:I, s:I, s:I, s:s, s:o*, s:o*, s:o*, s:o*}", "b", count(s->b), "s_q",
                              (json_int_t)tokens_of(s), "h_q", (json_int_t)s->h_q, "d_v",
                              (json_int_t)(s->d_v ? s->d_v : CALL_D_V), "dtype", dtype, "parts",
                              count(s->parts), "last", s->last ? json_true() : NULL, "used",
                              s->used ? json_true() : NULL, "sink", s->sink ? json_true() : NULL);
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

bool bench_report_json(const struct bench_timer *timer, const struct bench_row *row, struct outfile *file,
                       struct reason *reason)
{
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
    return json_line(file, line, reason);
}
