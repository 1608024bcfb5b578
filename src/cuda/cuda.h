/* SPDX-License-Identifier: MIT
 *
 * The CUDA back end: what dispatch sees of it.
 */
#ifndef FMLA_CUDA_H
#define FMLA_CUDA_H

#include "../dispatch.h"

#include "device.h"
#include "images.h"

#include <float.h>
#include <math.h>

fmla_status cuda_decode_plan(const struct plan_problem *problem);
fmla_status cuda_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *problem,
                                   size_t *bytes, size_t *alignment);
fmla_status cuda_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *problem);
/* Hopper's; what it takes: sm90/dense_decode/choice.h. */
const char *cuda_sm90_dense_decode_refuses(const struct dense_decode_problem *problem, const char **argument);
fmla_status cuda_sm90_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *problem);
/* Sparse decode: the portable one, and Hopper's (sm90/sparse_decode/choice.h): with tiles as the problem says, of 64 heads, of
 * 16. */
fmla_status cuda_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *problem,
                                    size_t *bytes, size_t *alignment);
const char *cuda_sparse_decode_refuses(const struct sparse_decode_problem *problem, const char **argument);
fmla_status cuda_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *problem);
const char *cuda_sm90_sparse_decode_refuses(const struct sparse_decode_problem *problem,
                                            const char **argument);
fmla_status cuda_sm90_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *problem);
fmla_status cuda_sm90_sparse_decode_64(const struct kernel *kernel,
                                       const struct sparse_decode_problem *problem);
fmla_status cuda_sm90_sparse_decode_16(const struct kernel *kernel,
                                       const struct sparse_decode_problem *problem);
/* Partitions of a plan for sparse decode where the caller names none: the same for all kernels. */
int32_t cuda_sparse_partitions(int32_t id, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                               int64_t extra_topk);
fmla_status cuda_sparse_prefill_size(const struct kernel *kernel,
                                     const struct sparse_prefill_problem *problem, size_t *bytes,
                                     size_t *alignment);
fmla_status cuda_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *problem);
/* Hopper's; what it takes: sm90/sparse_prefill/choice.h. */
const char *cuda_sm90_sparse_prefill_refuses(const struct sparse_prefill_problem *problem,
                                             const char **argument);
fmla_status cuda_sm90_sparse_prefill(const struct kernel *kernel,
                                     const struct sparse_prefill_problem *problem);
fmla_status cuda_merge(const struct merge_problem *problem);
fmla_status cuda_cache_append(const struct kernel *kernel, const struct cache_problem *problem);
fmla_status cuda_cache_gather(const struct kernel *kernel, const struct cache_problem *problem);

/* softmax_scale times log2 e, for exponentials of base 2; finite, so that nothing times it is NaN. */
static inline float cuda_scale_log2(float scale)
{
    return fmaxf(fminf((float)((double)scale * 1.44269504088896340736), FLT_MAX), -FLT_MAX);
}

/* Loads every kernel that the device may be given. */
fmla_status cuda_prepare(int32_t id);

#endif
