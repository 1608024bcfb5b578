/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

DENSE_DECODE_KERNEL(sm80_dense_decode_fp16_16x32, Fp16, 16, 32, 4)
DENSE_DECODE_KERNEL(sm80_dense_decode_fp16_64x64, Fp16, 64, 64, 8)
