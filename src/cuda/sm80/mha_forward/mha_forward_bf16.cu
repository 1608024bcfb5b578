/* SPDX-License-Identifier: MIT */
#include "mainloop.cuh"

#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas)                                            \
    using Layout_##d_qk##suffix = mha_forward::MhaLayout<Bf16, d_qk, d_v, row_tiles, warps, keys, q>;        \
    MHA_FORWARD_KERNEL(sm80_mha_forward_bf16_##d_qk##suffix, Layout_##d_qk##suffix, warps, ctas)
MHA_SM80_SHAPES(SHAPE)
