/* SPDX-License-Identifier: MIT
 *
 * flashmla verify: checks the kernels available on this machine on a short list of shapes against the
 * oracle. tests/checkattn is the thorough test; both use the same tolerances.
 */
#include "check.h"
#include "json_line.h"
#include "machine.h"
#include "make.h"
#include "options.h"

#include "gpu.h"
#include "json_memory.h"
#include "progress.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct command verify = {
    "verify",
    NULL,
    "compare this machine's kernels with the oracle",
    "\n"
    "Runs every kernel of this machine, forced by name, on a short list of shapes. The exit code is 1 if a "
    "result is wrong. With --json the first line describes the device and the library, and each other "
    "line a kernel. docs/chips.md says how to send this file for a chip that is not listed there.\n"
    "\n"
    "Examples\n"
    "  flashmla verify\n"
    "  flashmla verify --device cuda:0\n"
    "  flashmla verify --op sparse_decode\n"
    "  flashmla verify --json -\n",
    OPERAND_WORD,
    NULL};

/* Lengths 0, 1, 65: no key, one key, one past a block. */
static const int32_t edges[] = {0, 1, 65, 64, 130};

/* Sparse decode covers every format, holes, short lists and a second cache; prefill keys with and without
 * pages. */
static const struct verify_case {
    const char *name;
    struct shape shape; /* of dense decode s_k is the longest of lengths */
    int32_t lse_empty, log_base, batch_invariant;
} cases[] = {
    {"paged", .shape = {OP_DENSE_DECODE, 3, 1, 200, 16, 1, 576, .page_size = 64}},
    {"many heads", .shape = {OP_DENSE_DECODE, 1, 1, 300, 128, 1, 576, .page_size = 64}},
    {"one head", .shape = {OP_DENSE_DECODE, 2, 1, 190, 1, 1, 576, .page_size = 64}},
    {"d_qk 512", .shape = {OP_DENSE_DECODE, 2, 1, 129, 16, 1, 512, .page_size = 64}},
    {"contiguous", .shape = {OP_DENSE_DECODE, 2, 1, 150, 16, 1, 576, .page_size = 0}},
    {"causal", .shape = {OP_DENSE_DECODE, 2, 2, 100, 16, 1, 576, .page_size = 64, .causal = true}},
    {"causal, many heads",
     .shape = {OP_DENSE_DECODE, 1, 2, 65, 128, 1, 576, .page_size = 64, .causal = true}},
    {"two key heads", .shape = {OP_DENSE_DECODE, 2, 2, 90, 8, 2, 576, .page_size = 16}},
    {"edge lengths", .shape = {OP_DENSE_DECODE, 5, 1, 130, 16, 1, 576, .page_size = 64, .lengths = edges}},
    {"edge lengths, other conventions",
     .shape = {OP_DENSE_DECODE, 5, 2, 130, 16, 1, 576, .page_size = 64, .causal = true, .lengths = edges},
     .lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY, .log_base = FMLA_LOG_BASE_2},
    {"attention sink", .shape = {OP_DENSE_DECODE, 2, 1, 120, 16, 1, 576, .page_size = 64, .sink = true}},
    {"batch-invariant", .shape = {OP_DENSE_DECODE, 2, 1, 2200, 16, 1, 576, .page_size = 64},
     .batch_invariant = 1},
    {"fp16", .shape = {OP_DENSE_DECODE, 2, 1, 200, 16, 1, 576, .page_size = 64, .type = ELEMENT_FP16}},
    {"FP8_656",
     .shape = {OP_DENSE_DECODE, 3, 1, 200, 16, 1, 576, .page_size = 64, .format = FMLA_KV_FP8_656}},
    {"FP8_584, causal, many heads", .shape = {OP_DENSE_DECODE, 2, 2, 130, 128, 1, 512, .page_size = 7,
                                              .format = FMLA_KV_FP8_584, .causal = true}},
    {"FP8_576, edge lengths, a sink", .shape = {OP_DENSE_DECODE, 5, 1, 130, 16, 1, 576, .page_size = 64,
                                                .format = FMLA_KV_FP8_576, .sink = true, .lengths = edges}},
    {"FP8_576, contiguous",
     .shape = {OP_DENSE_DECODE, 2, 1, 150, 16, 1, 576, .page_size = 0, .format = FMLA_KV_FP8_576}},
    {"FP8 products", .shape = {OP_DENSE_DECODE, 3, 2, 200, 16, 1, 576, .page_size = 64, .causal = true,
                               .format = FMLA_KV_FP8_656, .products = MADE_FP8}},
    {"FP8 products, many heads", .shape = {OP_DENSE_DECODE, 2, 1, 300, 128, 1, 576, .page_size = 64,
                                           .format = FMLA_KV_FP8_576, .products = MADE_FP8}},
    {"FP8 products of codes, edge lengths",
     .shape = {OP_DENSE_DECODE, 5, 1, 130, 16, 1, 576, .page_size = 64, .format = FMLA_KV_FP8_576,
               .products = MADE_CODES, .lengths = edges}},
    {"sparse, FP8_656", .shape = {OP_SPARSE_DECODE, 2, 2, 300, 16, 1, 576, 64, .topk = 130,
                                  .format = FMLA_KV_FP8_656, .holes = true}},
    {"sparse, FP8_584 and an extra cache",
     .shape = {OP_SPARSE_DECODE, 2, 1, 200, 64, 1, 512, 64, .topk = 128, .format = FMLA_KV_FP8_584,
               .extra_s_k = 300, .extra_topk = 70, .extra_page_size = 2, .varlen = true, .sink = true}},
    {"sparse, FP8_528 and an extra cache of FP4_288",
     .shape = {OP_SPARSE_DECODE, 2, 1, 200, 64, 1, 512, 64, .topk = 128, .format = FMLA_KV_FP8_528,
               .extra_format = FMLA_KV_FP4_288, .extra_s_k = 300, .extra_topk = 70, .extra_page_size = 2,
               .varlen = true, .sink = true}},
    {"sparse, BF16", .shape = {OP_SPARSE_DECODE, 3, 1, 100, 128, 1, 576, 16, .topk = 128,
                               .format = FMLA_KV_BF16, .varlen = true}},
    {"sparse, FP16", .shape = {OP_SPARSE_DECODE, 2, 1, 500, 3, 1, 512, 61, .topk = 65, .format = FMLA_KV_FP16,
                               .type = ELEMENT_FP16, .extra_s_k = 20, .extra_topk = 20, .extra_page_size = 64,
                               .holes = true}},
    {"sparse, batch-invariant",
     .shape = {OP_SPARSE_DECODE, 2, 1, 2500, 16, 1, 576, 64, .topk = 2200, .format = FMLA_KV_FP8_656,
               .varlen = true},
     .batch_invariant = 1},
    {"prefill, BF16", .shape = {OP_SPARSE_PREFILL, 0, 3, 300, 16, 1, 576, 0, .topk = 130,
                                .format = FMLA_KV_BF16, .holes = true, .varlen = true}},
    {"prefill, FP4_288", .shape = {OP_SPARSE_PREFILL, 0, 2, 300, 16, 1, 512, 64, .topk = 130,
                                   .format = FMLA_KV_FP4_288, .holes = true}},
    {"prefill, two key heads and a sink",
     .shape = {OP_SPARSE_PREFILL, 0, 2, 200, 8, 2, 512, 0, .topk = 64, .format = FMLA_KV_BF16, .sink = true},
     .lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY, .log_base = FMLA_LOG_BASE_2},
    {"prefill, FP8_656", .shape = {OP_SPARSE_PREFILL, 0, 2, 300, 64, 1, 576, 64, .topk = 200,
                                   .format = FMLA_KV_FP8_656, .holes = true}},
    {"prefill, FP8_584", .shape = {OP_SPARSE_PREFILL, 0, 2, 150, 70, 1, 512, 7, .topk = 128,
                                   .format = FMLA_KV_FP8_584, .varlen = true}},
    {"MHA", .shape = {OP_MHA_FORWARD, 2, .s_k = 130, .h_q = 5, .h_kv = 5, .d_qk = 192, .d_v = 128}},
    {"MHA, a causal chunk", .shape = {OP_MHA_FORWARD, 2, 70, 150, 4, 4, 192, .d_v = 128, .causal = true}},
    {"MHA, grouped heads",
     .shape = {OP_MHA_FORWARD, 2, .s_k = 100, .h_q = 8, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true}},
    {"MHA, more tokens than keys", .shape = {OP_MHA_FORWARD, 2, 130, 65, 3, 3, 64, .d_v = 64, .causal = true},
     .lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY, .log_base = FMLA_LOG_BASE_2},
    {"MHA, 256/256", .shape = {OP_MHA_FORWARD, 2, 70, 150, 4, 2, 256, .d_v = 256, .causal = true}},
    {"MHA, 96/64", .shape = {OP_MHA_FORWARD, 2, 70, 150, 4, 2, 96, .d_v = 64, .causal = true}},
    {"MHA, edge lengths", .shape = {OP_MHA_FORWARD, 5, .h_q = 4, .h_kv = 4, .d_qk = 192, .d_v = 128,
                                    .causal = true, .varlen = true, .lengths = edges}},
    {"MHA, edge lengths, chunks", .shape = {OP_MHA_FORWARD, 5, 3, .h_q = 4, .h_kv = 1, .d_qk = 128,
                                            .d_v = 128, .causal = true, .varlen = true, .lengths = edges}},
    {"MHA, fp16", .shape = {OP_MHA_FORWARD, 1, .s_k = 90, .h_q = 4, .h_kv = 4, .d_qk = 64, .d_v = 64,
                            .type = ELEMENT_FP16}},
    {"MHA, a sink",
     .shape = {OP_MHA_FORWARD, 2, 70, 150, 4, 2, 128, .d_v = 128, .causal = true, .sink = true}},
    {"MHA, lengths in use",
     .shape = {OP_MHA_FORWARD, 3, 70, 150, 4, 2, 192, .d_v = 128, .causal = true, .used = true}},
    {"MHA, edge lengths in use, a sink",
     .shape = {OP_MHA_FORWARD, 5, .h_q = 4, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true, .sink = true,
               .varlen = true, .used = true, .lengths = edges},
     .lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY},
    {"MHA gradients",
     .shape = {OP_MHA_BACKWARD, 2, .s_k = 130, .h_q = 5, .h_kv = 5, .d_qk = 192, .d_v = 128}},
    {"MHA gradients, grouped heads",
     .shape = {OP_MHA_BACKWARD, 2, 70, 150, 8, 2, 128, .d_v = 128, .causal = true}},
    {"MHA gradients, 256/256", .shape = {OP_MHA_BACKWARD, 2, 70, 150, 4, 2, 256, .d_v = 256, .causal = true}},
    {"MHA gradients, 96/64", .shape = {OP_MHA_BACKWARD, 2, 70, 150, 4, 2, 96, .d_v = 64, .causal = true}},
    {"MHA gradients, edge lengths", .shape = {OP_MHA_BACKWARD, 5, .h_q = 4, .h_kv = 4, .d_qk = 64, .d_v = 64,
                                              .causal = true, .varlen = true, .lengths = edges}},
    {"MHA gradients, a sink",
     .shape = {OP_MHA_BACKWARD, 2, 70, 150, 4, 2, 192, .d_v = 128, .causal = true, .sink = true}},
    {"MHA gradients, a sink and dlse",
     .shape = {OP_MHA_BACKWARD, 5, .h_q = 4, .h_kv = 4, .d_qk = 128, .d_v = 128, .causal = true, .sink = true,
               .dlse = true, .varlen = true, .lengths = edges},
     .log_base = FMLA_LOG_BASE_2},
    {"MHA gradients, lengths in use",
     .shape = {OP_MHA_BACKWARD, 3, 70, 150, 4, 2, 192, .d_v = 128, .causal = true, .used = true}},
    {"MHA gradients, edge lengths in use, a sink",
     .shape = {OP_MHA_BACKWARD, 5, .h_q = 4, .h_kv = 2, .d_qk = 128, .d_v = 128, .causal = true, .sink = true,
               .varlen = true, .used = true, .lengths = edges}},
    {"merge", .shape = {OP_MERGE, 1, 1, .h_q = 4, .parts = 3, .type = ELEMENT_F32, .holes = true}},
    {"merge, last apart", .shape = {OP_MERGE, 1, 1, .h_q = 4, .parts = 1, .type = ELEMENT_F32, .last = true}},
    {"merge, one part of three", .shape = {OP_MERGE, 2, 1, .h_q = 4, .parts = 3, .part = 2,
                                           .type = ELEMENT_F32, .sink = true, .holes = true}},
    {"merge, base 2", .shape = {OP_MERGE, 1, 1, .h_q = 4, .parts = 3, .type = ELEMENT_F32, .holes = true},
     .log_base = FMLA_LOG_BASE_2},
    /* Cache operations run in this format and in all later ones. */
    {"BF16", .shape = {OP_CACHE_APPEND, .d_qk = 576, .page_size = 64, .tokens = 150, .format = FMLA_KV_BF16,
                       .type = ELEMENT_F32, .holes = true}},
    {"BF16", .shape = {OP_CACHE_APPEND, .d_qk = 576, .page_size = 64, .tokens = 150, .format = FMLA_KV_BF16,
                       .type = ELEMENT_BF16, .norm = true, .turns = FMLA_ROPE_INTERLEAVED, .holes = true}},
    {"BF16", .shape = {OP_CACHE_APPEND, .d_qk = 576, .page_size = 64, .tokens = 150, .format = FMLA_KV_BF16,
                       .type = ELEMENT_BF16, .norm = true, .turns = FMLA_ROPE_HALVES, .holes = true}},
    {"BF16", .shape = {OP_CACHE_CONVERT, .d_qk = 576, .page_size = 64, .extra_page_size = 16, .tokens = 150,
                       .format = FMLA_KV_BF16, .extra_format = FMLA_KV_FP8_656, .holes = true}},
    {"BF16", .shape = {OP_CACHE_CONVERT, .d_qk = 576, .page_size = 1, .extra_page_size = 64, .tokens = 150,
                       .format = FMLA_KV_BF16, .extra_format = FMLA_KV_FP16, .holes = true}},
    {"BF16", .shape = {OP_CACHE_GATHER, .d_qk = 576, .page_size = 64, .tokens = 150, .format = FMLA_KV_BF16,
                       .type = ELEMENT_F32, .holes = true}},
};
enum { CASES = sizeof cases / sizeof *cases };

