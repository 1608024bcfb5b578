/* SPDX-License-Identifier: MIT */
#include "choice.h"

enum { GROUP = 64 /* columns of a line of shared memory */, KEYS = 64 /* of a block */, ALIGNMENT = 16 };
enum { ROWS = SM90_DENSE_DECODE_ROWS, MOST_LANES = 1 << 20 };

static bool aligned(const void *data)
{
    return (uintptr_t)data % ALIGNMENT == 0;
}

/* Returns whether TMA takes this stride of pages or requests. A stride of 0 (all are the same one) is
 * possible. */
static bool outer_stride_possible(int64_t size, int64_t stride)
{
    return !stride || tensor_stride_possible(size, stride);
}

static int64_t row_stride(const struct attention_problem *p)
{
    return p->h_q > 1 ? p->q_stride[2] : p->q_stride[1];
}

int64_t sm90_dense_decode_q_heads(const struct attention_problem *p)
{
    const int64_t group = p->h_q / p->h_kv;
    const bool rows_follow = p->s_q == 1 || p->q_stride[1] == p->h_q * row_stride(p);
    if (p->h_kv == 1 && rows_follow) return p->s_q * p->h_q;
    if (p->s_q == 1 || group % ROWS == 0 || ROWS % group == 0) return group;
    return 0;
}

const char *sm90_dense_decode_refuses(const struct attention_problem *p, const char **argument)
{
    const struct key_source *keys = &p->keys[0];
    const bool some_keys = keys->pages > 0 && keys->page_size > 0;
    if (!p->b) return NULL;
    *argument = "kv_cache";
    if (keys->table && keys->page_size % KEYS) return "takes pages of a multiple of 64 keys";
    if (some_keys && (!aligned(keys->k.data) || !outer_stride_possible(keys->pages, keys->k.page_bytes / 2) ||
                      !tensor_stride_possible(keys->page_size, keys->k.slot_bytes / 2) ||
                      !tensor_stride_possible(p->h_kv, keys->k.head_bytes / 2)))
        return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "q";
    if (!aligned(p->q) || !outer_stride_possible(p->b, p->q_stride[0]) ||
        !tensor_stride_possible(p->s_q, p->q_stride[1]) || !tensor_stride_possible(p->h_q, p->q_stride[2]))
        return "takes queries whose base and strides are multiples of 16 bytes";
    if (!sm90_dense_decode_q_heads(p))
        return "takes several tokens where h_kv is 1 and their heads are contiguous, or where h_q / h_kv "
               "divides 64 or is a multiple of it";
    /* One CTA per worker and tile; MOST_LANES leaves room for the lanes of batch-invariant mode. */
    const int64_t tiles = p->h_kv * ((p->s_q * (p->h_q / p->h_kv) - 1) / ROWS + 1);
    const int64_t workers = p->b > p->num_partitions ? p->b : p->num_partitions; /* > 0 */
    if (tiles > (INT32_MAX - MOST_LANES) / workers)
        return "takes fewer than 2^31 tiles of 64 rows times partitions";
    *argument = "out";
    if (!aligned(p->out) || !tensor_stride_possible(p->b, p->out_stride[0]) ||
        !tensor_stride_possible(p->s_q, p->out_stride[1]) ||
        !tensor_stride_possible(p->h_q, p->out_stride[2]))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

struct tensor_view sm90_dense_decode_q_view(const struct attention_problem *p)
{
    const int64_t heads = sm90_dense_decode_q_heads(p), group = p->h_q / p->h_kv;
    const bool one_token = heads == p->s_q * p->h_q;
    const bool whole_tokens = !one_token && p->s_q > 1 && group < ROWS;
    return (struct tensor_view){
        .data = p->q,
        .element = p->element,
        .size = {GROUP, one_token ? heads : p->h_q, one_token ? 1 : p->s_q, p->d_qk / GROUP,
                 p->q_stride[0] ? p->b : 1},
        .stride = {1, row_stride(p), p->q_stride[1], GROUP, p->q_stride[0]},
        .box = {GROUP, whole_tokens ? (int32_t)group : ROWS, whole_tokens ? (int32_t)(ROWS / group) : 1, 2,
                1},
    };
}

struct tensor_view sm90_dense_decode_key_view(const struct attention_problem *p, int32_t groups)
{
    const struct key_source *keys = &p->keys[0];
    const bool some_keys = keys->pages && keys->page_size; /* an empty cache may have no address */
    return (struct tensor_view){
        .data = some_keys ? (const void *)keys->k.data : p->q,
        .element = p->element,
        .size = {GROUP, keys->page_size, p->d_qk / GROUP,
                 keys->pages > 0 && !keys->k.page_bytes ? 1 : keys->pages, p->h_kv},
        .stride = {1, keys->k.slot_bytes / 2, GROUP, keys->k.page_bytes / 2, keys->k.head_bytes / 2},
        .box = {GROUP, KEYS, groups, 1, 1},
    };
}
