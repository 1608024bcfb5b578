/* SPDX-License-Identifier: MIT
 *
 * Linked with the fake driver, whose launches do nothing, into a flashmla for tests: after a successful call
 * on a GPU, the oracle computes the results in that GPU's memory, which is the host's.
 *
 * FMLA_IDLE: it does not, as if the kernel wrote nothing.
 */
#include "wrap.h"

#include <stdlib.h>
#include <string.h>

/* Runs the call in host memory by the oracle, if the GPU accepted it. */
static fmla_status around(enum operation op, const void *args, real_function *real)
{
    fmla_status status = real(args);
    const struct member *member;
    struct call call;
    struct reason reason;
    if (status != FMLA_OK || getenv("FMLA_IDLE")) return status;
    call_begin(&call, op);
    if (!call_option(&call, "kernel")) return status; /* a plan has no oracle */
    memcpy(&call.args, args, descriptors[op].size);
    for (int i = 0; (member = call_member(op, i)); i++) {
        const fmla_tensor *tensor = wrapped_tensor(args, member);
        if (!tensor) continue;
        if (!device_is_gpu(tensor->device)) return status;
        call_set(&call, i, tensor->dtype, tensor->ndim, tensor->shape, tensor->data);
    }
    void **plan = call_option(&call, "plan");
    *(const char **)call_option(&call, "kernel") = "ref";
    *(void **)call_option(&call, "stream") = NULL;
    if (plan) *plan = NULL;
    if (!call_workspace(&call, &status, &reason)) abort();
    status = call_run(&call); /* calls this function again, with CPU tensors */
    call_close(&call);
    return status;
}
