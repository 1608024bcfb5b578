/* SPDX-License-Identifier: MIT
 *
 * Sparse decode on a GPU: the host part that all its kernels share. Each query token has its own keys, so a
 * partition of the plan is taken by one CTA per tile of heads of the request's tokens.
 *
 * Workspace: that of attention.h | on Hopper, if requests may be split, the barriers of CTA groups, one word
 * per SM
 */
#include "attention.h"

#include "sm90/sparse_decode/choice.h"

#include <string.h>

static bool has_hoppers(const struct cuda_device *device)
{
    const struct cuda_key small = {CUDA_SM90_SPARSE_DECODE_SMALL, ELEMENT_BF16, KV_FP8_656,
                                   SM90_SPARSE_DECODE_BYTES};
    return device->capability == 90 && cuda_can_have(device, cuda_kernel_of(small));
}

/* The same function of the shape for every format, because a plan may be made before a format is named. */
static int32_t partitions_of(const struct cuda_device *device, const struct sm90_sparse_shape *shape)
{
    return has_hoppers(device) ? sm90_sparse_decode_partitions(shape)
                               : plan_default_partitions(shape->sms, 1, shape->s_q * shape->h_q, shape->s_q);
}

static int32_t rows_of(const struct cuda_device *device, const struct sm90_sparse_shape *shape)
{
    return has_hoppers(device) ? sm90_sparse_decode_rows(shape) : partitions_of(device, shape);
}

int32_t cuda_sparse_rows(int32_t id, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk)
{
    const struct cuda_device *device = cuda_device(id);
    return rows_of(device, &(struct sm90_sparse_shape){0, s_q, h_q, topk, extra_topk, device->sms, true});
}

int32_t cuda_sparse_partitions(int32_t id, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                               int64_t extra_topk)
{
    const struct cuda_device *device = cuda_device(id);
    return partitions_of(device,
                         &(struct sm90_sparse_shape){b, s_q, h_q, topk, extra_topk, device->sms, true});
}

static void place_cta_group_barriers(bool may_be_split, struct cuda_work *w)
{
    if (may_be_split && has_hoppers(w->device)) cuda_place_cta_group_barriers(w);
}

/* Lays out the workspace of any call up to these sizes with the default number of partitions: every number of
 * tiles of a request is tried, with the most rows that they hold. With other numbers of partitions, or in
 * even splits, larger sizes need more. */
static fmla_status lay_out_most(const struct attention_problem *p, const struct sm90_sparse_shape *shape,
                                struct cuda_work *w)
{
    enum { HOPPER = SM90_SPARSE_DECODE_HEADS, SMALL = SM90_SPARSE_DECODE_SMALL_HEADS };
    static const int heads[] = {HOPPER, SMALL};
    const bool hoppers = has_hoppers(w->device);
    struct cuda_most most = {.partitions = 1};
    for (int i = 0; i < (hoppers ? 2 : 1); i++) {
        const int64_t most_tiles = p->s_q * cuda_ceil_div(p->h_q, heads[i]), all_rows = p->s_q * p->h_q;
        if (hoppers && heads[i] == HOPPER && p->h_q <= SMALL) continue;
        for (int64_t tiles = 1; tiles <= most_tiles; tiles++) {
            const int32_t partitions = hoppers ? sm90_sparse_decode_most_partitions(shape, tiles, heads[i])
                                               : (int32_t)(w->device->sms / tiles);
            if (partitions < 2) break; /* nor with more tiles */
            cuda_most_add(&most, partitions, all_rows < tiles * heads[i] ? all_rows : tiles * heads[i]);
        }
    }
    const fmla_status status = cuda_lay_out_most(p, &most, w);
    place_cta_group_barriers(most.partitions > 1, w);
    return status;
}

fmla_status cuda_sparse_prepare(const struct attention_problem *p, int64_t tiles, struct cuda_work *w)
{
    const struct sm90_sparse_shape shape = sm90_sparse_shape_of(p, w->device->sms);
    w->launch.tiles = tiles;
    w->split.keys = p->splitting == SPLIT_BATCH_INVARIANT ? INVARIANT_SPLIT_KEYS : 0;
    w->split.num_partitions = p->num_partitions ? p->num_partitions : rows_of(w->device, &shape);
    fmla_status status = cuda_lay_out(p, w);
    if (status || w->split.keys) return status;
    if (p->bound && !p->num_partitions) return lay_out_most(p, &shape, w);
    place_cta_group_barriers(w->split.parts > 0, w);
    if (!w->split.makes_plan || p->num_partitions) return FMLA_OK;
    const size_t bytes = w->bytes; /* also covers a call with a passed plan, which has more rows */
    w->split.num_partitions = partitions_of(w->device, &shape);
    status = cuda_lay_out(p, w);
    place_cta_group_barriers(w->split.parts > 0, w);
    w->bytes = bytes;
    return status;
}

const char *cuda_sparse_refuses(const struct attention_problem *p, int64_t tiles, const char **argument)
{
    enum { MOST_LANES = 1 << 20, MOST_KEYS = INT32_MAX - INVARIANT_SPLIT_KEYS };
    const int64_t workers = p->b > p->num_partitions ? p->b : p->num_partitions;
    *argument = p->keys[1].capacity ? "extra_indices" : "indices";
    if (p->capacity > MOST_KEYS) return "takes fewer than 2^31 - 2048 indices per token, over both caches";
    *argument = "q";
    if (workers && tiles > (INT32_MAX - MOST_LANES) / workers)
        return "takes fewer than 2^31 tiles of heads times partitions";
    return NULL;
}

struct sparse_decode_params cuda_sparse_params(const struct attention_problem *p, const struct cuda_work *w,
                                               int64_t tiles_of_token)
{
    struct sparse_decode_params params = {
        .b = (int32_t)p->b,
        .s_q = (int32_t)p->s_q,
        .h_q = (int32_t)p->h_q,
        .d_qk = (int32_t)p->d_qk,
        .tiles = (int32_t)w->launch.tiles,
        .tiles_of_token = (int32_t)tiles_of_token,
        .tiles_divisor = divisor_of((uint32_t)w->launch.tiles),
        .token_divisor = divisor_of((uint32_t)tiles_of_token),
        .heads_divisor = divisor_of((uint32_t)p->h_q),
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q,
        .cache = {cuda_cache_params(&p->keys[0]), cuda_cache_params(&p->keys[1])},
        .topk = attention_lists(p),
        .splits_divisor = divisor_of((uint32_t)w->split.even_splits),
        .split = cuda_split_params(p, w),
        .output = cuda_output_params(p),
    };
    memcpy(params.q_stride, p->q_stride, sizeof params.q_stride);
    return params;
}
