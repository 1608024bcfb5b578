/* SPDX-License-Identifier: MIT
 *
 * Tile sizes of the portable dense MHA backward, per head size. One of each size fits the 99 KiB of shared
 * memory that every GPU since Ampere gives. Where there is more, as on 8.0 and 9.0, several CTAs share an SM
 * and hide each other's waits; at 192/128, where registers allow one, it has 128 keys (choice.c), at 256/256
 * tiles of 64 rows.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_SHAPE_H
#define FMLA_SM80_MHA_BACKWARD_SHAPE_H

enum {
    MHA_BACKWARD_ROWS = 64,      /* query rows per tile */
    MHA_BACKWARD_HALF_ROWS = 32, /* the same of the kernel 256_small, which keeps values (KeptValues) */
    MHA_BACKWARD_KEYS = 64,      /* least keys per CTA */
    MHA_BACKWARD_WIDE = 128,     /* keys per CTA of the kernel 192_wide, which parks P (Backward::park_p) */
    MHA_BACKWARD_ROW_GROUPS = 2, /* row groups per tile, each processed by a different warp */
    MHA_BACKWARD_STATS = 2,      /* values per row: lse and delta */
    KEY_BLOCK_BYTES = 64
};

/* SHAPE(kernel, d_qk, d_v, keys of a CTA, of a warp, rows per tile, whether dV of the warp's own rows is computed
 * before dP, CTAs per SM where shared memory suffices). Early dV needs registers beside P; where there are enough
 * of them, P is not read again. */
#define MHA_BACKWARD_SHAPES(SHAPE)                                                                           \
    SHAPE(64, 64, 64, 64, 32, MHA_BACKWARD_ROWS, true, 3)                                                    \
    SHAPE(96, 96, 64, 64, 32, MHA_BACKWARD_ROWS, true, 2)                                                    \
    SHAPE(128, 128, 128, 64, 32, MHA_BACKWARD_ROWS, false, 2)                                                \
    SHAPE(192, 192, 128, 64, 16, MHA_BACKWARD_ROWS, true, 1)                                                 \
    SHAPE(192_wide, 192, 128, MHA_BACKWARD_WIDE, 32, MHA_BACKWARD_ROWS, true, 1)                             \
    SHAPE(256, 256, 256, 64, 16, MHA_BACKWARD_ROWS, true, 1)                                                 \
    SHAPE(256_small, 256, 256, 64, 16, MHA_BACKWARD_HALF_ROWS, true, 1)

/* The variants of the products. */
#define MHA_BACKWARD_ENUMERATOR(kernel, ...) MHA_BACKWARD_##kernel,
enum mha_backward_shape { MHA_BACKWARD_SHAPES(MHA_BACKWARD_ENUMERATOR) };
#undef MHA_BACKWARD_ENUMERATOR

/* Counters of a row tile, by d_qk: of as many tiles of the products. */
#define MHA_BACKWARD_COUNTERS(d_qk) ((d_qk) == 256 ? MHA_BACKWARD_ROWS / MHA_BACKWARD_HALF_ROWS : 1)

#define MHA_BACKWARD_THREADS(keys, warp_keys) (32 * MHA_BACKWARD_ROW_GROUPS * ((keys) / (warp_keys)))

/* Lines of 64 columns of a row; the last line of 96 columns is half empty. */
#define MHA_BACKWARD_LINES(columns) (((columns) + 63) / 64)

/* Bytes of dynamic shared memory: K, V | Q, dO | P, dS, with 32 rows in place of the last columns of V | lse and
 * delta of a tile | struct KeyBlock. */
#define MHA_BACKWARD_BYTES(d_qk, d_v, keys, rows)                                                            \
    (128 * ((keys) + (rows)) * (MHA_BACKWARD_LINES(d_qk) + MHA_BACKWARD_LINES(d_v)) +                        \
     ((rows) == MHA_BACKWARD_ROWS ? 4 * MHA_BACKWARD_ROWS * (keys) : 0) + MHA_BACKWARD_STATS * (rows)*4 +    \
     KEY_BLOCK_BYTES)

#endif
