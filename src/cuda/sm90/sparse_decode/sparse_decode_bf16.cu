/* SPDX-License-Identifier: MIT */
#include "sparse_decode.cuh"

SPARSE_DECODE_KERNEL(sm90_sparse_decode_bf16_fp8_656, KV_FP8_656)
SPARSE_DECODE_KERNEL(sm90_sparse_decode_bf16_fp8_584, KV_FP8_584)
SPARSE_DECODE_KERNEL_OF_ONE_PIECE(sm90_sparse_decode_bf16_fp8_656_together, KV_FP8_656)
SPARSE_DECODE_KERNEL_OF_ONE_PIECE(sm90_sparse_decode_bf16_fp8_584_together, KV_FP8_584)
