/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas)                                            \
    MHA_FORWARD_KERNEL(sm80_mha_forward_bf16_##d_qk##suffix, Bf16, d_qk, d_v, row_tiles, warps, keys, q, ctas)
MHA_SM80_SHAPES(SHAPE)
