/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

/* Element, d_qk, d_v, whether the keys of some tiles are split. */
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64, Fp16, 64, 64, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128, Fp16, 128, 128, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192, Fp16, 192, 128, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64_splits, Fp16, 64, 64, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_64, Fp16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128_splits, Fp16, 128, 128, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_128, Fp16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192_splits, Fp16, 192, 128, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_192, Fp16, 192, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_96, Fp16, 96, 64, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_96_splits, Fp16, 96, 64, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_96, Fp16, 96, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_256, Fp16, 256, 256, false)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_256_splits, Fp16, 256, 256, true)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_256, Fp16, 256, 256)
