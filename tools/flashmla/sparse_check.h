/* SPDX-License-Identifier: MIT
 *
 * Comparison of a computed batch of sparse decode with the oracle, through the public interface alone.
 */
#ifndef FLASHMLA_TOOL_SPARSE_CHECK_H
#define FLASHMLA_TOOL_SPARSE_CHECK_H

#include "check.h"

/* Computes args again with the oracle - whole if it is small, else the first token, the last and a sample, 64 rows at
 * least - and compares args->out and args->lse (which must be there) with it. All tensors lie in host memory without gaps.
 * False with a fault if it could not. */
bool sparse_check_against_oracle(const fmla_sparse_decode_args *args, struct check_result *result,
                                 struct fault *fault);

#endif
