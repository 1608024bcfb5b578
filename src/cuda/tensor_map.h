/* SPDX-License-Identifier: MIT
 *
 * TMA tensor descriptions: five dimensions of 16-bit elements, and the box that one copy brings to shared
 * memory. Lines have 128 bytes and the 128-byte swizzle (swizzle_128 of device/fragment.h); a box of 32
 * columns has lines of 64 bytes with the 64-byte swizzle; narrower boxes have no swizzle.
 */
#ifndef FMLA_CUDA_TENSOR_MAP_H
#define FMLA_CUDA_TENSOR_MAP_H

#include "../problem.h"
#include "device.h"
#include "params.h"

enum { TENSOR_DIMS = 5 };

/* Innermost dimension first; its stride is 1 and is ignored. */
struct tensor_view {
    const void *data; /* 16-byte aligned; not NULL, even if the tensor is empty */
    enum element element;
    int64_t size[TENSOR_DIMS];
    int64_t stride[TENSOR_DIMS]; /* in elements; a multiple of 8 */
    int32_t box[TENSOR_DIMS];
};

/* Returns whether TMA can step by `stride` elements over a dimension of `size`. A dimension of size 1 is
 * never stepped over. */
bool tensor_stride_possible(int64_t size, int64_t stride);

/* Returns whether TMA can read the tensor: the base is 16-byte aligned and, unless the tensor is empty, all
 * strides but the innermost are possible. */
bool tensor_view_possible(const struct tensor_view *view);

/* `what` names the tensor in the message if the driver refuses. */
fmla_status tensor_map_make(const char *operation, const struct cuda_scope *scope, const char *what,
                            const struct tensor_view *view, struct tensor_map *map);

#endif
