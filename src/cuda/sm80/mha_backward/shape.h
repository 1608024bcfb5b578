/* SPDX-License-Identifier: MIT
 *
 * The tiles of the portable gradients of dense MHA, by head sizes. They fit into the 99 KiB that every GPU since Ampere gives; where there
 * is more, as on 8.0 and 9.0, several blocks of threads share an SM, and one works while others wait.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_SHAPE_H
#define FMLA_SM80_MHA_BACKWARD_SHAPE_H

enum {
    MHA_BACKWARD_ROWS = 64,      /* of a tile */
    MHA_BACKWARD_KEYS = 64,      /* of a block of threads */
    MHA_BACKWARD_ROW_GROUPS = 2, /* of a tile, each of another warp */
    MHA_BACKWARD_NUMBERS = 2,    /* of a row: lse and delta */
    KEY_BLOCK_BYTES = 64
};

/* SHAPE(d_qk, d_v, keys of a warp, are own rows' dV made before dP, blocks of threads of an SM where it has the shared memory).
 * dV early takes registers beside P; where there are enough of them, P is not read again. */
#define MHA_BACKWARD_SHAPES(SHAPE)                                                                           \
    SHAPE(64, 64, 32, true, 3)                                                                               \
    SHAPE(128, 128, 32, false, 2)                                                                            \
    SHAPE(192, 128, 16, true, 1)

/* The variant of its kernels; of those of rows, beside MHA_BACKWARD_PREPARE or MHA_BACKWARD_FINISH. */
#define MHA_BACKWARD_SIZE(d_qk) ((int)(d_qk) / 64 - 1)

#define MHA_BACKWARD_THREADS(warp_keys) (32 * MHA_BACKWARD_ROW_GROUPS * (MHA_BACKWARD_KEYS / (warp_keys)))

/* Bytes of dynamic shared memory: K, V | Q, dO | P, dS | numbers of a tile | what the block of keys is. */
#define MHA_BACKWARD_BYTES(d_qk, d_v)                                                                        \
    (2 * (MHA_BACKWARD_KEYS + MHA_BACKWARD_ROWS) * ((d_qk) + (d_v)) +                                        \
     2 * 2 * MHA_BACKWARD_KEYS * MHA_BACKWARD_ROWS + MHA_BACKWARD_NUMBERS * MHA_BACKWARD_ROWS * 4 +          \
     KEY_BLOCK_BYTES)

#endif
