/* SPDX-License-Identifier: MIT */
#include "dense_decode_fp8.cuh"

/* Arguments: rows of a tile, whether CTAs join their results themselves, products, cache. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_64, 64, false, CODES, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_32, 32, false, CODES, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_16, 16, false, CODES, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_64_together, 64, true, CODES, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_32_together, 32, true, CODES, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_576_16_together, 16, true, CODES, OF_576)

/* Converted keys of FP8_576. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_64, 64, false, CONVERTED, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_32, 32, false, CONVERTED, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_16, 16, false, CONVERTED, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_64_together, 64, true, CONVERTED, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_32_together, 32, true, CONVERTED, OF_576)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_576_16_together, 16, true, CONVERTED, OF_576)

/* Converted keys of FP8_656. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_64, 64, false, CONVERTED, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_32, 32, false, CONVERTED, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_16, 16, false, CONVERTED, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_64_together, 64, true, CONVERTED, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_32_together, 32, true, CONVERTED, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_converted_656_16_together, 16, true, CONVERTED, OF_656)

/* Codes of FP8_656, line by line. */
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_64, 64, false, CODES, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_32, 32, false, CODES, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_16, 16, false, CODES, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_64_together, 64, true, CODES, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_32_together, 32, true, CODES, OF_656)
DENSE_DECODE_FP8_KERNEL(sm90_dense_decode_fp8_656_16_together, 16, true, CODES, OF_656)
