/* SPDX-License-Identifier: MIT
 *
 * The portable dense decode: choice of the tile shape, and launch.
 */
#include "../../attention.h"
#include "../latent/shape.h"

static const char *refuses(const struct attention_problem *p, const char **argument)
{
    *argument = "q";
    return cuda_of_bytes(p) && p->element != ELEMENT_BF16 ? "takes bf16 queries with a cache of bytes" : NULL;
}

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const bool of_bytes = cuda_of_bytes(p);
    const int32_t code = w->device->code;
    const struct latent_choice choice = latent_choose(
        p->s_q * (p->h_q / p->h_kv), of_bytes ? LATENT_MOST_ROWS_OF_BYTES(code) : INT32_MAX,
        of_bytes ? LATENT_TABLE_OF_BYTES : LATENT_TABLE, latent_bytes(w->device->shared_bytes, code));
    w->launch.kernel = cuda_kernel_of((struct cuda_key){CUDA_SM80_DENSE_DECODE, .element = p->element,
                                                        .format = cuda_of_bytes(p) ? CUDA_BYTES : 0,
                                                        .variant = choice.shape});
    w->launch.stages = choice.stages, w->launch.shared_bytes = choice.shared_bytes;
    const fmla_status status = cuda_dense_prepare(p, latent_shapes[choice.shape].rows, w);
    w->dense.ready_tiles = 0; /* there is room for ready flags, but this kernel sets none */
    return status;
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    struct attention_problem quantised;
    if (p->products == FMLA_PRODUCTS_FP8) {
        const fmla_status status = cuda_dense_quantise(scope, p, w);
        if (status) return status;
        quantised = cuda_dense_quantised(p, w), p = &quantised;
    }
    struct dense_decode_params params = cuda_dense_params(p, w);
    const struct cuda_launch launch = {.kernel = w->launch.kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .shared_bytes = w->launch.shared_bytes,
                                       .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm80_dense_decode = {
    .driver = CUDA_ATTENTION_DRIVER, .refuses = refuses, .prepare = prepare, .launch = launch};
