/* SPDX-License-Identifier: MIT
 *
 * The portable sparse prefill: uses the kernels of sparse decode with one request per token; lists are not
 * split.
 */
#include "../sparse_decode/listed.h"

static struct sparse_decode_params call_of(const struct sparse_prefill_params *prefill)
{
    return (struct sparse_decode_params){
        .b = prefill->s_q,
        .s_q = 1,
        .h_q = prefill->h_q,
        .d_qk = prefill->d_qk,
        .tiles = prefill->tiles,
        .tiles_of_token = prefill->tiles,
        .tiles_divisor = prefill->tiles_divisor,
        .token_divisor = prefill->tiles_divisor,
        .scale = prefill->scale,
        .scale_log2 = prefill->scale_log2,
        .q = prefill->q,
        .q_stride = {prefill->q_stride[0], 0, prefill->q_stride[1]},
        .cache = {prefill->kv},
        .topk = {.topk = prefill->topk, .length = prefill->topk_length},
        .splits_divisor = divisor_of(1),
        .split = {.even_splits = 1, .split_lanes = 1, .split_keys = INT32_MAX / PLAN_BLOCK * PLAN_BLOCK},
        .output = {.out = prefill->out,
                   .lse = prefill->lse,
                   .out_stride = {prefill->out_stride[0], 0, prefill->out_stride[1]},
                   .lse_stride = {prefill->lse_stride, 1},
                   .rules = prefill->rules,
                   .pairs_aligned = prefill->pairs_aligned},
    };
}

static struct latent_choice choose(const struct attention_problem *p, const struct cuda_device *device)
{
    return sm80_listed_choose(p, p->h_q / p->h_kv, latent_bytes(device->shared_bytes, device->code));
}

static fmla_status launch_part(const struct cuda_scope *scope, const struct attention_problem *p,
                               const struct token_range *range)
{
    const struct latent_choice choice = choose(p, scope->device);
    const struct sparse_prefill_params prefill =
        cuda_prefill_params(p, range, latent_shapes[choice.shape].rows);
    struct sparse_sm80_params params = sm80_listed_params(p, choice.stages);
    params.call = call_of(&prefill);
    params.max_logits = prefill.max_logits, params.max_stride = prefill.max_stride;
    const struct cuda_launch launch = {.kernel = sm80_listed_kernel(p, &choice),
                                       .blocks = range->tokens * prefill.tiles,
                                       .shared_bytes = choice.shared_bytes,
                                       .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    (void)w;
    return cuda_prefill_launch(scope, p, latent_shapes[choose(p, scope->device).shape].rows, launch_part);
}

const struct cuda_attention cuda_sm80_sparse_prefill = {.driver = CUDA_ATTENTION_DRIVER,
                                                        .refuses = sm80_listed_refuses,
                                                        .prepare = cuda_prefill_prepare,
                                                        .launch = launch};
