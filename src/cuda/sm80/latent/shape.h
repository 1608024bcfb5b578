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
    LATENT_LIST,           /* a list; a flag per key of the ring says whether an entry names it */
    LATENT_LIST_OF_BYTES   /* a list; tokens are converted in place in their stage: two stages */
};

/* Returns the dynamic shared memory of a CTA in bytes. */
int32_t latent_shared_bytes(const struct latent_shape *shape, enum latent_source source, int32_t stages);

/* Returns the number of stages: as many as fit and are useful; 0 if the shape does not fit with the
 * fewest. */
int32_t latent_stages(const struct latent_shape *shape, enum latent_source source, int32_t shared_bytes);

/* Limits of the code for a compute capability: the most shared memory of a tile, and its most rows over a
 * block table of bytes. Code for 8.6 and 8.9 also serves 8.7, which has 163 KiB; 12.x has 99 KiB. Before 8.9
 * there is no instruction that converts e4m3, and 64 rows leave no registers to convert without it. A later
 * GPU that runs the PTX has the same tiles. */
#define LATENT_MOST_BYTES(code)                                                                              \
    ((code) >= 120 ? 99 * 1024 : (code) == 86 || (code) == 89 ? 163 * 1024 : 227 * 1024)
#define LATENT_MOST_ROWS_OF_BYTES(code) ((code) < 89 ? 32 : 64)

/* Returns the shared memory that tiles may have on a GPU whose CTAs may have `bytes`. */
static inline int32_t latent_bytes(int32_t bytes, int32_t code)
{
    return bytes < LATENT_MOST_BYTES(code) ? bytes : LATENT_MOST_BYTES(code);
}

/* Returns the choice for `rows` rows per key head, among tiles of at most `most_rows` rows and
 * `shared_bytes` of shared memory (latent_bytes). Every GPU since Ampere gives 99 KiB, which the smallest
 * shape fits. */
struct latent_choice latent_choose(int64_t rows, int32_t most_rows, enum latent_source source,
                                   int32_t shared_bytes);

#endif
