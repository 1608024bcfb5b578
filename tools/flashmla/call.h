/* SPDX-License-Identifier: MIT
 *
 * A call of any operation, by its descriptor (src/operations.def): its argument struct with the tensors that it points to.
 * Every subcommand fills one, from a file (call_file.h) or with made values (make.h), runs it on the CPU or as a copy on a
 * GPU, and reads its results.
 */
#ifndef FLASHMLA_TOOL_CALL_H
#define FLASHMLA_TOOL_CALL_H

#include "fault.h"
#include "op_call.h"

enum { CALL_D_V = 512 /* where values are the first elements of their keys */ };

/* Stays where it is while it is used: args points to its tensors. */
struct call {
    enum operation op;
    fmla_device device; /* of the tensors */
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS]; /* in the descriptor's order; those that are not there have no shape */
    int64_t shape[MAX_TENSORS][MAX_DIMENSIONS], strides[MAX_TENSORS][MAX_DIMENSIONS];
    bool owned[MAX_TENSORS]; /* their memory is the call's */
    void *plan;              /* of a call on a GPU; the call's */
};

/* "cpu" or "cuda:N"; false for anything else. */
bool device_parse(const char *text, fmla_device *device);

static inline bool device_is_gpu(fmla_device device)
{
    return device.device_type == FMLA_DEVICE_CUDA;
}

/* ---- Making one ------------------------------------------------------------------------------ */

/* A call in host memory, without tensors and with every option at its default. */
void call_begin(struct call *call, enum operation op);

/* Frees what the call owns, workspace, plan and stream included; zero-initialised it owns nothing. */
void call_close(struct call *call);

/* The index-th tensor of the operation; NULL past the last one. */
const struct member *call_member(enum operation op, int index);

/* The names of a tensor's dimensions, which depend on its rank where it is OR_FLAT. */
struct form call_form(const struct member *member, int32_t rank);

/* Has it tensors that are flat (form_of in src/operations.h)? */
bool call_is_flat(const struct call *call);

/* Is the tensor a table of a plan? */
bool call_of_plan(const struct member *member);

/* The member that is no tensor, of whatever type it has; NULL where the operation has none of the name. */
void *call_option(const struct call *call, const char *name);

/* The first option of a kind; NULL where there is none. */
void *call_option_of(const struct call *call, enum member_kind kind);

/* Says which tensor the index-th is, contiguous; without memory if `data` is NULL. */
void call_set(struct call *call, int index, fmla_dtype dtype, int32_t rank, const int64_t *shape, void *data);

/* Memory for a tensor that was set. A fault that names it, its shape and its bytes where there is not enough. */
bool call_allocate(struct call *call, int index, struct fault *fault);

/* Sets the results that are not there, of the sizes that the inputs name, without memory. */
void call_set_results(struct call *call);

/* Allocates the results that were set and have no memory. They hold what no result is: what a kernel fails to write must not
 * pass. */
bool call_make_results(struct call *call, struct fault *fault);

/* Allocates the workspace that the library asks for. The library's status; FMLA_OK with a fault where there is no memory. */
bool call_workspace(struct call *call, fmla_status *status, struct fault *fault);

/* The part of a call in which each of `dimensions` is at one place, by views; what names a key head has that of its query
 * head. Nothing of it is owned, and results are views, too. */
void call_slice(struct call *part, const struct call *call, const enum dimension *dimensions,
                const int64_t *at, int count);

/* ---- Asking it ------------------------------------------------------------------------------- */

/* NULL if it is not there, or the operation has none. */
const fmla_tensor *call_tensor(const struct call *call, const char *name);

/* The size that the first tensor with this dimension has; without one d_v is CALL_D_V, and others are -1. */
int64_t call_size(const struct call *call, enum dimension dimension);

size_t call_bytes(const fmla_tensor *tensor);

static inline int element_bytes(fmla_dtype dtype)
{
    return dtype.bits / 8;
}

/* The kernel that would run: the library's answer, or where it has no such question, what is forced or first in its list. */
fmla_status call_kernel(const struct call *call, const char **name);

/* Runs it where it is; on a GPU it is sent to the call's stream. */
fmla_status call_run(const struct call *call);

/* Did the library refuse? Then `fault` has its words; *status is what it said. */
bool call_refused(fmla_status *status, fmla_status from, struct fault *fault);

/* ---- On a GPU (call_gpu.c) ------------------------------------------------------------------- */

/* Opens the GPU, asks the library whether it takes the call, and copies everything there, results too; the workspace is
 * allocated. *status is the library's where the call was refused, FMLA_UNSUPPORTED without the GPU, else FMLA_OK. */
bool call_to_gpu(struct call *gpu, fmla_device device, const struct call *host, fmla_status *status,
                 struct fault *fault);

/* Once more, from a plan of its own that call_plan makes on the device; workspace and plan as the library says. Nothing where
 * the operation has no plan. */
bool call_plan_open(struct call *gpu, fmla_status *status, struct fault *fault);
fmla_status call_plan(const struct call *gpu);

bool call_wait(const struct call *gpu, struct fault *fault);

/* Waits, and copies the results into the host's tensors; `inputs`: what was read, too. */
bool call_fetch(const struct call *gpu, const struct call *host, bool inputs, struct fault *fault);

#endif
