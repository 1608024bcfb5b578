/* SPDX-License-Identifier: MIT
 *
 * Dense decode as the driver of decode is given it, and the planner.
 */
#include "cpu.h"

static struct cpu_decode call_of(const struct dense_decode_problem *p)
{
    return (struct cpu_decode){
        .dense = p,
        .operation = "dense_decode",
        .b = p->b,
        .s_q = p->s_q,
        .h_q = p->h_q,
        .d_qk = p->d_qk,
        .d_v = p->d_v,
        .sets = p->h_kv,
        .set_rows = p->s_q * (p->h_q / p->h_kv),
        .tile_rows = PLAN_ROW_TILE,
        .capacity = p->capacity,
        .element = p->element,
        .layout = kv_layout_of(p->element == ELEMENT_BF16 ? KV_BF16 : KV_FP16, (int32_t)p->d_qk),
        .q = p->q,
        .q_stride = p->q_stride,
        .out = p->out,
        .out_stride = p->out_stride,
        .lse = p->lse,
        .lse_stride = p->lse_stride,
        .rules = &p->rules,
        .scale = p->scale,
        .batch_invariant = p->batch_invariant,
        .plan = p->plan,
        .plan_in_tables = p->plan_in_tables,
        .partitions = p->partitions,
        .num_partitions = p->num_partitions,
        .bound = p->bound,
        .workspace = p->workspace,
        .workspace_size = p->workspace_size,
    };
}

fmla_status cpu_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *p,
                                  size_t *bytes, size_t *alignment)
{
    const struct cpu_decode call = call_of(p);
    return cpu_decode_size(kernel, &call, bytes, alignment);
}

/* Every page that will be read is one of the cache. */
static fmla_status check_pages(const struct dense_decode_problem *p)
{
    if (!p->block_table) return FMLA_OK;
    for (int64_t r = 0; r < p->b; r++) {
        const int64_t length = plan_clamp_length(p->seqlens[r], p->capacity);
        const int64_t pages = (length + p->page_size - 1) / p->page_size;
        const int32_t *row = p->block_table + r * p->block_table_stride;
        for (int64_t i = 0; i < pages; i++)
            if (row[i] < 0 || row[i] >= p->pages)
                return fail(FMLA_INVALID_ARGUMENT,
                            "dense_decode: block_table: entry [%lld, %lld] is %d, must be in [0, %lld): "
                            "request %lld has "
                            "%lld keys",
                            (long long)r, (long long)i, row[i], (long long)p->pages, (long long)r,
                            (long long)length);
    }
    return FMLA_OK;
}

fmla_status cpu_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *p)
{
    const struct cpu_decode call = call_of(p);
    const fmla_status status = check_pages(p);
    return status ? status : cpu_decode_run(kernel, &call);
}

fmla_status cpu_decode_plan(const struct plan_problem *p)
{
    if (p->sparse)
        plan_build_sparse(p->plan, p->b, p->topk);
    else
        plan_build_by_costs(p->plan, p->b, p->seqlens, p->capacity, p->costs);
    return FMLA_OK;
}
