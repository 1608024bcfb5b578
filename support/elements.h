/* SPDX-License-Identifier: MIT
 *
 * Reads and writes elements of tensors in host memory as float, for tools and tests whose tensor types are
 * known only at run time.
 */
#ifndef FMLA_SUPPORT_ELEMENTS_H
#define FMLA_SUPPORT_ELEMENTS_H

#include "flashmla/flashmla.h"

#include <stdbool.h>

static inline bool dtype_is(fmla_dtype dtype, int code, int bits)
{
    return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

static inline fmla_dtype dtype_of(int code, int bits)
{
    const fmla_dtype dtype = {(uint8_t)code, (uint8_t)bits, 1};
    return dtype;
}

/* Returns element i of bf16, fp16 or fp32 data; NaN for other types. */
float element_load(const void *data, fmla_dtype dtype, int64_t i);

/* Writes element i of bf16, fp16 or fp32 data, rounded to nearest even; leaves other types alone. */
void element_store(void *data, fmla_dtype dtype, int64_t i, float value);

#endif