/* The cases, listed and plain, in each format: made for one kernel and reused for the next. */
enum { PLAIN = 2 * OPERATIONS, FORMATS = KV_FORMATS + 1 };
static struct made {
    struct call call, oracle; /* before it runs; computed by the oracle */
    bool good, asked;
} made[CASES + PLAIN][FORMATS];

struct tally {
    int64_t cases, rows, wrong;
    int64_t passed_over; /* cases the kernel does not support */
    double worst_out, worst_lse;
    char first[1024]; /* first error */
};

static void add_wrong(struct tally *tally, const char *name, const char *text)
{
    tally->cases++;
    if (!tally->wrong++) snprintf(tally->first, sizeof tally->first, "%s: %s", name, text);
}

static void add(struct tally *tally, const char *name, const struct check_result *result)
{
    char words[128];
    check_words(result, words, sizeof words);
    if (!result->passed)
        add_wrong(tally, name, words);
    else
        tally->cases++;
    tally->rows += result->rows;
    tally->worst_out = fmax(tally->worst_out, result->of[0].worst_abs);
    tally->worst_lse = fmax(tally->worst_lse, result->of[1].worst_abs);
}

/* Runs the call. *status is FMLA_UNSUPPORTED if the kernel does not support it. */
static bool run_call(fmla_device device, struct call *call, const char *kernel, fmla_status *status,
                     struct reason *reason)
{
    struct call gpu = {0};
    *(const char **)call_option(call, "kernel") = kernel;
    if (!device_is_gpu(device))
        return call_workspace(call, status, reason) && !call_refused(status, call_run(call), reason);
    const bool good = call_to_gpu(&gpu, device, call, status, reason) &&
                      !call_refused(status, call_run(&gpu), reason) && call_fetch(&gpu, call, true, reason);
    call_close(&gpu);
    return good;
}

