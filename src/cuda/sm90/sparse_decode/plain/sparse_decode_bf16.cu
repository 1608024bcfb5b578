/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

SPARSE_DECODE_KERNEL(sm90_sparse_decode_bf16_512, 512, Bf16)
SPARSE_DECODE_KERNEL(sm90_sparse_decode_bf16_576, 576, Bf16)
