/* SPDX-License-Identifier: MIT
 *
 * Dense MHA on a GPU: the host part that all its kernels share. There is no plan; kernels on
 * tensor cores split requests.
 */
#include "attention.h"

#include "sm80/mha_forward/choice.h"
#include "sm90/mha_forward/choice.h"

#include <string.h>

static void strides_of(const struct key_view *view, int64_t stride[3])
{
    stride[0] = view->page_bytes / 2, stride[1] = view->slot_bytes / 2, stride[2] = view->head_bytes / 2;
}

struct mha_forward_params cuda_mha_params(const struct attention_problem *p)
{
    const struct key_source *keys = &p->keys[0];
    struct mha_forward_params params = {
        .b = (int32_t)p->b,
        .h_q = (int32_t)p->h_q,
        .h_kv = (int32_t)p->h_kv,
        .group = (int32_t)(p->h_q / p->h_kv),
        .d_qk = (int32_t)p->d_qk,
        .d_v = (int32_t)p->d_v,
        .s_q = (int32_t)p->s_q,
        .s_k = (int32_t)keys->page_size,
        .starts_q = p->ragged_q.starts,
        .starts_k = p->ragged_k.starts,
        .tokens_q = (int32_t)p->ragged_q.tokens,
        .tokens_k = (int32_t)p->ragged_k.tokens,
        .used_q = p->ragged_q.used,
        .used_k = p->ragged_k.used,
        .causal = p->causal,
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q,
        .k = (const uint16_t *)(const void *)keys->k.data,
        .v = (const uint16_t *)(const void *)keys->v.data,
        .output = cuda_output_params(p),
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    strides_of(&keys->k, params.k_stride), strides_of(&keys->v, params.v_stride);
    return params;
}

struct mha_padding_params cuda_mha_padding(const struct ragged *side, int64_t b, int64_t extent,
                                           int64_t heads)
{
    return (struct mha_padding_params){
        .b = (int32_t)b,
        .starts = side->starts,
        .used = side->used,
        .extent = (int32_t)extent,
        .tokens = (int32_t)side->tokens,
        .heads = (int32_t)heads,
    };
}

fmla_status cuda_mha_write_padding(enum operation operation, const struct cuda_scope *scope,
                                   struct mha_padding_params *params, void *stream)
{
    enum { BLOCKS_OF_SM = 8 };
    const int64_t blocks = BLOCKS_OF_SM * scope->device->sms, b = params->b ? params->b : 1;
    params->slices = (int32_t)cuda_ceil_div(blocks, b), params->requests = (int32_t)cuda_ceil_div(b, blocks);
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){.schedule = CUDA_MHA_PADDING}),
        .blocks = cuda_ceil_div(params->b, params->requests) * params->slices,
        .stream = stream,
    };
    return params->used && params->b && (params->starts ? params->tokens : params->extent)
               ? cuda_launch(operation_name(operation), scope, &launch, (void *[]){params})
               : FMLA_OK;
}

fmla_status cuda_mha_forward_padding(const struct cuda_scope *scope, const struct attention_problem *p)
{
    struct mha_padding_params params = cuda_mha_padding(&p->ragged_q, p->b, p->s_q, p->h_q);
    params.to[0] = (struct mha_vectors){p->out, p->out_stride[0], p->out_stride[1], p->out_stride[2]};
    params.width[0] = (int32_t)p->d_v;
    params.aligned = cuda_out_aligned(p, sizeof(float[4]));
    params.lse = p->lse, params.lse_of_empty = p->rules.lse_of_empty;
    memcpy(params.lse_stride, p->lse_stride, sizeof params.lse_stride);
    return cuda_mha_write_padding(p->operation, scope, &params, p->stream);
}

/* Hopper's kernel counts the taken tiles in the workspace; it and the portable kernel have the parts of splits there.
 * On Hopper the portable kernel splits as Hopper's does, so that it needs no more room. */
fmla_status cuda_mha_prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct cuda_key key = {.schedule = CUDA_SM90_MHA_FORWARD, .element = p->element};
    if (w->device->capability == 90 && cuda_can_have(w->device, cuda_kernel_of(key))) {
        w->bytes = cuda_line_up(sizeof(struct tile_counters));
        w->mha = sm90_mha_forward_tiling(p, w->device->sms);
    } else {
        w->mha = sm80_mha_forward_tiling(p, w->device);
    }
    if (!w->mha.rows) return FMLA_OK;
    const int64_t rows = p->bound ? mha_most_part_rows(p, &w->mha) : mha_splitting(p, &w->mha).part_rows;
    return rows ? cuda_place_parts(p, rows, w->bytes, w) : FMLA_OK;
}
