/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

SPARSE_DECODE_KERNEL(sm90_sparse_decode_fp16_512, 512, Fp16)
SPARSE_DECODE_KERNEL(sm90_sparse_decode_fp16_576, 576, Fp16)
