/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

/* Element, d_qk, d_v, what the kernel takes. */
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64, Fp16, 64, 64, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128, Fp16, 128, 128, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192, Fp16, 192, 128, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64_splits, Fp16, 64, 64, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_64, Fp16, 64, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128_splits, Fp16, 128, 128, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_128, Fp16, 128, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192_splits, Fp16, 192, 128, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_192, Fp16, 192, 128)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_96, Fp16, 96, 64, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_96_splits, Fp16, 96, 64, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_96, Fp16, 96, 64)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_256, Fp16, 256, 256, WHOLE)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_256_splits, Fp16, 256, 256, SPLIT)
MHA_FORWARD_JOIN(sm90_mha_forward_join_fp16_256, Fp16, 256, 256)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_64_few, Fp16, 64, 64, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_96_few, Fp16, 96, 64, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_128_few, Fp16, 128, 128, FEW_ROWS)
MHA_FORWARD_KERNEL(sm90_mha_forward_fp16_192_few, Fp16, 192, 128, FEW_ROWS)
