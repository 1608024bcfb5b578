/* SPDX-License-Identifier: MIT */
#include "run.h"

#include "gpu_call.h"
#include "prefill_batch.h"

#include "elements.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fmla_tensor result(fmla_dtype dtype, int32_t ndim, const int64_t *shape, int64_t elements)
{
    return (fmla_tensor){.data = calloc((size_t)elements + 1, dtype.bits / 8),
                         .device = {FMLA_DEVICE_CPU, 0},
                         .ndim = ndim,
                         .dtype = dtype,
                         .shape = shape};
}

static bool make_results(struct run_prefill *run, const char *path, struct fault *fault)
{
    const fmla_tensor *q = &run->input.q;
    const fmla_dtype fp32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    int64_t rows;
    if (!run_rows(path, q->shape, 2, &rows, fault)) return false;
    memcpy(run->row_shape, q->shape, sizeof run->row_shape);
    memcpy(run->out_shape, q->shape, sizeof run->row_shape);
    run->out_shape[2] = RUN_D_V;
    run->out = result(q->dtype, 3, run->out_shape, rows * RUN_D_V);
    run->max_logits = result(fp32, 2, run->row_shape, rows);
    run->lse = result(fp32, 2, run->row_shape, rows);
    if (run->out.data && run->max_logits.data && run->lse.data) return true;
    return fault_set(fault, "%s: no memory for the results of %" PRId64 " rows", path, rows);
}

static void make_args(struct run_prefill *run, const struct run_options *options)
{
    fmla_sparse_prefill_args *args = &run->args;
    const struct prefill_input *input = &run->input;
    *args = FMLA_INIT(fmla_sparse_prefill_args);
    args->q = &input->q, args->kv = &input->kv, args->indices = &input->indices;
    args->topk_length = input_optional(&input->topk_length);
    args->attn_sink = input_optional(&input->attn_sink);
    args->out = &run->out, args->max_logits = &run->max_logits, args->lse = &run->lse;
    args->kv_format = input->kv_format;
    args->kernel = options->kernel;
    args->softmax_scale = (float)(options->scale_given ? options->softmax_scale : input->softmax_scale);
    args->lse_empty =
        options->lse_empty ? FMLA_LSE_EMPTY_NEGATIVE_INFINITY : FMLA_LSE_EMPTY_POSITIVE_INFINITY;
    args->log_base = options->log_base ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL;
}

bool run_prefill_open(struct run_prefill *run, const struct safetensors_file *file, const char *path,
                      const struct run_options *options, fmla_device device, fmla_status *refused,
                      struct fault *fault)
{
    struct fault why;
    *refused = FMLA_OK;
    if (!prefill_input_view(&run->input, file, path, fault) || !make_results(run, path, fault)) return false;
    make_args(run, options);
    if (device_is_gpu(device)) {
        if (gpu_prefill_open(&run->gpu, device, &run->args, refused, &why)) return true;
        return fault_set(fault, "%s: %s", path, why.text);
    }
    *refused = prefill_call_workspace(&run->args);
    if (*refused) return fault_set(fault, "%s: %s", path, fmla_last_error());
    return run->args.workspace ||
           fault_set(fault, "%s: no memory for a workspace of %zu bytes", path, run->args.workspace_size);
}

void run_prefill_close(struct run_prefill *run)
{
    gpu_prefill_close(&run->gpu);
    free(run->args.workspace), free(run->out.data), free(run->max_logits.data), free(run->lse.data);
}

void run_prefill_print(const struct run_prefill *run)
{
    const fmla_sparse_prefill_args *args = &run->args;
    const int64_t *q = args->q->shape, *kv = args->kv->shape;
    printf("%-12s [%" PRId64 ", %" PRId64 ", %" PRId64 "] bf16%s\n", "q", q[0], q[1], q[2],
           args->attn_sink ? ", sink" : "");
    printf("%-12s [", "kv");
    for (int i = 0; i < args->kv->ndim; i++) printf("%s%" PRId64, i ? ", " : "", kv[i]);
    printf("] %s, %" PRId64 " indices a token\n",
           args->kv_format ? input_format_name(args->kv_format) : "BF16", args->indices->shape[2]);
    printf("%-12s %.0f (token, key) pairs attended\n", "keys", prefill_work(args).keys);
}
