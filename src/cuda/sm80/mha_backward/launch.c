/* SPDX-License-Identifier: MIT
 *
 * Launches of the portable dense MHA backward on tensor cores: the row kernel before, the products with one
 * CTA per block of keys of a key head, and the row kernel after.
 */
#include "../../backward.h"
#include "choice.h"
#include "shape.h"

/* Returns the first shape of this size, with as many keys, that fits shared memory. */
static enum mha_backward_shape shape_of(int64_t d_qk, int64_t keys, int32_t shared_bytes)
{
#define SHAPE(kernel, d_qk, d_v, keys, warp_keys, rows, ...)                                                 \
    {d_qk, keys, MHA_BACKWARD_BYTES(d_qk, d_v, keys, rows), MHA_BACKWARD_##kernel},
    static const struct {
        int32_t d_qk, keys, bytes;
        enum mha_backward_shape shape;
    } shapes[] = {MHA_BACKWARD_SHAPES(SHAPE)};
#undef SHAPE
    enum mha_backward_shape shape = MHA_BACKWARD_64; /* every pair has one */
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i].d_qk != d_qk || shapes[i].keys != keys) continue;
        shape = shapes[i].shape;
        if (shapes[i].bytes <= shared_bytes) break;
    }
    return shape;
}

static fmla_status launch_kernel(const struct cuda_scope *scope, const struct backward_problem *p,
                                 struct mha_backward_sm80_params *params, enum cuda_schedule schedule,
                                 int32_t variant, int64_t blocks)
{
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){schedule, .element = p->element, .variant = variant}),
        .blocks = blocks,
        .stream = p->stream,
    };
    return blocks ? cuda_launch(operation_name(OP_MHA_BACKWARD), scope, &launch, (void *[]){params})
                  : FMLA_OK;
}

static fmla_status launch(const struct cuda_scope *scope, const struct backward_problem *p)
{
    const struct cuda_device *device = scope->device;
    struct backward_tiles tiles = sm80_mha_backward_tiles(p);
    tiles.keys = sm80_mha_backward_keys(p, device->sms, device->shared_bytes);
    const struct backward_layout at = backward_layout(p, tiles);
    const enum mha_size size = mha_size_of(p->d_qk);
    char *const workspace = p->workspace;
    struct mha_backward_sm80_params params = {
        .call = cuda_backward_params(p, workspace + at.of_dsink, backward_row_tiles(p, tiles)),
        .row_tiles = (int32_t)backward_row_tiles(p, tiles),
        .key_blocks = (int32_t)backward_key_blocks(p, tiles),
        .heads_of_set = backward_heads(p, tiles, device->sms),
        .rows = (float *)(void *)(workspace + at.rows),
        .dq_sums = (float *)(void *)(workspace + at.dq_sums),
        .taken = (uint32_t *)(void *)(workspace + at.taken),
        .in_order = p->deterministic,
        .added = (uint32_t *)(void *)(workspace + at.added),
    };
    const int64_t row_tiles = (int64_t)params.row_tiles * p->h_q,
                  blocks = (int64_t)params.key_blocks * p->h_kv;
    /* Even without tiles the first launch must clear the counter. */
    fmla_status status =
        launch_kernel(scope, p, &params, CUDA_SM80_MHA_BACKWARD_PREPARE, size, row_tiles ? row_tiles : 1);
    if (!status)
        status = launch_kernel(scope, p, &params, CUDA_SM80_MHA_BACKWARD,
                               shape_of(p->d_qk, tiles.keys, device->shared_bytes), blocks);
    if (!status) status = launch_kernel(scope, p, &params, CUDA_SM80_MHA_BACKWARD_FINISH, size, row_tiles);
    return status ? status : cuda_backward_add_dsinks(scope, p, &params.call);
}

const struct cuda_gradients cuda_sm80_gradients = {CUDA_BACKWARD_DRIVER, sm80_mha_backward_refuses, launch};
