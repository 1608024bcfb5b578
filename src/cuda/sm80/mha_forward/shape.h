/* SPDX-License-Identifier: MIT
 *
 * The tile shapes of the portable dense MHA forward on tensor cores.
 */
#ifndef FMLA_SM80_MHA_FORWARD_SHAPE_H
#define FMLA_SM80_MHA_FORWARD_SHAPE_H

/* SHAPE(d_qk, d_v, suffix of the name, row tiles per warp, warps, keys per block, Q in
 * registers instead of shared memory, CTAs per SM). A wide shape has 32 rows per warp, which needs the least
 * bandwidth of shared memory; it is good where two CTAs share an SM, as two of the middle shape do on A100. A
 * small shape has twice the warps and fits 99 KiB. At 256/256 O of 32 rows would take all registers: both shapes
 * have 16 rows per warp. */
#define MHA_SM80_SHAPES(SHAPE)                                                                               \
    SHAPE(64, 64, , 2, 4, 128, 0, 2)                                                                         \
    SHAPE(96, 64, , 2, 4, 64, 0, 2)                                                                          \
    SHAPE(128, 128, , 2, 4, 80, 0, 2)                                                                        \
    SHAPE(192, 128, , 2, 4, 48, 0, 2)                                                                        \
    SHAPE(256, 256, , 1, 8, 48, 0, 1)                                                                        \
    SHAPE(128, 128, _middle, 2, 4, 48, 0, 2)                                                                 \
    SHAPE(64, 64, _small, 1, 8, 64, 1, 1)                                                                    \
    SHAPE(96, 64, _small, 1, 8, 64, 1, 1)                                                                    \
    SHAPE(128, 128, _small, 1, 8, 64, 0, 1)                                                                  \
    SHAPE(192, 128, _small, 1, 8, 32, 0, 1)                                                                  \
    SHAPE(256, 256, _small, 1, 8, 16, 0, 1)

enum {
    MHA_SM80_ROWS = 128, /* per tile */
    MHA_SM80_STAGES = 2, /* one block of keys is processed while another arrives */
    MHA_SM80_TILE_BYTES = 128
};

/* The variants of the kernel; those of a size in order, the widest first. */
#define MHA_SM80_ENUMERATOR(d_qk, d_v, suffix, ...) MHA_SM80_##d_qk##suffix,
enum mha_sm80_shape { MHA_SM80_SHAPES(MHA_SM80_ENUMERATOR) };
#undef MHA_SM80_ENUMERATOR

/* Lines of 64 columns of a row; the last line of 96 columns is half empty. */
#define MHA_SM80_LINES(columns) (((columns) + 63) / 64)

/* Bytes of dynamic shared memory of a CTA: Q, later the output; blocks of keys and of values; struct
 * Shared. */
#define MHA_SM80_BYTES(d_qk, d_v, keys)                                                                      \
    (128 * (MHA_SM80_ROWS * MHA_SM80_LINES(d_qk) +                                                           \
            MHA_SM80_STAGES * (keys) * (MHA_SM80_LINES(d_qk) + MHA_SM80_LINES(d_v))) +                       \
     MHA_SM80_TILE_BYTES)

#endif
