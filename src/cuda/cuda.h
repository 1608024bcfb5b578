/* SPDX-License-Identifier: MIT
 *
 * The CUDA back end's interface to dispatch.
 */
#ifndef FMLA_CUDA_H
#define FMLA_CUDA_H

#include "../kernel.h"

#include "device.h"
#include "images.h"

extern const struct kernel_driver cuda_plan_driver, cuda_cache_driver;

/* ---- Attention (attention.c) ------------------------------------------------------------------- */

struct cuda_work;

/* An implementation of attention on a GPU. */
struct cuda_attention {
    struct kernel_driver driver;
    /* Returns NULL if it takes the problem; else says which problems it takes, and sets *argument to the one
     * that differs. */
    const char *(*refuses)(const struct attention_problem *p, const char **argument);
    /* Makes the decisions and lays out the workspace. On entry `work` has its device and is zero otherwise.
     * All kernels of a device that may take a call return the same size, the maximum of their needs: a size
     * query has no addresses, and kernels refuse by addresses. */
    fmla_status (*prepare)(const struct attention_problem *p, struct cuda_work *work);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *work);
    /* Returns whether the next kernel of the table is faster, as measured on an H200. NULL: it never is. Where a
     * request's bits may not depend on its batch, the answer may not either. */
    bool (*leaves)(const struct attention_problem *p);
};

driver_refuses cuda_attention_refuses;
driver_leaves cuda_attention_leaves;
driver_prepare cuda_attention_prepare;
driver_run cuda_attention_run;
#define CUDA_ATTENTION_DRIVER                                                                                \
    {                                                                                                        \
        .refuses = cuda_attention_refuses, .leaves = cuda_attention_leaves,                                  \
        .prepare = cuda_attention_prepare, .run = cuda_attention_run                                         \
    }

/* Dense decode has a portable kernel (sm80) and Hopper's (sm90). The other operations also have one without
 * tensor cores. Sparse decode on Hopper has three: tile size by problem, tiles of 64 heads, tiles of 16
 * heads. The choice.h beside each Hopper kernel says which problems it takes. */
extern const struct cuda_attention cuda_sm80_dense_decode, cuda_sm90_dense_decode, cuda_sm90_dense_decode_fp8,
    cuda_sparse_decode, cuda_sm80_sparse_decode, cuda_sm90_sparse_decode, cuda_sm90_sparse_decode_64,
    cuda_sm90_sparse_decode_16, cuda_sparse_prefill, cuda_sm80_sparse_prefill, cuda_sm90_sparse_prefill,
    cuda_mha_forward, cuda_sm80_mha_forward, cuda_sm90_mha_forward;

/* The partitions of a sparse decode plan if the caller names none; the same for all kernels.
 * cuda_sparse_partitions returns how many partitions share a batch, cuda_sparse_rows the rows that a plan of
 * any batch has, so that one plan may be copied over another. */
int32_t cuda_sparse_partitions(int32_t id, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                               int64_t extra_topk);
int32_t cuda_sparse_rows(int32_t id, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk);

/* Loads every kernel that the device may use. */
fmla_status cuda_prepare(int32_t id);

#endif
