/* SPDX-License-Identifier: MIT
 *
 * Linked into a flashmla of the tests' own beside the fake driver, whose launches do nothing: after a call on a GPU that
 * went well the oracle does its work in that GPU's memory, which is the host's.
 *
 * FMLA_IDLE: it does not, as if a kernel wrote nothing.
 */
#include "flashmla/flashmla.h"

#include <stdbool.h>
#include <stdlib.h>

fmla_status __real_fmla_dense_decode(const fmla_dense_decode_args *args);
fmla_status __wrap_fmla_dense_decode(const fmla_dense_decode_args *args);
fmla_status __real_fmla_sparse_decode(const fmla_sparse_decode_args *args);
fmla_status __wrap_fmla_sparse_decode(const fmla_sparse_decode_args *args);
fmla_status __real_fmla_sparse_prefill(const fmla_sparse_prefill_args *args);
fmla_status __wrap_fmla_sparse_prefill(const fmla_sparse_prefill_args *args);

enum { MOST = 10 };

/* The tensors as those of a CPU, in `host`. */
static void take_over(const fmla_tensor **tensors[], int count, fmla_tensor host[MOST])
{
    for (int i = 0; i < count; i++) {
        if (!*tensors[i]) continue;
        host[i] = **tensors[i];
        host[i].device = (fmla_device){FMLA_DEVICE_CPU, 0};
        *tensors[i] = &host[i];
    }
}

static bool works_on(const fmla_tensor *q, fmla_status status)
{
    return status == FMLA_OK && q->device.device_type == FMLA_DEVICE_CUDA && !getenv("FMLA_IDLE");
}

static void *oracle_workspace(fmla_status asked, size_t bytes)
{
    void *workspace = asked == FMLA_OK ? aligned_alloc(64, bytes / 64 * 64 + 64) : NULL;
    if (!workspace) abort();
    return workspace;
}

fmla_status __wrap_fmla_dense_decode(const fmla_dense_decode_args *args)
{
    const fmla_status status = __real_fmla_dense_decode(args);
    if (!works_on(args->q, status)) return status;
    fmla_dense_decode_args call = *args;
    fmla_tensor host[MOST];
    take_over((const fmla_tensor **[]){&call.q, &call.kv_cache, &call.block_table, &call.seqlens,
                                       &call.attn_sink, &call.out, &call.lse},
              7, host);
    call.kernel = "ref", call.workspace = call.stream = NULL;
    const fmla_status asked = fmla_dense_decode_workspace_size(&call, &call.workspace_size, NULL);
    call.workspace = oracle_workspace(asked, call.workspace_size);
    const fmla_status done = __real_fmla_dense_decode(&call);
    free(call.workspace);
    return done;
}

fmla_status __wrap_fmla_sparse_decode(const fmla_sparse_decode_args *args)
{
    const fmla_status status = __real_fmla_sparse_decode(args);
    if (!works_on(args->q, status)) return status;
    fmla_sparse_decode_args call = *args;
    fmla_tensor host[MOST];
    take_over((const fmla_tensor **[]){&call.q, &call.kv_cache, &call.indices, &call.topk_length,
                                       &call.attn_sink, &call.extra_kv_cache, &call.extra_indices,
                                       &call.extra_topk_length, &call.out, &call.lse},
              10, host);
    call.kernel = "ref", call.workspace = call.stream = NULL;
    const fmla_status asked = fmla_sparse_decode_workspace_size(&call, &call.workspace_size, NULL);
    call.workspace = oracle_workspace(asked, call.workspace_size);
    const fmla_status done = __real_fmla_sparse_decode(&call);
    free(call.workspace);
    return done;
}

fmla_status __wrap_fmla_sparse_prefill(const fmla_sparse_prefill_args *args)
{
    const fmla_status status = __real_fmla_sparse_prefill(args);
    if (!works_on(args->q, status)) return status;
    fmla_sparse_prefill_args call = *args;
    fmla_tensor host[MOST];
    take_over((const fmla_tensor **[]){&call.q, &call.kv, &call.indices, &call.topk_length, &call.attn_sink,
                                       &call.out, &call.max_logits, &call.lse},
              8, host);
    call.kernel = "ref", call.workspace = call.stream = NULL;
    const fmla_status asked = fmla_sparse_prefill_workspace_size(&call, &call.workspace_size, NULL);
    call.workspace = oracle_workspace(asked, call.workspace_size);
    const fmla_status done = __real_fmla_sparse_prefill(&call);
    free(call.workspace);
    return done;
}
