/* SPDX-License-Identifier: MIT */
#include "codes/sparse_prefill.cuh"

SPARSE_PREFILL_CODES_KERNEL(sm90_sparse_prefill_fp8_656, KV_FP8_656)
SPARSE_PREFILL_CODES_KERNEL(sm90_sparse_prefill_fp8_584, KV_FP8_584)
