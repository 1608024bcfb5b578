/* SPDX-License-Identifier: MIT
 *
 * Tile sizes of the portable dense MHA backward, per head size. They fit the 99 KiB of shared memory that
 * every GPU since Ampere gives. Where there is more, as on 8.0 and 9.0, several CTAs share an SM and hide
 * each other's waits.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_SHAPE_H
#define FMLA_SM80_MHA_BACKWARD_SHAPE_H

enum {
    MHA_BACKWARD_ROWS = 64,      /* query rows per tile */
    MHA_BACKWARD_ROW_GROUPS = 2, /* row groups per tile, each processed by a different warp */
    MHA_BACKWARD_NUMBERS = 2,    /* values per row: lse and delta */
    KEY_BLOCK_BYTES = 64
};

/* SHAPE(d_qk, d_v, keys of a warp, whether dV of the warp's own rows is computed before dP, CTAs per SM where
 * shared memory suffices). Early dV needs registers beside P; where there are enough of them, P is not read
 * again. */
#define MHA_BACKWARD_SHAPES(SHAPE)                                                                           \
    SHAPE(64, 64, 64, 64, 32, true, false, 3)                                                                \
    SHAPE(128, 128, 128, 64, 32, false, false, 2)                                                            \
    SHAPE(192, 192, 128, 64, 16, true, false, 1)                                                             \
    SHAPE(192_wide, 192, 128, 128, 32, true, true, 1)

/* Kernel variant; for the row kernels it is added to MHA_BACKWARD_PREPARE or MHA_BACKWARD_FINISH. */
#define MHA_BACKWARD_SIZE(d_qk) ((int)(d_qk) / 64 - 1)

#define MHA_BACKWARD_VARIANT(d_qk, keys) ((keys) == 128 ? 3 : MHA_BACKWARD_SIZE(d_qk))

#define MHA_BACKWARD_THREADS(keys, warp_keys) (32 * MHA_BACKWARD_ROW_GROUPS * ((keys) / (warp_keys)))

/* Bytes of dynamic shared memory: K, V | Q, dO | P, dS | lse and delta of a tile | struct KeyBlock. */
#define MHA_BACKWARD_BYTES(d_qk, d_v, keys)                                                                  \
    (2 * ((keys) + MHA_BACKWARD_ROWS) * ((d_qk) + (d_v)) + 2 * 2 * (keys)*MHA_BACKWARD_ROWS +                \
     MHA_BACKWARD_NUMBERS * MHA_BACKWARD_ROWS * 4 + KEY_BLOCK_BYTES)

#endif
