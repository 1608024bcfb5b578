/* SPDX-License-Identifier: MIT */
#include "mha_backward.cuh"
#include "rows.cuh"

/* Element, d_qk, d_v, is dq added to in one order. */
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_64, Fp16, 64, 64, false)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_64_ordered, Fp16, 64, 64, true)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_64, sm90_mha_backward_finish_fp16_64, Fp16, 64, 64)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_128, Fp16, 128, 128, false)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_128_ordered, Fp16, 128, 128, true)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_128, sm90_mha_backward_finish_fp16_128, Fp16, 128,
                         128)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_192, Fp16, 192, 128, false)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_192_ordered, Fp16, 192, 128, true)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_192, sm90_mha_backward_finish_fp16_192, Fp16, 192,
                         128)
