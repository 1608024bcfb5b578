/* SPDX-License-Identifier: MIT */
#include "shape.h"

const struct latent_shape latent_shapes[LATENT_SHAPE_COUNT] = {
#define SHAPE(rows, keys, warps, stages, q) {rows, keys, warps, stages, q},
    LATENT_SHAPES(SHAPE)
#undef SHAPE
};

/* Reserved for static shared memory that the compiler allocates. */
enum { STATIC_BYTES = 1024 };

/* Follows the layout of the kernel (drawn in layout.cuh): Q, P, per-row data, ring, raw tokens or indices,
 * flags. */
int32_t latent_shared_bytes(const struct latent_shape *shape, enum latent_source source, int32_t stages)
{
    enum { LINE = 128 };
    const bool listed = source == LATENT_LIST || source == LATENT_LIST_OF_BYTES;
    const int32_t key_groups = shape->warps / (shape->rows / 16);
    const int32_t q = shape->q_in_registers ? 0 : MAX_GROUPS * LINE;
    const int32_t side = shape->rows * (key_groups + 1) * (int32_t)sizeof(float);
    const int32_t behind_ring = source == LATENT_TABLE_OF_BYTES  ? RAW_LINE_BYTES
                                : source == LATENT_LIST_OF_BYTES ? (int32_t)sizeof(int32_t)
                                                                 : 0;
    return shape->rows * (q + LINE) + (side + LINE - 1) / LINE * LINE +
           shape->keys * (stages * MAX_GROUPS * LINE + behind_ring + (listed ? stages : 0));
}

static int32_t least_stages(enum latent_source source)
{
    return source == LATENT_TABLE_OF_BYTES ? 1 : LATENT_LEAST_STAGES;
}

static int32_t most_stages(const struct latent_shape *shape, enum latent_source source)
{
    const bool of_bytes = source == LATENT_TABLE_OF_BYTES || source == LATENT_LIST_OF_BYTES;
    return of_bytes ? least_stages(source) : shape->most_stages;
}

int32_t latent_stages(const struct latent_shape *shape, enum latent_source source, int32_t shared_bytes)
{
    const int32_t least = least_stages(source);
    int32_t stages = most_stages(shape, source);
    while (stages >= least && latent_shared_bytes(shape, source, stages) + STATIC_BYTES > shared_bytes)
        stages--;
    return stages >= least ? stages : 0;
}

/* Keys are read once per tile, so the choice is the fewest rows that hold a whole key head, or else the most
 * that fit; among shapes of equal rows the one with the most keys. */
struct latent_choice latent_choose(int64_t rows, int32_t most_rows, enum latent_source source,
                                   int32_t shared_bytes)
{
    struct latent_choice choice = {0, least_stages(source), 0};
    for (int32_t i = 0; i < LATENT_SHAPE_COUNT; i++) {
        const struct latent_shape *shape = &latent_shapes[i], *best = &latent_shapes[choice.shape];
        const int32_t stages = latent_stages(shape, source, shared_bytes);
        if (stages && shape->rows <= most_rows && (best->rows < rows || shape->rows == best->rows))
            choice = (struct latent_choice){.shape = i, .stages = stages};
    }
    choice.shared_bytes = latent_shared_bytes(&latent_shapes[choice.shape], source, choice.stages);
    return choice;
}
