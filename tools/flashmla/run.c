/* SPDX-License-Identifier: MIT
 *
 * flashmla run: dense or sparse decode, or sparse prefill, over a tensor file. The output file is opened before anything is computed, and
 * appears only after everything, the check included, went well.
 */
#include "run.h"
#include "call.h"
#include "check.h"
#include "commands.h"
#include "gpu_call.h"
#include "gpu_sparse.h"
#include "input.h"
#include "kernels.h"
#include "options.h"
#include "prefill_batch.h"
#include "prefill_check.h"
#include "run_json.h"
#include "sparse_batch.h"
#include "sparse_check.h"

#include "elements.h"
#include "gpu.h"
#include "infile.h"
#include "outfile.h"
#include "progress.h"
#include "timing.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command run = {
    "run",
    "FILE",
    "compute attention from a tensor file; check and time it",
    "\n"
    "FILE has the tensors q, kv_cache, seqlens, and optionally block_table and attn_sink, as make-input "
    "writes them; "
    "\"causal\" and \"softmax_scale\" of its metadata hold unless options say otherwise. --out gets the "
    "tensors out and "
    "lse. With --check the result is compared with the oracle - all of it if that is quick, else 64 rows - "
    "and a wrong one "
    "is not written. A file with the tensor indices is one of sparse decode: q, kv_cache, and optionally "
    "topk_length, "
    "extra_kv_cache, extra_indices, extra_topk_length and attn_sink, with \"kv_format\" in its metadata. One "
    "with kv in "
    "place of kv_cache is one of sparse prefill, without extra tensors; --out gets max_logits, too.\n"
    "\n"
    "Examples\n"
    "  flashmla run batch.safetensors --check\n"
    "  flashmla run batch.safetensors --out result.safetensors --threads 2 --repeat 5\n"
    "  flashmla run batch.safetensors --kernel ref --no-causal --log-base 2\n"
    "  flashmla run batch.safetensors --device cuda:0 --check\n"
    "  flashmla make-input sparse.safetensors --op sparse_decode --cache fp8_656\n"
    "  flashmla run sparse.safetensors --device cuda:0 --check\n"
    "  flashmla make-input prompt.safetensors --op sparse_prefill --query-tokens 64 --seq-len 8192\n"
    "  flashmla run prompt.safetensors --check --out result.safetensors\n"
    "  flashmla make-input - --batch 2 | flashmla run - --check\n",
    OPERAND_INPUT,
    NULL};

/* Everything one call needs, and what it made. */
struct job {
    struct safetensors_file *file;
    bool sparse, prompt;              /* sparse decode, sparse prefill; else dense decode */
    struct input input;               /* of dense decode */
    struct sparse_input sparse_input; /* of sparse decode */
    int64_t out_shape[4], lse_shape[3];
    fmla_tensor out, lse;
    fmla_dense_decode_args args; /* in host memory */
    fmla_sparse_decode_args sparse_args;
    fmla_device device;
    struct gpu_call gpu; /* the same on the GPU, if that is where it runs */
    struct gpu_sparse gpu_sparse;
    struct run_prefill prefill;
    struct safetensors_writer *writer;
    struct outfile *json;
    struct run_told told;
};

/* The call where it runs. */
static const fmla_dense_decode_args *dense_call(const struct job *job)
{
    return device_is_gpu(job->device) ? &job->gpu.args : &job->args;
}

static const fmla_sparse_decode_args *sparse_call(const struct job *job)
{
    return device_is_gpu(job->device) ? &job->gpu_sparse.args : &job->sparse_args;
}

static const fmla_sparse_prefill_args *prefill_call(const struct job *job)
{
    return device_is_gpu(job->device) ? &job->prefill.gpu.args : &job->prefill.args;
}

static int exit_of(fmla_status refused)
{
    return refused == FMLA_UNSUPPORTED ? EXIT_UNSUPPORTED : EXIT_FAILED;
}

static bool library_fault(const char *path, fmla_status status, int *exit_code, struct fault *fault)
{
    *exit_code = exit_of(status);
    return fault_set(fault, "%s: %s", path, fmla_last_error());
}

static void set_sparse_options(struct job *job, const struct run_options *options)
{
    fmla_sparse_decode_args *args = &job->sparse_args;
    args->kernel = options->kernel;
    args->softmax_scale =
        (float)(options->scale_given ? options->softmax_scale : job->sparse_input.softmax_scale);
    args->lse_empty = job->args.lse_empty, args->log_base = job->args.log_base;
    args->batch_invariant = options->batch_invariant;
}

