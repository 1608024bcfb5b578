/* SPDX-License-Identifier: MIT */
#include "tensor_map.h"

#include <stdio.h>

enum { ELEMENT_BYTES = 2, STRIDE_BYTES = 16 /* strides are multiples of STRIDE_BYTES */ };
enum { NARROW_LINE = 32 /* elements of a line of 64 bytes */ };

bool tensor_stride_possible(int64_t size, int64_t stride)
{
    const int64_t most = (INT64_C(1) << 40) / ELEMENT_BYTES;
    return size <= 1 || (stride > 0 && stride < most && stride % (STRIDE_BYTES / ELEMENT_BYTES) == 0);
}

bool tensor_view_possible(const struct tensor_view *view)
{
    bool possible = true, empty = false;
    for (int i = 1; i < TENSOR_DIMS; i++) {
        possible = possible && tensor_stride_possible(view->size[i], view->stride[i]);
        empty = empty || !view->size[i];
    }
    return (uintptr_t)view->data % STRIDE_BYTES == 0 && (possible || empty);
}

fmla_status tensor_map_make(const char *operation, const struct cuda_scope *scope, const char *what,
                            const struct tensor_view *view, struct tensor_map *map)
{
    uint64_t sizes[TENSOR_DIMS], strides[TENSOR_DIMS - 1];
    uint32_t box[TENSOR_DIMS], steps[TENSOR_DIMS];
    bool empty = false; /* then nothing is read, and one element stands in */
    for (int i = 0; i < TENSOR_DIMS; i++) empty |= view->size[i] == 0;
    for (int i = 0; i < TENSOR_DIMS; i++) {
        sizes[i] = empty ? 1 : (uint64_t)view->size[i];
        box[i] = (uint32_t)view->box[i], steps[i] = 1;
        if (i) strides[i - 1] = sizes[i] > 1 ? (uint64_t)view->stride[i] * ELEMENT_BYTES : STRIDE_BYTES;
    }
    union {
        const void *data;
        void *base; /* not written by the driver */
    } from = {view->data};
    const cu_result error = scope->driver->tensor_map_encode(
        (cu_tensor_map)(void *)map, view->element == ELEMENT_BF16 ? CU_TENSOR_BFLOAT16 : CU_TENSOR_FLOAT16,
        TENSOR_DIMS, from.base, sizes, strides, box, steps, CU_TENSOR_INTERLEAVE_NONE,
        view->box[0] < NARROW_LINE    ? CU_TENSOR_SWIZZLE_NONE
        : view->box[0] == NARROW_LINE ? CU_TENSOR_SWIZZLE_64B
                                      : CU_TENSOR_SWIZZLE_128B,
        CU_TENSOR_PROMOTION_128B, CU_TENSOR_FILL_ZERO);
    if (!error) return FMLA_OK;
    char asked[64];
    snprintf(asked, sizeof asked, "cuTensorMapEncodeTiled of %s", what);
    return cuda_failed(operation, scope, asked, error);
}
