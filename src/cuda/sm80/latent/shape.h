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

/* A line holds a token of a cache of bytes, with its scales, in shared memory. It is an odd multiple of 64 bytes: two tokens, of which
 * half a warp reads 64 bytes each, lie in different banks. */
enum { RAW_LINE_BYTES = 704 };

/* SHAPE(rows, keys, warps, most stages that are of use, Q in registers instead of shared memory); fewest rows first, then
 * fewest keys. */
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
    LATENT_LEAST_STAGES = 2 /* one is computed on while another arrives */
};

extern const struct latent_shape latent_shapes[LATENT_SHAPE_COUNT];

/* What a launch is made with. */
struct latent_choice {
    int32_t shape; /* index of latent_shapes */
    int32_t stages;
    int32_t shared_bytes;
};

/* Where keys come from. */
enum latent_source {
    LATENT_TABLE,          /* a block table names values of the queries' type */
    LATENT_TABLE_OF_BYTES, /* there is one stage, and a block of tokens as they lie */
    LATENT_LIST, /* a list names them, and a flag for each key of the ring says whether an entry does */
    LATENT_LIST_OF_BYTES /* tokens lie in the stage in which they become values: there are two stages */
};

/* Returns the dynamic shared memory of a block of threads. */
int32_t latent_shared_bytes(const struct latent_shape *shape, enum latent_source source, int32_t stages);

/* As many stages as fit and are of use; 0 where the shape does not fit with the least number of them. */
int32_t latent_stages(const struct latent_shape *shape, enum latent_source source, int32_t shared_bytes);

/* The most rows of a tile where a cache of bytes meets a GPU that does not convert e4m3 in hardware. */
enum { LATENT_ROWS_WITHOUT_CODES = 32 };

/* The choice for `rows` rows a key head on a GPU whose blocks may have `shared_bytes`, among tiles of at most `most_rows`. Every GPU
 * since Ampere gives 99 KiB, and the smallest shape fits into that. */
struct latent_choice latent_choose(int64_t rows, int32_t most_rows, enum latent_source source,
                                   int32_t shared_bytes);

#endif
