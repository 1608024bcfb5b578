/* SPDX-License-Identifier: MIT
 *
 * The driver of attention on a GPU, and the parameters that kernels of several operations share.
 */
#include "attention.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- Parameters ------------------------------------------------------------------------------ */

float cuda_scale_log2(float scale)
{
    return fmaxf(fminf((float)((double)scale * 1.44269504088896340736), FLT_MAX), -FLT_MAX);
}

struct result_params cuda_result_params(const struct result_rules *rules)
{
    return (struct result_params){
        .attn_sink = rules->attn_sink, .lse_of_empty = rules->lse_of_empty, .lse_factor = rules->lse_factor};
}

bool cuda_out_aligned(const struct attention_problem *p, int64_t bytes)
{
    const int64_t shape[] = {p->b, p->ragged_q.starts ? p->ragged_q.tokens : p->s_q, p->h_q};
    return cuda_rows_aligned(p->out, shape, p->out_stride, 3, sizeof(uint16_t), bytes);
}

struct output_params cuda_output_params(const struct attention_problem *p)
{
    struct output_params params = {.out = p->out,
                                   .lse = p->lse,
                                   .rules = cuda_result_params(&p->rules),
                                   .pairs_aligned = cuda_out_aligned(p, sizeof(uint16_t[2]))};
    memcpy(params.out_stride, p->out_stride, sizeof params.out_stride);
    memcpy(params.lse_stride, p->lse_stride, sizeof params.lse_stride);
    return params;
}

struct sparse_cache_params cuda_cache_params(const struct key_source *keys)
{
    const int64_t slots = keys->pages * keys->page_size, most = (int64_t)1 << 31; /* indices are int32 */
    const struct kv_layout layout = kv_layout_of(keys->format, 0); /* the scales do not depend on the width */
    return (struct sparse_cache_params){
        .data = keys->k.data,
        .page_bytes = keys->k.page_bytes,
        .slot_bytes = keys->k.slot_bytes,
        .indices = keys->table,
        .indices_stride = {keys->table_stride[0], keys->table_stride[1]},
        .slots = (uint32_t)(slots < most ? slots : most),
        .page_size = (int32_t)keys->page_size,
        .page_divisor = divisor_of((uint32_t)(keys->page_size ? keys->page_size : 1)),
        .scale_base = (int64_t)kv_scales_at(&layout, keys->page_size, 0),
        .scale_step = layout.scale_bytes ? layout.scale_bytes : keys->k.slot_bytes,
        .format = (int32_t)keys->format,
    };
}

/* ---- A call ---------------------------------------------------------------------------------- */

const char *cuda_attention_refuses(const struct kernel_driver *driver, union problem problem,
                                   const char **argument)
{
    const struct cuda_attention *attention = (const struct cuda_attention *)driver;
    return attention->refuses ? attention->refuses(problem.attention, argument) : NULL;
}

bool cuda_attention_leaves(const struct kernel_driver *driver, union problem problem)
{
    const struct cuda_attention *attention = (const struct cuda_attention *)driver;
    return attention->leaves && attention->leaves(problem.attention);
}

fmla_status cuda_attention_prepare(const struct kernel_driver *driver, union problem problem,
                                   struct prepared *prepared)
{
    const struct cuda_attention *attention = (const struct cuda_attention *)driver;
    struct cuda_work *work = DECISION(struct cuda_work, prepared);
    memset(work, 0, sizeof *work);
    work->device = cuda_device(problem.attention->device.id);
    const fmla_status status = attention->prepare(problem.attention, work);
    prepared->bytes = work->bytes, prepared->alignment = CUDA_WORKSPACE_ALIGNMENT;
    return status;
}

static fmla_status launch_plan(const struct cuda_scope *scope, const struct attention_problem *p,
                               const struct cuda_work *work)
{
    struct plan_problem problem = {
        .b = p->b,
        .kind = p->keys[0].kind,
        .lists = attention_lists(p),
        .plan = plan_tables_of(p->workspace, work->split.num_partitions),
        .stream = p->stream,
    };
    if (problem.kind == KEYS_PAGED && cuda_has_plan_costs(scope->device))
        problem.costs = plan_costs_of(p->s_q, p->h_q, p->h_kv);
    return cuda_launch_plan(operation_name(p->operation), scope, &problem);
}

static fmla_status launch_all(const struct cuda_scope *scope, const struct cuda_attention *attention,
                              const struct attention_problem *p, const struct cuda_work *work)
{
    fmla_status status = FMLA_OK;
    if (work->split.makes_plan) status = launch_plan(scope, p, work);
    if (!status) status = attention->launch(scope, p, work);
    if (!status && work->split.join == JOIN_BY_LAUNCH) status = cuda_launch_join(scope, p, work);
    if (!status && p->ragged_q.used) status = cuda_mha_forward_padding(scope, p);
    return status;
}

fmla_status cuda_attention_run(const struct kernel_driver *driver, union problem problem,
                               const struct prepared *prepared)
{
    const struct attention_problem *p = problem.attention;
    const struct cuda_attention *attention = (const struct cuda_attention *)driver;
    const struct cuda_work *work = DECIDED(struct cuda_work, prepared);
    struct cuda_scope scope;
    if (!p->b) return FMLA_OK;
    fmla_status status = cuda_enter(operation_name(p->operation), "q", p->device.id, &scope);
    if (status) return status;
    status = launch_all(&scope, attention, p, work);
    if (status == CUDA_NO_ROOM) {
        struct cuda_work again = {.device = work->device, .ctas_must_not_wait = true};
        status = attention->prepare(p, &again);
        if (!status) status = launch_all(&scope, attention, p, &again);
    }
    cuda_leave(&scope);
    return status;
}
