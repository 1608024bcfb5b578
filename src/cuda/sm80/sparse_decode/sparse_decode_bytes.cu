/* SPDX-License-Identifier: MIT */
#include "listed_bytes.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    SPARSE_DECODE_KERNEL(sm80_sparse_decode_bytes, SparseDecodeOfBytes, Bf16, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
