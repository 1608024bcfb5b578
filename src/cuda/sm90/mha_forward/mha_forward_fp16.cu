/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

/* Element, d_qk, d_v. */
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64, Fp16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128, Fp16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192, Fp16, 192, 128)
