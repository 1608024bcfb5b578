/* SPDX-License-Identifier: MIT */
#include "byte_convert.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    LISTED_BYTES_KERNEL(sm80_sparse_decode_fp8_584, LISTED_584, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
