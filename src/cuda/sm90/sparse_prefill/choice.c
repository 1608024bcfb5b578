/* SPDX-License-Identifier: MIT */
#include "choice.h"

enum { GROUP = 64 /* columns of a line of shared memory */, GROUPS_OF_BOX = 2, ALIGNMENT = 16 };
enum { MOST_ENTRIES = INT32_MAX - 256 /* of a list: the producer looks a block of 64 ahead */ };

static bool aligned(const void *data)
{
    return (uintptr_t)data % ALIGNMENT == 0;
}

static bool steps_aligned(int64_t size, int64_t bytes)
{
    return size <= 1 || bytes % ALIGNMENT == 0;
}

const char *sm90_sparse_prefill_refuses(const struct sparse_prefill_problem *p, const char **argument)
{
    const struct sparse_cache *kv = &p->kv;
    if (!p->s_q) return NULL;
    *argument = "q";
    if (!aligned(p->q) || !tensor_stride_possible(p->s_q, p->q_stride[0]) ||
        !tensor_stride_possible(p->h_q, p->q_stride[1]))
        return "takes queries whose base and strides are multiples of 16 bytes";
    *argument = "kv";
    if (kv->pages &&
        (!aligned(kv->data) || !steps_aligned(kv->pages, kv->page_bytes) ||
         !steps_aligned(kv->page_size, kv->slot_bytes) || !steps_aligned(p->h_kv, p->kv_head_bytes)))
        return "takes keys whose base and strides are multiples of 16 bytes";
    *argument = "indices";
    if (p->topk > MOST_ENTRIES) return "takes fewer than 2^31 - 256 entries of a token";
    *argument = "out";
    if (!aligned(p->out) || !tensor_stride_possible(p->s_q, p->out_stride[0]) ||
        !tensor_stride_possible(p->h_q, p->out_stride[1]))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

struct tensor_view sm90_sparse_prefill_view(const struct sparse_prefill_problem *p, const uint16_t *data,
                                            const int64_t stride[2], int64_t tokens, int64_t heads,
                                            int64_t columns)
{
    return (struct tensor_view){
        .data = data,
        .element = p->element,
        .size = {GROUP, heads, columns / GROUP, tokens, 1},
        .stride = {1, stride[1], GROUP, stride[0], 0},
        .box = {GROUP, SM90_SPARSE_PREFILL_HEADS, GROUPS_OF_BOX, 1, 1},
    };
}
