/* SPDX-License-Identifier: MIT */
#include "backward.h"

#include "attention.h"
#include "backward_tiles.h"
#include "sm80/mha_backward/choice.h"
#include "sm90/mha_backward/choice.h"

static struct mha_vectors vectors_of(const struct token_view *view)
{
    return (struct mha_vectors){view->data, view->request, view->token, view->head};
}

struct mha_backward_params cuda_backward_params(const struct backward_problem *p, void *of_dsink,
                                                int64_t dsink_parts)
{
    const bool ragged = p->is_ragged;
    return (struct mha_backward_params){
        .b = (int32_t)p->b,
        .h_q = (int32_t)p->h_q,
        .h_kv = (int32_t)p->h_kv,
        .group = (int32_t)(p->h_q / p->h_kv),
        .d_qk = (int32_t)p->d_qk,
        .d_v = (int32_t)p->d_v,
        .s_q = (int32_t)p->s_q,
        .s_k = (int32_t)p->s_k,
        .starts_q = ragged ? p->ragged_q.starts : NULL,
        .starts_k = ragged ? p->ragged_k.starts : NULL,
        .tokens_q = (int32_t)p->ragged_q.tokens,
        .tokens_k = (int32_t)p->ragged_k.tokens,
        .used_q = p->ragged_q.used,
        .used_k = p->ragged_k.used,
        .causal = p->causal,
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .lse_log2 = p->rules.lse_factor == 1.0f ? cuda_scale_log2(1.0f) : 1.0f,
        .q = vectors_of(&p->q),
        .k = vectors_of(&p->k),
        .v = vectors_of(&p->v),
        .out = vectors_of(&p->out),
        .dout = vectors_of(&p->dout),
        .dq = vectors_of(&p->dq),
        .dk = vectors_of(&p->dk),
        .dv = vectors_of(&p->dv),
        .lse = p->lse,
        .lse_stride = {p->lse_stride[0], p->lse_stride[1]},
        .attn_sink = p->rules.attn_sink,
        .dlse = p->dlse,
        .dlse_stride = {p->dlse_stride[0], p->dlse_stride[1]},
        .dlse_natural = p->rules.lse_factor,
        .dsink_parts = dsink_parts,
        .of_dsink = p->d_attn_sink ? of_dsink : NULL,
        .d_attn_sink = p->d_attn_sink,
    };
}

fmla_status cuda_backward_add_dsinks(const struct cuda_scope *scope, const struct backward_problem *p,
                                     struct mha_backward_params *params)
{
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){.schedule = CUDA_MHA_BACKWARD_DSINKS}),
        .blocks = p->h_q,
        .stream = p->stream,
    };
    return p->d_attn_sink ? cuda_launch(operation_name(OP_MHA_BACKWARD), scope, &launch, (void *[]){params})
                          : FMLA_OK;
}

static fmla_status write_padding(const struct cuda_scope *scope, const struct backward_problem *p)
{
    struct mha_padding_params of_q = cuda_mha_padding(&p->ragged_q, p->b, p->s_q, p->h_q),
                              of_k = cuda_mha_padding(&p->ragged_k, p->b, p->s_k, p->h_kv);
    of_q.to[0] = vectors_of(&p->dq), of_q.width[0] = (int32_t)p->d_qk;
    of_q.aligned = backward_rows_aligned(p, &p->dq, false);
    of_k.to[0] = vectors_of(&p->dk), of_k.width[0] = (int32_t)p->d_qk;
    of_k.to[1] = vectors_of(&p->dv), of_k.width[1] = (int32_t)p->d_v;
    of_k.aligned = backward_rows_aligned(p, &p->dk, true) && backward_rows_aligned(p, &p->dv, true);
    const fmla_status status = cuda_mha_write_padding(OP_MHA_BACKWARD, scope, &of_q, p->stream);
    return status ? status : cuda_mha_write_padding(OP_MHA_BACKWARD, scope, &of_k, p->stream);
}

const char *cuda_backward_refuses(const struct kernel_driver *driver, union problem problem,
                                  const char **argument)
{
    const struct cuda_gradients *gradients = (const struct cuda_gradients *)driver;
    return gradients->refuses(problem.backward, argument);
}

/* All kernels of a device that may take a call return the same size, the maximum of their needs: a size query
 * has no addresses, and kernels refuse by addresses. */
fmla_status cuda_backward_prepare(const struct kernel_driver *driver, union problem problem,
                                  struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    const struct cuda_device *device = cuda_device(p->device.id);
    const struct cuda_key key = {.schedule = CUDA_SM90_MHA_BACKWARD, .element = p->element};
    (void)driver;
    prepared->alignment = CUDA_WORKSPACE_ALIGNMENT;
    prepared->bytes = backward_layout(p, sm80_mha_backward_tiles(p)).bytes;
    if (device->capability == 90 && cuda_can_have(device, cuda_kernel_of(key))) {
        const size_t bytes = backward_layout(p, sm90_mha_backward_tiles(p)).bytes;
        if (bytes > prepared->bytes) prepared->bytes = bytes;
    }
    return FMLA_OK;
}

fmla_status cuda_backward_run(const struct kernel_driver *driver, union problem problem,
                              const struct prepared *prepared)
{
    const struct backward_problem *p = problem.backward;
    /* Without requests every gradient is 0; the portable kernels write the zeros. */
    const struct cuda_gradients *gradients =
        p->b ? (const struct cuda_gradients *)driver : &cuda_any_gradients;
    struct cuda_scope scope;
    (void)prepared;
    if (!p->b && !p->is_ragged && !p->d_attn_sink) return FMLA_OK;
    fmla_status status = cuda_enter(operation_name(OP_MHA_BACKWARD), "q", p->device.id, &scope);
    if (status) return status;
    status = gradients->launch(&scope, p);
    if (!status) status = write_padding(&scope, p);
    cuda_leave(&scope);
    return status;
}
