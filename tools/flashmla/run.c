/* SPDX-License-Identifier: MIT
 *
 * flashmla run: dense or sparse decode, sparse prefill or dense MHA over a tensor file. The output file is
 * opened before the computation and appears only after everything, including the check, succeeded.
 */
#include "call_file.h"
#include "check.h"
#include "json_line.h"
#include "machine.h"
#include "options.h"

#include "infile.h"
#include "json_memory.h"
#include "outfile.h"
#include "progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const struct command run = {
    "run",
    "FILE",
    "compute attention from a tensor file; check and time it",
    "\n"
    "FILE has the tensors q, kv_cache and seqlens, and optionally block_table and attn_sink, as make-"
    "input writes them. \"causal\" and \"softmax_scale\" in its metadata apply unless options override "
    "them. \"kv_format\" in the metadata names the format of a kv_cache of bytes; the tensor kv_scale "
    "is the scale of an FP8_576 cache. With \"products\" fp8, q may have e4m3 codes, whose scale is the "
    "tensor q_scale. --out receives the tensors out and lse. --check compares the result with the "
    "oracle: all rows if that is quick, else 64 rows. A wrong result is not written.\n"
    "\n"
    "A file with the tensor indices is sparse decode: q, kv_cache, and optionally topk_length, "
    "extra_kv_cache, extra_indices, extra_topk_length and attn_sink, with \"kv_format\" and "
    "\"extra_kv_format\" in its metadata. A file with kv instead of kv_cache is sparse prefill, without "
    "extra tensors; --out also receives max_logits. A file with k and v is dense MHA, with "
    "cu_seqlens_q and cu_seqlens_k if q has three dimensions.\n"
    "\n"
    "Examples\n"
    "  flashmla run batch.safetensors --check\n"
    "  flashmla run batch.safetensors --out result.safetensors --threads 2 --repeat 5\n"
    "  flashmla run batch.safetensors --kernel ref --no-causal --log-base 2\n"
    "  flashmla run batch.safetensors --device cuda:0 --check\n"
    "  flashmla make-input bytes.safetensors --cache fp8_656\n"
    "  flashmla run bytes.safetensors --check\n"
    "  flashmla make-input sparse.safetensors --op sparse_decode --cache fp8_656\n"
    "  flashmla run sparse.safetensors --device cuda:0 --check\n"
    "  flashmla make-input prefill.safetensors --op sparse_prefill --query-tokens 64 --seq-len 8192\n"
    "  flashmla run prefill.safetensors --check --out result.safetensors\n"
    "  flashmla make-input mha.safetensors --op mha_forward --varlen --batch 4 --causal\n"
    "  flashmla run mha.safetensors --check\n"
    "  flashmla make-input - --batch 2 | flashmla run - --check\n",
    OPERAND_INPUT,
    NULL};

struct run_options {
    const char *out, *json, *kernel;
    fmla_device device;
    bool causal, no_causal, check, batch_invariant, scale_given;
    double softmax_scale;
    int lse_empty, log_base, products; /* indices of the choices */
    bool products_given;
    int64_t repeat, threads;
};

/* State of one run. */
struct job {
    struct safetensors_file *file;
    struct call call, gpu;   /* in host memory; its copy on the GPU, if used */
    const struct call *runs; /* the one that runs */
    struct safetensors_declaration results[CALL_FILE_NAMES];
    size_t result_count;
    struct safetensors_writer *writer;
    struct outfile *json;
    /* What `run` reports, in its text and in its line of JSON. */
    const char *kernel;
    size_t workspace;
    int64_t repeat;
    double seconds; /* median */
    struct work work;
    bool checked; /* check is meaningful */
    struct check_result check;
};

static int exit_of(fmla_status refused)
{
    return refused == FMLA_UNSUPPORTED ? EXIT_UNSUPPORTED : EXIT_FAILED;
}

