/* SPDX-License-Identifier: MIT
 *
 * flashmla verify: the kernels that this machine chooses from, on a short list of shapes, against the oracle.
 * tests/checkattn is the thorough one; both hold results to the same tolerances.
 */
#include "batch.h"
#include "call.h"
#include "check.h"
#include "commands.h"
#include "gpu_call.h"
#include "gpu_sparse.h"
#include "json_line.h"
#include "options.h"
#include "sparse_batch.h"
#include "sparse_check.h"
#include "verify_cache.h"

#include "elements.h"
#include "gpu.h"
#include "json_memory.h"
#include "progress.h"
#include "timing.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command verify = {
    "verify",
    NULL,
    "hold this machine's kernels to the oracle",
    "\n"
    "Every kernel that runs here, forced by name, on a short list of shapes. Ends "
    "with 1 if a result is wrong.\n"
    "\n"
    "Examples\n"
    "  flashmla verify\n"
    "  flashmla verify --device cuda:0\n"
    "  flashmla verify --json -\n",
    OPERAND_WORD,
    NULL};

/* lengths 0, 1, 65: no key, one, and one past a block */
static const int32_t edges[] = {0, 1, 65, 64, 130};

static const struct {
    const char *name;
    struct batch_shape shape; /* s_k: the longest of lengths */
    int32_t lse_empty, log_base, batch_invariant;
} cases[] = {
    {"paged", {.b = 3, .s_q = 1, .s_k = 200, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64}, 0, 0, 0},
    {"many heads",
     {.b = 1, .s_q = 1, .s_k = 300, .h_q = 128, .h_kv = 1, .d_qk = 576, .page_size = 64},
     0,
     0,
     0},
    {"one head", {.b = 2, .s_q = 1, .s_k = 190, .h_q = 1, .h_kv = 1, .d_qk = 576, .page_size = 64}, 0, 0, 0},
    {"d_qk 512", {.b = 2, .s_q = 1, .s_k = 129, .h_q = 16, .h_kv = 1, .d_qk = 512, .page_size = 64}, 0, 0, 0},
    {"contiguous",
     {.b = 2, .s_q = 1, .s_k = 150, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64, .contiguous = true},
     0,
     0,
     0},
    {"causal",
     {.b = 2, .s_q = 2, .s_k = 100, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64, .causal = true},
     0,
     0,
     0},
    {"causal, many heads",
     {.b = 1, .s_q = 2, .s_k = 65, .h_q = 128, .h_kv = 1, .d_qk = 576, .page_size = 64, .causal = true},
     0,
     0,
     0},
    {"two key heads",
     {.b = 2, .s_q = 2, .s_k = 90, .h_q = 8, .h_kv = 2, .d_qk = 576, .page_size = 16},
     0,
     0,
     0},
    {"edge lengths",
     {.b = 5, .s_q = 1, .s_k = 130, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64, .lengths = edges},
     FMLA_LSE_EMPTY_POSITIVE_INFINITY,
     FMLA_LOG_NATURAL,
     0},
    {"edge lengths, other conventions",
     {.b = 5,
      .s_q = 2,
      .s_k = 130,
      .h_q = 16,
      .h_kv = 1,
      .d_qk = 576,
      .page_size = 64,
      .causal = true,
      .lengths = edges},
     FMLA_LSE_EMPTY_NEGATIVE_INFINITY,
     FMLA_LOG_BASE_2,
     0},
    {"attention sink",
     {.b = 2, .s_q = 1, .s_k = 120, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64, .sink = true},
     0,
     0,
     0},
    {"batch-invariant",
     {.b = 2, .s_q = 1, .s_k = 2200, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64},
     0,
     0,
     1},
    {"fp16",
     {.b = 2, .s_q = 1, .s_k = 200, .h_q = 16, .h_kv = 1, .d_qk = 576, .page_size = 64, .fp16 = true},
     0,
     0,
     0},
};
enum { CASES = sizeof cases / sizeof *cases };

