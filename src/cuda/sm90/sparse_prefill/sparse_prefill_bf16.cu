/* SPDX-License-Identifier: MIT */
#include "sparse_prefill.cuh"

SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_512, 512)
SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_576, 576)
