/* SPDX-License-Identifier: MIT
 *
 * Comparison of a computed prompt of sparse prefill with the oracle, through the public interface alone.
 */
#ifndef FLASHMLA_TOOL_PREFILL_CHECK_H
#define FLASHMLA_TOOL_PREFILL_CHECK_H

#include "check.h"

/* As sparse_check_against_oracle, of args->out, args->max_logits and args->lse, which must all be there. */
bool prefill_check_against_oracle(const fmla_sparse_prefill_args *args, struct check_result *result,
                                  struct fault *fault);

#endif