struct tally {
    int64_t cases, rows, wrong;
    int64_t passed_over; /* cases that the kernel does not take */
    double worst_out, worst_lse;
    char first[1024]; /* what went wrong */
};

static void add(struct tally *tally, const char *name, const struct check_result *result)
{
    tally->cases++;
    tally->rows += result->rows;
    tally->worst_out = fmax(tally->worst_out, result->out.worst_abs);
    tally->worst_lse = fmax(tally->worst_lse, result->lse.worst_abs);
    if (!result->passed && !tally->wrong++)
        snprintf(tally->first, sizeof tally->first,
                 "%s: %" PRId64 " values of out and %" PRId64 " of lse differ", name, result->out.wrong,
                 result->lse.wrong);
}

static void add_fault(struct tally *tally, const char *name, const char *text)
{
    tally->cases++;
    if (!tally->wrong++) snprintf(tally->first, sizeof tally->first, "%s: %s", name, text);
}

static bool call_on_cpu(fmla_dense_decode_args *args, struct fault *fault)
{
    fmla_status status = call_workspace(args);
    if (!status && args->workspace) status = fmla_dense_decode(args);
    return (!status && args->workspace) || fault_set(fault, "%s", status ? fmla_last_error() : "no memory");
}

/* *status: FMLA_UNSUPPORTED where the kernel does not take the call. */
static bool call_on_gpu(fmla_device device, const fmla_dense_decode_args *args, fmla_status *status,
                        struct fault *fault)
{
    struct gpu_call call = {0};
    bool good = gpu_call_open(&call, device, args, status, fault);
    if (good) *status = fmla_dense_decode(&call.args);
    good = good && (*status == FMLA_OK || fault_set(fault, "%s", fmla_last_error()));
    good = good && gpu_call_results(&call, fault);
    gpu_call_close(&call);
    return good;
}

static void verify_decode_case(fmla_device device, const char *kernel, int index, struct tally *tally)
{
    struct batch batch;
    struct fault fault = {""};
    struct check_result result;
    fmla_status status = FMLA_OK;
    bool good = batch_make(&batch, &cases[index].shape, &fault);
    fmla_dense_decode_args *args = &batch.args;
    if (good) {
        args->kernel = kernel;
        args->lse_empty = cases[index].lse_empty, args->log_base = cases[index].log_base;
        args->batch_invariant = cases[index].batch_invariant;
        /* What a kernel fails to write must not pass. */
        memset(batch.memory[2], 0xff,
               (size_t)(batch.b[0] * batch.out_shape[1] * batch.h_q[0] * BATCH_D_V) * 2);
        good = device_is_gpu(device) ? call_on_gpu(device, args, &status, &fault) : call_on_cpu(args, &fault);
    }
    good = good && check_against_oracle(args, &result, &fault);
    if (good)
        add(tally, cases[index].name, &result);
    else if (status == FMLA_UNSUPPORTED)
        tally->passed_over++;
    else
        add_fault(tally, cases[index].name, fault.text);
    batch_free(&batch);
}

static void verify_decode(fmla_device device, const fmla_capability *row, struct progress *progress,
                          struct tally *tally)
{
    for (int i = 0; i < CASES; i++) {
        progress_update(progress, i, CASES);
        if (strstr(row->dtypes, cases[i].shape.fp16 ? "fp16" : "bf16"))
            verify_decode_case(device, row->kernel, i, tally);
    }
}

