/* SPDX-License-Identifier: MIT
 *
 * Tensors as expressions, valid until the end of the enclosing block. The body of an `if` or a loop is a
 * block, with or without braces.
 */
#ifndef FMLA_TENSORS_H
#define FMLA_TENSORS_H

#include "arguments.h"

static const fmla_dtype u8 = {FMLA_TYPE_UINT, 8, 1}, i64 = {FMLA_TYPE_INT, 64, 1};
static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};

static inline const fmla_tensor *tensor_of(struct held *held, void *data, fmla_dtype dtype,
                                           const int64_t *shape, size_t ndim)
{
    held_set(held, data, dtype, (int)ndim, shape);
    return &held->tensor;
}

/* A contiguous CPU tensor; the shape follows the type. */
#define TENSOR_OF(data, dtype, ...)                                                                          \
    tensor_of(&(struct held){0}, data, dtype, (const int64_t[]){__VA_ARGS__},                                \
              sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

#endif