/* Command-line options override the file's; options that the operation lacks were refused before. */
static void set_options(struct call *call, const struct run_options *options)
{
    float *scale = call_option(call, "softmax_scale");
    int32_t *lse_empty = call_option(call, "lse_empty"), *log_base = call_option(call, "log_base");
    int32_t *causal = call_option(call, "causal"), *invariant = call_option(call, "batch_invariant");
    *(const char **)call_option(call, "kernel") = options->kernel;
    if (scale && options->scale_given) *scale = (float)options->softmax_scale;
    if (causal) *causal = options->causal || (*causal && !options->no_causal);
    if (invariant) *invariant = options->batch_invariant;
    int32_t *products = call_option(call, "products");
    if (products && options->products_given)
        *products = options->products ? FMLA_PRODUCTS_FP8 : FMLA_PRODUCTS_BF16;
    if (lse_empty)
        *lse_empty = options->lse_empty ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    if (log_base) *log_base = options->log_base ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
}

static bool prepare(struct job *job, const char *path, const struct run_options *options, int *exit_code,
                    struct reason *reason)
{
    const fmla_device device = options->device;
    struct call *call = &job->call;
    struct reason why = {""};
    fmla_status refused = FMLA_OK;
    set_options(call, options);
    call_set_results(call);
    bool good = call_make_results(call, &why);
    job->runs = device_is_gpu(device) ? &job->gpu : call;
    if (good)
        good = device_is_gpu(device) ? call_to_gpu(&job->gpu, device, call, &refused, &why)
                                     : call_workspace(call, &refused, &why);
    if (good) return true;
    *exit_code = exit_of(refused);
    return reason_set(reason, "%s: %s", path, why.text);
}

static bool open_output(struct job *job, const struct run_options *options, struct reason *reason)
{
    const char *names[CALL_FILE_NAMES + 1] = {NULL};
    int count = 0;
    for (const struct member *member = descriptors[job->call.op].members; member->name; member++)
        if (member->kind == MEMBER_TENSOR && member->allowed & IS_OUTPUT && count < CALL_FILE_NAMES)
            names[count++] = member->name;
    const struct safetensors_note notes[] = {{"lse_empty", options->lse_empty ? "neg" : "pos"},
                                             {"log_base", options->log_base ? "2" : "e"}};
    job->result_count = call_file_declare(&job->call, names, job->results);
    job->writer = safetensors_create(options->out, job->results, job->result_count, notes,
                                     call_option(&job->call, "log_base") ? 2 : 0, reason);
    return job->writer != NULL;
}

static bool write_output(struct job *job, struct reason *reason)
{
    struct safetensors_writer *writer = job->writer;
    if (!call_file_write(&job->call, job->results, job->result_count, writer, reason)) return false;
    job->writer = NULL; /* commit frees it */
    return safetensors_commit(writer, reason);
}

static bool compute(struct job *job, const char *path, int64_t repeat, int *exit_code, struct reason *reason)
{
    double *seconds = malloc((size_t)repeat * sizeof *seconds);
    if (!seconds) return reason_set(reason, "no memory for %" PRId64 " times", repeat);
    fmla_status status = FMLA_OK;
    struct reason why = {""};
    struct progress progress;
    bool good = true;
    progress_begin(&progress, "computing");
    for (int64_t i = 0; good && i < repeat; i++) {
        good = call_time(job->runs, &seconds[i], &status, &why);
        progress_update(&progress, i + 1, repeat);
    }
    progress_wipe(&progress);
    if (good) {
        qsort(seconds, (size_t)repeat, sizeof *seconds, double_by_value);
        job->seconds = seconds[repeat / 2], job->repeat = repeat;
    }
    free(seconds);
    if (good) return !device_is_gpu(job->runs->device) || call_fetch(job->runs, &job->call, false, reason);
    *exit_code = exit_of(status);
    return status ? reason_set(reason, "%s: %s", path, why.text) : reason_set(reason, "%s", why.text);
}

/* ---- Report ---- */

static void print_report(struct job *job)
{
    job->work = call_work(&job->call);
    call_kernel(job->runs, &job->kernel); /* succeeds, as the call did */
    const size_t *workspace = call_option(job->runs, "workspace_size");
    job->workspace = workspace ? *workspace : 0;
    policies[job->call.op].print(&job->call, &job->work);
    if (device_is_gpu(job->runs->device))
        printf("%-12s %s on cuda:%d\n", "kernel", job->kernel, job->runs->device.id);
    else
        printf("%-12s %s, %d threads\n", "kernel", job->kernel, (int)fmla_num_threads());
    printf("%-12s %zu bytes\n", "workspace", job->workspace);
    printf("%-12s %.1f us, median of %" PRId64 "\n", "time", 1e6 * job->seconds, job->repeat);
    printf("%-12s %.3f TFLOP/s, %.2f GB/s\n", "speed", 1e-12 * job->work.flop / job->seconds,
           1e-9 * job->work.bytes / job->seconds);
}

