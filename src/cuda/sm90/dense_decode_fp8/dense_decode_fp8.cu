/* SPDX-License-Identifier: MIT */
#include "dense_decode_fp8.cuh"

/* Rows of a tile, whether blocks of threads join what they made. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_64, 64, false, CODES)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_32, 32, false, CODES)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_16, 16, false, CODES)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_64_together, 64, true, CODES)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_32_together, 32, true, CODES)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_16_together, 16, true, CODES)

/* The same with converted keys. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_64, 64, false, CONVERTED)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_32, 32, false, CONVERTED)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_16, 16, false, CONVERTED)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_64_together, 64, true, CONVERTED)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_32_together, 32, true, CONVERTED)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_16_together, 16, true, CONVERTED)
