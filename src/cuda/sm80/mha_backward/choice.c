/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../attention.h"
#include "shape.h"

enum { ALIGNMENT = 16 };

static int64_t numbers_of(const struct backward_problem *p, int64_t tokens, int64_t each, int32_t size)
{
    return p->is_ragged ? tokens / size + p->b + 2 : p->b * cuda_ceil_div(each, size);
}

int64_t sm80_mha_backward_row_tiles(const struct backward_problem *p)
{
    return numbers_of(p, p->ragged_q.tokens, p->s_q, MHA_BACKWARD_ROWS);
}

int64_t sm80_mha_backward_key_blocks(const struct backward_problem *p)
{
    return numbers_of(p, p->ragged_k.tokens, p->s_k, MHA_BACKWARD_KEYS);
}

int32_t sm80_mha_backward_heads(const struct backward_problem *p, int32_t sms)
{
    const int64_t blocks = cuda_ceil_div(p->s_k, MHA_BACKWARD_KEYS),
                  tiles = cuda_ceil_div(p->s_q, MHA_BACKWARD_ROWS) * (p->h_q / p->h_kv);
    int64_t heads = blocks ? 2 * sms / blocks : p->h_kv;
    /* Blocks of keys of a head come to a tile one after the other. Causal: each begins at another tile. Full: all begin with the first, and
     * so many heads are taken together that the next block is taken about a tile later. */
    if (p->deterministic) heads = p->causal || !tiles ? 1 : cuda_ceil_div(sms, tiles);
    return (int32_t)(heads < 1 ? 1 : heads < p->h_kv ? heads : p->h_kv);
}

struct sm80_mha_backward_layout sm80_mha_backward_layout(const struct backward_problem *p)
{
    const size_t tiles = (size_t)(sm80_mha_backward_row_tiles(p) * p->h_q);
    struct sm80_mha_backward_layout l = {0};
    l.dq_sums = l.rows + cuda_line_up(tiles * MHA_BACKWARD_NUMBERS * MHA_BACKWARD_ROWS * sizeof(float));
    l.taken = l.dq_sums + cuda_line_up(tiles * MHA_BACKWARD_ROWS * (size_t)p->d_qk * sizeof(float));
    l.added = l.taken + cuda_line_up(sizeof(uint32_t));
    l.bytes = l.added + cuda_line_up(tiles * sizeof(uint32_t));
    return l;
}

static bool rows_aligned(const struct backward_problem *p, const struct token_view *view, bool of_keys)
{
    const int64_t shape[] = {p->is_ragged ? 1 : p->b, of_keys ? backward_keys(p) : backward_tokens(p),
                             of_keys ? p->h_kv : p->h_q};
    const int64_t stride[] = {view->request, view->token, view->head};
    return !shape[1] || cuda_rows_aligned(view->data, shape, stride, 3, 2, ALIGNMENT);
}

const char *sm80_mha_backward_refuses(const struct backward_problem *p, const char **argument)
{
    const struct {
        const char *name;
        const struct token_view *view;
        bool of_keys;
    } tensors[] = {{"q", &p->q, false},       {"k", &p->k, true},      {"v", &p->v, true},
                   {"dout", &p->dout, false}, {"out", &p->out, false}, {"dq", &p->dq, false},
                   {"dk", &p->dk, true},      {"dv", &p->dv, true}};
    *argument = "v";
    if (p->d_v != (p->d_qk == 64 ? 64 : 128))
        return "takes values of 128 where d_qk is 128 or 192, of 64 where it is 64";
    *argument = "q";
    if (sm80_mha_backward_row_tiles(p) > INT32_MAX / p->h_q) return "takes fewer than 2^31 tiles of rows";
    *argument = "k";
    if (sm80_mha_backward_key_blocks(p) > INT32_MAX / p->h_kv) return "takes fewer than 2^31 blocks of keys";
    if (!p->b) return NULL;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        *argument = tensors[i].name;
        if (!rows_aligned(p, tensors[i].view, tensors[i].of_keys))
            return "takes a tensor whose base and strides are multiples of 16 bytes";
    }
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
