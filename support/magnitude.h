/* SPDX-License-Identifier: MIT
 *
 * The scale of rounding errors in a row's results, which may exceed the results themselves
 * (docs/semantics.md, "Tolerances"): Σ_d |scale · q_d · k_d| of the key with the largest score, for lse
 * and max_logits; Σ_t p_t |v_t|, for an element of out. Computed in double from the values that the oracle
 * reads.
 */
#ifndef FMLA_SUPPORT_MAGNITUDE_H
#define FMLA_SUPPORT_MAGNITUDE_H

#include "flashmla/flashmla.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum { MAGNITUDE_MOST = 512 }; /* values of a row */

/* Zero-initialise it, then add each key that the row sees. */
struct magnitude {
    bool any;
    double score, sum; /* of the key with the largest score */
    double weight,
        values[MAGNITUDE_MOST]; /* Σ_t p_t and Σ_t p_t |v_t|, where p_t = exp(its score - the largest) */
};

/* Adds a key and its d_v values. */
static inline void magnitude_add(struct magnitude *m, double scale, const float *q, const float *key,
                                 int64_t d_qk, const float *value, int64_t d_v)
{
    double score = 0.0, sum = 0.0;
    for (int64_t d = 0; d < d_qk; d++) {
        const double product = scale * (double)q[d] * (double)key[d];
        score += product, sum += fabs(product);
    }
    if (isnan(score)) return;
    if (!m->any || score > m->score) {
        const double smaller = m->any ? exp(m->score - score) : 0.0;
        m->any = true, m->score = score, m->sum = sum, m->weight *= smaller;
        for (int64_t d = 0; d < d_v; d++) m->values[d] *= smaller;
    }
    const double p = exp(score - m->score);
    m->weight += p;
    for (int64_t d = 0; d < d_v; d++) m->values[d] += p * fabs((double)value[d]);
}

/* Returns the error that the rounding of products allows an lse of that base; 0 if the row sees no key. */
static inline double magnitude_bound(const struct magnitude *m, int32_t log_base)
{
    static const double log2_e = 1.44269504088896341;
    return 0x1p-20 * m->sum * (log_base == FMLA_LOG_BASE_2 ? log2_e : 1.0);
}

/* Returns the error that the rounding of probabilities and of out to bf16, by 2^-9 each, allows element d
 * of out; 0 if the row sees no key. */
static inline double magnitude_out_bound(const struct magnitude *m, double sink, int d)
{
    return m->any ? 0x1p-8 * m->values[d] / (m->weight + exp(sink - m->score)) : 0.0;
}

#endif