/* In every format; holes, lists that end early, a second cache. */
static const struct {
    const char *name;
    struct sparse_shape shape;
    int32_t batch_invariant;
} sparse_cases[] = {
    {"sparse, FP8_656",
     {.b = 2,
      .s_q = 2,
      .h_q = 16,
      .d_qk = 576,
      .format = FMLA_KV_FP8_656,
      .cache = {{300, 130, 64}},
      .holes = true},
     0},
    {"sparse, FP8_584 and an extra cache",
     {.b = 2,
      .s_q = 1,
      .h_q = 64,
      .d_qk = 512,
      .format = FMLA_KV_FP8_584,
      .cache = {{200, 128, 64}, {300, 70, 2}},
      .varlen = true,
      .sink = true},
     0},
    {"sparse, BF16",
     {.b = 3,
      .s_q = 1,
      .h_q = 128,
      .d_qk = 576,
      .format = FMLA_KV_BF16,
      .cache = {{100, 128, 16}},
      .varlen = true},
     0},
    {"sparse, FP16",
     {.b = 2,
      .s_q = 1,
      .h_q = 3,
      .d_qk = 512,
      .format = FMLA_KV_FP16,
      .cache = {{500, 65, 61}, {20, 20, 64}},
      .holes = true},
     0},
    {"sparse, batch-invariant",
     {.b = 2,
      .s_q = 1,
      .h_q = 16,
      .d_qk = 576,
      .format = FMLA_KV_FP8_656,
      .cache = {{2500, 2200, 64}},
      .varlen = true},
     1},
};
enum { SPARSE_CASES = sizeof sparse_cases / sizeof *sparse_cases };

static bool sparse_on_cpu(fmla_sparse_decode_args *args, struct fault *fault)
{
    fmla_status status = sparse_call_workspace(args);
    if (!status && args->workspace) status = fmla_sparse_decode(args);
    return (!status && args->workspace) || fault_set(fault, "%s", status ? fmla_last_error() : "no memory");
}

/* *status: FMLA_UNSUPPORTED where the kernel does not take the call. */
static bool sparse_on_gpu(fmla_device device, const fmla_sparse_decode_args *args, fmla_status *status,
                          struct fault *fault)
{
    struct gpu_sparse call = {0};
    bool good = gpu_sparse_open(&call, device, args, status, fault);
    if (good) *status = fmla_sparse_decode(&call.args);
    good = good && (*status == FMLA_OK || fault_set(fault, "%s", fmla_last_error()));
    good = good && gpu_sparse_results(&call, fault);
    gpu_sparse_close(&call);
    return good;
}

static void verify_sparse_case(fmla_device device, const char *kernel, int index, struct tally *tally)
{
    struct sparse_batch batch;
    struct fault fault = {""};
    struct check_result result;
    fmla_status status = FMLA_OK;
    bool good = sparse_batch_make(&batch, &sparse_cases[index].shape, &fault);
    fmla_sparse_decode_args *args = &batch.args;
    if (good) {
        args->kernel = kernel, args->batch_invariant = sparse_cases[index].batch_invariant;
        good = device_is_gpu(device) ? sparse_on_gpu(device, args, &status, &fault)
                                     : sparse_on_cpu(args, &fault);
    }
    good = good && sparse_check_against_oracle(args, &result, &fault);
    if (good)
        add(tally, sparse_cases[index].name, &result);
    else if (status == FMLA_UNSUPPORTED)
        tally->passed_over++;
    else
        add_fault(tally, sparse_cases[index].name, fault.text);
    sparse_batch_free(&batch);
}

static void verify_sparse(fmla_device device, const fmla_capability *row, struct progress *progress,
                          struct tally *tally)
{
    for (int i = 0; i < SPARSE_CASES; i++) {
        progress_update(progress, i, SPARSE_CASES);
        if (strstr(row->dtypes, sparse_cases[i].shape.format == FMLA_KV_FP16 ? "fp16" : "bf16"))
            verify_sparse_case(device, row->kernel, i, tally);
    }
}

enum { PARTS = 3, ROWS = 4, D_V = BATCH_D_V };

