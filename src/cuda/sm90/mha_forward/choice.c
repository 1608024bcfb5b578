/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../attention.h"
#include "../../launch.h"
#include "../../variants.h"

enum { GROUP = 64 /* columns of a line of shared memory */, ALIGNMENT = 16 };

static struct mha_tiling usual_tiling(const struct attention_problem *p, int32_t sms)
{
    return (struct mha_tiling){MHA_SM90_ROWS(p->d_qk), MHA_SM90_KEYS(p->d_qk), sms};
}

_Static_assert(MHA_SM90_ROWS(192) >= MHA_SM90_FEW_CTAS * MHA_SM90_FEW_ROWS &&
                   MHA_SM90_ROWS(64) >= MHA_SM90_FEW_CTAS * MHA_SM90_FEW_ROWS,
               "parts of few rows have room");

/* Tiles of few rows split keys otherwise, so by the batch only. Parts of their splits have no more rows than the usual
 * ones, for which a call without lengths asks room. */
struct mha_tiling sm90_mha_forward_tiling(const struct attention_problem *p, int32_t sms)
{
    const struct mha_tiling few = {MHA_SM90_FEW_ROWS, MHA_SM90_FEW_KEYS(p->d_qk), MHA_SM90_FEW_CTAS * sms},
                            usual = usual_tiling(p, sms);
    if (p->bound || !p->batch_dependent || p->mha_splits || p->d_qk > 192) return usual;
    const int64_t tokens = p->ragged_q.starts ? p->max_s_q : p->s_q;
    if (!tokens || tokens > MHA_SM90_FEW_ROWS / (p->h_q / p->h_kv)) return usual;
    return mha_splitting(p, &usual).part_rows && mha_splitting(p, &few).part_rows ? few : usual;
}

bool sm90_mha_forward_takes_splits_kernel(const struct attention_problem *p, int32_t sms)
{
    enum { MOST_BLOCKS_OF_SM = 96 };
    if (!p->b) return false;
    if (p->ragged_q.used) return true;
    if (p->d_qk != 128) return false;
    if (p->rules.attn_sink || p->causal) return true;
    const int64_t tokens = p->ragged_q.starts ? p->max_s_q : p->s_q,
                  tiles = mha_tiles_of_requests(p, MHA_SM90_ROWS(p->d_qk), tokens);
    return tokens && tiles <= sms && tiles > sms / 2 &&
           p->capacity <= (int64_t)MOST_BLOCKS_OF_SM * MHA_SM90_KEYS(p->d_qk);
}

/* Returns the tiles of 64 columns that hold `d` columns; 96 are in two that overlap. */
static int64_t column_tiles(int64_t d)
{
    return cuda_ceil_div(d, GROUP);
}

/* Returns the columns from one tile to the next. */
static int64_t column_step(int64_t d)
{
    return d % GROUP ? d - GROUP : GROUP;
}

struct tensor_view sm90_mha_forward_q_view(const struct attention_problem *p, const struct mha_tiling *t)
{
    const bool ragged = p->ragged_q.starts;
    const int32_t heads = mha_heads_of_tile(p, t->rows);
    return (struct tensor_view){
        .data = p->q,
        .element = p->element,
        .size = {GROUP, p->h_q, ragged ? p->ragged_q.tokens : p->s_q, column_tiles(p->d_qk),
                 ragged ? 1 : p->b},
        .stride = {1, p->q_stride[2], p->q_stride[1], column_step(p->d_qk), p->q_stride[0]},
        .box = {GROUP, heads, (int32_t)t->rows / heads, 1, 1},
    };
}

struct tensor_view sm90_mha_forward_key_view(const struct attention_problem *p, const struct mha_tiling *t,
                                             const struct key_view *view, int64_t d)
{
    const int64_t columns = column_tiles(d);
    return (struct tensor_view){
        .data = p->keys[0].page_size ? view->data
                                     : (const uint8_t *)(const void *)p->q, /* without keys nothing is read */
        .element = p->element,
        .size = {GROUP, p->keys[0].page_size, p->h_kv, columns, p->ragged_k.starts ? 1 : p->b},
        .stride = {1, view->slot_bytes / 2, view->head_bytes / 2, column_step(d), view->page_bytes / 2},
        .box = {GROUP, (int32_t)t->keys, 1, (int32_t)columns, 1},
    };
}

const char *sm90_mha_forward_refuses(const struct attention_problem *p, const char **argument)
{
    const struct key_source *keys = &p->keys[0];
    const struct mha_tiling t = usual_tiling(p, 0);
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    if (!p->b || !p->s_q) return NULL;
    *argument = "q";
    if (mha_tiles(p, t.rows) > (INT32_MAX - MHA_MOST_BLOCKS) / (p->mha_splits ? p->mha_splits : 1))
        return "takes fewer than 2^31 - 65536 tiles of rows, and of splits of them";
    const struct tensor_view q = sm90_mha_forward_q_view(p, &t),
                             k = sm90_mha_forward_key_view(p, &t, &keys->k, p->d_qk),
                             v = sm90_mha_forward_key_view(p, &t, &keys->v, p->d_v);
    if (!tensor_view_possible(&q))
        return "takes queries whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "k";
    if (!tensor_view_possible(&k))
        return "takes keys whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "v";
    if (!tensor_view_possible(&v))
        return "takes values whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "out";
    if (!cuda_out_aligned(p, ALIGNMENT))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
