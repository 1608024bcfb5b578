/* SPDX-License-Identifier: MIT
 *
 * The tile shapes that the portable dense decode is built in, and the choice among them.
 */
#ifndef FMLA_SM80_DENSE_DECODE_SHAPE_H
#define FMLA_SM80_DENSE_DECODE_SHAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_GROUPS = 9 /* of 64 columns: d_qk 576 */ };

/* A line holds a token of a cache of bytes, with its scales, in shared memory. It is an odd multiple of 64 bytes: two tokens, of which
 * half a warp reads 64 bytes each, lie in different banks. */
enum { RAW_LINE_BYTES = 704 };

/* SHAPE(rows, keys, warps, most stages that are of use, Q in registers instead of shared memory); fewest rows first, then
 * fewest keys. */
#define DENSE_DECODE_SHAPES(SHAPE)                                                                           \
    SHAPE(16, 32, 4, 5, 0)                                                                                   \
    SHAPE(16, 64, 8, 5, 1)                                                                                   \
    SHAPE(32, 64, 8, 5, 0)                                                                                   \
    SHAPE(64, 32, 8, 5, 0)                                                                                   \
    SHAPE(64, 64, 8, 5, 0)

struct dense_decode_shape {
    int32_t rows, keys, warps, most_stages, q_in_registers;
};

enum {
#define SHAPE(rows, keys, warps, stages, q) DENSE_DECODE_SHAPE_##rows##x##keys,
    DENSE_DECODE_SHAPES(SHAPE)
#undef SHAPE
        DENSE_DECODE_SHAPE_COUNT,
    DENSE_DECODE_LEAST_STAGES = 2 /* one is computed on while another arrives */
};

extern const struct dense_decode_shape dense_decode_shapes[DENSE_DECODE_SHAPE_COUNT];

/* What a launch is made with. */
struct dense_decode_choice {
    int32_t shape; /* index of dense_decode_shapes */
    int32_t stages;
    int32_t shared_bytes;
};

/* Returns the dynamic shared memory of a block of threads. `of_bytes` here and below says that the cache is of bytes: there is one
 * stage then, and a block of tokens. */
int32_t dense_decode_shared_bytes(const struct dense_decode_shape *shape, bool of_bytes, int32_t stages);

/* As many stages as fit and are of use; 0 where the shape does not fit with the least number of them. */
int32_t dense_decode_stages(const struct dense_decode_shape *shape, bool of_bytes, int32_t shared_bytes);

/* The most rows of a tile where a cache of bytes meets a GPU that does not convert e4m3 in hardware. */
enum { DENSE_DECODE_ROWS_WITHOUT_CODES = 32 };

/* The choice for `rows` rows a key head on a GPU whose blocks may have `shared_bytes`, among tiles of at most `most_rows`. Every GPU
 * since Ampere gives 99 KiB, and the smallest shape fits into that. */
struct dense_decode_choice dense_decode_choose(int64_t rows, int32_t most_rows, bool of_bytes,
                                               int32_t shared_bytes);

#endif
