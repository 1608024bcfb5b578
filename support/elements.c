/* SPDX-License-Identifier: MIT */
#include "elements.h"

#include "num.h"

#include <math.h>
#include <string.h>

float element_load(const void *data, fmla_dtype dtype, int64_t i)
{
    const char *at = (const char *)data + i * (dtype.bits / 8);
    uint16_t half;
    float single;
    if (dtype.bits == 8) return num_from_e4m3((uint8_t)*at);
    if (dtype_is(dtype, FMLA_TYPE_FLOAT, 32)) return memcpy(&single, at, sizeof single), single;
    memcpy(&half, at, sizeof half);
    if (dtype_is(dtype, FMLA_TYPE_BFLOAT, 16)) return num_from_bf16(half);
    if (dtype_is(dtype, FMLA_TYPE_FLOAT, 16)) return num_from_fp16(half);
    return NAN;
}

void element_store(void *data, fmla_dtype dtype, int64_t i, float value)
{
    char *at = (char *)data + i * (dtype.bits / 8);
    const uint16_t half = dtype_is(dtype, FMLA_TYPE_BFLOAT, 16) ? num_to_bf16(value) : num_to_fp16(value);
    if (dtype.bits == 8)
        *(uint8_t *)at = num_to_e4m3(value);
    else if (dtype_is(dtype, FMLA_TYPE_FLOAT, 32))
        memcpy(at, &value, sizeof value);
    else if (dtype_is(dtype, FMLA_TYPE_BFLOAT, 16) || dtype_is(dtype, FMLA_TYPE_FLOAT, 16))
        memcpy(at, &half, sizeof half);
}