/* The call on copies of its tensors; the results come back. */
static bool merge_on_gpu(fmla_device device, const fmla_merge_args *host, struct fault *fault)
{
    enum { TENSORS = 4 };
    static const size_t bytes[TENSORS] = {sizeof(float) * PARTS * ROWS * D_V, sizeof(float) * PARTS * ROWS,
                                          sizeof(float) * ROWS * D_V, sizeof(float) * ROWS};
    fmla_merge_args args = *host;
    const fmla_tensor *from[TENSORS] = {host->out_parts, host->lse_parts, host->out, host->lse};
    const fmla_tensor **to[TENSORS] = {&args.out_parts, &args.lse_parts, &args.out, &args.lse};
    fmla_tensor tensors[TENSORS];
    bool good = gpu_open(device.id, fault);
    for (int i = 0; i < TENSORS; i++) {
        tensors[i] = *from[i], *to[i] = &tensors[i];
        tensors[i].device = device, tensors[i].data = NULL;
        good = good && gpu_alloc(&tensors[i].data, bytes[i], fault) &&
               gpu_upload(tensors[i].data, from[i]->data, bytes[i], fault);
    }
    if (good && fmla_merge(&args) != FMLA_OK) good = fault_set(fault, "%s", fmla_last_error());
    good = good && gpu_stream_wait(NULL, fault);
    for (int i = 2; i < TENSORS; i++)
        good = good && gpu_download(from[i]->data, tensors[i].data, bytes[i], fault);
    for (int i = 0; i < TENSORS; i++) gpu_free(tensors[i].data);
    return good;
}

/* Three parts of which some saw no key, in either convention of the logarithm. */
static void verify_merge(fmla_device device, const char *kernel, int32_t log_base, struct tally *tally)
{
    static float parts[PARTS * ROWS * D_V], lse_parts[PARTS * ROWS], outs[2][ROWS * D_V], lses[2][ROWS];
    static const int64_t parts_shape[] = {PARTS, 1, 1, ROWS, D_V}, lse_shape[] = {PARTS, 1, ROWS, 1};
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_dtype fp32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    struct random_state random = {7};
    struct check_result result = {.rows = ROWS, .all_rows = ROWS};
    const char *name = log_base ? "merge, base 2" : "merge";
    batch_fill(parts, fp32, PARTS * ROWS * D_V, D_V, &random);
    for (int i = 0; i < PARTS * ROWS; i++)
        lse_parts[i] = i % ROWS == 3 || i == 5 ? INFINITY : 2.0f * random_normal(&random);
    fmla_tensor tensors[2] = {{parts, cpu, 5, fp32, parts_shape, NULL, 0},
                              {lse_parts, cpu, 4, fp32, lse_shape, NULL, 0}};
    for (int oracle = 0; oracle < 2; oracle++) {
        fmla_tensor out = {outs[oracle], cpu, 4, fp32, parts_shape + 1, NULL, 0};
        fmla_tensor lse = {lses[oracle], cpu, 3, fp32, lse_shape + 1, NULL, 0};
        fmla_merge_args args = FMLA_INIT(fmla_merge_args);
        memset(outs[oracle], 0xff, sizeof outs[oracle]);
        args.out_parts = &tensors[0], args.lse_parts = &tensors[1], args.out = &out, args.lse = &lse;
        args.log_base = log_base, args.kernel = oracle ? "ref" : kernel;
        struct fault fault;
        const bool good = device_is_gpu(device) && !oracle
                              ? merge_on_gpu(device, &args, &fault)
                              : fmla_merge(&args) == FMLA_OK || fault_set(&fault, "%s", fmla_last_error());
        if (!good) {
            add_fault(tally, name, fault.text);
            return;
        }
    }
    for (int i = 0; i < ROWS * D_V; i++)
        compare_add(&result.out, &tolerance_exact_f32, (double)outs[0][i], (double)outs[1][i]);
    for (int i = 0; i < ROWS; i++)
        compare_add(&result.lse, &tolerance_decode_lse, (double)lses[0][i], (double)lses[1][i]);
    result.passed = compare_passed(&result.out, &tolerance_exact_f32) &&
                    compare_passed(&result.lse, &tolerance_decode_lse);
    add(tally, name, &result);
}