static void set_options(struct job *job, const struct run_options *options)
{
    fmla_dense_decode_args *args = &job->args;
    args->kernel = options->kernel;
    args->causal = options->causal || (job->input.causal && !options->no_causal);
    args->softmax_scale = (float)(options->scale_given ? options->softmax_scale : job->input.softmax_scale);
    args->lse_empty =
        options->lse_empty ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    args->log_base = options->log_base ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
    args->batch_invariant = options->batch_invariant;
}

bool run_rows(const char *path, const int64_t *shape, int dimensions, int64_t *rows, struct fault *fault)
{
    int64_t bytes;
    *rows = 1;
    bool good = true;
    for (int i = 0; i < dimensions; i++) good = good && !__builtin_mul_overflow(*rows, shape[i], rows);
    return (good && !__builtin_mul_overflow(*rows, (int64_t)RUN_D_V * (int64_t)sizeof(float), &bytes)) ||
           fault_set(fault, "%s: tensor \"q\": counts more rows than memory can hold", path);
}

/* Results of the shapes that q asks for. */
static bool make_results(struct job *job, const char *path, struct fault *fault)
{
    const fmla_tensor *q = job->sparse ? &job->sparse_input.q : &job->input.q;
    int64_t rows;
    if (!run_rows(path, q->shape, 3, &rows, fault)) return false;
    memcpy(job->out_shape, q->shape, 3 * sizeof *q->shape);
    job->out_shape[3] = RUN_D_V;
    job->lse_shape[0] = q->shape[0], job->lse_shape[1] = q->shape[2], job->lse_shape[2] = q->shape[1];
    job->out = (fmla_tensor){.data = calloc((size_t)rows * RUN_D_V + 1, sizeof(uint16_t)),
                             .device = q->device,
                             .ndim = 4,
                             .dtype = q->dtype,
                             .shape = job->out_shape};
    job->lse = (fmla_tensor){.data = calloc((size_t)rows + 1, sizeof(float)),
                             .device = q->device,
                             .ndim = 3,
                             .dtype = dtype_of(FMLA_TYPE_FLOAT, 32),
                             .shape = job->lse_shape};
    if (job->out.data && job->lse.data) return true;
    return fault_set(fault, "%s: no memory for the results of %" PRId64 " rows", path, rows);
}

/* The call is copied to the GPU. */
static bool prepare_on_gpu(struct job *job, const char *path, int *exit_code, struct fault *fault)
{
    fmla_status refused;
    struct fault why;
    if (job->sparse ? gpu_sparse_open(&job->gpu_sparse, job->device, &job->sparse_args, &refused, &why)
                    : gpu_call_open(&job->gpu, job->device, &job->args, &refused, &why))
        return true;
    *exit_code = exit_of(refused);
    return fault_set(fault, "%s: %s", path, why.text);
}

static bool prepare_sparse(struct job *job, const char *path, const struct run_options *options,
                           int *exit_code, struct fault *fault)
{
    struct sparse_input *input = &job->sparse_input;
    if (!sparse_input_view(input, job->file, path, fault) || !make_results(job, path, fault)) return false;
    job->sparse_args = FMLA_INIT(fmla_sparse_decode_args);
    fmla_sparse_decode_args *args = &job->sparse_args;
    args->q = &input->q, args->kv_cache = &input->kv_cache, args->indices = &input->indices;
    args->topk_length = input_optional(&input->topk_length);
    args->extra_kv_cache = input_optional(&input->extra_kv_cache);
    args->extra_indices = input_optional(&input->extra_indices);
    args->extra_topk_length = input_optional(&input->extra_topk_length);
    args->attn_sink = input_optional(&input->attn_sink);
    args->out = &job->out, args->lse = &job->lse, args->kv_format = input->kv_format;
    set_options(job, options); /* what the output file tells */
    set_sparse_options(job, options);
    if (device_is_gpu(job->device)) return prepare_on_gpu(job, path, exit_code, fault);
    const fmla_status status = sparse_call_workspace(args);
    if (status != FMLA_OK) return library_fault(path, status, exit_code, fault);
    return args->workspace ||
           fault_set(fault, "%s: no memory for a workspace of %zu bytes", path, args->workspace_size);
}

