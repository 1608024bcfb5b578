/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"
#include "rows.cuh"

#define SHAPE(...) MHA_BACKWARD_OF_SHAPE(sm80_mha_backward_fp16_, Fp16, __VA_ARGS__)
MHA_BACKWARD_SHAPES(SHAPE)
MHA_BACKWARD_ROW_KERNELS(sm80_mha_backward_fp16_, Fp16, 64, 64)
MHA_BACKWARD_ROW_KERNELS(sm80_mha_backward_fp16_, Fp16, 96, 64)
MHA_BACKWARD_ROW_KERNELS(sm80_mha_backward_fp16_, Fp16, 128, 128)
MHA_BACKWARD_ROW_KERNELS(sm80_mha_backward_fp16_, Fp16, 192, 128)
MHA_BACKWARD_ROW_KERNELS(sm80_mha_backward_fp16_, Fp16, 256, 256)
