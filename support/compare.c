/* SPDX-License-Identifier: MIT */
#include "compare.h"

#include <math.h>

/* Probabilities and results are rounded to 16 bits, by 2^-9 of each at most. If all these errors have one
 * sign, the cosine difference is (2^-8)²/2. */
static const double leaning = 0x1p-17;

const struct tolerance tolerance_dense_decode_out = {8e-4, 2.01 / 128, 5e-6};
const struct tolerance tolerance_sparse_decode_out = {1e-3, 2.01 / 128, 5e-6};
/* The oracle rounds dequantised keys to bf16; a kernel that multiplies codes and applies scales later does not. That changes scores and
 * values by up to 2^-9 each, beside the 2^-9 of the result. */
const struct tolerance tolerance_dense_unrounded_out = {8e-4, 2.01 / 128, 9 * 0x1p-19 /* (3 · 2^-9)² / 2 */};
const struct tolerance tolerance_fp8_products_out = {3e-3, 4.01 / 128, 2e-4};
const struct tolerance tolerance_decode_lse = {1e-6, 8.01 / 65536, 1e-7};
const struct tolerance tolerance_sparse_prefill_out = {8e-4, 3.01 / 128, 7e-6};
const struct tolerance tolerance_mha_out = {1e-3, 8.01 / 128, 7e-6};
const struct tolerance tolerance_mha_dsink = {1e-6, 1.01 / 1024, 1e-6};
const struct tolerance tolerance_prefill_lse = {1e-6, 2.01 / 65536, 1e-7};
const double rounded_scale_lse = 1e-3;
const struct tolerance tolerance_exact_f32 = {1e-6, 1e-5, 1e-9};

bool compare_misses(const struct tolerance *tolerance, double value, double reference)
{
    const double difference = fabs(value - reference);
    if (!isfinite(value) || !isfinite(reference)) return false;
    return !(difference < tolerance->abs || difference / fabs(reference) < tolerance->rel);
}

void compare_add_within(struct comparison *comparison, const struct tolerance *tolerance, double value,
                        double reference, double within)
{
    bool wrong = false;
    if (isfinite(value) && isfinite(reference)) {
        const double difference = fabs(value - reference);
        if (difference > comparison->worst_abs) comparison->worst_abs = difference;
        wrong = compare_misses(tolerance, value, reference);
        if (wrong && difference <= within) wrong = false, value = reference;
        comparison->sum_ab += value * reference;
        comparison->sum_aabb += value * value + reference * reference;
        comparison->sum_refref += reference * reference;
        comparison->most_refref = fmax(comparison->most_refref, reference * reference);
    } else {
        /* Matching special values count as 0 in the sums. */
        wrong = isnan(reference) ? !isnan(value) : !(value == reference);
    }
    if (wrong && comparison->wrong++ == 0) comparison->first_wrong = comparison->count;
    comparison->count++;
}

double compare_cosine(const struct comparison *comparison)
{
    if (comparison->sum_refref < 1e-12) return 0.0;
    return 1.0 - 2.0 * comparison->sum_ab / comparison->sum_aabb;
}

bool compare_passed(const struct comparison *comparison, const struct tolerance *tolerance)
{
    return comparison->wrong == 0 && compare_cosine(comparison) < tolerance->cosine;
}

bool compare_passed_other(const struct comparison *comparison, const struct tolerance *tolerance)
{
    const bool few = comparison->most_refref > comparison->sum_refref / 256;
    return comparison->wrong == 0 &&
           compare_cosine(comparison) < (few ? fmax(leaning, tolerance->cosine) : tolerance->cosine);
}
