/* SPDX-License-Identifier: MIT
 *
 * Σ_d |scale · q_d · k_d| of the key that has the largest score of a row: what the rounding of that score is relative to,
 * and so that of lse and max_logits, however small they are themselves (docs/semantics.md, "Tolerances"). In double, from
 * the values that the oracle reads.
 */
#ifndef CHECKATTN_MAGNITUDE_H
#define CHECKATTN_MAGNITUDE_H

#include "flashmla/flashmla.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Zero-initialised, and then given the keys that the row sees, one after the other. */
struct magnitude {
    bool any;
    double score, sum; /* of the key with the largest score */
};

static inline void magnitude_add(struct magnitude *m, double scale, const float *q, const float *key,
                                 int64_t d_qk)
{
    double score = 0.0, sum = 0.0;
    for (int64_t d = 0; d < d_qk; d++) {
        const double product = scale * (double)q[d] * (double)key[d];
        score += product, sum += fabs(product);
    }
    if (isnan(score) || (m->any && score <= m->score)) return;
    *m = (struct magnitude){true, score, sum};
}

/* How far from the oracle's an lse of that base may be for the rounding of products; 0 where no key is seen. */
static inline double magnitude_bound(const struct magnitude *m, int32_t log_base)
{
    static const double log2_e = 1.44269504088896341;
    return 0x1p-20 * m->sum * (log_base == FMLA_LOG_BASE_2 ? log2_e : 1.0);
}

#endif
