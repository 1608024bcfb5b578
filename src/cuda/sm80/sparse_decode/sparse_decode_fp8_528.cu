/* SPDX-License-Identifier: MIT */
#include "byte_convert.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    LISTED_BYTES_KERNEL(sm80_sparse_decode_fp8_528, LISTED_528, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
