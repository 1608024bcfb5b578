/* SPDX-License-Identifier: MIT */
#include "join.cuh"
#include "mainloop.cuh"

#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas)                                            \
    using Layout_##d_qk##suffix =                                                                            \
        mha_forward::WithSplits<mha_forward::MhaLayout<Fp16, d_qk, d_v, row_tiles, warps, keys, q>>;         \
    MHA_FORWARD_KERNEL(sm80_mha_forward_fp16_##d_qk##suffix##_splits, Layout_##d_qk##suffix, warps, ctas)
MHA_SM80_SHAPES(SHAPE)
MHA_FORWARD_JOIN(sm80_mha_forward_join_fp16_64, Fp16, 64)
MHA_FORWARD_JOIN(sm80_mha_forward_join_fp16_128, Fp16, 128)
MHA_FORWARD_JOIN(sm80_mha_forward_join_fp16_256, Fp16, 256)
