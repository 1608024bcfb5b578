/* SPDX-License-Identifier: MIT */
#include "gpu_sparse.h"

#include "gpu.h"

#include <string.h>

static const fmla_tensor **tensor_of(fmla_sparse_decode_args *args, int i)
{
    const fmla_tensor **all[GPU_SPARSE_TENSORS] = {&args->q,
                                                   &args->kv_cache,
                                                   &args->indices,
                                                   &args->topk_length,
                                                   &args->attn_sink,
                                                   &args->extra_kv_cache,
                                                   &args->extra_indices,
                                                   &args->extra_topk_length,
                                                   &args->out,
                                                   &args->lse};
    return all[i];
}

static size_t bytes_of(const fmla_tensor *tensor)
{
    size_t bytes = tensor->dtype.bits / 8;
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

static bool refused(fmla_status *status, fmla_status from, struct fault *fault)
{
    *status = from;
    return from != FMLA_OK && !fault_set(fault, "%s", fmla_last_error());
}

static bool open_workspace(struct gpu_sparse *call, fmla_status *status, struct fault *fault)
{
    fmla_sparse_decode_args *args = &call->args;
    size_t bytes = 0;
    gpu_free(args->workspace);
    args->workspace = NULL;
    if (refused(status, fmla_sparse_decode_workspace_size(args, &bytes, NULL), fault)) return false;
    args->workspace_size = bytes;
    return gpu_alloc(&args->workspace, bytes, fault);
}

bool gpu_sparse_open(struct gpu_sparse *call, fmla_device device, const fmla_sparse_decode_args *host,
                     fmla_status *status, struct fault *fault)
{
    *status = FMLA_OK;
    call->device = device, call->args = *host;
    call->args.workspace = call->args.stream = NULL;
    if (!gpu_open(device.id, fault)) {
        *status = FMLA_UNSUPPORTED;
        return false;
    }
    for (int i = 0; i < GPU_SPARSE_TENSORS; i++) {
        const fmla_tensor **tensor = tensor_of(&call->args, i);
        if (!*tensor) continue;
        call->host[i] = *tensor;
        call->tensor[i] = **tensor;
        call->tensor[i].device = device, call->tensor[i].data = NULL;
        *tensor = &call->tensor[i];
    }
    if (!open_workspace(call, status, fault)) return false;
    for (int i = 0; i < GPU_SPARSE_TENSORS; i++) {
        const fmla_tensor *from = call->host[i];
        if (!from) continue;
        if (!gpu_alloc(&call->tensor[i].data, bytes_of(from), fault) ||
            !gpu_upload(call->tensor[i].data, from->data, bytes_of(from), fault))
            return false;
    }
    return gpu_stream_open(&call->args.stream, fault);
}

static fmla_decode_plan_args plan_args(const struct gpu_sparse *call)
{
    const fmla_sparse_decode_args *args = &call->args;
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    plan.sparse = 1, plan.target = call->device, plan.stream = args->stream;
    plan.b = (int32_t)args->q->shape[0], plan.s_q = args->q->shape[1], plan.h_q = args->q->shape[2];
    plan.topk = args->indices->shape[2], plan.topk_length = args->topk_length;
    plan.extra_topk = args->extra_indices ? args->extra_indices->shape[2] : 0;
    plan.extra_topk_length = args->extra_topk_length;
    plan.num_partitions = args->num_partitions;
    plan.plan = call->plan, plan.plan_size = args->plan_size;
    return plan;
}

bool gpu_sparse_plan_open(struct gpu_sparse *call, fmla_status *status, struct fault *fault)
{
    const fmla_decode_plan_args plan = plan_args(call);
    size_t bytes = 0;
    if (refused(status, fmla_decode_plan_size(&plan, &bytes), fault)) return false;
    if (!gpu_alloc(&call->plan, bytes, fault)) return false;
    call->args.plan = call->plan, call->args.plan_size = bytes;
    if (refused(status, gpu_sparse_plan(call), fault)) return false;
    return gpu_stream_wait(call->args.stream, fault) && open_workspace(call, status, fault);
}

fmla_status gpu_sparse_plan(const struct gpu_sparse *call)
{
    const fmla_decode_plan_args plan = plan_args(call);
    return fmla_decode_plan(&plan);
}

bool gpu_sparse_results(const struct gpu_sparse *call, struct fault *fault)
{
    if (!gpu_stream_wait(call->args.stream, fault)) return false;
    for (int i = 0; i < GPU_SPARSE_TENSORS; i++) {
        const fmla_tensor *to = call->host[i], *from = &call->tensor[i];
        if (!to || (from != call->args.out && from != call->args.lse)) continue;
        if (!gpu_download(to->data, from->data, bytes_of(to), fault)) return false;
    }
    return true;
}

void gpu_sparse_close(struct gpu_sparse *call)
{
    if (call->device.device_type != FMLA_DEVICE_CUDA) return;
    for (int i = 0; i < GPU_SPARSE_TENSORS; i++)
        if (call->host[i]) gpu_free(call->tensor[i].data);
    gpu_free(call->plan), gpu_free(call->args.workspace);
    gpu_stream_close(call->args.stream);
    memset(call, 0, sizeof *call);
}
