/* SPDX-License-Identifier: MIT */
#include "shape.h"

#include <stdlib.h>

const struct mha_backward_shape mha_backward_shapes[MHA_BACKWARD_SHAPE_COUNT] = {
#define SHAPE(d_qk, d_v, keys, warp_keys, q_stages, dout_stages, blocks)                                     \
    {d_qk, d_v, keys, MHA_BACKWARD_BYTES(d_qk, d_v, keys, q_stages, dout_stages)},
    MHA_BACKWARD_SHAPES(SHAPE)
#undef SHAPE
};

int32_t mha_backward_shape_of(int64_t d_qk, int64_t d_v, int32_t shared_bytes)
{
    for (int32_t i = 0; i < MHA_BACKWARD_SHAPE_COUNT; i++) {
        const struct mha_backward_shape *shape = &mha_backward_shapes[i];
        if (getenv("MB_SHAPE") && i < atoi(getenv("MB_SHAPE"))) continue;
        if (shape->d_qk == d_qk && shape->d_v == d_v && shape->shared_bytes <= shared_bytes) return i;
    }
    return -1;
}