static bool check(struct job *job, struct reason *reason)
{
    struct check_result *result = &job->check;
    char wrong[128];
    if (!check_against_oracle(&job->call, device_is_gpu(job->runs->device), result, reason)) return false;
    printf("%-12s %s: %" PRId64 " of %" PRId64 " rows against the oracle", "check",
           result->passed ? "PASS" : "FAIL", result->rows, result->all_rows);
    job->checked = true;
    for (int k = 0; k < RESULTS && policies[job->call.op].results[k].name; k++) {
        const char *name = policies[job->call.op].results[k].name;
        if (!call_tensor(&job->call, name)) continue;
        printf("; %s: worst difference %.2e", name, result->of[k].worst_abs);
        if (!k) printf(", cosine %.1e", compare_cosine(&result->of[k]));
    }
    putchar('\n');
    if (result->passed) return true;
    check_words(result, wrong, sizeof wrong);
    return reason_set(reason, "the result is wrong: %s from the oracle", wrong);
}

static json_t *shape_of(const fmla_tensor *tensor)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->ndim; i++)
        json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    return shape;
}

static bool run_json(const struct job *job, struct reason *reason)
{
    const struct call *call = job->runs;
    const fmla_tensor *first = &call->tensor[0];
    char device[16];
    json_memory_watch();
    const fmla_dtype dtype = first->dtype;
    const char *const type = dtype.bits == 8 ? "bytes" : dtype.code == FMLA_TYPE_BFLOAT ? "bf16" : "fp16";
    json_t *line = json_pack("{s:s, s:s, s:s, s:o, s:s, s:I, s:I, s:f, s:f, s:f, s:s}", "op",
                             descriptors[call->op].name, "kernel", job->kernel, "device",
                             machine_device_name(call->device, device), "q", shape_of(first), "dtype", type,
                             "workspace", (json_int_t)job->workspace, "runs", (json_int_t)job->repeat, "us",
                             1e6 * job->seconds, "tflops", 1e-12 * job->work.flop / job->seconds, "gbs",
                             1e-9 * job->work.bytes / job->seconds, "version", fmla_version_string());
    const struct check_result *check = &job->check;
    if (job->checked)
        json_object_set_new(line, "check",
                            json_pack("{s:b, s:I, s:I, s:f, s:f}", "passed", check->passed, "rows",
                                      (json_int_t)check->rows, "all_rows", (json_int_t)check->all_rows,
                                      "worst_out", check->of[0].worst_abs, "worst_lse",
                                      check->of[1].worst_abs));
    return json_line(job->json, line, reason);
}

/* Writes the report even if the result is wrong; `reason` then says so. */
static bool write_json(struct job *job, bool right, struct reason *reason)
{
    struct reason why;
    if (run_json(job, &why)) {
        struct outfile *json = job->json;
        job->json = NULL; /* commit frees it */
        if (outfile_commit(json, &why)) return true;
    }
    return right ? reason_set(reason, "%s", why.text) : false;
}

static bool work(struct job *job, const char *path, const struct run_options *options, int *exit_code,
                 struct reason *reason)
{
    if (!prepare(job, path, options, exit_code, reason)) return false;
    if (options->out && !open_output(job, options, reason)) return false;
    if (options->json && !(job->json = outfile_open_lines(options->json, reason))) return false;
    if (!compute(job, path, options->repeat, exit_code, reason)) return false;
    print_report(job);
    const bool right = !options->check || check(job, reason);
    if ((right || job->checked) && job->json && !write_json(job, right, reason)) return false;
    if (!right) return false;
    if (!options->out) return true;
    if (!write_output(job, reason)) return false;
    printf("%-12s %s\n", "written", options->out);
    return true;
}

