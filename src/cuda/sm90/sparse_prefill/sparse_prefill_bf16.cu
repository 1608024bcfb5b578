/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_512, 512, false)
SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_576, 576, false)
SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_512_splits, 512, true)
SPARSE_PREFILL_KERNEL(sm90_sparse_prefill_bf16_576_splits, 576, true)
