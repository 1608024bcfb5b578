/* SPDX-License-Identifier: MIT
 *
 * Launch of the portable sparse decode.
 */
#include "listed.h"

static int64_t tiles_of_token(const struct attention_problem *p, int32_t rows)
{
    return cuda_ceil_div(p->h_q, rows);
}

static const char *refuses(const struct attention_problem *p, const char **argument)
{
    enum { FEWEST_ROWS = 16 /* of all shapes */ };
    const char *const why = cuda_sparse_refuses(p, p->s_q * tiles_of_token(p, FEWEST_ROWS), argument);
    return why ? why : sm80_listed_refuses(p, argument);
}

/* Returns the shared memory that each of two CTAs on an SM may have; the system reserves 1 KiB per CTA. */
static int32_t half_of_sm(const struct cuda_device *device)
{
    enum { SYSTEM_BYTES = 1024 };
    return (device->shared_bytes + SYSTEM_BYTES) / 2 - SYSTEM_BYTES;
}

/* Returns the tile shape. A plan may be made for Hopper's small kernel, of which two CTAs share an SM. Then
 * two CTAs of this kernel share an SM, too, if a smaller tile with as many rows allows it; otherwise the
 * second half of the CTAs would wait for the first. In batch-invariant mode the choice must not depend on the
 * batch. */
static struct latent_choice choice_for(const struct attention_problem *p, const struct cuda_work *w,
                                       const struct latent_choice *alone)
{
    if (w->split.keys || cuda_blocks(p, w) <= w->device->sms) return *alone;
    const int32_t half = half_of_sm(w->device);
    const struct latent_choice beside = sm80_listed_choose(p, p->h_q, latent_bytes(half, w->device->code));
    const bool as_many_rows = latent_shapes[beside.shape].rows == latent_shapes[alone->shape].rows;
    return as_many_rows && beside.shared_bytes <= half ? beside : *alone;
}

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct latent_choice alone =
        sm80_listed_choose(p, p->h_q, latent_bytes(w->device->shared_bytes, w->device->code));
    const fmla_status status =
        cuda_sparse_prepare(p, p->s_q * tiles_of_token(p, latent_shapes[alone.shape].rows), w);
    const struct latent_choice choice = choice_for(p, w, &alone);
    w->launch.kernel = sm80_listed_kernel(p, &choice);
    w->launch.stages = choice.stages, w->launch.shared_bytes = choice.shared_bytes;
    return status;
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    struct sparse_sm80_params params = sm80_listed_params(p, w->launch.stages);
    params.call = cuda_sparse_params(p, w, w->launch.tiles / p->s_q);
    const struct cuda_launch launch = {.kernel = w->launch.kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .shared_bytes = w->launch.shared_bytes,
                                       .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm80_sparse_decode = {
    .driver = CUDA_ATTENTION_DRIVER, .refuses = refuses, .prepare = prepare, .launch = launch};