/* Returns a given option that the operation does not have; NULL if there is none. */
static const char *needless(struct call *call, const struct run_options *options)
{
    return options->causal && !call_option(call, "causal")                     ? "--causal"
           : options->no_causal && !call_option(call, "causal")                ? "--no-causal"
           : options->products_given && !call_option(call, "products")         ? "--products"
           : options->batch_invariant && !call_option(call, "batch_invariant") ? "--batch-invariant"
                                                                               : NULL;
}

/* Runs the open file; `name` is its name in messages. */
static int run_opened(struct job *job, const char *name, const struct run_options *options)
{
    struct reason reason = {""};
    int exit_code = EXIT_FAILED;
    call_begin(&job->call, call_file_operation(job->file));
    if (needless(&job->call, options))
        return complain(&run, EXIT_USAGE, "%s: does not apply to %s", needless(&job->call, options),
                        operation_title(job->call.op));
    if (!kernel_exists(descriptors[job->call.op].name, options->kernel, &reason))
        return complain(&run, EXIT_USAGE, "%s", reason.text);
    const bool good =
        call_file_read(&job->call, job->file, name, &reason) && work(job, name, options, &exit_code, &reason);
    safetensors_abandon(job->writer), outfile_abandon(job->json);
    call_close(&job->gpu), call_close(&job->call);
    return good ? EXIT_GOOD : complain(&run, exit_code, "%s", reason.text);
}

static int run_file(const char *path, const struct run_options *options)
{
    struct job job = {0};
    struct reason reason = {""};
    if (options->causal && options->no_causal)
        return complain(&run, EXIT_USAGE, "--causal: cannot be combined with --no-causal");
    if (!isfinite((float)options->softmax_scale))
        return complain(&run, EXIT_USAGE, "--softmax-scale: %g must be finite in fp32",
                        options->softmax_scale);
    if (options->scale_given && (float)options->softmax_scale == 0.0f)
        return complain(&run, EXIT_USAGE,
                        "--softmax-scale: %g is 0 in fp32, must be another number; without the option it is "
                        "1/sqrt(d_qk)",
                        options->softmax_scale);
    if (options->threads && fmla_set_num_threads((int32_t)options->threads) != FMLA_OK)
        return complain(&run, EXIT_FAILED, "%s", fmla_last_error());
    job.file = safetensors_open(path, &reason);
    if (!job.file) return complain(&run, EXIT_FAILED, "%s", reason.text);
    const int exit_code = run_opened(&job, infile_name(path), options);
    safetensors_close(job.file);
    return exit_code;
}

int command_run(int argc, char **argv)
{
    struct run_options o = {.repeat = 3, .device = {FMLA_DEVICE_CPU, 0}};
    const char *path = NULL;
    const struct option options[] = {
        OPTION_FILE("--out", &o.out, "write out and lse there"),
        OPTION_JSON(&o.json),
        OPTION_DEVICE(&o.device),
        OPTION_KERNEL(&o.kernel),
        OPTION_SWITCH("--causal", &o.causal, "token j of s_q sees keys t <= s_k - s_q + j"),
        OPTION_SWITCH("--no-causal", &o.no_causal, "every token sees every key"),
        OPTION_ROW("--softmax-scale", OPTION_REAL, &o.softmax_scale, "X", "default 1/sqrt(d_qk)", 0, 0,
                   &o.scale_given, NULL),
        OPTION_SWITCH("--batch-invariant", &o.batch_invariant,
                      "the results of a request have the same bits in every batch"),
        OPTION_ONE_OF("--products", &o.products, "WHICH",
                      "products over a cache of bytes: bf16 or fp8; default: as in the file, else bf16",
                      &o.products_given, "bf16", "fp8"),
        OPTION_ONE_OF("--lse-empty", &o.lse_empty, "SIGN",
                      "lse of a row without keys: pos (infinity, the default) or neg", NULL, "pos", "neg"),
        OPTION_ONE_OF("--log-base", &o.log_base, "BASE", "base of lse: e (the default) or 2", NULL, "e", "2"),
        OPTION_NUMBER("--repeat", &o.repeat, 1, 100000, "number of runs; default 3", NULL),
        OPTION_SWITCH("--check", &o.check, "compare with the oracle"),
        OPTION_THREADS(&o.threads),
        {0}};
    const int done = options_parse(&run, options, argc, argv, &path);
    if (done >= 0) return done;
    return run_file(path, &o);
}
