/* SPDX-License-Identifier: MIT
 *
 * The CUDA back end: what dispatch sees of it.
 */
#ifndef FMLA_CUDA_H
#define FMLA_CUDA_H

#include "../kernel.h"

#include "device.h"
#include "images.h"

extern const struct kernel_driver cuda_attention_driver, cuda_plan_driver, cuda_cache_driver;

/* Dense decode has the portable one (sm80) and Hopper's (sm90); the others have one without tensor cores beside these. Sparse decode has
 * Hopper's with tiles as the problem says, of 64 heads, of 16. What Hopper's take: choice.h beside each. */
struct cuda_attention;
extern const struct cuda_attention cuda_sm80_dense_decode, cuda_sm90_dense_decode, cuda_sm90_dense_decode_fp8,
    cuda_sparse_decode, cuda_sm80_sparse_decode, cuda_sm90_sparse_decode, cuda_sm90_sparse_decode_64,
    cuda_sm90_sparse_decode_16, cuda_sparse_prefill, cuda_sm80_sparse_prefill, cuda_sm90_sparse_prefill,
    cuda_mha_forward, cuda_sm80_mha_forward, cuda_sm90_mha_forward;

/* Partitions of a plan for sparse decode where the caller names none, the same for all kernels: those that a batch is shared
 * among, and the rows that a plan of any batch has, so that one may be copied over another. */
int32_t cuda_sparse_partitions(int32_t id, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                               int64_t extra_topk);
int32_t cuda_sparse_rows(int32_t id, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk);

/* Loads every kernel that the device may be given. */
fmla_status cuda_prepare(int32_t id);

#endif