static bool prepare(struct job *job, const char *path, const struct run_options *options, int *exit_code,
                    struct fault *fault)
{
    fmla_status refused;
    if (job->prompt) {
        if (run_prefill_open(&job->prefill, job->file, path, options, job->device, &refused, fault))
            return true;
        *exit_code = exit_of(refused);
        return false;
    }
    if (job->sparse) return prepare_sparse(job, path, options, exit_code, fault);
    if (!input_view(&job->input, job->file, path, fault) || !make_results(job, path, fault)) return false;
    job->args = FMLA_INIT(fmla_dense_decode_args);
    fmla_dense_decode_args *args = &job->args;
    args->q = &job->input.q, args->kv_cache = &job->input.kv_cache, args->seqlens = &job->input.seqlens;
    args->block_table = input_optional(&job->input.block_table);
    args->attn_sink = input_optional(&job->input.attn_sink);
    args->out = &job->out, args->lse = &job->lse;
    set_options(job, options);
    if (device_is_gpu(job->device)) return prepare_on_gpu(job, path, exit_code, fault);
    const fmla_status status = call_workspace(args);
    if (status != FMLA_OK) return library_fault(path, status, exit_code, fault);
    return args->workspace ||
           fault_set(fault, "%s: no memory for a workspace of %zu bytes", path, args->workspace_size);
}

/* What the output file gets, in its order; NULL after the last one. */
struct results {
    const char *name[4];
    const fmla_tensor *tensor[4];
};

static struct results results_of(const struct job *job)
{
    const struct run_prefill *p = &job->prefill;
    if (job->prompt)
        return (struct results){{"out", "max_logits", "lse"}, {&p->out, &p->max_logits, &p->lse}};
    return (struct results){{"out", "lse"}, {&job->out, &job->lse}};
}

