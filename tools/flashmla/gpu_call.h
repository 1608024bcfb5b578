/* SPDX-License-Identifier: MIT
 *
 * A call whose arguments are in host memory, run on a GPU: contiguous tensors are copied there, results come back.
 */
#ifndef FLASHMLA_TOOL_GPU_CALL_H
#define FLASHMLA_TOOL_GPU_CALL_H

#include "fault.h"

#include "flashmla/flashmla.h"

/* "cpu" or "cuda:N"; NULL is "cpu". False for anything else. */
bool device_parse(const char *text, fmla_device *device);

static inline bool device_is_gpu(fmla_device device)
{
    return device.device_type == FMLA_DEVICE_CUDA;
}

enum { GPU_CALL_TENSORS = 7 };

/* Zero-initialised. */
struct gpu_call {
    fmla_device device;
    fmla_dense_decode_args args; /* on the device, workspace and stream included */
    fmla_tensor tensor[GPU_CALL_TENSORS];
    void *plan;
    struct {
        void *device;
        const fmla_tensor *host;
    } memory[GPU_CALL_TENSORS];
};

/* Opens the GPU, asks the library whether it takes the call, and copies everything there, out and lse too; the
 * workspace is allocated. *status is the library's where the call was refused, FMLA_UNSUPPORTED without the GPU, else
 * FMLA_OK. Entries of a block table
 * that are used must be pages: on a GPU the library cannot refuse others. */
bool gpu_call_open(struct gpu_call *call, fmla_device device, const fmla_dense_decode_args *host,
                   fmla_status *status, struct fault *fault);

/* Once more, from a plan of its own that gpu_call_plan makes on the device; workspace and plan as the library says. */
bool gpu_call_plan_open(struct gpu_call *call, fmla_status *status, struct fault *fault);
fmla_status gpu_call_plan(const struct gpu_call *call);

/* Waits, and copies out and lse into the host's tensors. */
bool gpu_call_results(const struct gpu_call *call, struct fault *fault);

void gpu_call_close(struct gpu_call *call);

#endif
