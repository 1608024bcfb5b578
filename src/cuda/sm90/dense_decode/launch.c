/* SPDX-License-Identifier: MIT
 *
 * Hopper's dense decode: its launch.
 */
#include "../../attention.h"
#include "choice.h"

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const bool shared = p->s_q * (p->h_q / p->h_kv) > SM90_DENSE_DECODE_ROWS;
    w->kernel = cuda_kernel_of((struct cuda_key){CUDA_SM90_DENSE_DECODE, .element = p->element,
                                                 .variant = 2 * (p->d_qk > p->d_v) + shared});
    w->flags = LAUNCH_OVERLAP;
    return cuda_dense_prepare(p, SM90_DENSE_DECODE_ROWS, w);
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const char *op = operation_name(p->operation);
    const uint32_t tiles_of_head = (uint32_t)(w->tiles / p->h_kv);
    struct dense_decode_sm90_params params = {
        .call = cuda_dense_params(p, w),
        .q_heads = (int32_t)sm90_dense_decode_q_heads(p),
        .tiles_of_head = (int32_t)tiles_of_head,
        .tiles_of_head_divisor = divisor_of(tiles_of_head),
        .tiles_divisor = divisor_of((uint32_t)w->tiles),
        .request_step = p->q_stride[0] != 0,
        .page_step = p->keys[0].k.page_bytes != 0,
    };
    const struct tensor_view keys = sm90_dense_decode_key_view(p, 2), rope = sm90_dense_decode_key_view(p, 1),
                             queries = sm90_dense_decode_q_view(p);
    fmla_status status = tensor_map_make(op, scope, "kv_cache", &keys, &params.keys);
    if (!status) status = tensor_map_make(op, scope, "kv_cache", &rope, &params.rope);
    if (!status) status = tensor_map_make(op, scope, "q", &queries, &params.queries);
    if (status) return status;
    const struct cuda_launch launch = {
        .kernel = w->kernel, .blocks = cuda_blocks(p, w), .flags = w->flags, .stream = p->stream};
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_dense_decode = {sm90_dense_decode_refuses, prepare, launch};
