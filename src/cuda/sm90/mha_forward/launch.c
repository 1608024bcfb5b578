/* SPDX-License-Identifier: MIT
 *
 * Launch of dense MHA forward on Hopper. The grid is persistent: at most one CTA per SM, and CTAs take tiles
 * dynamically.
 */
#include "../../attention.h"
#include "choice.h"

enum { CACHED_BYTES = 24 * 1000 * 1000 /* of L2, for the K and V of heads that are processed together */ };

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const char *op = operation_name(p->operation);
    const int64_t tiles = sm90_mha_forward_tiles(p), sms = scope->device->sms;
    const int32_t heads = sm90_mha_forward_heads(p), tokens = sm90_mha_forward_tokens(p);
    const struct key_source *keys = &p->keys[0];
    (void)w;
    if (!tiles) return FMLA_OK;
    struct mha_forward_sm90_params params = {
        .call = cuda_mha_params(p),
        .heads_of_tile = heads,
        .tile_tokens = tokens,
        .tile_rows = tokens * heads,
        .heads_divisor = divisor_of((uint32_t)heads),
        .units = (int32_t)(p->h_q / heads),
        .units_of_key_head = (int32_t)(p->h_q / p->h_kv / heads),
        .cached_keys = (int32_t)(CACHED_BYTES / (2 * (p->d_qk + p->d_v))),
        .tile_counters = tiles > sms ? p->workspace : NULL,
        .ticket = cuda_ticket(),
    };
    const struct tensor_view q = sm90_mha_forward_q_view(p),
                             k = sm90_mha_forward_key_view(p, &keys->k, p->d_qk),
                             v = sm90_mha_forward_key_view(p, &keys->v, p->d_v);
    fmla_status status = tensor_map_make(op, scope, "q", &q, &params.q);
    if (!status) status = tensor_map_make(op, scope, "k", &k, &params.k);
    if (!status) status = tensor_map_make(op, scope, "v", &v, &params.v);
    if (status) return status;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(
            (struct cuda_key){CUDA_SM90_MHA_FORWARD, .element = p->element, .variant = mha_size_of(p->d_qk)}),
        .blocks = tiles < sms ? tiles : sms,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_mha_forward = {.driver = CUDA_ATTENTION_DRIVER,
                                                     .refuses = sm90_mha_forward_refuses,
                                                     .prepare = cuda_mha_prepare,
                                                     .launch = launch};
