/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

/* Element, rows, keys, warps, column splits, Q in registers: the shapes of shape.c. */
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_16x32, Bf16, 16, 32, 4, 1, false)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_16x64, Bf16, 16, 64, 8, 1, true)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_32x64, Bf16, 32, 64, 8, 1, false)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_64x32, Bf16, 64, 32, 8, 2, false)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_64x64, Bf16, 64, 64, 8, 2, false)
