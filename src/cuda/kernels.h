/* SPDX-License-Identifier: MIT
 *
 * The kernels, by operation: where each file of the back end finds its own, and cuda_prepare all of them.
 */
#ifndef FMLA_CUDA_KERNELS_H
#define FMLA_CUDA_KERNELS_H

#include "launch.h"
#include "params.h"
#include "sm80/dense_decode/shape.h"
#include "sm90/dense_decode/choice.h"
#include "sm90/sparse_decode/choice.h"
#include "sm90/sparse_prefill/choice.h"

/* The index of those that differ by type is an enum element: ELEMENT_BF16 or ELEMENT_FP16. */
extern struct cuda_kernel cuda_kernel_plan, cuda_kernel_merge,
    cuda_kernel_join[2][2][3] /* slots in halves; element; whole rows, halves, quarters */;
extern struct cuda_kernel cuda_kernel_dense_decode[2][DENSE_DECODE_SHAPE_COUNT];
/* [type][d_qk is 576][several tiles of rows read the same keys] */
extern struct cuda_kernel cuda_kernel_dense_decode_sm90[2][2][2];
/* [type][format]; no name where there is none */
extern struct cuda_kernel cuda_kernel_sparse_decode[2][KV_FORMATS];
/* [tiles of 16 heads, not of 64][the format is FP8_584] */
extern struct cuda_kernel cuda_kernel_sparse_decode_sm90[2][2];
/* Over caches of the queries' type: [type][d_qk is 576] */
extern struct cuda_kernel cuda_kernel_sparse_decode_sm90_rows[2][2];
/* [format]; no name where there is none */
extern struct cuda_kernel cuda_kernel_sparse_prefill[KV_FORMATS];
/* [some tiles are cut][d_qk is 576]; of FP8 pages: [FP8_584] */
extern struct cuda_kernel cuda_kernel_sparse_prefill_sm90[2][2], cuda_kernel_sparse_prefill_sm90_fp8[2],
    cuda_kernel_sparse_prefill_join;
/* [enum kv_format][enum element of the vectors] */
enum { CACHE_FORMATS = 5, CACHE_ELEMENTS = 3 };
extern struct cuda_kernel cuda_kernel_cache_append[CACHE_FORMATS][CACHE_ELEMENTS],
    cuda_kernel_cache_gather[CACHE_FORMATS][CACHE_ELEMENTS];

/* Launches the planner in a scope that is open. */
fmla_status cuda_launch_plan(const char *operation, const struct cuda_scope *scope,
                             const struct plan_params *params, void *stream);

struct result_rules;
struct result_params cuda_result_params(const struct result_rules *rules);

struct sparse_cache;
struct sparse_cache_params cuda_sparse_cache_params(const struct sparse_cache *cache);

/* Does every row begin at a multiple of `bytes`, where an element has element_bytes? Strides of dimensions with one
 * element are never used. */
bool cuda_rows_aligned(const void *data, const int64_t *shape, const int64_t *stride, int dims,
                       int64_t element_bytes, int64_t bytes);

#endif