static bool make_case(struct made *m, const struct verify_case *which, struct reason *reason)
{
    if (m->good) return true;
    m->good = make_call(&m->call, &which->shape, reason);
    int32_t *lse_empty = call_option(&m->call, "lse_empty"), *log_base = call_option(&m->call, "log_base");
    int32_t *invariant = call_option(&m->call, "batch_invariant");
    if (lse_empty) *lse_empty = which->lse_empty, *log_base = which->log_base;
    if (invariant) *invariant = which->batch_invariant;
    if (!m->good) call_close(&m->call);
    return m->good;
}

static bool ask(struct made *m, struct reason *reason)
{
    if (m->asked) return true;
    m->asked = call_copy(&m->oracle, &m->call, reason) && check_ask(&m->oracle, reason);
    if (!m->asked) call_close(&m->oracle);
    return m->asked;
}

static void forget(void)
{
    for (int i = 0; i < CASES + PLAIN; i++)
        for (int format = 0; format < FORMATS; format++)
            call_close(&made[i][format].call), call_close(&made[i][format].oracle);
}

static void verify_case(fmla_device device, const char *kernel, int i, const struct verify_case *which,
                        struct tally *tally)
{
    struct made *m = &made[i][which->shape.format];
    struct call call = {0};
    struct reason reason = {""};
    struct check_result result;
    fmla_status status = FMLA_OK;
    if (make_case(m, which, &reason) && call_copy(&call, &m->call, &reason) &&
        run_call(device, &call, kernel, &status, &reason) && ask(m, &reason)) {
        check_against_asked(&call, &m->oracle, device_is_gpu(device), &result);
        add(tally, which->name, &result);
    } else if (status == FMLA_UNSUPPORTED) {
        tally->passed_over++;
    } else {
        add_wrong(tally, which->name, reason.text);
    }
    call_close(&call);
}

