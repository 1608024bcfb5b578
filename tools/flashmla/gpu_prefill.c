/* SPDX-License-Identifier: MIT */
#include "gpu_prefill.h"

#include "gpu.h"

#include <string.h>

/* Inputs, then from FIRST_RESULT on what a call writes. */
enum { FIRST_RESULT = 5 };

static const fmla_tensor **tensor_of(fmla_sparse_prefill_args *args, int i)
{
    const fmla_tensor **all[GPU_PREFILL_TENSORS] = {&args->q,           &args->kv,        &args->indices,
                                                    &args->topk_length, &args->attn_sink, &args->out,
                                                    &args->max_logits,  &args->lse};
    return all[i];
}

static size_t bytes_of(const fmla_tensor *tensor)
{
    size_t bytes = tensor->dtype.bits / 8;
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

bool gpu_prefill_open(struct gpu_prefill *call, fmla_device device, const fmla_sparse_prefill_args *host,
                      fmla_status *status, struct fault *fault)
{
    call->device = device, call->args = *host;
    call->args.workspace = call->args.stream = NULL;
    *status = FMLA_UNSUPPORTED;
    if (!gpu_open(device.id, fault)) return false;
    for (int i = 0; i < GPU_PREFILL_TENSORS; i++) {
        const fmla_tensor **tensor = tensor_of(&call->args, i);
        if (!*tensor) continue;
        call->host[i] = *tensor;
        call->tensor[i] = **tensor;
        call->tensor[i].device = device, call->tensor[i].data = NULL;
        *tensor = &call->tensor[i];
    }
    *status = fmla_sparse_prefill_workspace_size(&call->args, &call->args.workspace_size, NULL);
    if (*status != FMLA_OK) return fault_set(fault, "%s", fmla_last_error());
    if (!gpu_alloc(&call->args.workspace, call->args.workspace_size, fault)) return false;
    for (int i = 0; i < GPU_PREFILL_TENSORS; i++) {
        const fmla_tensor *from = call->host[i];
        if (!from) continue;
        if (!gpu_alloc(&call->tensor[i].data, bytes_of(from), fault) ||
            !gpu_upload(call->tensor[i].data, from->data, bytes_of(from), fault))
            return false;
    }
    return gpu_stream_open(&call->args.stream, fault);
}

bool gpu_prefill_results(const struct gpu_prefill *call, struct fault *fault)
{
    if (!gpu_stream_wait(call->args.stream, fault)) return false;
    for (int i = FIRST_RESULT; i < GPU_PREFILL_TENSORS; i++) {
        const fmla_tensor *to = call->host[i];
        if (to && !gpu_download(to->data, call->tensor[i].data, bytes_of(to), fault)) return false;
    }
    return true;
}

void gpu_prefill_close(struct gpu_prefill *call)
{
    if (call->device.device_type != FMLA_DEVICE_CUDA) return;
    for (int i = 0; i < GPU_PREFILL_TENSORS; i++)
        if (call->host[i]) gpu_free(call->tensor[i].data);
    gpu_free(call->args.workspace);
    gpu_stream_close(call->args.stream);
    memset(call, 0, sizeof *call);
}
