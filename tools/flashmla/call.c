/* SPDX-License-Identifier: MIT */
#include "call.h"

#include "gpu.h"
#include "timing.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The library's functions ----------------------------------------------------------------- */

fmla_status call_run(const struct call *call)
{
    return op_functions[call->op].run(&call->args);
}

bool call_time(const struct call *call, double *seconds, fmla_status *status, struct reason *reason)
{
    const double start = timing_now();
    if (call_refused(status, call_run(call), reason)) return false;
    if (device_is_gpu(call->device) && !call_wait(call, reason)) return false;
    *seconds = timing_now() - start;
    return true;
}

bool call_refused(fmla_status *status, fmla_status from, struct reason *reason)
{
    *status = from;
    return from != FMLA_OK && !reason_set(reason, "%s", fmla_last_error());
}

fmla_status call_kernel(const struct call *call, const char **name)
{
    if (op_functions[call->op].kernel) return op_functions[call->op].kernel(&call->args, name);
    const char *forced = *(const char **)call_option(call, "kernel");
    fmla_capability row = FMLA_INIT(fmla_capability);
    *name = forced ? forced : "none";
    for (int64_t i = 0; !forced && fmla_capabilities(call->device, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, descriptors[call->op].name) != 0 || !row.available || row.forced_only)
            continue;
        *name = row.kernel;
        break;
    }
    return FMLA_OK;
}

/* ---- Members --------------------------------------------------------------------------------- */

const struct member *call_member(enum operation op, int index)
{
    for (const struct member *member = descriptors[op].members; member->name; member++)
        if (member->kind == MEMBER_TENSOR && !index--) return member;
    return NULL;
}

struct form call_form(const struct member *member, int32_t rank)
{
    return form_of(member, rank != member->rank);
}

bool call_is_flat(const struct call *call)
{
    const struct member *member;
    for (int i = 0; (member = call_member(call->op, i)); i++)
        if (member->allowed & OR_FLAT && call->tensor[i].shape)
            return call->tensor[i].ndim == form_of(member, true).rank;
    return false;
}

bool call_of_plan(const struct member *member)
{
    return !strcmp(member->name, "partitions") || !strcmp(member->name, "num_splits");
}

void *call_option(const struct call *call, const char *name)
{
    return op_option(call->op, &call->args, name);
}

void *call_option_of(const struct call *call, enum member_kind kind)
{
    for (const struct member *m = descriptors[call->op].members; m->name; m++)
        if (m->kind == kind) return call_option(call, m->name);
    return NULL;
}

const fmla_tensor *call_tensor(const struct call *call, const char *name)
{
    const struct member *member;
    for (int i = 0; (member = call_member(call->op, i)); i++)
        if (call->tensor[i].shape && !strcmp(member->name, name)) return &call->tensor[i];
    return NULL;
}

int64_t call_size(const struct call *call, enum dimension dimension)
{
    const struct member *member;
    for (int i = 0; (member = call_member(call->op, i)); i++) {
        const fmla_tensor *tensor = &call->tensor[i];
        const struct form form = call_form(member, tensor->ndim);
        for (int d = 0; tensor->shape && d < tensor->ndim; d++)
            if (form.dimensions[d] == dimension) return tensor->shape[d];
    }
    const struct range range = descriptors[call->op].ranges[dimension];
    if (range.high && range.low == range.high) return range.low;
    return dimension == DIM_d_v ? CALL_D_V : -1;
}