static bool open_output(struct job *job, const struct run_options *options, struct fault *fault)
{
    const struct results results = results_of(job);
    struct safetensors_declaration tensors[3];
    size_t count = 0;
    for (; results.name[count]; count++) {
        const fmla_tensor *tensor = results.tensor[count];
        tensors[count] =
            (struct safetensors_declaration){results.name[count], tensor->dtype, tensor->ndim, {0}};
        memcpy(tensors[count].shape, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
    }
    const struct safetensors_note notes[] = {{"lse_empty", options->lse_empty ? "neg" : "pos"},
                                             {"log_base", options->log_base ? "2" : "e"}};
    job->writer = safetensors_create(options->out, tensors, count, notes, 2, fault);
    return job->writer != NULL;
}

static bool write_output(struct job *job, struct fault *fault)
{
    const struct results results = results_of(job);
    struct safetensors_writer *writer = job->writer;
    for (int i = 0; results.name[i]; i++) {
        const fmla_tensor *tensor = results.tensor[i];
        size_t bytes = tensor->dtype.bits / 8;
        for (int d = 0; d < tensor->ndim; d++) bytes *= (size_t)tensor->shape[d];
        if (!safetensors_write(writer, tensor->data, bytes, fault)) return false;
    }
    job->writer = NULL; /* commit frees it */
    return safetensors_commit(writer, fault);
}

static void *stream_of(const struct job *job)
{
    return job->prompt   ? prefill_call(job)->stream
           : job->sparse ? sparse_call(job)->stream
                         : dense_call(job)->stream;
}

/* One call where it runs, and how long it took. */
static bool call_once(struct job *job, double *seconds, fmla_status *status, struct fault *fault)
{
    const double start = timing_now();
    *status = job->prompt   ? fmla_sparse_prefill(prefill_call(job))
              : job->sparse ? fmla_sparse_decode(sparse_call(job))
                            : fmla_dense_decode(dense_call(job));
    if (*status == FMLA_OK && device_is_gpu(job->device) && !gpu_stream_wait(stream_of(job), fault))
        return false;
    *seconds = timing_now() - start;
    return true;
}

/* The results into host memory. */
static bool fetch(struct job *job, struct fault *fault)
{
    if (!device_is_gpu(job->device)) return true;
    if (job->prompt) return gpu_prefill_results(&job->prefill.gpu, fault);
    return job->sparse ? gpu_sparse_results(&job->gpu_sparse, fault) : gpu_call_results(&job->gpu, fault);
}

static bool compute(struct job *job, const char *path, int64_t repeat, int *exit_code, struct fault *fault)
{
    double *seconds = malloc((size_t)repeat * sizeof *seconds);
    if (!seconds) return fault_set(fault, "no memory for %" PRId64 " times", repeat);
    fmla_status status = FMLA_OK;
    struct progress progress;
    bool good = true;
    progress_begin(&progress, "computing");
    for (int64_t i = 0; good && i < repeat && status == FMLA_OK; i++) {
        good = call_once(job, &seconds[i], &status, fault);
        progress_update(&progress, i + 1, repeat);
    }
    progress_wipe(&progress);
    if (status == FMLA_OK) {
        qsort(seconds, (size_t)repeat, sizeof *seconds, call_by_value);
        job->told.seconds = seconds[repeat / 2], job->told.runs = repeat;
    }
    free(seconds);
    if (status != FMLA_OK) return library_fault(path, status, exit_code, fault);
    return good && fetch(job, fault);
}

/* ---- Report ---- */

static const char *operation_name(const struct job *job)
{
    return job->prompt ? "sparse_prefill" : job->sparse ? "sparse_decode" : "dense_decode";
}

static void ask_kernel(struct job *job)
{
    const char *name = "";
    if (job->prompt) /* the call has succeeded: so does this */
        fmla_sparse_prefill_kernel(prefill_call(job), &name);
    else if (job->sparse)
        fmla_sparse_decode_kernel(sparse_call(job), &name);
    else
        fmla_dense_decode_kernel(dense_call(job), &name);
    job->told.kernel = name;
}

/* What all operations tell of a call. */
static void print_call(struct job *job, double flop, double bytes)
{
    struct run_told *told = &job->told;
    ask_kernel(job);
    told->operation = operation_name(job), told->device = job->device;
    told->q = job->prompt ? job->prefill.args.q : job->sparse ? job->sparse_args.q : job->args.q;
    told->workspace = job->prompt   ? prefill_call(job)->workspace_size
                      : job->sparse ? sparse_call(job)->workspace_size
                                    : dense_call(job)->workspace_size;
    told->flop = flop, told->bytes = bytes;
    if (device_is_gpu(job->device))
        printf("%-12s %s on cuda:%d\n", "kernel", told->kernel, job->device.id);
    else
        printf("%-12s %s, %d threads\n", "kernel", told->kernel, (int)fmla_num_threads());
    printf("%-12s %zu bytes\n", "workspace", told->workspace);
    printf("%-12s %.3f ms, median of %" PRId64 "\n", "time", 1e3 * told->seconds, told->runs);
    printf("%-12s %.2f GFLOP/s, %.2f GB/s\n", "speed", 1e-9 * flop / told->seconds,
           1e-9 * bytes / told->seconds);
}

static void print_cache(const char *name, const fmla_tensor *cache, const fmla_tensor *indices,
                        const char *format)
{
    if (!cache) return;
    const int64_t *s = cache->shape;
    printf("%-12s [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "] %s, %" PRId64 " indices a token\n",
           name, s[0], s[1], s[2], s[3], format, indices->shape[2]);
}

static void print_sparse_report(struct job *job)
{
    const fmla_sparse_decode_args *args = &job->sparse_args;
    const int64_t *q = args->q->shape;
    const struct sparse_work work = sparse_work(args);
    const bool bf16 = args->q->dtype.code == FMLA_TYPE_BFLOAT;
    const char *format = args->kv_format ? input_format_name(args->kv_format) : bf16 ? "BF16" : "FP16";
    printf("%-12s [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "] %s%s\n", "q", q[0], q[1], q[2], q[3],
           bf16 ? "bf16" : "fp16", args->attn_sink ? ", sink" : "");
    print_cache("kv_cache", args->kv_cache, args->indices, format);
    print_cache("extra cache", args->extra_kv_cache, args->extra_indices, format);
    printf("%-12s %.0f (token, key) pairs attended\n", "keys", work.keys);
    print_call(job, work.flop, work.bytes);
}

