/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on a GPU: the host part that all its kernels share. Each key head has its own launches, each
 * with at most as many tokens as its CTA count allows. There is no plan.
 */
#include "attention.h"

#include "sm90/sparse_prefill/choice.h"

struct sparse_prefill_params cuda_prefill_params(const struct attention_problem *p,
                                                 const struct token_range *range, int heads)
{
    const int64_t group = p->h_q / p->h_kv, head = range->key_head * group, first = range->first;
    const int64_t out_shape[] = {range->tokens, group}, out_stride[] = {p->out_stride[0], p->out_stride[2]};
    const int64_t tiles = cuda_prefill_tiles(p, heads);
    struct key_source keys = p->keys[0];
    keys.k.data += range->key_head * keys.k.head_bytes;
    keys.table += first * keys.table_stride[0] + range->key_head * keys.table_stride[2];
    struct sparse_prefill_params params = {
        .s_q = (int32_t)range->tokens,
        .h_q = (int32_t)group,
        .d_qk = (int32_t)p->d_qk,
        .topk = (int32_t)p->capacity,
        .tiles = (int32_t)tiles,
        .tiles_divisor = divisor_of((uint32_t)tiles),
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q + first * p->q_stride[0] + head * p->q_stride[2],
        .q_stride = {p->q_stride[0], p->q_stride[2]},
        .kv = cuda_cache_params(&keys),
        .topk_length = keys.lengths ? keys.lengths + first : NULL,
        .out = p->out + first * out_stride[0] + head * out_stride[1],
        .out_stride = {out_stride[0], out_stride[1]},
        .max_logits = p->max_logits ? p->max_logits + first * p->max_stride[0] + head : NULL,
        .lse = p->lse ? p->lse + first * p->lse_stride[0] + head : NULL,
        .max_stride = p->max_stride[0],
        .lse_stride = p->lse_stride[0],
        .rules = cuda_result_params(&p->rules),
    };
    params.kv.indices_stride[1] = keys.table_stride[2];
    if (params.rules.attn_sink) params.rules.attn_sink += head;
    params.pairs_aligned = cuda_rows_aligned(params.out, out_shape, out_stride, 2, 2, 4);
    return params;
}

fmla_status cuda_prefill_launch(const struct cuda_scope *scope, const struct attention_problem *p, int heads,
                                fmla_status (*launch)(const struct cuda_scope *scope,
                                                      const struct attention_problem *p,
                                                      const struct token_range *range))
{
    const int64_t most = cuda_prefill_most_tokens(p, heads);
    fmla_status status = FMLA_OK;
    struct token_range range;
    for (range.key_head = 0; range.key_head < p->h_kv; range.key_head++)
        for (range.first = 0; range.first < p->b && !status; range.first += range.tokens) {
            const int64_t left = p->b - range.first;
            range.tokens = left < most ? left : most;
            status = launch(scope, p, &range);
        }
    return status;
}

enum { HEADS = SM90_SPARSE_PREFILL_HEADS };

fmla_status cuda_prefill_split_lists(const struct attention_problem *p, struct cuda_work *w)
{
    w->launch.tiles = cuda_prefill_tiles(p, HEADS);
    w->split.keys = sm90_sparse_prefill_split_keys(p->b * w->launch.tiles, p->capacity, w->device->sms);
    if (!w->split.keys) return FMLA_OK;
    w->split.at_once = w->split.parts_in_halves = true;
    const fmla_status status = cuda_lay_out(p, w);
    w->split.join = JOIN_IN_KERNEL;
    cuda_place_cta_group_barriers(w);
    return status;
}

/* Sets the bytes for FP8 pages. A call up to some sizes has at most one split of a tile per SM. */
static fmla_status lists_bytes(const struct attention_problem *p, struct cuda_work *w)
{
    struct cuda_work split = {.device = w->device};
    const int32_t sms = w->device->sms;
    fmla_status status = FMLA_OK;
    if (!p->bound) {
        status = cuda_prefill_split_lists(p, &split);
    } else if (sm90_sparse_prefill_split_keys(p->b > 0, p->capacity, sms)) {
        const int64_t most = p->h_q < HEADS ? p->h_q : HEADS; /* rows of a tile */
        status = cuda_place_parts(p, sms * most, 0, &split);
        cuda_place_cta_group_barriers(&split);
    }
    w->bytes = split.bytes;
    return status;
}

/* Returns the most splits of a launch; the launches of a call follow one another and share the parts. */
static int64_t most_splits(const struct attention_problem *p, int32_t sms)
{
    const int64_t tiles = cuda_prefill_tiles(p, HEADS);
    if (p->bound) /* of all launches, each of which has fewer tiles */
        return sm90_sparse_prefill_most_splits(p->b * tiles, p->capacity, sms);
    const int64_t last = p->b % cuda_prefill_most_tokens(p, HEADS); /* the others are too large to be split */
    const struct prefill_splits splits = sm90_sparse_prefill_splits(last * tiles, p->capacity, sms);
    return splits.of_tile > 1 ? (last * tiles - splits.whole) * splits.of_tile : 0;
}

fmla_status cuda_prefill_prepare(const struct attention_problem *p, struct cuda_work *w)
{
    const struct cuda_key join = {.schedule = CUDA_SM90_SPARSE_PREFILL_JOIN};
    if (w->device->capability != 90 || !cuda_can_have(w->device, cuda_kernel_of(join))) return FMLA_OK;
    if (p->format != KV_BF16) return lists_bytes(p, w);
    w->bytes = (size_t)most_splits(p, w->device->sms) * PREFILL_PART_BYTES;
    return FMLA_OK;
}
