/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over formats of 512 columns without rope values.
 */
#include "mainloop.cuh"

SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_528, Fp8_528)
SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_528_f32, Fp8_528_F32)
SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_528_or_fp4, Fp8_528_Or_Fp4)
SPARSE_DECODE_KERNELS(sm90_sparse_decode_bf16_fp8_528_f32_or_fp4, Fp8_528_F32_Or_Fp4)
