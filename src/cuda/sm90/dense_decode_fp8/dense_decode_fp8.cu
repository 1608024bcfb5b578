/* SPDX-License-Identifier: MIT */
#include "dense_decode_fp8.cuh"

#include "../../variants.h"

#define CODES_OF(bytes, variant, rows, join_in_kernel)                                                       \
    DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_##bytes##_##variant, rows, join_in_kernel, CODES,          \
                            OF_##bytes)
#define CONVERTED_OF(bytes, variant, rows, join_in_kernel)                                                   \
    DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_##bytes##_##variant, rows, join_in_kernel,           \
                            CONVERTED, OF_##bytes)
SM90_DENSE_DECODE_FP8_VARIANTS(CODES_OF, 576)
SM90_DENSE_DECODE_FP8_VARIANTS(CONVERTED_OF, 576)
SM90_DENSE_DECODE_FP8_VARIANTS(CONVERTED_OF, 656)
SM90_DENSE_DECODE_FP8_VARIANTS(CODES_OF, 656) /* line by line */
