/* SPDX-License-Identifier: MIT
 *
 * A call of any operation, described by its descriptor (src/operations.def): its argument struct and the
 * tensors that it points to. Every subcommand fills one from a file (call_file.h) or with generated values
 * (make.h), runs it on the CPU or as a copy on a GPU, and reads its results.
 */
#ifndef FLASHMLA_TOOL_CALL_H
#define FLASHMLA_TOOL_CALL_H

#include "op_call.h"
#include "reason.h"

enum { CALL_D_V = 512 /* if values are the first elements of their keys */ };

/* Must not move while in use: args points to its tensors. */
struct call {
    enum operation op;
    fmla_device device; /* of the tensors */
    union call_args args;
    fmla_tensor tensor[MAX_TENSORS]; /* in the descriptor's order; absent ones have no shape */
    int64_t shape[MAX_TENSORS][MAX_DIMENSIONS], strides[MAX_TENSORS][MAX_DIMENSIONS];
    bool owned[MAX_TENSORS]; /* the call owns their memory */
    void *plan;              /* of a call on a GPU; owned by the call */
};

/* Parses "cpu" or "cuda:N"; returns false for anything else. */
bool device_parse(const char *text, fmla_device *device);

static inline bool device_is_gpu(fmla_device device)
{
    return device.device_type == FMLA_DEVICE_CUDA;
}

/* ---- Making one ------------------------------------------------------------------------------ */

/* Initialises a call in host memory without tensors and with default options. */
void call_begin(struct call *call, enum operation op);

/* Frees everything the call owns, including workspace, plan and stream; a zero-initialised call owns
 * nothing. */
void call_close(struct call *call);

/* Returns the index-th tensor of the operation; NULL past the last one. */
const struct member *call_member(enum operation op, int index);

/* Returns the names of a tensor's dimensions, which depend on its rank if it is OR_FLAT. */
struct form call_form(const struct member *member, int32_t rank);

/* Returns true if the call has flat tensors (form_of in src/operations.h). */
bool call_is_flat(const struct call *call);

/* Returns true if the tensor is a table of a plan. */
bool call_of_plan(const struct member *member);

/* Returns the member `name`, which is not a tensor, as void *; NULL if the operation has no such member. */
void *call_option(const struct call *call, const char *name);

/* Returns the first option of a kind; NULL if there is none. */
void *call_option_of(const struct call *call, enum member_kind kind);

/* Describes the index-th tensor as contiguous; without memory if `data` is NULL. */
void call_set(struct call *call, int index, fmla_dtype dtype, int32_t rank, const int64_t *shape, void *data);

/* Allocates memory for a tensor that was set. If memory is insufficient, the reason names the tensor, its
 * shape and its bytes. */
bool call_allocate(struct call *call, int index, struct reason *reason);

/* Sets the absent results, without memory, to the sizes that the inputs imply; a gradient of an absent input
 * stays absent. */
void call_set_results(struct call *call);

/* Allocates the results that were set and have no memory. They are filled with bytes that no result has,
 * so that an element the kernel fails to write is detected. */
bool call_make_results(struct call *call, struct reason *reason);

/* Allocates the workspace that the library asks for. *status is the library's; FMLA_OK with a reason if
 * memory is insufficient. */
bool call_workspace(struct call *call, fmla_status *status, struct reason *reason);

/* Describes copies of a call's tensors on a device, without memory, and copies its arguments but workspace and
 * stream. */
void call_describe(struct call *copy, fmla_device device, const struct call *call);

/* Copies a call in host memory with all of its tensors. */
bool call_copy(struct call *copy, const struct call *call, struct reason *reason);

/* Makes `part` the slice of a call with one position in each of `dimensions`, by views; a dimension of key
 * heads takes the head of its query head. The slice owns nothing, and its results are views too. */
void call_slice(struct call *part, const struct call *call, const enum dimension *dimensions,
                const int64_t *at, int count);

/* ---- Asking it ------------------------------------------------------------------------------- */

/* Returns a tensor by name; NULL if it is absent or the operation has none of the name. */
const fmla_tensor *call_tensor(const struct call *call, const char *name);

/* Returns the size of this dimension in the first tensor that has it; if none has, the only size that the
 * operation allows, else CALL_D_V for d_v and -1 for others. */
int64_t call_size(const struct call *call, enum dimension dimension);

size_t call_bytes(const fmla_tensor *tensor);

static inline int element_bytes(fmla_dtype dtype)
{
    return dtype.bits / 8;
}

/* Sets *name to the kernel that would run: the library's answer or, if the operation has no such query,
 * the forced kernel or the first in its list. */
fmla_status call_kernel(const struct call *call, const char **name);

/* Runs the call on its device; on a GPU it is enqueued on the call's stream. */
fmla_status call_run(const struct call *call);

/* Runs the call once, until a GPU has finished too, and sets *seconds. *status is the library's. */
bool call_time(const struct call *call, double *seconds, fmla_status *status, struct reason *reason);

/* Returns true if the library refused; `reason` then holds its message. *status is set to `from`. */
bool call_refused(fmla_status *status, fmla_status from, struct reason *reason);

/* ---- On a GPU (call_gpu.c) ------------------------------------------------------------------- */

/* Opens the GPU, asks the library whether it accepts the call, copies all tensors there, results included,
 * and allocates the workspace. *status is the library's if it refused the call, FMLA_UNSUPPORTED without a
 * GPU, else FMLA_OK. */
bool call_to_gpu(struct call *gpu, fmla_device device, const struct call *host, fmla_status *status,
                 struct reason *reason);

/* Gives the call a plan of its own, which call_plan makes on the device; sizes of workspace and plan come
 * from the library. Does nothing if the operation has no plan. */
bool call_plan_open(struct call *gpu, fmla_status *status, struct reason *reason);
fmla_status call_plan(const struct call *gpu);

bool call_wait(const struct call *gpu, struct reason *reason);

/* Waits, and copies the results into the host's tensors; `inputs`: copies the inputs too. */
bool call_fetch(const struct call *gpu, const struct call *host, bool inputs, struct reason *reason);

#endif
