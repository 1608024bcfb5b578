/* SPDX-License-Identifier: MIT
 *
 * The oracle: every operation as docs/semantics.md defines it, scalar, in double, row by row. It shares
 * nothing with the kernels but the number formats and the roundings of new_token.h. It runs only when named,
 * and its results count as correct.
 */
#ifndef FMLA_REF_H
#define FMLA_REF_H

#include "../kernel.h"
#include "../num.h"

/* Returns element i of a tensor. */
static inline float ref_load(const void *data, enum element element, int64_t i)
{
    if (element == ELEMENT_F32) return ((const float *)data)[i];
    const uint16_t narrow = ((const uint16_t *)data)[i];
    return element == ELEMENT_BF16 ? num_from_bf16(narrow) : num_from_fp16(narrow);
}

static inline void ref_store(void *data, enum element element, int64_t i, float x)
{
    if (element == ELEMENT_F32)
        ((float *)data)[i] = x;
    else
        ((uint16_t *)data)[i] = element == ELEMENT_BF16 ? num_to_bf16(x) : num_to_fp16(x);
}

extern const struct kernel_driver ref_attention_driver, ref_cache_driver;

#endif
