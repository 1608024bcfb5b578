/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

/* Element, d_qk, d_v. */
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64, Bf16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128, Bf16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192, Bf16, 192, 128)