static void print_report(struct job *job)
{
    if (job->prompt) {
        const struct prefill_work done = prefill_work(&job->prefill.args);
        run_prefill_print(&job->prefill);
        print_call(job, done.flop, done.bytes);
        return;
    }
    if (job->sparse) {
        print_sparse_report(job);
        return;
    }
    const fmla_dense_decode_args *args = &job->args;
    const int64_t *q = args->q->shape, *cache = args->kv_cache->shape;
    const struct call_work work = call_work(args);
    printf("%-12s [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "] %s%s%s\n", "q", q[0], q[1], q[2], q[3],
           args->q->dtype.code == FMLA_TYPE_BFLOAT ? "bf16" : "fp16", args->causal ? ", causal" : "",
           args->attn_sink ? ", sink" : "");
    printf("%-12s [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]%s\n", "kv_cache", cache[0], cache[1],
           cache[2], cache[3], args->block_table ? "" : ", no block table");
    printf("%-12s %" PRId64 " of %" PRId64 " requests; %.0f (row, key) pairs attended\n", "keys", work.keys,
           q[0], work.pairs);
    print_call(job, work.flop, work.bytes);
}

static bool check(struct job *job, struct fault *fault)
{
    struct check_result result;
    if (!(job->prompt   ? prefill_check_against_oracle(&job->prefill.args, &result, fault)
          : job->sparse ? sparse_check_against_oracle(&job->sparse_args, &result, fault)
                        : check_against_oracle(&job->args, &result, fault)))
        return false;
    printf("%-12s %s: %" PRId64 " of %" PRId64 " rows against the oracle; out: worst difference %.2e, cosine "
           "%.1e; lse: worst difference %.2e",
           "check", result.passed ? "PASS" : "FAIL", result.rows, result.all_rows, result.out.worst_abs,
           compare_cosine(&result.out), result.lse.worst_abs);
    job->told.check = result, job->told.checked = true;
    if (job->prompt) printf("; max_logits: worst difference %.2e", result.max_logits.worst_abs);
    putchar('\n');
    if (result.passed) return true;
    if (result.max_logits.wrong)
        return fault_set(fault,
                         "the result is wrong: %" PRId64 " values of max_logits differ from the oracle",
                         result.max_logits.wrong);
    return fault_set(
        fault, "the result is wrong: %" PRId64 " values of out and %" PRId64 " of lse differ from the oracle",
        result.out.wrong, result.lse.wrong);
}

/* A result that is wrong is told all the same; then `fault` says that it is. */
static bool write_json(struct job *job, bool right, struct fault *fault)
{
    struct fault why;
    if (run_json(job->json, &job->told, &why)) {
        struct outfile *json = job->json;
        job->json = NULL; /* commit frees it */
        if (outfile_commit(json, &why)) return true;
    }
    return right ? fault_set(fault, "%s", why.text) : false;
}

static bool work(struct job *job, const char *path, const struct run_options *options, int *exit_code,
                 struct fault *fault)
{
    if (!prepare(job, path, options, exit_code, fault)) return false;
    if (options->out && !open_output(job, options, fault)) return false;
    if (options->json && !(job->json = outfile_open_lines(options->json, fault))) return false;
    if (!compute(job, path, options->repeat, exit_code, fault)) return false;
    print_report(job);
    const bool right = !options->check || check(job, fault);
    if ((right || job->told.checked) && job->json && !write_json(job, right, fault)) return false;
    if (!right) return false;
    if (!options->out) return true;
    if (!write_output(job, fault)) return false;
    printf("%-12s %s\n", "written", options->out);
    return true;
}

/* Of the open file, whose name in messages is `name`. */
static int run_opened(struct job *job, const char *name, const struct run_options *options)
{
    struct fault fault = {""};
    int exit_code = EXIT_FAILED;
    const enum input_operation operation = input_operation(job->file);
    job->sparse = operation == INPUT_SPARSE_DECODE, job->prompt = operation == INPUT_SPARSE_PREFILL;
    if ((job->sparse || job->prompt) && (options->causal || options->no_causal))
        return complain(&run, EXIT_USAGE, "--%scausal: not with sparse %s", options->causal ? "" : "no-",
                        job->sparse ? "decode" : "prefill");
    if (job->prompt && options->batch_invariant)
        return complain(&run, EXIT_USAGE, "--batch-invariant: not with sparse prefill");
    if (!kernel_exists(operation_name(job), options->kernel, &fault))
        return complain(&run, EXIT_USAGE, "%s", fault.text);
    const bool good = work(job, name, options, &exit_code, &fault);
    safetensors_abandon(job->writer), outfile_abandon(job->json);
    gpu_call_close(&job->gpu), gpu_sparse_close(&job->gpu_sparse);
    free(job->args.workspace), free(job->sparse_args.workspace), free(job->out.data), free(job->lse.data);
    run_prefill_close(&job->prefill);
    return good ? EXIT_GOOD : complain(&run, exit_code, "%s", fault.text);
}

