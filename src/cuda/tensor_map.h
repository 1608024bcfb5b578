/* SPDX-License-Identifier: MIT
 *
 * Tensors as TMA is told of them: five dimensions of 16-bit elements, and the box that one copy brings to shared memory in
 * lines of 128 bytes, swizzled (swizzle_128 of device/fragment.h); lines of a box of 32 columns have 64 bytes, and their own
 * swizzle; those of narrower boxes have none.
 */
#ifndef FMLA_CUDA_TENSOR_MAP_H
#define FMLA_CUDA_TENSOR_MAP_H

#include "../problem.h"
#include "device.h"
#include "params.h"

enum { TENSOR_DIMS = 5 };

/* Innermost dimension first; its stride is 1 and is not looked at. */
struct tensor_view {
    const void *data; /* at a multiple of 16 bytes; not NULL, even if the tensor is empty */
    enum element element;
    int64_t size[TENSOR_DIMS];
    int64_t stride[TENSOR_DIMS]; /* of elements; a multiple of 8 */
    int32_t box[TENSOR_DIMS];
};

/* Can TMA step by this many elements over a dimension of `size`? Steps over a single element are never made. */
bool tensor_stride_possible(int64_t size, int64_t stride);

/* Can TMA read it? It steps over all dimensions but the innermost, of a tensor with elements; bases are at multiples of 16 bytes. */
bool tensor_view_possible(const struct tensor_view *view);

/* `what` is named where the driver refuses. */
fmla_status tensor_map_make(const char *operation, const struct cuda_scope *scope, const char *what,
                            const struct tensor_view *view, struct tensor_map *map);

#endif
