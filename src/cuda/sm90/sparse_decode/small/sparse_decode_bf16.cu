/* SPDX-License-Identifier: MIT */
#include "sparse_decode.cuh"

SPARSE_DECODE_SMALL_KERNEL(sm90_sparse_decode_small_bf16_fp8_656, KV_FP8_656)
SPARSE_DECODE_SMALL_KERNEL(sm90_sparse_decode_small_bf16_fp8_584, KV_FP8_584)
