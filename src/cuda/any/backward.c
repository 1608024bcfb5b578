/* SPDX-License-Identifier: MIT
 *
 * The portable kernels of the gradients of dense MHA: a warp takes a row of dq, then a warp takes a key of dk
 * and dv. The workspace, of which the kernels on tensor cores need more, has a part of its sink's gradient for each
 * row.
 */
#include "../backward.h"

static int64_t blocks_of(int64_t tokens, int64_t heads)
{
    return cuda_ceil_div(tokens * heads, MHA_WARPS);
}

static const char *refuses(const struct backward_problem *p, const char **argument)
{
    *argument = "q";
    if (blocks_of(backward_tokens(p), p->h_q) > INT32_MAX) return "takes fewer than 2^34 rows";
    *argument = "k";
    return blocks_of(backward_keys(p), p->h_kv) > INT32_MAX ? "takes fewer than 2^34 keys times key heads"
                                                            : NULL;
}

static fmla_status launch(const struct cuda_scope *scope, const struct backward_problem *p)
{
    struct mha_backward_params params = cuda_backward_params(p, p->workspace, backward_tokens(p));
    const int64_t blocks[] = {blocks_of(backward_tokens(p), p->h_q), blocks_of(backward_keys(p), p->h_kv)};
    for (int variant = 0; variant < 2; variant++) {
        const struct cuda_launch launch = {
            .kernel = cuda_kernel_of(
                (struct cuda_key){CUDA_MHA_BACKWARD, .element = p->element, .variant = variant}),
            .blocks = blocks[variant],
            .stream = p->stream,
        };
        const fmla_status status =
            launch.blocks ? cuda_launch(operation_name(OP_MHA_BACKWARD), scope, &launch, (void *[]){&params})
                          : FMLA_OK;
        if (status) return status;
    }
    return cuda_backward_add_dsinks(scope, p, &params);
}

const struct cuda_gradients cuda_any_gradients = {CUDA_BACKWARD_DRIVER, refuses, launch};