static int run_file(const char *path, const struct run_options *options)
{
    struct job job = {0};
    struct fault fault = {""};
    if (options->causal && options->no_causal)
        return complain(&run, EXIT_USAGE, "--causal: not together with --no-causal");
    if (!isfinite((float)options->softmax_scale))
        return complain(&run, EXIT_USAGE, "--softmax-scale: %g must be finite in fp32",
                        options->softmax_scale);
    if (options->scale_given && (float)options->softmax_scale == 0.0f)
        return complain(&run, EXIT_USAGE,
                        "--softmax-scale: %g is 0 in fp32, must be another number; without the option it is "
                        "1/sqrt(d_qk)",
                        options->softmax_scale);
    if (!device_parse(options->device, &job.device))
        return complain(&run, EXIT_USAGE, "--device: '%s' must be cpu or cuda:N", options->device);
    if (options->threads && fmla_set_num_threads((int32_t)options->threads) != FMLA_OK)
        return complain(&run, EXIT_FAILED, "%s", fmla_last_error());
    job.file = safetensors_open(path, &fault);
    if (!job.file) return complain(&run, EXIT_FAILED, "%s", fault.text);
    const int exit_code = run_opened(&job, infile_name(path), options);
    safetensors_close(job.file);
    return exit_code;
}

int command_run(int argc, char **argv)
{
    struct run_options o = {.repeat = 3};
    const char *path = NULL;
    const struct option options[] = {
        {"--out", OPTION_OUTPUT, &o.out, "FILE", "write out and lse there", 0, 0, {NULL}, NULL},
        OPTION_JSON(&o.json),
        {"--device",
         OPTION_TEXT,
         &o.device,
         "DEVICE",
         "cpu (the default) or cuda:N",
         0,
         0,
         {"cpu", "cuda:0", NULL},
         NULL},
        {"--kernel",
         OPTION_TEXT,
         &o.kernel,
         "NAME",
         "force a kernel; flashmla info lists them",
         0,
         0,
         {NULL},
         NULL},
        {"--causal",
         OPTION_ON,
         &o.causal,
         NULL,
         "token j of s_q sees keys t <= s_k - s_q + j",
         0,
         0,
         {NULL},
         NULL},
        {"--no-causal", OPTION_ON, &o.no_causal, NULL, "every token sees every key", 0, 0, {NULL}, NULL},
        {"--softmax-scale",
         OPTION_REAL,
         &o.softmax_scale,
         "X",
         "default 1/sqrt(d_qk)",
         0,
         0,
         {NULL},
         &o.scale_given},
        {"--batch-invariant",
         OPTION_ON,
         &o.batch_invariant,
         NULL,
         "same bits for a request whatever else is in the batch",
         0,
         0,
         {NULL},
         NULL},
        {"--lse-empty",
         OPTION_CHOICE,
         &o.lse_empty,
         "SIGN",
         "lse of a row without keys: pos (infinity, the default) or neg",
         0,
         0,
         {"pos", "neg", NULL},
         NULL},
        {"--log-base",
         OPTION_CHOICE,
         &o.log_base,
         "BASE",
         "of lse: e (the default) or 2",
         0,
         0,
         {"e", "2", NULL},
         NULL},
        {"--repeat", OPTION_COUNT, &o.repeat, "N", "times to compute; default 3", 1, 100000, {NULL}, NULL},
        {"--check", OPTION_ON, &o.check, NULL, "compare with the oracle", 0, 0, {NULL}, NULL},
        {"--threads",
         OPTION_COUNT,
         &o.threads,
         "N",
         "default: OMP_NUM_THREADS, else all cores",
         1,
         4096,
         {NULL},
         NULL},
        {0}};
    switch (options_parse(&run, options, argc, argv, &path)) {
    case OPTIONS_HELPED: return EXIT_GOOD;
    case OPTIONS_WRONG: return EXIT_USAGE;
    case OPTIONS_PARSED: break;
    }
    return run_file(path, &o);
}
