/* SPDX-License-Identifier: MIT
 *
 * A call of sparse prefill whose arguments are in host memory, run on a GPU: contiguous tensors are copied there, results
 * come back.
 */
#ifndef FLASHMLA_TOOL_GPU_PREFILL_H
#define FLASHMLA_TOOL_GPU_PREFILL_H

#include "fault.h"

#include "flashmla/flashmla.h"

enum { GPU_PREFILL_TENSORS = 8 };

/* Zero-initialised. */
struct gpu_prefill {
    fmla_device device;
    fmla_sparse_prefill_args args; /* on the device, workspace and stream included */
    fmla_tensor tensor[GPU_PREFILL_TENSORS];
    const fmla_tensor *host[GPU_PREFILL_TENSORS];
};

/* As gpu_call_open. */
bool gpu_prefill_open(struct gpu_prefill *call, fmla_device device, const fmla_sparse_prefill_args *host,
                      fmla_status *status, struct fault *fault);

/* Waits, and copies out, max_logits and lse into the host's tensors. */
bool gpu_prefill_results(const struct gpu_prefill *call, struct fault *fault);

void gpu_prefill_close(struct gpu_prefill *call);

#endif
