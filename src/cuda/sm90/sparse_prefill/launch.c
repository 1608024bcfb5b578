/* SPDX-License-Identifier: MIT
 *
 * Launches of sparse prefill on Hopper. The kernel over bf16 keys cuts the tiles of a short call's last round
 * into splits where these tiles are few, and a second launch joins the splits. FP8 pages use the kernel of
 * sparse decode, which splits the lists of few tokens.
 */
#include "../../attention.h"
#include "choice.h"

enum { HEADS = SM90_SPARSE_PREFILL_HEADS };

static fmla_status launch_join(const struct cuda_scope *scope, const struct attention_problem *p,
                               struct sparse_prefill_sm90_params *params)
{
    const int64_t tiles = (params->items - params->splits.whole) / params->splits.of_tile;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){.schedule = CUDA_SM90_SPARSE_PREFILL_JOIN}),
        .blocks = tiles * HEADS / PREFILL_JOIN_WARPS,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){params});
}

static int variant_of_rows(const struct attention_problem *p, bool split)
{
    if (p->d_qk > p->d_v) return split ? SM90_SPARSE_PREFILL_ROWS_576_SPLITS : SM90_SPARSE_PREFILL_ROWS_576;
    return split ? SM90_SPARSE_PREFILL_ROWS_512_SPLITS : SM90_SPARSE_PREFILL_ROWS_512;
}

/* The grid is persistent: a CTA takes tiles, then splits, each time the one a grid further. */
static fmla_status launch_rows(const struct cuda_scope *scope, const struct attention_problem *p,
                               const struct token_range *range)
{
    const char *op = operation_name(p->operation);
    const int64_t group = p->h_q / p->h_kv, tiles = range->tokens * cuda_prefill_tiles(p, HEADS);
    struct sparse_prefill_sm90_params params = {.call = cuda_prefill_params(p, range, HEADS)};
    const struct tensor_view queries =
        sm90_sparse_prefill_view(p, params.call.q, params.call.q_stride, range->tokens, group, p->d_qk);
    const struct tensor_view results =
        sm90_sparse_prefill_view(p, params.call.out, params.call.out_stride, range->tokens, group, p->d_v);
    fmla_status status = tensor_map_make(op, scope, "q", &queries, &params.queries);
    if (!status) status = tensor_map_make(op, scope, "out", &results, &params.results);
    if (status) return status;
    params.splits = sm90_sparse_prefill_splits(tiles, p->capacity, scope->device->sms);
    params.splits.parts = p->workspace;
    params.items = params.splits.whole + (int32_t)((tiles - params.splits.whole) * params.splits.of_tile);
    const bool split = params.splits.of_tile > 1;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(
            (struct cuda_key){CUDA_SM90_SPARSE_PREFILL, p->element, p->format, variant_of_rows(p, split)}),
        .blocks = params.items < scope->device->sms ? params.items : scope->device->sms,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    status = cuda_launch(op, scope, &launch, (void *[]){&params});
    return split && !status ? launch_join(scope, p, &params) : status;
}

/* Launches over FP8 pages, with a request per token. A CTA keeps its tile of heads. */
static fmla_status launch_fp8(const struct cuda_scope *scope, const struct attention_problem *p,
                              const struct token_range *range)
{
    const struct sparse_prefill_params call = cuda_prefill_params(p, range, HEADS);
    const int32_t sms = scope->device->sms, at_once = sms > call.tiles ? sms / call.tiles : 1;
    const int32_t workers = call.s_q < at_once ? call.s_q : at_once;
    struct sparse_prefill_fp8_params params = {
        .decode.call = {.b = call.s_q,
                        .s_q = 1,
                        .h_q = call.h_q,
                        .d_qk = call.d_qk,
                        .tiles = call.tiles,
                        .tiles_of_token = call.tiles,
                        .tiles_divisor = call.tiles_divisor,
                        .token_divisor = call.tiles_divisor,
                        .scale = call.scale,
                        .scale_log2 = call.scale_log2,
                        .q = call.q,
                        .q_stride = {call.q_stride[0], 0, call.q_stride[1]},
                        .cache = {call.kv},
                        .topk = {.topk = call.topk, .length = call.topk_length},
                        .split = {.num_partitions = workers},
                        .output = {.out = call.out,
                                   .lse = call.lse,
                                   .out_stride = {call.out_stride[0], 0, call.out_stride[1]},
                                   .lse_stride = {call.lse_stride, 1},
                                   .rules = call.rules}},
        .max_logits = call.max_logits,
        .max_stride = call.max_stride,
    };
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){CUDA_SM90_SPARSE_PREFILL, .element = p->element,
                                                   .format = kv_unsplit(p->format),
                                                   .variant = SM90_SPARSE_PREFILL_BYTES}),
        .blocks = (int64_t)workers * call.tiles,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

/* Launches over FP8 pages with few tokens: a CTA takes a split of a token's list. */
static fmla_status launch_fp8_splits(const struct cuda_scope *scope, const struct attention_problem *p,
                                     const struct cuda_work *w)
{
    struct sparse_prefill_fp8_params params = {
        .decode = {.call = cuda_sparse_params(p, w, w->launch.tiles),
                   .cta_group_barriers = cuda_cta_group_barriers(p, w),
                   .ticket = cuda_ticket()},
        .max_logits = p->max_logits,
        .max_stride = p->max_stride[0],
    };
    const struct cuda_launch launch = {
        .kernel =
            cuda_kernel_of((struct cuda_key){CUDA_SM90_SPARSE_PREFILL, p->element, kv_unsplit(p->format),
                                             SM90_SPARSE_PREFILL_BYTES_JOIN_IN_KERNEL}),
        .blocks = cuda_blocks(p, w),
        .flags = LAUNCH_OVERLAP | LAUNCH_COOPERATIVE,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

static fmla_status prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const bool may_be_split = p->format != KV_BF16 && !p->bound && !w->ctas_must_not_wait;
    return may_be_split ? cuda_prefill_split_lists(p, w) : cuda_prefill_prepare(p, w);
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    if (w->split.join == JOIN_IN_KERNEL) return launch_fp8_splits(scope, p, w);
    return cuda_prefill_launch(scope, p, HEADS, p->format == KV_BF16 ? launch_rows : launch_fp8);
}

const struct cuda_attention cuda_sm90_sparse_prefill = {.driver = CUDA_ATTENTION_DRIVER,
                                                        .refuses = sm90_sparse_prefill_refuses,
                                                        .prepare = prepare,
                                                        .launch = launch};
