/* SPDX-License-Identifier: MIT
 *
 * Calls any operation of the library in host memory and on the device, with the hooks of a stress test.
 */
#include "case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Members ---------------------------------------------------------------------------------- */

void *pointer_at(const struct subject *op, const union call_args *args, const char *name)
{
    void *pointer = NULL;
    const void *at = op_option(op->of, args, name);
    if (at) memcpy(&pointer, at, sizeof pointer);
    return pointer;
}

void set_pointer(const struct subject *op, union call_args *args, const char *name, const void *pointer)
{
    memcpy(op_option(op->of, args, name), &pointer, sizeof pointer);
}

void set_size(const struct subject *op, union call_args *args, const char *name, size_t size)
{
    memcpy(op_option(op->of, args, name), &size, sizeof size);
}

const fmla_tensor *tensor_at(const struct subject *op, const union call_args *args, int i)
{
    const fmla_tensor *tensor;
    memcpy(&tensor, (const char *)args + op->tensor[i]->offset, sizeof(fmla_tensor *));
    return tensor;
}

void set_tensor(const struct subject *op, union call_args *args, int i, const fmla_tensor *tensor)
{
    memcpy((char *)args + op->tensor[i]->offset, &tensor, sizeof(fmla_tensor *));
}

static void set_workspace(const struct subject *op, union call_args *args, void *memory, size_t bytes)
{
    if (!op_functions[op->of].workspace) return;
    set_pointer(op, args, "workspace", memory);
    set_size(op, args, "workspace_size", bytes);
}

static fmla_status workspace_of(const struct subject *op, const union call_args *args, size_t *bytes,
                                size_t *alignment)
{
    *bytes = 0, *alignment = 1;
    return op_functions[op->of].workspace ? op_functions[op->of].workspace(args, bytes, alignment) : FMLA_OK;
}

/* ---- In host memory --------------------------------------------------------------------------- */

fmla_status call_on_host(const struct subject *op, union call_args *args, int fill)
{
    enum { GUARD_BYTES = 64, GUARD = 0x5a };
    size_t bytes, alignment;
    fmla_status status = workspace_of(op, args, &bytes, &alignment);
    if (status) return status;
    unsigned char *memory = must_alloc(bytes + GUARD_BYTES);
    if (fill >= 0) memset(memory, fill, bytes);
    memset(memory + bytes, GUARD, GUARD_BYTES);
    set_workspace(op, args, memory, bytes);
    status = op_functions[op->of].run(args);
    for (int i = 0; i < GUARD_BYTES; i++)
        if (memory[bytes + (size_t)i] != GUARD) {
            fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
            exit(1);
        }
    free(memory);
    return status;
}

/* ---- On the device ---------------------------------------------------------------------------- */

void device_args_make(struct device_args *to, const struct test_case *c, const union call_args *from)
{
    const struct subject *op = c->op;
    to->args = *from;
    for (int i = 0; i < op->tensors; i++)
        set_tensor(op, &to->args, i, device_tensor(&c->blocks, tensor_at(op, from, i), &to->tensor[i]));
    if (op->tables)
        set_pointer(op, &to->args, "plan", device_address(&c->blocks, pointer_at(op, from, "plan")));
}

/* A call whose arguments are on the device; `from`: its tensors on the host. */
struct call {
    const struct test_case *c;
    const union call_args *from;
    union call_args *args;
    size_t bytes, alignment; /* workspace */
};

/* Returns result k on the host; NULL: not requested. */
static const fmla_tensor *result_of(const struct call *call, int k)
{
    return tensor_at(call->c->op, call->from, call->c->op->result[k]);
}

/* Returns true if the results on the device equal the host's. */
static bool untouched(const struct call *call)
{
    bool same = true;
    for (int k = 0; k < call->c->op->results; k++)
        if (result_of(call, k)) same &= device_is(&call->c->blocks, result_of(call, k)->data);
    return same;
}

static fmla_status run(const struct call *call)
{
    return op_functions[call->c->op->of].run(call->args);
}

/* Makes the call with a workspace that it must refuse. */
static void must_refuse(const struct call *call, void *workspace, size_t bytes, fmla_status expected)
{
    char what[400];
    set_workspace(call->c->op, call->args, workspace, bytes);
    const fmla_status status = run(call);
    if (status != expected) {
        snprintf(what, sizeof what,
                 "a workspace of %zu bytes at %p, where %zu at a multiple of %zu are needed, gave %s", bytes,
                 workspace, call->bytes, call->alignment, fmla_status_name(status));
        device_stress->wrong(what);
    }
    if (device_stress->refused) device_stress->refused(&call->c->blocks, result_of(call, 0));
    if (!untouched(call)) device_stress->wrong("a call that was refused wrote to a result");
}

