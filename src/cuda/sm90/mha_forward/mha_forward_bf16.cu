/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

/* Element, d_qk, d_v, what the kernel takes. */
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64, Bf16, 64, 64, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128, Bf16, 128, 128, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192, Bf16, 192, 128, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64_splits, Bf16, 64, 64, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_64, Bf16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128_splits, Bf16, 128, 128, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_128, Bf16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192_splits, Bf16, 192, 128, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_192, Bf16, 192, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_96, Bf16, 96, 64, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_96_splits, Bf16, 96, 64, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_96, Bf16, 96, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_256, Bf16, 256, 256, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_256_splits, Bf16, 256, 256, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_bf16_256, Bf16, 256, 256)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_64_few, Bf16, 64, 64, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_96_few, Bf16, 96, 64, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_128_few, Bf16, 128, 128, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_bf16_192_few, Bf16, 192, 128, FEW_ROWS)
