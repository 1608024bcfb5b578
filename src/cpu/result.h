/* SPDX-License-Identifier: MIT
 *
 * From an attention's fp32 row and natural lse to what the caller asked for, shared by decode and merge, and the sum of
 * parts of which merge is given the lse alone. An lse of ±inf says that no key was seen.
 */
#ifndef FMLA_CPU_RESULT_H
#define FMLA_CPU_RESULT_H

#include "../num.h"
#include "../problem.h"

#include <math.h>

static inline float result_load(const void *data, enum element element, int64_t i)
{
    switch (element) {
    case ELEMENT_BF16: return num_from_bf16(((const uint16_t *)data)[i]);
    case ELEMENT_FP16: return num_from_fp16(((const uint16_t *)data)[i]);
    case ELEMENT_F32: break;
    }
    return ((const float *)data)[i];
}

/* Writes `count` values times `factor` from data[at]. */
static inline void result_store(void *data, enum element element, int64_t at, const float *values,
                                float factor, int64_t count)
{
    uint16_t *narrow = (uint16_t *)data + at;
    switch (element) {
    case ELEMENT_BF16:
        for (int64_t i = 0; i < count; i++) narrow[i] = num_to_bf16(values[i] * factor);
        break;
    case ELEMENT_FP16:
        for (int64_t i = 0; i < count; i++) narrow[i] = num_to_fp16(values[i] * factor);
        break;
    case ELEMENT_F32:
        for (int64_t i = 0; i < count; i++) ((float *)data)[at + i] = values[i] * factor;
        break;
    }
}

/* What `out` is multiplied by. */
static inline float result_sink_factor(const struct result_rules *rules, int64_t head, float lse)
{
    if (!rules->attn_sink || isinf(lse)) return 1.0f;
    return 1.0f / (1.0f + expf(rules->attn_sink[head] - lse));
}

static inline float result_lse(const struct result_rules *rules, float lse)
{
    return isinf(lse) ? rules->lse_of_empty : lse * rules->lse_factor;
}

/* ln Σ exp(lse) of parts, one after the other in their order. */
struct lse_sum {
    float max, sum;
};

static const struct lse_sum lse_sum_empty = {-INFINITY, 0.0f};

static inline void lse_sum_add(struct lse_sum *total, float lse)
{
    if (isinf(lse)) return;
    if (lse > total->max) {
        total->sum = total->sum * expf(total->max - lse) + 1.0f; /* the first: 0 · exp(-inf) + 1 */
        total->max = lse;
    } else {
        /* A NaN comes here, also as the first: it must reach the sum. */
        total->sum += total->max == -INFINITY ? lse : expf(lse - total->max);
    }
}

static inline float lse_sum_value(const struct lse_sum *total)
{
    return total->sum == 0.0f        ? -INFINITY
           : total->max == -INFINITY ? total->sum
                                     : total->max + logf(total->sum);
}

/* What a part counts in the whole. */
static inline float lse_weight(float part, float whole)
{
    return isinf(part) ? 0.0f : expf(part - whole);
}

#endif
