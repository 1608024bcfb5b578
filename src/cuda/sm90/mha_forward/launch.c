/* SPDX-License-Identifier: MIT
 *
 * Launch of dense MHA forward on Hopper. The grid is persistent: at most one CTA per SM, two of few rows, and CTAs
 * take tiles dynamically.
 */
#include "../../attention.h"
#include "choice.h"

enum { CACHED_BYTES = 24 * 1000 * 1000 /* of L2, for the K and V of heads that are processed together */ };
enum { JOIN_BLOCKS_PER_SM = 4 };

static struct cuda_kernel *kernel_of(const struct attention_problem *p, enum cuda_schedule schedule)
{
    return cuda_kernel_of(
        (struct cuda_key){schedule, .element = p->element, .variant = mha_size_of(p->d_qk)});
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const char *op = operation_name(p->operation);
    const struct mha_splitting splitting = mha_splitting(p, &w->mha);
    const struct mha_tiling *const t = &w->mha;
    const int64_t tiles = mha_tiles(p, t->rows) * splitting.most_splits;
    const int32_t heads = mha_heads_of_tile(p, t->rows), tokens = (int32_t)t->rows / heads;
    const struct key_source *keys = &p->keys[0];
    if (!tiles) return FMLA_OK;
    struct mha_forward_sm90_params params = {
        .call = cuda_mha_params(p),
        .heads_of_tile = heads,
        .tile_tokens = tokens,
        .tile_rows = tokens * heads,
        .heads_divisor = divisor_of((uint32_t)heads),
        .tokens_divisor = divisor_of((uint32_t)tokens),
        .units_divisor = divisor_of((uint32_t)(p->h_q / heads)),
        .units = (int32_t)(p->h_q / heads),
        .units_of_key_head = (int32_t)(p->h_q / p->h_kv / heads),
        .cached_keys = (int32_t)(CACHED_BYTES / (2 * (p->d_qk + p->d_v))),
        .cached_keys_of_all =
            p->h_kv == 1 ? INT32_MAX : (int32_t)(CACHED_BYTES / (2 * (p->d_qk + p->d_v) * p->h_kv)),
        .tile_counters = tiles > t->slots ? p->workspace : NULL,
        .ticket = cuda_ticket(),
        .splits = splitting.splits,
        .blocks_of_split = splitting.blocks_of_split,
        .most_splits = splitting.most_splits,
        .sms = w->device->sms,
        .few_rows = t->rows == MHA_SM90_FEW_ROWS,
        .part_rows = (int32_t)splitting.part_rows,
    };
    if (splitting.part_rows) {
        char *const workspace = p->workspace;
        params.part_out = (float *)(void *)(workspace + w->split.part_out_offset);
        params.part_ends = (struct part_end *)(void *)(workspace + w->split.part_ends_offset);
    }
    const struct tensor_view q = sm90_mha_forward_q_view(p, t),
                             k = sm90_mha_forward_key_view(p, t, &keys->k, p->d_qk),
                             v = sm90_mha_forward_key_view(p, t, &keys->v, p->d_v);
    fmla_status status = tensor_map_make(op, scope, "q", &q, &params.q);
    if (!status) status = tensor_map_make(op, scope, "k", &k, &params.k);
    if (!status) status = tensor_map_make(op, scope, "v", &v, &params.v);
    if (status) return status;
    const bool has_splits = splitting.part_rows || sm90_mha_forward_takes_splits_kernel(p, w->device->sms);
    const struct cuda_launch launch = {
        .kernel = kernel_of(p, params.few_rows ? CUDA_SM90_MHA_FORWARD_FEW
                               : has_splits    ? CUDA_SM90_MHA_FORWARD_SPLITS
                                               : CUDA_SM90_MHA_FORWARD),
        .blocks = tiles < t->slots ? tiles : t->slots,
        .flags = splitting.part_rows ? LAUNCH_OVERLAP : 0, /* the others lose by it (docs/kernels/mha.md) */
        .stream = p->stream,
    };
    status = cuda_launch(op, scope, &launch, (void *[]){&params});
    if (status || !splitting.part_rows) return status;
    const int64_t rows = mha_tiles(p, t->rows) * params.tile_rows,
                  wanted = cuda_ceil_div(rows, MHA_JOIN_WARPS),
                  most = (int64_t)JOIN_BLOCKS_PER_SM * w->device->sms;
    const struct cuda_launch join = {
        .kernel = kernel_of(p, CUDA_SM90_MHA_FORWARD_JOIN),
        .blocks = wanted < most ? wanted : most,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &join, (void *[]){&params});
}

const struct cuda_attention cuda_sm90_mha_forward = {.driver = CUDA_ATTENTION_DRIVER,
                                                     .refuses = sm90_mha_forward_refuses,
                                                     .prepare = cuda_mha_prepare,
                                                     .launch = launch};