/* Sets the case of a cache operation to the next format; returns false if there is none. */
static bool next_format(struct verify_case *which)
{
    struct shape *shape = &which->shape;
    if (!shape->tokens || shape->format == last_format(shape->op)) return false;
    which->name = format_name(++shape->format);
    const int64_t width = cache_formats[shape->format].d_qk;
    shape->d_qk = width ? width : 576;
    if (cache_formats[shape->extra_format].token)
        shape->extra_format = shape->d_qk == 576 ? FMLA_KV_FP8_656 : FMLA_KV_FP8_528;
    return true;
}

/* Returns the shape of the plain case, which an operation without listed ones has for each type. */
static struct shape plain_shape(enum operation op, enum element type)
{
    struct shape shape = {op, .b = 3, .s_q = 1, .s_k = 130, .h_q = 16, .h_kv = 1, .d_qk = 576};
    shape.page_size = shape.extra_page_size = 64, shape.tokens = 150, shape.varlen = true;
    shape.type = type, shape.format = first_format(op);
    if (cache_formats[shape.format].d_qk) shape.d_qk = cache_formats[shape.format].d_qk;
    return shape;
}

/* A kernel takes the types of q in its row; cache operations take vectors of all types. */
static void verify_kernel(fmla_device device, const fmla_capability *row, struct progress *progress,
                          struct tally *tally)
{
    const enum operation op = operation_named(row->operation);
    bool listed = !policies[op].work; /* a plan */
    for (int i = 0; i < CASES; i++) {
        const struct shape *shape = &cases[i].shape;
        if (shape->op != op) continue;
        listed = true;
        if (shape->type != ELEMENT_F32 && !(row->types >> shape->type & 1)) continue;
        progress_update(progress, i, CASES);
        struct verify_case which = cases[i];
        do verify_case(device, row->kernel, i, &which, tally);
        while (next_format(&which));
    }
    for (enum element type = ELEMENT_BF16; !listed && type <= ELEMENT_FP16; type++) {
        const struct verify_case plain = {element_name(type), .shape = plain_shape(op, type)};
        if (row->types >> type & 1)
            verify_case(device, row->kernel, CASES + 2 * (int)op + (type == ELEMENT_FP16), &plain, tally);
    }
}

