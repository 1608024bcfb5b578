/* SPDX-License-Identifier: MIT
 *
 * Tile sizes of the portable dense MHA backward, per head size. With 64 keys they fit the 99 KiB of shared
 * memory that every GPU since Ampere gives. Where there is more, as on 8.0 and 9.0, several CTAs share an SM
 * and hide each other's waits; at 192/128, where registers allow one, it has 128 keys (choice.c).
 */
#ifndef FMLA_SM80_MHA_BACKWARD_SHAPE_H
#define FMLA_SM80_MHA_BACKWARD_SHAPE_H

enum {
    MHA_BACKWARD_ROWS = 64,      /* query rows per tile */
    MHA_BACKWARD_KEYS = 64,      /* least keys per CTA */
    MHA_BACKWARD_WIDE = 128,     /* keys per CTA of the kernel 192_wide, which parks P (Backward::park_p) */
    MHA_BACKWARD_ROW_GROUPS = 2, /* row groups per tile, each processed by a different warp */
    MHA_BACKWARD_STATS = 2,      /* values per row: lse and delta */
    KEY_BLOCK_BYTES = 64
};

/* SHAPE(kernel, d_qk, d_v, keys of a CTA, of a warp, whether dV of the warp's own rows is computed before dP,
 * CTAs per SM where shared memory suffices). Early dV needs registers beside P; where there are enough of
 * them, P is not read again. */
#define MHA_BACKWARD_SHAPES(SHAPE)                                                                           \
    SHAPE(64, 64, 64, 64, 32, true, 3)                                                                       \
    SHAPE(128, 128, 128, 64, 32, false, 2)                                                                   \
    SHAPE(192, 192, 128, 64, 16, true, 1)                                                                    \
    SHAPE(192_wide, 192, 128, MHA_BACKWARD_WIDE, 32, true, 1)

/* The variants of the products. */
#define MHA_BACKWARD_ENUMERATOR(kernel, ...) MHA_BACKWARD_##kernel,
enum mha_backward_shape { MHA_BACKWARD_SHAPES(MHA_BACKWARD_ENUMERATOR) };
#undef MHA_BACKWARD_ENUMERATOR

#define MHA_BACKWARD_THREADS(keys, warp_keys) (32 * MHA_BACKWARD_ROW_GROUPS * ((keys) / (warp_keys)))

/* Bytes of dynamic shared memory: K, V | Q, dO | P, dS | lse and delta of a tile | struct KeyBlock. */
#define MHA_BACKWARD_BYTES(d_qk, d_v, keys)                                                                  \
    (2 * ((keys) + MHA_BACKWARD_ROWS) * ((d_qk) + (d_v)) + 4 * MHA_BACKWARD_ROWS * (keys) +                  \
     MHA_BACKWARD_STATS * MHA_BACKWARD_ROWS * 4 + KEY_BLOCK_BYTES)

#endif
