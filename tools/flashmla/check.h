/* SPDX-License-Identifier: MIT
 *
 * Compares a computed call with the oracle, through the public interface only.
 */
#ifndef FLASHMLA_TOOL_CHECK_H
#define FLASHMLA_TOOL_CHECK_H

#include "policy.h"

struct check_result {
    enum operation op;
    int64_t rows;                  /* compared */
    int64_t all_rows;              /* in the call */
    struct comparison of[RESULTS]; /* for each result with a tolerance: out, lse, max_logits; or gradients */
    int64_t wrong_bytes;           /* in results without a tolerance, and in written inputs */
    bool passed;
};

/* Recomputes the call with the oracle and compares the results, which must be present, under the rules for
 * arbitrary inputs. It compares the whole call if that is quick, else the first row or token, the last one
 * and random others, at least 64 rows. All tensors are contiguous in host memory; by_gpu: a GPU computed the
 * results. Returns false with a reason if the oracle could not run. */
bool check_against_oracle(const struct call *call, bool by_gpu, struct check_result *result,
                          struct reason *reason);

/* Computes the whole call with the oracle. Returns false with a reason if that failed. */
bool check_ask(struct call *call, struct reason *reason);

/* Compares the whole call under the rules of the table of tolerances. `asked` is the call before it ran,
 * computed by check_ask; inputs that the call has overwritten are errors. */
void check_against_asked(const struct call *call, const struct call *asked, bool by_gpu,
                         struct check_result *result);

/* Describes a failed check: "1 values of out and 0 of lse differ". */
void check_words(const struct check_result *result, char *text, size_t room);

#endif
