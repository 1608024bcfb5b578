/* SPDX-License-Identifier: MIT */
#include "gpu_call.h"

#include "call.h"

#include "gpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

bool device_parse(const char *text, fmla_device *device)
{
    char *end;
    *device = (fmla_device){FMLA_DEVICE_CPU, 0};
    if (!text || !strcmp(text, "cpu")) return true;
    if (strncmp(text, "cuda:", 5) != 0 || text[5] < '0' || text[5] > '9') return false;
    const long id = strtol(text + 5, &end, 10);
    *device = (fmla_device){FMLA_DEVICE_CUDA, (int32_t)id};
    return !*end && id < 1024;
}

static const fmla_tensor **tensors_of(fmla_dense_decode_args *args, int i)
{
    const fmla_tensor **all[GPU_CALL_TENSORS] = {&args->q,       &args->kv_cache,  &args->block_table,
                                                 &args->seqlens, &args->attn_sink, &args->out,
                                                 &args->lse};
    return all[i];
}

/* The library has found the sizes to be good. */
static size_t bytes_of(const fmla_tensor *tensor)
{
    size_t bytes = tensor->dtype.bits / 8;
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

static bool check_table(const fmla_dense_decode_args *host, struct fault *fault)
{
    const int64_t page_size = host->kv_cache->shape[1], pages = host->kv_cache->shape[0];
    if (!host->block_table) return true;
    const int32_t *table = host->block_table->data;
    const int64_t max_pages = host->block_table->shape[1];
    for (int64_t r = 0; r < host->q->shape[0]; r++)
        for (int64_t i = 0; i * page_size < call_length(host, r); i++)
            if (table[r * max_pages + i] < 0 || table[r * max_pages + i] >= pages)
                return fault_set(
                    fault, "block_table[%" PRId64 ", %" PRId64 "]: is %d, must be one of %" PRId64 " pages",
                    r, i, table[r * max_pages + i], pages);
    return true;
}

static bool refused(fmla_status *status, fmla_status from, struct fault *fault)
{
    *status = from;
    return from != FMLA_OK && !fault_set(fault, "%s", fmla_last_error());
}

static bool open_workspace(struct gpu_call *call, fmla_status *status, struct fault *fault)
{
    fmla_dense_decode_args *args = &call->args;
    size_t bytes = 0;
    gpu_free(args->workspace);
    args->workspace = NULL;
    if (refused(status, fmla_dense_decode_workspace_size(args, &bytes, NULL), fault)) return false;
    args->workspace_size = bytes;
    return gpu_alloc(&args->workspace, bytes, fault);
}

bool gpu_call_open(struct gpu_call *call, fmla_device device, const fmla_dense_decode_args *host,
                   fmla_status *status, struct fault *fault)
{
    *status = FMLA_OK;
    call->device = device, call->args = *host;
    call->args.workspace = call->args.stream = NULL;
    if (!gpu_open(device.id, fault)) {
        *status = FMLA_UNSUPPORTED;
        return false;
    }
    for (int i = 0; i < GPU_CALL_TENSORS; i++) {
        const fmla_tensor **tensor = tensors_of(&call->args, i);
        if (!*tensor) continue;
        call->memory[i].host = *tensor;
        call->tensor[i] = **tensor;
        call->tensor[i].device = device, call->tensor[i].data = NULL;
        *tensor = &call->tensor[i];
    }
    if (!open_workspace(call, status, fault) || !check_table(host, fault)) return false;
    for (int i = 0; i < GPU_CALL_TENSORS; i++) {
        const fmla_tensor *from = call->memory[i].host;
        if (!from) continue;
        if (!gpu_alloc(&call->memory[i].device, bytes_of(from), fault) ||
            !gpu_upload(call->memory[i].device, from->data, bytes_of(from), fault))
            return false;
        call->tensor[i].data = call->memory[i].device;
    }
    return gpu_stream_open(&call->args.stream, fault);
}

static fmla_decode_plan_args plan_args(const struct gpu_call *call)
{
    const fmla_dense_decode_args *args = &call->args;
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    plan.seqlens = args->seqlens, plan.stream = args->stream;
    plan.s_q = args->q->shape[1], plan.h_q = args->q->shape[2], plan.h_kv = args->kv_cache->shape[2];
    plan.capacity = args->kv_cache->shape[1] * (args->block_table ? args->block_table->shape[1] : 1);
    plan.num_partitions = args->num_partitions;
    plan.plan = call->plan, plan.plan_size = args->plan_size;
    return plan;
}

bool gpu_call_plan_open(struct gpu_call *call, fmla_status *status, struct fault *fault)
{
    const fmla_decode_plan_args plan = plan_args(call);
    size_t bytes = 0;
    if (refused(status, fmla_decode_plan_size(&plan, &bytes), fault)) return false;
    if (!gpu_alloc(&call->plan, bytes, fault)) return false;
    call->args.plan = call->plan, call->args.plan_size = bytes;
    if (refused(status, gpu_call_plan(call), fault)) return false;
    return gpu_stream_wait(call->args.stream, fault) && open_workspace(call, status, fault);
}

fmla_status gpu_call_plan(const struct gpu_call *call)
{
    const fmla_decode_plan_args plan = plan_args(call);
    return fmla_decode_plan(&plan);
}

bool gpu_call_results(const struct gpu_call *call, struct fault *fault)
{
    if (!gpu_stream_wait(call->args.stream, fault)) return false;
    for (int i = 0; i < GPU_CALL_TENSORS; i++) {
        const fmla_tensor *to = call->memory[i].host;
        if (!to || (&call->tensor[i] != call->args.out && &call->tensor[i] != call->args.lse)) continue;
        if (!gpu_download(to->data, call->memory[i].device, bytes_of(to), fault)) return false;
    }
    return true;
}

void gpu_call_close(struct gpu_call *call)
{
    if (!device_is_gpu(call->device)) return;
    for (int i = 0; i < GPU_CALL_TENSORS; i++) gpu_free(call->memory[i].device);
    gpu_free(call->plan), gpu_free(call->args.workspace);
    gpu_stream_close(call->args.stream);
    memset(call, 0, sizeof *call);
}
