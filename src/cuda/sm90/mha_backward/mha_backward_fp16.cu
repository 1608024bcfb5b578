/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"
#include "rows.cuh"

/* Element, d_qk, d_v. */
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_64, Fp16, 64, 64)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_64, sm90_mha_backward_finish_fp16_64, Fp16, 64, 64)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_96, Fp16, 96, 64)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_96, sm90_mha_backward_finish_fp16_96, Fp16, 96, 64)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_128, Fp16, 128, 128)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_128, sm90_mha_backward_finish_fp16_128, Fp16, 128,
                         128)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_192, Fp16, 192, 128)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_192, sm90_mha_backward_finish_fp16_192, Fp16, 192,
                         128)
MHA_BACKWARD_KERNEL(sm90_mha_backward_fp16_256, Fp16, 256, 256)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_fp16_256, sm90_mha_backward_finish_fp16_256, Fp16, 256,
                         256)
