/* SPDX-License-Identifier: MIT
 *
 * The tile shapes that portable latent attention is built in, and the choice among them.
 */
#ifndef FMLA_SM80_LATENT_SHAPE_H
#define FMLA_SM80_LATENT_SHAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_GROUPS = 9 /* of 64 columns: d_qk 576 */ };

/* Bytes of a line in shared memory that holds a token of a cache of bytes and its scales. An odd multiple of
 * 64: two tokens, of which half a warp reads 64 bytes each, lie in different banks. */
enum { RAW_LINE_BYTES = 704 };

/* SHAPE(rows, keys, warps, most useful stages, Q in registers instead of shared memory), by ascending rows,
 * then keys. */
#define LATENT_SHAPES(SHAPE)                                                                                 \
    SHAPE(16, 32, 4, 5, 0)                                                                                   \
    SHAPE(16, 64, 8, 5, 1)                                                                                   \
    SHAPE(32, 64, 8, 5, 0)                                                                                   \
    SHAPE(64, 32, 8, 5, 0)                                                                                   \
    SHAPE(64, 64, 8, 5, 0)

struct latent_shape {
    int32_t rows, keys, warps, most_stages, q_in_registers;
};

enum {
#define SHAPE(rows, keys, warps, stages, q) LATENT_SHAPE_##rows##x##keys,
    LATENT_SHAPES(SHAPE)
#undef SHAPE
        LATENT_SHAPE_COUNT,
    LATENT_LEAST_STAGES = 2 /* one is processed while another arrives */
};

extern const struct latent_shape latent_shapes[LATENT_SHAPE_COUNT];

/* Shape and sizes of a launch. */
struct latent_choice {
    int32_t shape; /* index in latent_shapes */
    int32_t stages;
    int32_t shared_bytes;
};

/* Source of the keys. */
enum latent_source {
    LATENT_TABLE,          /* a block table; the cache has the element type of the queries */
    LATENT_TABLE_OF_BYTES, /* a block table; one stage, and a block of raw tokens */
    LATENT_LIST,           /* a list; a flag per key of the ring tells whether an entry names it */
    LATENT_LIST_OF_BYTES   /* a list; tokens are converted in place in their stage: two stages */
};

/* Returns the dynamic shared memory of a CTA in bytes. */
int32_t latent_shared_bytes(const struct latent_shape *shape, enum latent_source source, int32_t stages);

/* Returns the number of stages: as many as fit and are useful; 0 if the shape does not fit with the
 * fewest. */
int32_t latent_stages(const struct latent_shape *shape, enum latent_source source, int32_t shared_bytes);

/* Most rows of a tile over a cache of bytes on a GPU that does not convert e4m3 in hardware. */
enum { LATENT_ROWS_WITHOUT_CODES = 32 };

/* Returns the choice for `rows` rows per key head on a GPU whose CTAs may have `shared_bytes` of shared
 * memory, among tiles of at most `most_rows` rows. Every GPU since Ampere gives 99 KiB, which the smallest
 * shape fits. */
struct latent_choice latent_choose(int64_t rows, int32_t most_rows, enum latent_source source,
                                   int32_t shared_bytes);

#endif
