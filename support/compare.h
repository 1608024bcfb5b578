/* SPDX-License-Identifier: MIT
 *
 * Comparison of results with the oracle, as docs/semantics.md ("Tolerances") defines it: infinities and NaN
 * must match exactly and in place; every other element passes if |Δ| < abs or |Δ| / |reference| < rel; and
 * over the whole tensor the cosine difference 1 - 2 Σab / Σ(a² + b²) must stay below its bound. An element may
 * have a bound of its own beside these.
 */
#ifndef FMLA_SUPPORT_COMPARE_H
#define FMLA_SUPPORT_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

struct tolerance {
    double abs, rel, cosine;
};

extern const struct tolerance tolerance_dense_decode_out; /* of bf16 and fp16 outputs */
extern const struct tolerance
    tolerance_dense_unrounded_out; /* where a kernel does not round dequantised keys */
extern const struct tolerance tolerance_sparse_decode_out; /* of bf16 and fp16 outputs */
extern const struct tolerance
    tolerance_fp8_products_out; /* of kernels that multiply codes; FP8 products as defined have the above */
extern const struct tolerance tolerance_decode_lse;
extern const struct tolerance tolerance_sparse_prefill_out;
extern const struct tolerance tolerance_prefill_lse; /* of max_logits too */
extern const struct tolerance tolerance_mha_out;     /* its lse has that of sparse prefill */
/* How far an lse or a max_logits may be besides, where kernels may round a cache's scales to bf16: the bound of its own that
 * compare_add_within takes. */
extern const double rounded_scale_lse;
extern const struct tolerance tolerance_exact_f32; /* a merge in fp32 against the oracle's */

/* Fed element by element; zero-initialised. */
struct comparison {
    int64_t count;
    int64_t wrong;       /* elements that fail, non-finite mismatches included */
    int64_t first_wrong; /* index of the first (in feeding order) */
    double worst_abs;    /* largest |Δ| of finite elements */
    double sum_ab, sum_aabb, sum_refref, most_refref;
};

/* Are both finite, and farther apart than abs and rel allow? */
bool compare_misses(const struct tolerance *tolerance, double value, double reference);

/* Adds an element. A finite one passes with |Δ| ≤ within, too; if by that alone, it counts as equal in the cosine. */
void compare_add_within(struct comparison *comparison, const struct tolerance *tolerance, double value,
                        double reference, double within);

/* The cosine difference so far; 0 where the reference is all but zero. */
double compare_cosine(const struct comparison *comparison);

bool compare_passed(const struct comparison *comparison, const struct tolerance *tolerance);

/* The same of an `out` whose inputs are none of the tolerance's table (docs/semantics.md, "Other inputs than the table's"):
 * where one element is more than 1/256 of Σ reference², the cosine difference may be 2^-17. That an element may be off by the
 * rounding of what it is summed of is compare_add_within's to say, with magnitude_out_bound. */
bool compare_passed_other(const struct comparison *comparison, const struct tolerance *tolerance);

#endif
