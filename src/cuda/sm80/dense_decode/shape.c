/* SPDX-License-Identifier: MIT */
#include "shape.h"

const struct dense_decode_shape dense_decode_shapes[DENSE_DECODE_SHAPE_COUNT] = {
#define SHAPE(rows, keys, warps, stages, q) {rows, keys, warps, stages, q},
    DENSE_DECODE_SHAPES(SHAPE)
#undef SHAPE
};

/* Left for what the compiler places in shared memory by itself. */
enum { STATIC_BYTES = 1024 };

/* As the kernel lays it out (the picture in dense_decode.cuh): Q, ring, P, maxima, factors. */
int32_t dense_decode_shared_bytes(const struct dense_decode_shape *shape, bool of_bytes, int32_t stages)
{
    enum { LINE = 128 };
    const int32_t key_groups = shape->warps / (shape->rows / 16);
    const int32_t q = shape->q_in_registers ? 0 : MAX_GROUPS * LINE;
    const int32_t per_row = q + LINE + (key_groups + 1) * (int32_t)sizeof(float);
    const int32_t per_key = stages * MAX_GROUPS * LINE + (of_bytes ? RAW_LINE_BYTES : 0);
    return shape->rows * per_row + shape->keys * per_key;
}

int32_t dense_decode_stages(const struct dense_decode_shape *shape, bool of_bytes, int32_t shared_bytes)
{
    const int32_t least = of_bytes ? 1 : DENSE_DECODE_LEAST_STAGES;
    int32_t stages = of_bytes ? 1 : shape->most_stages;
    while (stages >= least &&
           dense_decode_shared_bytes(shape, of_bytes, stages) + STATIC_BYTES > shared_bytes)
        stages--;
    return stages >= least ? stages : 0;
}

/* Keys are read once a tile: the fewest rows that hold a key head whole, or else the most that fit; of the same rows the
 * most keys. */
struct dense_decode_choice dense_decode_choose(int64_t rows, int32_t most_rows, bool of_bytes,
                                               int32_t shared_bytes)
{
    struct dense_decode_choice choice = {0, of_bytes ? 1 : DENSE_DECODE_LEAST_STAGES, 0};
    for (int32_t i = 0; i < DENSE_DECODE_SHAPE_COUNT; i++) {
        const struct dense_decode_shape *shape = &dense_decode_shapes[i],
                                        *best = &dense_decode_shapes[choice.shape];
        const int32_t stages = dense_decode_stages(shape, of_bytes, shared_bytes);
        if (stages && shape->rows <= most_rows && (best->rows < rows || shape->rows == best->rows))
            choice = (struct dense_decode_choice){.shape = i, .stages = stages};
    }
    choice.shared_bytes =
        dense_decode_shared_bytes(&dense_decode_shapes[choice.shape], of_bytes, choice.stages);
    return choice;
}
