/* SPDX-License-Identifier: MIT
 *
 * Comparison of a computed batch with the oracle, through the public interface alone.
 */
#ifndef FLASHMLA_TOOL_CHECK_H
#define FLASHMLA_TOOL_CHECK_H

#include "compare.h"
#include "fault.h"

#include "flashmla/flashmla.h"

struct check_result {
    int64_t rows;     /* compared */
    int64_t all_rows; /* of the batch */
    struct comparison out, lse;
    struct comparison max_logits; /* of sparse prefill */
    bool passed;
};

/* Products of one element that the oracle needs for a key of a row. */
static inline int64_t check_row_cost(const fmla_dense_decode_args *args)
{
    return args->q->shape[3] + args->out->shape[3];
}

/* Computes args again with the oracle - whole if it is small, else the first row, the last and a sample - and
 * compares args->out and args->lse (which must be there) with it. False with a fault if it could not. */
bool check_against_oracle(const fmla_dense_decode_args *args, struct check_result *result,
                          struct fault *fault);

#endif
