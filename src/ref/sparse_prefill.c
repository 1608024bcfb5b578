/* SPDX-License-Identifier: MIT */
#include "sparse.h"

fmla_status ref_sparse_prefill_size(const struct kernel *kernel, const struct sparse_prefill_problem *p,
                                    size_t *bytes, size_t *alignment)
{
    (void)kernel, (void)alignment;
    return ref_memory_size("sparse_prefill", (size_t)p->topk, p->d_qk, p->d_v, bytes);
}

static struct ref_row row_of(const struct sparse_prefill_problem *p, int64_t token, int64_t head)
{
    return (struct ref_row){
        .d_qk = p->d_qk,
        .d_v = p->d_v,
        .head = head,
        .element = p->element,
        .scale = p->scale,
        .rules = &p->rules,
        .q = p->q + token * p->q_stride[0] + head * p->q_stride[1],
        .out = p->out + token * p->out_stride[0] + head * p->out_stride[1],
        .max_logit = p->max_logits ? p->max_logits + token * p->max_stride + head : NULL,
        .lse = p->lse ? p->lse + token * p->lse_stride + head : NULL,
    };
}

fmla_status ref_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *p)
{
    (void)kernel;
    const struct ref_memory m = ref_memory_of(p->workspace, (size_t)p->topk, p->d_qk, p->d_v);
    const int64_t group = p->h_q / p->h_kv;
    for (int64_t token = 0; token < p->s_q; token++)
        for (int64_t key_head = 0; key_head < p->h_kv; key_head++) {
            struct sparse_cache kv = p->kv;
            kv.data += key_head * p->kv_head_bytes;
            const int32_t *indices =
                kv.indices + token * kv.indices_stride[0] + key_head * kv.indices_stride[1];
            const int64_t count = ref_list_keys(&kv, p->format, p->d_qk, indices,
                                                ref_count(p->topk, p->topk_length, token), m.keys, 0);
            for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
                const struct ref_row row = row_of(p, token, head);
                ref_attend(&row, &m, count);
            }
        }
    return FMLA_OK;
}