static bool report(const fmla_capability *row, const struct tally *tally, struct outfile *json,
                   struct reason *reason)
{
    printf("%-6s %-14s %-15s %" PRId64 " cases, %" PRId64 " rows; worst difference: out %.1e, lse %.1e\n",
           tally->wrong ? "FAILED" : "ok", row->operation, row->kernel, tally->cases, tally->rows,
           tally->worst_out, tally->worst_lse);
    return !json || json_line(json,
                              json_pack("{s:s, s:s, s:b, s:I, s:I, s:I, s:f, s:f, s:s}", "operation",
                                        row->operation, "kernel", row->kernel, "passed", !tally->wrong,
                                        "cases", (json_int_t)tally->cases, "failed", (json_int_t)tally->wrong,
                                        "rows", (json_int_t)tally->rows, "worst_out", tally->worst_out,
                                        "worst_lse", tally->worst_lse, "first_failure", tally->first),
                              reason);
}

/* Writes the first line: the machine and the library. */
static bool say_machine(struct outfile *json, fmla_device device, struct reason *reason)
{
    json_t *line = machine_json(device);
    if (line) json_object_set_new(line, "version", json_string(fmla_version_string()));
    return json_line(json, line, reason);
}

/* `only`: the operation whose kernels are compared; NULL: all. `first` names the comparison with a wrong
 * result; returns false if a line of JSON could not be written. */
