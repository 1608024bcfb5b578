/* SPDX-License-Identifier: MIT
 *
 * Launch of the portable dense MHA forward on tensor cores: a CTA has one tile, or one split of its keys; then, if
 * there are splits, the join.
 */
#include "../../attention.h"
#include "choice.h"
#include "shape.h"

enum { ALIGNMENT = 16 /* bytes of a store to out */ };
enum { CACHED_BYTES = 24 * 1000 * 1000 /* of L2, for the K and V of heads that are processed together */ };
enum { JOIN_BLOCKS_PER_SM = 4 };

static struct cuda_kernel *kernel_of(const struct attention_problem *p, enum cuda_schedule schedule,
                                     int variant)
{
    return cuda_kernel_of((struct cuda_key){schedule, .element = p->element, .variant = variant});
}

static struct mha_forward_sm80_params params_of(const struct attention_problem *p)
{
    const int32_t heads = mha_heads_of_tile(p, MHA_SM80_ROWS);
    return (struct mha_forward_sm80_params){
        .call = cuda_mha_params(p),
        .heads_of_tile = heads,
        .tile_tokens = MHA_SM80_ROWS / heads,
        .heads_divisor = divisor_of((uint32_t)heads),
        .tokens_divisor = divisor_of((uint32_t)(MHA_SM80_ROWS / heads)),
        .units = (int32_t)(p->h_q / heads),
        .units_divisor = divisor_of((uint32_t)(p->h_q / heads)),
        .group_divisor = divisor_of((uint32_t)(p->h_q / p->h_kv)),
        .units_of_key_head = (int32_t)(p->h_q / p->h_kv / heads),
        .cached_keys = (int32_t)(CACHED_BYTES / (2 * (p->d_qk + p->d_v))),
        .out_aligned = cuda_out_aligned(p, ALIGNMENT),
        .splits = 1,
    };
}

static void put_splits(struct mha_forward_sm80_params *params, const struct attention_problem *p,
                       const struct cuda_work *w, const struct mha_splitting *splitting)
{
    char *const workspace = p->workspace;
    params->splits = splitting->splits, params->blocks_of_split = splitting->blocks_of_split;
    params->most_splits = splitting->most_splits, params->slots = w->mha.slots;
    params->rows_alone = (int32_t)w->mha.rows;
    params->block_keys = (int32_t)w->mha.keys, params->block_divisor = divisor_of((uint32_t)w->mha.keys);
    params->part_rows = (int32_t)splitting->part_rows;
    params->part_out = (float *)(void *)(workspace + w->split.part_out_offset);
    params->part_ends = (struct part_end *)(void *)(workspace + w->split.part_ends_offset);
}

/* Launches the join, a warp for each row of split tiles, which take turns. */
static fmla_status launch_join(const struct cuda_scope *scope, const struct attention_problem *p,
                               struct mha_forward_sm80_params *params)
{
    const int64_t rows = params->part_rows / (params->splits ? params->splits : 2), /* at most */
        wanted = cuda_ceil_div(rows, MHA_JOIN_WARPS), most = JOIN_BLOCKS_PER_SM * (int64_t)scope->device->sms;
    const struct cuda_launch launch = {
        .kernel = kernel_of(p, CUDA_SM80_MHA_FORWARD_JOIN, mha_size_of(p->d_v)),
        .blocks = wanted < most ? wanted : most,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){params});
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const struct sm80_mha_shape *shape = sm80_mha_forward_shape(p, w->device);
    const struct mha_splitting splitting = sm80_mha_forward_splitting(p, &w->mha);
    struct mha_forward_sm80_params params = params_of(p);
    if (splitting.part_rows) put_splits(&params, p, w, &splitting);
    const struct cuda_launch launch = {
        .kernel = kernel_of(p, splitting.part_rows ? CUDA_SM80_MHA_FORWARD_SPLITS : CUDA_SM80_MHA_FORWARD,
                            shape->variant),
        .blocks = mha_most_items(p, MHA_SM80_ROWS, &w->mha, &splitting),
        .stream = p->stream,
    };
    if (!launch.blocks) return FMLA_OK;
    const fmla_status status = cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
    return status || !splitting.part_rows ? status : launch_join(scope, p, &params);
}

const struct cuda_attention cuda_sm80_mha_forward = {.driver = CUDA_ATTENTION_DRIVER,
                                                     .refuses = sm80_mha_forward_refuses,
                                                     .prepare = cuda_mha_prepare,
                                                     .launch = launch};
