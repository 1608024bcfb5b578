/* SPDX-License-Identifier: MIT */
#include "sparse_decode.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    SPARSE_DECODE_KERNEL(sm80_sparse_decode_bf16, Bf16, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
