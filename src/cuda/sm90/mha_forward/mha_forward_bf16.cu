/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

/* Element, d_qk, d_v, whether the keys of some tiles are split. */
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64, Bf16, 64, 64, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128, Bf16, 128, 128, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192, Bf16, 192, 128, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64_splits, Bf16, 64, 64, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_64, Bf16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128_splits, Bf16, 128, 128, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_128, Bf16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192_splits, Bf16, 192, 128, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_192, Bf16, 192, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_96, Bf16, 96, 64, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_96_splits, Bf16, 96, 64, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_96, Bf16, 96, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_256, Bf16, 256, 256, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_256_splits, Bf16, 256, 256, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_256, Bf16, 256, 256)
