/* SPDX-License-Identifier: MIT
 *
 * Compares results with the oracle as docs/semantics.md ("Tolerances") defines: infinities and NaN must
 * match exactly and in place; every other element passes if |Δ| < abs or |Δ| / |reference| < rel; over the
 * whole tensor the cosine difference 1 - 2 Σab / Σ(a² + b²) must stay below its bound. An element may also
 * have a bound of its own.
 */
#ifndef FMLA_SUPPORT_COMPARE_H
#define FMLA_SUPPORT_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

struct tolerance {
    double abs, rel, cosine;
};

extern const struct tolerance tolerance_dense_decode_out;    /* bf16 and fp16 outputs */
extern const struct tolerance tolerance_dense_unrounded_out; /* kernels that do not round dequantised keys */
extern const struct tolerance tolerance_sparse_decode_out;   /* bf16 and fp16 outputs */
extern const struct tolerance
    tolerance_fp8_products_out; /* kernels that multiply codes; FP8 products as defined use the above */
extern const struct tolerance tolerance_decode_lse;
extern const struct tolerance tolerance_sparse_prefill_out;
extern const struct tolerance tolerance_prefill_lse; /* also of max_logits */
extern const struct tolerance tolerance_mha_out;     /* its lse uses tolerance_prefill_lse */
extern const struct tolerance tolerance_mha_dsink;   /* the gradient of a sink */
/* The bound that compare_add_within takes for lse and max_logits where kernels may round a cache's scales
 * to bf16. */
extern const double rounded_scale_lse;
extern const struct tolerance tolerance_exact_f32; /* a merge in fp32 against the oracle */

/* Filled by compare_add_within, one element at a time; zero-initialise it. */
struct comparison {
    int64_t count;
    int64_t wrong;       /* elements that fail, non-finite mismatches included */
    int64_t first_wrong; /* index of the first (in feeding order) */
    double worst_abs;    /* largest |Δ| of finite elements */
    double sum_ab, sum_aabb, sum_refref, most_refref;
};

/* Returns true if both are finite and differ by more than abs and rel allow. */
bool compare_misses(const struct tolerance *tolerance, double value, double reference);

/* Adds an element. A finite element also passes with |Δ| ≤ within; if only that passes it, the cosine
 * counts it as equal. */
void compare_add_within(struct comparison *comparison, const struct tolerance *tolerance, double value,
                        double reference, double within);

/* Returns the cosine difference so far; 0 where the reference is almost zero. */
double compare_cosine(const struct comparison *comparison);

bool compare_passed(const struct comparison *comparison, const struct tolerance *tolerance);

/* Like compare_passed, for an `out` whose inputs are not in the table of tolerances (docs/semantics.md,
 * "Other inputs than the table's"): where one element is more than 1/256 of Σ reference², the cosine
 * difference may be 2^-17. compare_add_within with magnitude_out_bound covers the rounding of an element's
 * summands. */
bool compare_passed_other(const struct comparison *comparison, const struct tolerance *tolerance);

#endif
