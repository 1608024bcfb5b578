/* SPDX-License-Identifier: MIT
 *
 * Turns the fp32 row and natural lse of an attention into the results that the caller asked for; attention,
 * its gradients and merge share it. An lse of ±inf says that the row saw no key.
 */
#ifndef FMLA_CPU_RESULT_H
#define FMLA_CPU_RESULT_H

#include "../num_fast.h"
#include "../problem.h"

#include <math.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float result_load(const void *data, enum element element, int64_t i)
{
    switch (element) {
    case ELEMENT_BF16: return num_from_bf16(((const uint16_t *)data)[i]);
    case ELEMENT_FP16: return num_from_fp16(((const uint16_t *)data)[i]);
    case ELEMENT_F32: break;
    }
    return ((const float *)data)[i];
}

/* Rounds values · factor to 16 bits; branch-free, so that compilers vectorize it. GCC 12 does not for fp16. */
static inline void result_round(uint16_t *to, const float *values, float factor, int64_t count,
                                enum element element)
{
    int64_t i = 0;
    if (element == ELEMENT_BF16) {
        for (; i < count; i++) to[i] = fast_to_bf16(values[i] * factor);
        return;
    }
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(to + i),
                         _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(factor)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
    for (; i < count; i++) to[i] = fast_to_fp16(values[i] * factor);
}

/* Writes values · factor to data[at …], rounded to `element`. */
static inline void result_store(void *data, enum element element, int64_t at, const float *values,
                                float factor, int64_t count)
{
    if (element == ELEMENT_F32)
        for (int64_t i = 0; i < count; i++) ((float *)data)[at + i] = values[i] * factor;
    else
        result_round((uint16_t *)data + at, values, factor, count, element);
}

/* Returns the factor that the attention sink applies to `out`. */
static inline float result_sink_factor(const struct result_rules *rules, int64_t head, float lse)
{
    if (!rules->attn_sink || isinf(lse)) return 1.0f;
    return 1.0f / (1.0f + expf(rules->attn_sink[head] - lse));
}

static inline float result_lse(const struct result_rules *rules, float lse)
{
    return isinf(lse) ? rules->lse_of_empty : lse * rules->lse_factor;
}

#endif