static void verify_caches(fmla_device device, bool gather, const char *kernel, struct tally *tally)
{
    for (int i = 0; i < VERIFY_CACHE_CASES; i++) {
        struct check_result result = {.rows = VERIFY_CACHE_ROWS, .passed = true};
        struct fault fault;
        if (verify_cache(device, gather, kernel, i, &fault))
            add(tally, verify_cache_name(i), &result);
        else
            add_fault(tally, verify_cache_name(i), fault.text);
    }
}

static bool report(const fmla_capability *row, const struct tally *tally, struct outfile *json,
                   struct fault *fault)
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
                              fault);
}

/* What was compared is told in `first`, where a result is wrong; false where a line of JSON could not be written. */
static bool verify_rows(struct outfile *json, fmla_device device, int64_t *checked, bool *failed,
                        struct fault *first)
{
    struct progress progress;
    progress_begin(&progress, "verifying");
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        if (!row.kernel || !row.available || (row.forced_only && !*row.part_of)) continue;
        struct tally tally = {0};
        if (!strcmp(row.operation, "dense_decode")) verify_decode(device, &row, &progress, &tally);
        if (!strcmp(row.operation, "sparse_decode")) verify_sparse(device, &row, &progress, &tally);
        if (!strcmp(row.operation, "merge"))
            verify_merge(device, row.kernel, FMLA_LOG_NATURAL, &tally),
                verify_merge(device, row.kernel, FMLA_LOG_BASE_2, &tally);
        if (!strcmp(row.operation, "cache_append")) verify_caches(device, false, row.kernel, &tally);
        if (!strcmp(row.operation, "cache_gather")) verify_caches(device, true, row.kernel, &tally);
        if (!tally.cases && tally.passed_over) add_fault(&tally, "every case", "the kernel does not take it");
        if (!tally.cases) continue; /* decode_plan: exact, and held to hand-made plans by its unit test */
        progress_wipe(&progress);
        if (!report(&row, &tally, json, first)) return false;
        *checked += tally.cases;
        if (tally.wrong && !*failed) fault_set(first, "%s %s: %s", row.operation, row.kernel, tally.first);
        *failed |= tally.wrong > 0;
    }
    return true;
}

static int verify_all(const char *path, fmla_device device)
{
    struct fault first = {""}, why = {""};
    int64_t checked = 0;
    bool failed = false;
    struct outfile *json = path ? outfile_open_lines(path, &first) : NULL;
    if (path && !json) return complain(&verify, EXIT_FAILED, "%s", first.text);
    json_memory_watch();
    const bool written = verify_rows(json, device, &checked, &failed, &first);
    if (json && !(written && checked))
        outfile_abandon(json);
    else if (json && !outfile_commit(json, &why))
        return complain(&verify, EXIT_FAILED, "%s", why.text);
    if (!written) return complain(&verify, EXIT_FAILED, "%s", first.text);
    if (failed) return complain(&verify, EXIT_FAILED, "%s", first.text);
    if (checked) return EXIT_GOOD;
    if (device_is_gpu(device) && !gpu_open(device.id, &first))
        return complain(&verify, EXIT_UNSUPPORTED, "%s", first.text);
    return complain(&verify, device_is_gpu(device) ? EXIT_UNSUPPORTED : EXIT_FAILED, "nothing was compared");
}

int command_verify(int argc, char **argv)
{
    const char *name = NULL, *json = NULL;
    fmla_device device;
    const struct option options[] = {{"--device",
                                      OPTION_TEXT,
                                      &name,
                                      "DEVICE",
                                      "cpu (the default) or cuda:N",
                                      0,
                                      0,
                                      {"cpu", "cuda:0", NULL},
                                      NULL},
                                     OPTION_JSON(&json),
                                     {0}};
    switch (options_parse(&verify, options, argc, argv, NULL)) {
    case OPTIONS_HELPED: return EXIT_GOOD;
    case OPTIONS_WRONG: return EXIT_USAGE;
    case OPTIONS_PARSED: break;
    }
    if (!device_parse(name, &device))
        return complain(&verify, EXIT_USAGE, "--device: '%s' must be cpu or cuda:N", name);
    return verify_all(json, device);
}
