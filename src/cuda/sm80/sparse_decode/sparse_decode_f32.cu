/* SPDX-License-Identifier: MIT */
#include "byte_convert.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    LISTED_BYTES_KERNEL(sm80_sparse_decode_f32, LISTED_F32, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
