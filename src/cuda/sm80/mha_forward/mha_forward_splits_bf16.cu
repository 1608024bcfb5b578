/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas)                                            \
    using Layout_##d_qk##suffix =                                                                            \
        mha_forward::WithSplits<mha_forward::MhaLayout<Bf16, d_qk, d_v, row_tiles, warps, keys, q>>;         \
    MHA_FORWARD_KERNEL(sm80_mha_forward_bf16_##d_qk##suffix##_splits, Layout_##d_qk##suffix, warps, ctas)
MHA_SM80_SHAPES(SHAPE)
MHA_FORWARD_JOIN(sm80_mha_forward_join_bf16_64, Bf16, 64)
MHA_FORWARD_JOIN(sm80_mha_forward_join_bf16_128, Bf16, 128)
MHA_FORWARD_JOIN(sm80_mha_forward_join_bf16_256, Bf16, 256)
