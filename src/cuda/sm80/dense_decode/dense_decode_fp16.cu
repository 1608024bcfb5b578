/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    DENSE_DECODE_KERNEL(sm80_dense_decode_fp16, DenseDecode, Fp16, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
