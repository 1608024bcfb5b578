/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"
#include "rows.cuh"

/* Element, d_qk, d_v. */
MHA_BACKWARD_KERNEL(sm90_mha_backward_bf16_64, Bf16, 64, 64)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_bf16_64, sm90_mha_backward_finish_bf16_64, Bf16, 64, 64)
MHA_BACKWARD_KERNEL(sm90_mha_backward_bf16_96, Bf16, 96, 64)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_bf16_96, sm90_mha_backward_finish_bf16_96, Bf16, 96, 64)
MHA_BACKWARD_KERNEL(sm90_mha_backward_bf16_128, Bf16, 128, 128)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_bf16_128, sm90_mha_backward_finish_bf16_128, Bf16, 128,
                         128)
MHA_BACKWARD_KERNEL(sm90_mha_backward_bf16_192, Bf16, 192, 128)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_bf16_192, sm90_mha_backward_finish_bf16_192, Bf16, 192,
                         128)
MHA_BACKWARD_KERNEL(sm90_mha_backward_bf16_256, Bf16, 256, 256)
MHA_BACKWARD_ROW_KERNELS(sm90_mha_backward_prepare_bf16_256, sm90_mha_backward_finish_bf16_256, Bf16, 256,
                         256)
