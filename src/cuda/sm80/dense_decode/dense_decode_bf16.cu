/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_16x32, Bf16, 16, 32, 4, 1, false)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_16x64, Bf16, 16, 64, 8, 1, true)
DENSE_DECODE_KERNEL(sm80_dense_decode_bf16_64x64, Bf16, 64, 64, 8, 2, false)
