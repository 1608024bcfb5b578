/* SPDX-License-Identifier: MIT
 *
 * The portable sparse decode: its launch.
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

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct latent_choice choice = sm80_listed_choose(p, w->device, p->h_q);
    w->kernel = sm80_listed_kernel(p, &choice);
    w->stages = choice.stages, w->shared_bytes = choice.shared_bytes;
    return cuda_sparse_prepare(p, p->s_q * tiles_of_token(p, latent_shapes[choice.shape].rows), w);
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    struct sparse_sm80_params params = sm80_listed_params(p, w->stages);
    params.call = cuda_sparse_params(p, w, w->tiles / p->s_q);
    const struct cuda_launch launch = {.kernel = w->kernel,
                                       .blocks = cuda_blocks(p, w),
                                       .shared_bytes = w->shared_bytes,
                                       .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm80_sparse_decode = {
    .refuses = refuses, .prepare = prepare, .launch = launch};
