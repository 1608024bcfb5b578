/* SPDX-License-Identifier: MIT
 *
 * The tile shapes that the portable dense MHA with tensor cores is built in.
 */
#ifndef FMLA_SM80_MHA_FORWARD_SHAPE_H
#define FMLA_SM80_MHA_FORWARD_SHAPE_H

/* SHAPE(d_qk, d_v, what its variant is greater by, suffix of its name, row tiles of a warp, warps, keys of a block, Q in registers
 * instead of shared memory, CTAs that share an SM). A wide shape has 32 rows a warp: it asks least of shared memory's bandwidth, and it
 * is good where two CTAs share an SM: a middle one does on A100. A small one has twice the warps, and fits 99 KiB. */
#define MHA_SM80_SHAPES(SHAPE)                                                                               \
    SHAPE(64, 64, 0, , 2, 4, 128, 0, 2)                                                                      \
    SHAPE(128, 128, 0, , 2, 4, 80, 0, 2)                                                                     \
    SHAPE(192, 128, 0, , 2, 4, 48, 0, 2)                                                                     \
    SHAPE(128, 128, MHA_SM80_MIDDLE, _middle, 2, 4, 48, 0, 2)                                                \
    SHAPE(64, 64, MHA_SM80_SMALL, _small, 1, 8, 64, 1, 1)                                                    \
    SHAPE(128, 128, MHA_SM80_SMALL, _small, 1, 8, 64, 0, 1)                                                  \
    SHAPE(192, 128, MHA_SM80_SMALL, _small, 1, 8, 32, 0, 1)

enum {
    MHA_SM80_ROWS = 128, /* of a tile */
    MHA_SM80_STAGES = 2, /* one block of keys is computed on while another arrives */
    MHA_SM80_TILE_BYTES = 128,
    /* What variants are greater by. */
    MHA_SM80_MIDDLE = 3,
    MHA_SM80_SMALL = 6
};

/* The dynamic shared memory of a CTA: Q, or its results; blocks of keys and of values; and what is known of the tile. */
#define MHA_SM80_BYTES(d_qk, d_v, keys)                                                                      \
    (2 * (MHA_SM80_ROWS * (d_qk) + MHA_SM80_STAGES * (keys) * ((d_qk) + (d_v))) + MHA_SM80_TILE_BYTES)

#endif
