/* SPDX-License-Identifier: MIT
 *
 * The CUDA back end's interface to dispatch.
 */
#ifndef FMLA_CUDA_H
#define FMLA_CUDA_H

#include "../kernel.h"

#include "device.h"
#include "images.h"

extern const struct kernel_driver cuda_attention_driver, cuda_plan_driver, cuda_cache_driver;

/* Dense decode has a portable kernel (sm80) and Hopper's (sm90). The other operations also have one without
 * tensor cores. Sparse decode on Hopper has three: tile size by problem, tiles of 64 heads, tiles of 16
 * heads. The choice.h beside each Hopper kernel says which problems it takes. */
struct cuda_attention;
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