static void refusals(const struct call *call)
{
    if (!call->bytes) return;
    struct device_scratch scratch;
    device_scratch_make(&scratch, call->bytes - 1, 0x77);
    must_refuse(call, scratch.memory, call->bytes - 1, FMLA_BUFFER_TOO_SMALL);
    must_refuse(call, scratch.memory, 0, FMLA_BUFFER_TOO_SMALL);
    must_refuse(call, NULL, call->bytes, FMLA_INVALID_ARGUMENT);
    device_scratch_free(&scratch);
    if (call->alignment == 1) return;
    const size_t beside = 1 + call->bytes % (call->alignment - 1);
    device_scratch_make(&scratch, call->bytes + beside, 0x77);
    must_refuse(call, scratch.memory + beside, call->bytes, FMLA_INVALID_ARGUMENT);
    device_scratch_free(&scratch);
}

/* Runs the call, directly or in a graph. */
static fmla_status send(const struct call *call, void *stream)
{
    if (!call->c->captured) return run(call);
    device_capture_begin(stream);
    const fmla_status status = run(call);
    void *graph = device_capture_end(stream);
    if (!status) device_launch(graph, stream), device_wait(stream);
    gpu_graph_close(graph);
    return status;
}

fmla_status call_on_device(const struct test_case *c, struct device_args *there, const union call_args *from,
                           int fill)
{
    const struct subject *op = c->op;
    struct call call = {.c = c, .from = from, .args = &there->args};
    const fmla_tensor *input = NULL; /* the first one */
    struct device_scratch workspace;
    fmla_status status = workspace_of(op, call.args, &call.bytes, &call.alignment);
    if (status) return status;
    for (int i = 0; i < op->tensors && !input; i++)
        if (!is_result(op, i) && !is_table(op, i)) input = tensor_at(op, from, i);
    for (int k = 0; k < op->results; k++)
        if (result_of(&call, k)) case_move_result(c, k, result_of(&call, k), true);
    if (device_stress) refusals(&call);
    device_scratch_make(&workspace, call.bytes, fill);
    void *stream = fill || c->captured ? device_stream_open() : NULL; /* also test the default stream */
    set_workspace(op, call.args, workspace.memory, call.bytes);
    set_pointer(op, call.args, "stream", stream);
    status = send(&call, stream);
    if (device_stress && device_stress->after)
        device_stress->after(&c->blocks, result_of(&call, 0), input, &workspace);
    if (!status) {
        device_wait(stream);
        for (int k = 0; k < op->results; k++)
            if (result_of(&call, k)) case_move_result(c, k, result_of(&call, k), false);
    }
    if (!device_scratch_intact(&workspace) && device_stress) {
        device_stress->wrong("the call wrote past the end of its workspace");
    } else if (!device_scratch_intact(&workspace)) {
        fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
        exit(3);
    }
    gpu_stream_close(stream);
    device_scratch_free(&workspace);
    return status;
}

fmla_status case_run(const struct test_case *c, union call_args *args, int fill)
{
    struct device_args there;
    if (!is_apart(c->device)) {
        const fmla_status status = call_on_host(c->op, args, fill);
        for (int k = 0; k < c->op->results; k++) guarded_move(&c->tensor[c->op->result[k]], false);
        return status;
    }
    device_args_make(&there, c, args);
    return call_on_device(c, &there, args, fill);
}

fmla_status case_kernel(const struct test_case *c, const char **name)
{
    struct device_args there;
    if (!op_functions[c->op->of].kernel) {
        *name = pointer_at(c->op, &c->args, "kernel");
        return FMLA_OK;
    }
    if (!is_apart(c->device)) return op_functions[c->op->of].kernel(&c->args, name);
    device_args_make(&there, c, &c->args);
    return op_functions[c->op->of].kernel(&there.args, name);
}

fmla_status case_asked(const struct subject *op, const struct run *run, const int64_t *v)
{
    const char *kernel;
    struct test_case *c = case_make(op, run, NULL, v, 1);
    case_to_device(c, NULL);
    const fmla_status status = case_kernel(c, &kernel);
    case_free(c);
    return status;
}
