/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill as the driver of decode is given it: a token is a request of one token, the rows of a key head are a set.
 */
#include "cpu.h"

struct strides {
    int64_t q[3], out[3], lse[2];
};

static struct strides strides_of(const struct sparse_prefill_problem *p)
{
    return (struct strides){
        {p->q_stride[0], 0, p->q_stride[1]}, {p->out_stride[0], 0, p->out_stride[1]}, {p->lse_stride, 1}};
}

static int32_t next_keys(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key *keys)
{
    const struct sparse_prefill_problem *p = tile->call->prefill;
    struct sparse_cache kv = p->kv;
    kv.data += tile->set * p->kv_head_bytes;
    const int32_t *indices =
        kv.indices + tile->request * kv.indices_stride[0] + tile->set * kv.indices_stride[1];
    return cpu_gather_keys(&tile->call->layout, &kv, indices, 0, at, end, keys, 0);
}

/* Rows of a tile: as many as the kernel takes, so that the keys of a token are gathered and converted once for them. */
static int32_t tile_rows(const struct kernel *kernel, int64_t set_rows)
{
    const int32_t most = kernel->cpu_attention->most_rows;
    return set_rows > most - PLAN_ROW_TILE
               ? most
               : (int32_t)(set_rows + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE * PLAN_ROW_TILE;
}

static struct cpu_decode call_of(const struct kernel *kernel, const struct sparse_prefill_problem *p,
                                 const struct strides *strides)
{
    return (struct cpu_decode){
        .prefill = p,
        .next_keys = next_keys,
        .operation = "sparse_prefill",
        .b = p->s_q,
        .s_q = 1,
        .h_q = p->h_q,
        .d_qk = p->d_qk,
        .d_v = p->d_v,
        .sets = p->h_kv,
        .set_rows = p->h_q / p->h_kv,
        .tile_rows = tile_rows(kernel, p->h_q / p->h_kv),
        .capacity = p->topk,
        .element = p->element,
        .layout = kv_layout_of(p->format, (int32_t)p->d_qk),
        .q = p->q,
        .q_stride = strides->q,
        .out = p->out,
        .out_stride = strides->out,
        .lse = p->lse,
        .lse_stride = strides->lse,
        .max_logits = p->max_logits,
        .max_stride = p->max_stride,
        .rules = &p->rules,
        .scale = p->scale,
        .bound = p->bound,
        .workspace = p->workspace,
        .workspace_size = p->workspace_size,
    };
}

fmla_status cpu_sparse_prefill_size(const struct kernel *kernel, const struct sparse_prefill_problem *p,
                                    size_t *bytes, size_t *alignment)
{
    const struct strides strides = strides_of(p);
    const struct cpu_decode call = call_of(kernel, p, &strides);
    return cpu_decode_size(kernel, &call, bytes, alignment);
}

fmla_status cpu_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *p)
{
    const struct strides strides = strides_of(p);
    const struct cpu_decode call = call_of(kernel, p, &strides);
    return cpu_decode_run(kernel, &call);
}
