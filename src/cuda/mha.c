/* SPDX-License-Identifier: MIT
 *
 * Dense MHA on a GPU: the host part that all its kernels share. There is no plan; Hopper's kernel splits
 * requests.
 */
#include "attention.h"

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

/* Hopper's kernel counts the taken tiles in the workspace, and has the parts of splits there. */
fmla_status cuda_mha_prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct cuda_key key = {.schedule = CUDA_SM90_MHA_FORWARD, .element = p->element};
    const int32_t sms = w->device->sms;
    if (w->device->capability != 90 || !cuda_can_have(w->device, cuda_kernel_of(key))) return FMLA_OK;
    w->bytes = cuda_line_up(sizeof(struct tile_counters));
    const int64_t rows =
        p->bound ? sm90_mha_forward_most_part_rows(p, sms) : sm90_mha_forward_splitting(p, sms).part_rows;
    return rows ? cuda_place_parts(p, rows, w->bytes, w) : FMLA_OK;
}
