/* SPDX-License-Identifier: MIT
 *
 * The shapes of tiles that the portable gradients of dense MHA are built in, and the choice among them.
 */
#ifndef FMLA_SM80_MHA_BACKWARD_SHAPE_H
#define FMLA_SM80_MHA_BACKWARD_SHAPE_H

#include <stddef.h>
#include <stdint.h>

/* SHAPE(d_qk, d_v, keys of a block, keys of a warp, stages of Q, stages of dO, blocks of threads of an SM); of the same head sizes the
 * best first. The last one of each fits into the 99 KiB that every GPU since Ampere gives. */
#define MHA_BACKWARD_SHAPES(SHAPE)                                                                           \
    SHAPE(64, 64, 128, 32, 2, 2, 1)                                                                          \
    SHAPE(64, 64, 64, 32, 2, 2, 3)                                                                           \
    SHAPE(64, 64, 64, 32, 2, 2, 2)                                                                           \
    SHAPE(128, 128, 128, 32, 2, 2, 1)                                                                        \
    SHAPE(128, 128, 64, 32, 2, 2, 2)                                                                         \
    SHAPE(128, 128, 64, 16, 2, 1, 1)                                                                         \
    SHAPE(192, 128, 64, 16, 2, 2, 1)                                                                         \
    SHAPE(192, 128, 64, 16, 1, 1, 1)

/* The name of a shape, behind PREFIX. */
#define MHA_BACKWARD_SHAPE_NAME(PREFIX, d_qk, d_v, keys, warp_keys, q_stages, dout_stages, blocks)           \
    PREFIX##d_qk##_##keys##x##warp_keys##_##q_stages##dout_stages##blocks

enum {
    MHA_BACKWARD_ROWS = 64,        /* of a tile */
    MHA_BACKWARD_ROW_GROUPS = 2,   /* of a tile, each of another warp */
    MHA_BACKWARD_FEWEST_KEYS = 64, /* of a block, in any shape */
    MHA_BACKWARD_NUMBERS = 2       /* of a row: lse and delta */
};
/* The variant of its kernels of rows, beside MHA_BACKWARD_PREPARE or MHA_BACKWARD_FINISH. */
#define MHA_BACKWARD_SIZE(d_qk) ((int32_t)(d_qk) / 64 - 1)

#define MHA_BACKWARD_THREADS(keys, warp_keys) (32 * MHA_BACKWARD_ROW_GROUPS * ((keys) / (warp_keys)))

/* Bytes of dynamic shared memory: K, V | Q | dO | P, dS | numbers of two tiles. */
#define MHA_BACKWARD_BYTES(d_qk, d_v, keys, q_stages, dout_stages)                                           \
    (2 * ((keys) * ((d_qk) + (d_v)) + MHA_BACKWARD_ROWS * ((q_stages) * (d_qk) + (dout_stages) * (d_v)) +    \
          2 * (keys)*MHA_BACKWARD_ROWS) +                                                                    \
     2 * MHA_BACKWARD_NUMBERS * MHA_BACKWARD_ROWS * 4)

enum {
#define SHAPE(...) MHA_BACKWARD_SHAPE_NAME(MHA_BACKWARD_SHAPE_, __VA_ARGS__),
    MHA_BACKWARD_SHAPES(SHAPE)
#undef SHAPE
        MHA_BACKWARD_SHAPE_COUNT
};

struct mha_backward_shape {
    int32_t d_qk, d_v, keys, shared_bytes;
};
extern const struct mha_backward_shape mha_backward_shapes[MHA_BACKWARD_SHAPE_COUNT];

/* The index of the first shape of these head sizes that fits into `shared_bytes`; -1 where there is none. */
int32_t mha_backward_shape_of(int64_t d_qk, int64_t d_v, int32_t shared_bytes);

#endif