size_t call_bytes(const fmla_tensor *tensor)
{
    size_t bytes = (size_t)element_bytes(tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

/* ---- Making one ------------------------------------------------------------------------------ */

void call_begin(struct call *call, enum operation op)
{
    memset(call, 0, sizeof *call);
    call->op = op, call->device = (fmla_device){FMLA_DEVICE_CPU, 0};
    memcpy(&call->args, &descriptors[op].size, sizeof descriptors[op].size); /* struct_size */
}

void call_set(struct call *call, int index, fmla_dtype dtype, int32_t rank, const int64_t *shape, void *data)
{
    const fmla_tensor **const to = (void *)((char *)&call->args + call_member(call->op, index)->offset);
    *to = &call->tensor[index];
    memcpy(call->shape[index], shape, (size_t)rank * sizeof *shape);
    call->tensor[index] = (fmla_tensor){
        .data = data, .device = call->device, .ndim = rank, .dtype = dtype, .shape = call->shape[index]};
}

static void no_memory(const char *name, const fmla_tensor *tensor, struct reason *reason)
{
    char shape[128] = "";
    double bytes = element_bytes(tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) {
        const size_t used = strlen(shape);
        snprintf(shape + used, sizeof shape - used, "%s%" PRId64, i ? ", " : "", tensor->shape[i]);
        bytes *= (double)tensor->shape[i];
    }
    reason_set(reason, "no memory for %s [%s] of %.0f bytes", name, shape, bytes);
}

bool call_allocate(struct call *call, int index, struct reason *reason)
{
    fmla_tensor *tensor = &call->tensor[index];
    size_t bytes = (size_t)element_bytes(tensor->dtype);
    bool fits = true;
    for (int i = 0; i < tensor->ndim; i++)
        fits = !__builtin_mul_overflow(bytes, (size_t)tensor->shape[i], &bytes) && fits;
    /* With overcommit, an allocation larger than physical memory would succeed and the process would be
     * killed later. */
    fits = fits && bytes / (size_t)sysconf(_SC_PAGESIZE) < (size_t)sysconf(_SC_PHYS_PAGES);
    tensor->data = fits ? aligned_alloc(64, bytes / 64 * 64 + 64) : NULL;
    call->owned[index] = tensor->data;
    if (!tensor->data) no_memory(call_member(call->op, index)->name, tensor, reason);
    return tensor->data != NULL;
}

/* Returns true for the gradient of an input that is absent: there is none. */
static bool is_gradient_of_none(const struct call *call, const struct member *member)
{
    return !strcmp(member->name, "d_attn_sink") && !call_tensor(call, "attn_sink");
}

void call_set_results(struct call *call)
{
    const fmla_dtype fp32 = {FMLA_TYPE_FLOAT, 32, 1}, bf16 = {FMLA_TYPE_BFLOAT, 16, 1};
    const bool flat = call_is_flat(call);
    const struct member *member;
    for (int i = 0; (member = call_member(call->op, i)); i++) {
        const struct form form = form_of(member, flat);
        int64_t shape[MAX_DIMENSIONS];
        if (call->tensor[i].shape || !(member->allowed & IS_OUTPUT)) continue;
        if (is_gradient_of_none(call, member)) continue;
        for (int d = 0; d < form.rank; d++) shape[d] = call_size(call, form.dimensions[d]);
        const fmla_dtype same = call->tensor[0].dtype.bits == 8 ? bf16 : call->tensor[0].dtype;
        call_set(call, i, member->allowed & ALLOW_SAME ? same : fp32, form.rank, shape, NULL);
    }
}

bool call_make_results(struct call *call, struct reason *reason)
{
    const struct member *member;
    for (int i = 0; (member = call_member(call->op, i)); i++) {
        const fmla_tensor *tensor = &call->tensor[i];
        if (!tensor->shape || tensor->data || !(member->allowed & IS_OUTPUT)) continue;
        if (!call_allocate(call, i, reason)) return false;
        memset(tensor->data, 0xff, call_bytes(tensor));
    }
    return true;
}

/* Sets *bytes and returns the address of the call's workspace pointer; NULL if the operation takes no
 * workspace. */
static void **ask_workspace(struct call *call, size_t *bytes, size_t *alignment, fmla_status *status)
{
    void **workspace = call_option(call, "workspace");
    *bytes = 0, *alignment = 1, *status = FMLA_OK;
    if (!workspace) return NULL;
    *workspace = NULL;
    *status = op_functions[call->op].workspace(&call->args, bytes, alignment);
    *(size_t *)call_option(call, "workspace_size") = *bytes;
    return workspace;
}

bool call_workspace(struct call *call, fmla_status *status, struct reason *reason)
{
    size_t bytes, alignment;
    void **workspace = call_option(call, "workspace");
    if (workspace && device_is_gpu(call->device)) gpu_free(*workspace);
    workspace = ask_workspace(call, &bytes, &alignment, status);
    if (call_refused(status, *status, reason)) return false;
    if (!workspace) return true;
    if (device_is_gpu(call->device)) return gpu_alloc(workspace, bytes, reason);
    const size_t unit = alignment > sizeof(void *) ? alignment : sizeof(void *);
    *workspace = aligned_alloc(unit, (bytes / unit + 1) * unit);
    return *workspace || reason_set(reason, "no memory for a workspace of %zu bytes", bytes);
}

void call_close(struct call *call)
{
    const bool gpu = device_is_gpu(call->device);
    void **workspace = call_option(call, "workspace");
    void **stream = gpu ? call_option(call, "stream") : NULL;
    for (int i = 0; i < MAX_TENSORS; i++)
        if (call->owned[i]) (gpu ? gpu_free : free)(call->tensor[i].data);
    if (workspace) (gpu ? gpu_free : free)(*workspace);
    if (gpu) gpu_free(call->plan);
    if (stream) gpu_stream_close(*stream);
    memset(call, 0, sizeof *call);
}

/* ---- Copies and parts ------------------------------------------------------------------------ */

void call_describe(struct call *copy, fmla_device device, const struct call *call)
{
    call_begin(copy, call->op);
    copy->device = device, copy->args = call->args;
    void **workspace = call_option(copy, "workspace");
    if (workspace) *workspace = NULL;
    *(void **)call_option(copy, "stream") = NULL;
    for (int i = 0; i < MAX_TENSORS; i++) {
        const fmla_tensor *from = &call->tensor[i];
        if (from->shape) call_set(copy, i, from->dtype, from->ndim, from->shape, NULL);
    }
}

bool call_copy(struct call *copy, const struct call *call, struct reason *reason)
{
    call_describe(copy, call->device, call);
    for (int i = 0; i < MAX_TENSORS; i++) {
        if (!call->tensor[i].shape) continue;
        if (!call_allocate(copy, i, reason)) return false;
        memcpy(copy->tensor[i].data, call->tensor[i].data, call_bytes(&call->tensor[i]));
    }
    return true;
}

/* Returns the slice's position along a dimension; -1 if it has all of it. */
static int64_t place_along(const struct call *call, enum dimension dimension,
                           const enum dimension *dimensions, const int64_t *at, int count)
{
    for (int i = 0; i < count; i++) {
        if (dimensions[i] == dimension) return at[i];
        if (dimensions[i] == DIM_h_q && dimension == DIM_h_kv)
            return at[i] / (call_size(call, DIM_h_q) / call_size(call, DIM_h_kv));
    }
    return -1;
}

void call_slice(struct call *part, const struct call *call, const enum dimension *dimensions,
                const int64_t *at, int count)
{
    const struct member *member;
    *part = *call;
    memset(part->owned, 0, sizeof part->owned);
    void **workspace = call_option(part, "workspace");
    if (workspace) *workspace = NULL;
    for (int i = 0; (member = call_member(call->op, i)); i++) {
        const fmla_tensor *from = &call->tensor[i];
        const struct form form = call_form(member, from->ndim);
        int64_t offset = 0, stride = 1;
        if (!from->shape) continue;
        call_set(part, i, from->dtype, from->ndim, from->shape, from->data);
        for (int d = from->ndim - 1; d >= 0; d--) {
            const int64_t where = place_along(call, form.dimensions[d], dimensions, at, count);
            part->strides[i][d] = from->strides ? call->strides[i][d] : stride, stride *= from->shape[d];
            if (where < 0) continue;
            offset += where * part->strides[i][d], part->shape[i][d] = 1;
        }
        part->tensor[i].strides = part->strides[i];
        part->tensor[i].data = (char *)from->data + offset * element_bytes(from->dtype);
    }
}