static bool verify_rows(struct outfile *json, fmla_device device, const char *only, int64_t *checked,
                        bool *failed, struct reason *first)
{
    struct progress progress;
    progress_begin(&progress, "verifying");
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        if (!row.kernel || !row.available || (row.forced_only && !*row.part_of)) continue;
        if (only && strcmp(row.operation, only) != 0) continue;
        struct tally tally = {0};
        verify_kernel(device, &row, &progress, &tally);
        if (!tally.cases && tally.passed_over) add_wrong(&tally, "every case", "the kernel does not take it");
        if (!tally.cases) continue; /* decode_plan: exact; its unit test compares it with hand-made plans */
        progress_wipe(&progress);
        if (!report(&row, &tally, json, first)) return false;
        *checked += tally.cases;
        if (tally.wrong && !*failed) reason_set(first, "%s %s: %s", row.operation, row.kernel, tally.first);
        *failed |= tally.wrong > 0;
    }
    return true;
}

static int verify_all(const char *path, fmla_device device, const char *only)
{
    struct reason first = {""}, why = {""};
    int64_t checked = 0;
    bool failed = false;
    struct outfile *json = path ? outfile_open_lines(path, &first) : NULL;
    if (path && !json) return complain(&verify, EXIT_FAILED, "%s", first.text);
    json_memory_watch();
    const bool written = (!json || say_machine(json, device, &first)) &&
                         verify_rows(json, device, only, &checked, &failed, &first);
    forget();
    if (json && !(written && checked))
        outfile_abandon(json);
    else if (json && !outfile_commit(json, &why))
        return complain(&verify, EXIT_FAILED, "%s", why.text);
    if (!written || failed) return complain(&verify, EXIT_FAILED, "%s", first.text);
    if (checked) return EXIT_GOOD;
    if (device_is_gpu(device) && !gpu_open(device.id, &first))
        return complain(&verify, EXIT_UNSUPPORTED, "%s", first.text);
    return complain(&verify, device_is_gpu(device) ? EXIT_UNSUPPORTED : EXIT_FAILED, "nothing was compared");
}

int command_verify(int argc, char **argv)
{
    const char *json = NULL;
    fmla_device device = {FMLA_DEVICE_CPU, 0};
    int op = 0;
    bool op_given = false;
    const char *operations[OPTION_CHOICES];
    _Static_assert((int)OPERATIONS < (int)OPTION_CHOICES, "an option can name every operation");
    char words[200];
    struct option options[] = {
        OPTION_ONE_OF("--op", &op, "NAME", "compare only the kernels of this operation", &op_given, NULL),
        OPTION_DEVICE(&device),
        OPTION_JSON(&json),
        {0}};
    operation_choices(false, operations, words, sizeof words);
    memcpy(options[0].choices, operations, sizeof operations);
    const int done = options_parse(&verify, options, argc, argv, NULL);
    return done >= 0 ? done : verify_all(json, device, op_given ? operations[op] : NULL);
}
