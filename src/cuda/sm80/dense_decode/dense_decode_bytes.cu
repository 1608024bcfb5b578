/* SPDX-License-Identifier: MIT */
#include "byte_producer.cuh"

#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    DENSE_DECODE_KERNEL(sm80_dense_decode_bytes, DenseDecodeOfBytes, Bf16, rows, keys, warps, q)
LATENT_SHAPES(SHAPE)
