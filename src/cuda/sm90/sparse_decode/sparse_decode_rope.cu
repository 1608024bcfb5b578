/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over the FP8 formats that have rope values, which are bf16.
 */
#include "mainloop.cuh"

SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_656, Fp8_656)
SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_584, Fp8_584)
