/* SPDX-License-Identifier: MIT */
#include "call.h"

#include "policy.h"

#include "gpu.h"

#include <stdlib.h>
#include <string.h>

bool device_parse(const char *text, fmla_device *device)
{
    char *end;
    *device = (fmla_device){FMLA_DEVICE_CPU, 0};
    if (!strcmp(text, "cpu")) return true;
    if (strncmp(text, "cuda:", 5) != 0 || text[5] < '0' || text[5] > '9') return false;
    const long id = strtol(text + 5, &end, 10);
    *device = (fmla_device){FMLA_DEVICE_CUDA, (int32_t)id};
    return !*end && id < 1024;
}

static void **stream_of(const struct call *gpu)
{
    return call_option(gpu, "stream");
}

bool call_to_gpu(struct call *gpu, fmla_device device, const struct call *host, fmla_status *status,
                 struct reason *reason)
{
    const struct policy *policy = &policies[host->op];
    *status = FMLA_UNSUPPORTED;
    call_describe(gpu, device, host); /* without memory: the library is asked first */
    if (!gpu_open(device.id, reason) || !call_workspace(gpu, status, reason)) return false;
    if (policy->check && !policy->check(host, reason)) return false;
    for (int i = 0; i < MAX_TENSORS; i++) {
        const fmla_tensor *from = &host->tensor[i];
        void *memory;
        if (!from->shape) continue;
        if (!gpu_alloc(&memory, call_bytes(from), reason)) return false;
        gpu->tensor[i].data = memory, gpu->owned[i] = true;
        if (!gpu_upload(memory, from->data, call_bytes(from), reason)) return false;
    }
    return gpu_stream_open(stream_of(gpu), reason);
}

bool call_plan_open(struct call *gpu, fmla_status *status, struct reason *reason)
{
    const struct policy *policy = &policies[gpu->op];
    size_t bytes = 0;
    if (!policy->plan) return true;
    if (call_refused(status, policy->plan(gpu, &bytes), reason) || !gpu_alloc(&gpu->plan, bytes, reason))
        return false;
    *(void **)call_option(gpu, "plan") = gpu->plan;
    *(size_t *)call_option(gpu, "plan_size") = bytes;
    if (call_refused(status, call_plan(gpu), reason)) return false;
    return call_wait(gpu, reason) && call_workspace(gpu, status, reason);
}

fmla_status call_plan(const struct call *gpu)
{
    return policies[gpu->op].plan(gpu, NULL);
}

bool call_wait(const struct call *gpu, struct reason *reason)
{
    return gpu_stream_wait(*stream_of(gpu), reason);
}

bool call_fetch(const struct call *gpu, const struct call *host, bool inputs, struct reason *reason)
{
    const struct member *member;
    if (!call_wait(gpu, reason)) return false;
    for (int i = 0; (member = call_member(gpu->op, i)); i++) {
        const fmla_tensor *to = &host->tensor[i];
        if (!to->shape || !(inputs || member->allowed & IS_OUTPUT)) continue;
        if (!gpu_download(to->data, gpu->tensor[i].data, call_bytes(to), reason)) return false;
    }
    return true;
}
