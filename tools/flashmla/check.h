/* SPDX-License-Identifier: MIT
 *
 * Comparison of a computed call with the oracle, through the public interface alone.
 */
#ifndef FLASHMLA_TOOL_CHECK_H
#define FLASHMLA_TOOL_CHECK_H

#include "policy.h"

struct check_result {
    enum operation op;
    int64_t rows;                  /* compared */
    int64_t all_rows;              /* of the call */
    struct comparison of[RESULTS]; /* of each result that has a tolerance: out, lse, max_logits */
    int64_t wrong_bytes;           /* of those that have none, and of inputs that were written */
    bool passed;
};

/* Computes the call again with the oracle - whole if that is quick, else the first row or token, the last and others at
 * random, 64 rows at least - and compares the results, which must be there, as those of inputs that may be any. All tensors
 * lie in host memory without gaps; by_gpu: the results are a GPU's. False with a fault if it could not. */
bool check_against_oracle(const struct call *call, bool by_gpu, struct check_result *result,
                          struct fault *fault);

/* Computes the call, whole, with the oracle. False with a fault if it could not. */
bool check_ask(struct call *call, struct fault *fault);

/* The same comparison, whole, of inputs of the table of tolerances, which may have been written: `asked` is the call as it was,
 * computed by check_ask. Inputs must be as they were. */
void check_against_asked(const struct call *call, const struct call *asked, bool by_gpu,
                         struct check_result *result);

/* "1 values of out and 0 of lse differ", of a check that did not pass. */
void check_words(const struct check_result *result, char *text, size_t room);

#endif
