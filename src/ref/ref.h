/* SPDX-License-Identifier: MIT
 *
 * The oracle: every operation as its definition reads (docs/semantics.md), scalar, in double, one row after
 * the other, with nothing shared with the kernels but the number formats. It runs when named, and decides who
 * is right.
 */
#ifndef FMLA_REF_H
#define FMLA_REF_H

#include "../dispatch.h"

fmla_status ref_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *problem,
                                  size_t *bytes, size_t *alignment);
fmla_status ref_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *problem);
fmla_status ref_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *problem,
                                   size_t *bytes, size_t *alignment);
fmla_status ref_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *problem);
fmla_status ref_sparse_prefill_size(const struct kernel *kernel, const struct sparse_prefill_problem *problem,
                                    size_t *bytes, size_t *alignment);
fmla_status ref_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *problem);
fmla_status ref_merge(const struct merge_problem *problem);
fmla_status ref_cache_append(const struct kernel *kernel, const struct cache_problem *problem);
fmla_status ref_cache_gather(const struct kernel *kernel, const struct cache_problem *problem);

#endif
