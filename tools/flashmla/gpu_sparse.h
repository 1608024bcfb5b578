/* SPDX-License-Identifier: MIT
 *
 * A call of sparse decode whose arguments are in host memory, run on a GPU: contiguous tensors are copied there, results come
 * back.
 */
#ifndef FLASHMLA_TOOL_GPU_SPARSE_H
#define FLASHMLA_TOOL_GPU_SPARSE_H

#include "fault.h"

#include "flashmla/flashmla.h"

enum { GPU_SPARSE_TENSORS = 10 };

/* Zero-initialised. */
struct gpu_sparse {
    fmla_device device;
    fmla_sparse_decode_args args; /* on the device, workspace and stream included */
    fmla_tensor tensor[GPU_SPARSE_TENSORS];
    const fmla_tensor *host[GPU_SPARSE_TENSORS];
    void *plan;
};

/* As gpu_call_open: opens the GPU, asks the library whether it takes the call, copies everything there, allocates the
 * workspace. *status is the library's where the call was refused, FMLA_UNSUPPORTED without the GPU, else FMLA_OK. */
bool gpu_sparse_open(struct gpu_sparse *call, fmla_device device, const fmla_sparse_decode_args *host,
                     fmla_status *status, struct fault *fault);

/* Once more, from a plan of its own that gpu_sparse_plan makes on the device. */
bool gpu_sparse_plan_open(struct gpu_sparse *call, fmla_status *status, struct fault *fault);
fmla_status gpu_sparse_plan(const struct gpu_sparse *call);

/* Waits, and copies out and lse into the host's tensors. */
bool gpu_sparse_results(const struct gpu_sparse *call, struct fault *fault);

void gpu_sparse_close(struct gpu_sparse *call);

#endif
