/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../launch.h"
#include "../../mha_splits.h"
#include "../../variants.h"
#include "shape.h"

enum { ALIGNMENT = 16 /* bytes per cp.async */ };

static bool keys_aligned(const struct attention_problem *p, const struct key_view *view)
{
    const int64_t shape[] = {p->ragged_k.starts ? 1 : p->b, p->keys[0].page_size, p->h_kv};
    const int64_t bytes[] = {view->page_bytes, view->slot_bytes, view->head_bytes};
    return !p->keys[0].page_size || cuda_rows_aligned(view->data, shape, bytes, 3, 1, ALIGNMENT);
}

const char *sm80_mha_forward_refuses(const struct attention_problem *p, const char **argument)
{
    const int64_t shape[] = {p->ragged_q.starts ? 1 : p->b, p->ragged_q.starts ? p->ragged_q.tokens : p->s_q,
                             p->h_q};
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    *argument = "q";
    if (mha_tiles(p, MHA_SM80_ROWS) > INT32_MAX / (p->mha_splits ? p->mha_splits : 1))
        return "takes fewer than 2^31 tiles of rows, and of splits of them";
    if (!cuda_rows_aligned(p->q, shape, p->q_stride, 3, 2, ALIGNMENT))
        return "takes queries whose base and strides are multiples of 16 bytes";
    *argument = "k";
    if (!keys_aligned(p, &p->keys[0].k)) return "takes keys whose base and strides are multiples of 16 bytes";
    *argument = "v";
    if (!keys_aligned(p, &p->keys[0].v))
        return "takes values whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

const struct sm80_mha_shape *sm80_mha_forward_shape(const struct attention_problem *p,
                                                    const struct cuda_device *device)
{
    enum { OF_SYSTEM = 1024 };
#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas)                                            \
    {d_qk, d_v, keys, ctas, MHA_SM80_BYTES(d_qk, d_v, keys), MHA_SM80_##d_qk##suffix},
    static const struct sm80_mha_shape shapes[] = {MHA_SM80_SHAPES(SHAPE)};
#undef SHAPE
    const struct sm80_mha_shape *shape = NULL;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i].d_qk != p->d_qk || shapes[i].d_v != p->d_v) continue;
        shape = &shapes[i];
        if (shape->ctas * (shape->bytes + OF_SYSTEM) <= device->shared_bytes + OF_SYSTEM) break;
    }
    return shape;
}

struct mha_tiling sm80_mha_forward_tiling(const struct attention_problem *p, const struct cuda_device *device)
{
    const struct sm80_mha_shape *shape = sm80_mha_forward_shape(p, device);
    return shape ? (struct mha_tiling){MHA_SM80_ROWS, shape->keys, shape->ctas * device->sms}
                 : (struct mha_tiling){0};
}

struct mha_splitting sm80_mha_forward_splitting(const struct attention_problem *p,
                                                const struct mha_tiling *tiling)
{
    const struct mha_splitting none = {.splits = 1, .most_splits = 1};
    struct mha_splitting s = mha_splitting(p, tiling);
    if (!s.part_rows) return none;
    if (p->ragged_q.starts) return mha_tiles(p, MHA_SM80_ROWS) > INT32_MAX / s.most_splits ? none : s;
    if (!p->has_used) s.splits = s.most_splits, s.blocks_of_split = 0;
    if (p->s_q > MHA_MOST_PART_ROWS_OF_REQUEST / s.most_splits / p->h_q) return none;
    return p->b * p->s_q * p->h_q * s.most_splits > s.part_rows ? none : s;
}
