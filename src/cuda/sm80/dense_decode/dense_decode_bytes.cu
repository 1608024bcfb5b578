/* SPDX-License-Identifier: MIT */
#include "dense_decode.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    DENSE_DECODE_OF_SHAPE(sm80_dense_decode_bytes, Bf16, rows, keys, warps, q, true)
LATENT_SHAPES(SHAPE)
