/* SPDX-License-Identifier: MIT
 *
 * Launches of dense MHA backward on Hopper: the row kernel before, the products, and the row kernel after.
 * The grid of the products is persistent, at most one CTA per SM. A launch may begin before the previous one
 * has ended.
 */
#include "../../backward.h"
#include "choice.h"

static fmla_status launch_rows(const struct cuda_scope *scope, const struct backward_problem *p,
                               struct mha_backward_sm90_params *params, enum cuda_schedule schedule)
{
    const int64_t blocks = (int64_t)params->row_tiles * p->h_q;
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of(
            (struct cuda_key){schedule, .element = p->element, .variant = mha_size_of(p->d_qk)}),
        .blocks = blocks ? blocks : 1, /* CTA 0 clears counters */
        .flags = schedule == CUDA_SM90_MHA_BACKWARD_FINISH ? LAUNCH_OVERLAP : 0,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(OP_MHA_BACKWARD), scope, &launch, (void *[]){params});
}

/* Key blocks of a group wait for each other, so as many CTAs as a group has must run at once. These are launched together,
 * and the others join them as SMs are free: a kernel that holds some SMs delays only CTAs that it leaves no room. Where
 * CTAs may not be launched together, a group is one block. */
static fmla_status launch_products(const struct cuda_scope *scope, const struct backward_problem *p,
                                   struct mha_backward_sm90_params *params)
{
    const char *op = operation_name(OP_MHA_BACKWARD);
    const int64_t ctas = MHA_BACKWARD_SM90_CTAS(p->d_qk), most = scope->device->sms / ctas,
                  at_once = params->items < most ? params->items : most, group = params->blocks_of_group;
    struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){CUDA_SM90_MHA_BACKWARD, .element = p->element,
                                                   .variant = mha_size_of(p->d_qk)}),
        .blocks = at_once * ctas,
        .cluster = ctas > 1 ? (int32_t)ctas : 0,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    if (group > 1 && at_once) {
        struct cuda_launch together = launch;
        together.blocks = at_once < group ? at_once : group;
        together.flags |= LAUNCH_COOPERATIVE;
        const fmla_status status = cuda_launch(op, scope, &together, (void *[]){params});
        if (!status) {
            params->joins = 1;
            launch.blocks -= together.blocks;
        } else if (status == CUDA_NO_ROOM) {
            params->blocks_of_group = 1;
            params->heads_of_set = backward_heads(p, sm90_mha_backward_tiles(p), params->in_order);
        } else {
            return status;
        }
    }
    return launch.blocks ? cuda_launch(op, scope, &launch, (void *[]){params}) : FMLA_OK;
}

static fmla_status launch(const struct cuda_scope *scope, const struct backward_problem *p)
{
    static const char op[] = "mha_backward";
    const struct backward_tiles tiles = sm90_mha_backward_tiles(p);
    const struct backward_layout at = backward_layout(p, tiles);
    const int32_t q_columns = p->d_qk == 96 ? 32 : 64, key_columns = p->d_qk == 192 ? 32 : q_columns,
                  k_box = (int32_t)p->d_qk / MHA_BACKWARD_SM90_CTAS(p->d_qk);
    /* The order of deterministic sums follows from the SMs that the call may have. */
    const int32_t sms = p->deterministic ? cuda_sms_of_context(scope) : scope->device->sms;
    char *const workspace = p->workspace;
    struct mha_backward_sm90_params params = {
        .call = cuda_backward_params(p, workspace + at.of_dsink, backward_row_tiles(p, tiles)),
        .row_tiles = (int32_t)backward_row_tiles(p, tiles),
        .key_blocks = (int32_t)backward_key_blocks(p, tiles),
        .items = (int32_t)(backward_key_blocks(p, tiles) * p->h_q / tiles.heads),
        .work_heads = tiles.heads,
        .key_heads_divisor = divisor_of((uint32_t)p->h_kv),
        .blocks_divisor = divisor_of((uint32_t)(backward_key_blocks(p, tiles) * p->h_kv)),
        .heads_of_set = sm90_mha_backward_heads(p, sms),
        .blocks_of_group = sm90_mha_backward_group(p, sms),
        .rows = (float *)(void *)(workspace + at.rows),
        .dq_sums = (float *)(void *)(workspace + at.dq_sums),
        .taken = (uint32_t *)(void *)(workspace + at.taken),
        .head_sums = (float *)(void *)(workspace + at.head_sums),
        .heads_added = (uint32_t *)(void *)(workspace + at.heads_added),
        .head_counters = at.head_counters,
        .in_order = p->deterministic ? sms / MHA_BACKWARD_SM90_CTAS(p->d_qk) : 0,
        .clears = p->is_ragged || p->ragged_q.used || p->ragged_k.used,
        .added = (uint32_t *)(void *)(workspace + at.added),
    };
    const struct tensor_view q = sm90_mha_backward_view(p, &p->q, false, p->d_qk, q_columns,
                                                        (int32_t)p->d_qk),
                             k = sm90_mha_backward_view(p, &p->k, true, p->d_qk, key_columns, k_box),
                             v = sm90_mha_backward_view(p, &p->v, true, p->d_v, 64, (int32_t)p->d_v),
                             dout = sm90_mha_backward_view(p, &p->dout, false, p->d_v, 64, (int32_t)p->d_v);
    fmla_status status = tensor_map_make(op, scope, "q", &q, &params.q);
    if (!status) status = tensor_map_make(op, scope, "k", &k, &params.k);
    if (!status) status = tensor_map_make(op, scope, "v", &v, &params.v);
    if (!status) status = tensor_map_make(op, scope, "dout", &dout, &params.dout);
    if (!status) status = launch_rows(scope, p, &params, CUDA_SM90_MHA_BACKWARD_PREPARE);
    if (!status) status = launch_products(scope, p, &params);
    if (!status) status = launch_rows(scope, p, &params, CUDA_SM90_MHA_BACKWARD_FINISH);
    return status ? status : cuda_backward_add_dsinks(scope, p, &params.call);
}

const struct cuda_gradients cuda_sm90_gradients = {CUDA_BACKWARD_DRIVER, sm90_mha_backward_refuses, launch};
