/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../launch.h"

enum { GROUP = 64 /* columns of a line of shared memory */, ALIGNMENT = 16 };
enum { MOST_BLOCKS = 65536 /* CTAs: their tile counters run past the last tile */ };

int32_t sm90_mha_forward_heads(const struct attention_problem *p)
{
    const int64_t rows = MHA_SM90_ROWS(p->d_qk), group = p->h_q / p->h_kv, most = rows / group;
    if (group == 1 || !most) return 1;
    return cuda_ceil_div(p->s_q, most) < group * cuda_ceil_div(p->s_q, rows) ? (int32_t)group : 1;
}

int32_t sm90_mha_forward_tokens(const struct attention_problem *p)
{
    return MHA_SM90_ROWS(p->d_qk) / sm90_mha_forward_heads(p);
}

int64_t sm90_mha_forward_tiles(const struct attention_problem *p)
{
    const int64_t tokens = sm90_mha_forward_tokens(p), units = p->h_q / sm90_mha_forward_heads(p);
    if (!p->ragged_q.starts) return p->b * cuda_ceil_div(p->s_q, tokens) * units;
    const int64_t begun = p->ragged_q.tokens < p->b ? p->ragged_q.tokens : p->b; /* non-empty requests */
    return (p->ragged_q.tokens / tokens + begun) * units;
}

struct tensor_view sm90_mha_forward_q_view(const struct attention_problem *p)
{
    const bool ragged = p->ragged_q.starts;
    return (struct tensor_view){
        .data = p->q,
        .element = p->element,
        .size = {GROUP, p->h_q, ragged ? p->ragged_q.tokens : p->s_q, p->d_qk / GROUP, ragged ? 1 : p->b},
        .stride = {1, p->q_stride[2], p->q_stride[1], GROUP, p->q_stride[0]},
        .box = {GROUP, sm90_mha_forward_heads(p), sm90_mha_forward_tokens(p), 1, 1},
    };
}

struct tensor_view sm90_mha_forward_key_view(const struct attention_problem *p, const struct key_view *view,
                                             int64_t d)
{
    const int64_t columns = d / GROUP;
    return (struct tensor_view){
        .data = p->keys[0].page_size ? view->data
                                     : (const uint8_t *)(const void *)p->q, /* without keys nothing is read */
        .element = p->element,
        .size = {GROUP, p->keys[0].page_size, p->h_kv, columns, p->ragged_k.starts ? 1 : p->b},
        .stride = {1, view->slot_bytes / 2, view->head_bytes / 2, GROUP, view->page_bytes / 2},
        .box = {GROUP, MHA_SM90_KEYS(p->d_qk), 1, (int32_t)columns, 1},
    };
}

const char *sm90_mha_forward_refuses(const struct attention_problem *p, const char **argument)
{
    const struct key_source *keys = &p->keys[0];
    *argument = "v";
    if (p->d_v != (p->d_qk == 64 ? 64 : 128))
        return "takes d_v 128 with d_qk 128 or 192, and d_v 64 with d_qk 64";
    if (!p->b || !p->s_q) return NULL;
    *argument = "q";
    if (sm90_mha_forward_tiles(p) > INT32_MAX - MOST_BLOCKS)
        return "takes fewer than 2^31 - 65536 tiles of rows";
    const struct tensor_view q = sm90_mha_forward_q_view(p),
                             k = sm90_mha_forward_key_view(p, &keys->k, p->d_qk),
                             v = sm90_mha_forward_key_view(p, &keys->v, p->d_v);
    if (!tensor_view_possible(&q))
        return "takes queries whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "k";
    if (!tensor_view_possible(&k))
        return "takes keys whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "v";
    if (!tensor_view_possible(&v))
        return "takes values whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "out";
    const int64_t shape[] = {p->b, p->s_q, p->h_q};
    if (!cuda_rows_aligned(p->out, shape, p->out_stride, 3, 2, ALIGNMENT))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
