/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../attention.h"

enum { ALIGNMENT = 16, MOST_BLOCKS = 65536 /* of threads, that go from item to item, past the last */ };

static int64_t numbers_of(const struct backward_problem *p, int64_t tokens, int64_t each, int32_t size)
{
    return p->is_ragged ? tokens / size + p->b + 2 : p->b * cuda_ceil_div(each, size);
}

int64_t sm90_mha_backward_row_tiles(const struct backward_problem *p)
{
    return numbers_of(p, p->ragged_q.tokens, p->s_q, MHA_BACKWARD_SM90_ROWS(p->d_qk));
}

int64_t sm90_mha_backward_key_blocks(const struct backward_problem *p)
{
    return numbers_of(p, p->ragged_k.tokens, p->s_k, MHA_BACKWARD_SM90_KEYS(p->d_qk));
}

int32_t sm90_mha_backward_heads(const struct backward_problem *p, int32_t sms)
{
    const int64_t blocks = cuda_ceil_div(p->s_k, MHA_BACKWARD_SM90_KEYS(p->d_qk)),
                  tiles = cuda_ceil_div(p->s_q, MHA_BACKWARD_SM90_ROWS(p->d_qk)) * (p->h_q / p->h_kv);
    int64_t heads = blocks ? 2 * sms / blocks : p->h_kv;
    /* Blocks of keys of a head come to a tile one after the other. Causal: each begins at another tile. Full: all begin with the first, and
     * so many heads are taken together that the next block is taken about a tile later. */
    if (p->deterministic) heads = p->causal || !tiles ? 1 : cuda_ceil_div(sms, tiles);
    return (int32_t)(heads < 1 ? 1 : heads < p->h_kv ? heads : p->h_kv);
}

struct sm90_mha_backward_layout sm90_mha_backward_layout(const struct backward_problem *p)
{
    const int32_t rows = MHA_BACKWARD_SM90_ROWS(p->d_qk);
    const size_t tiles = (size_t)(sm90_mha_backward_row_tiles(p) * p->h_q);
    struct sm90_mha_backward_layout l = {0};
    l.dq_sums = l.rows + cuda_line_up(tiles * 2 * (size_t)rows * sizeof(float));
    l.taken = l.dq_sums + cuda_line_up(tiles * (size_t)rows * (size_t)p->d_qk * sizeof(float));
    l.added = l.taken + cuda_line_up(sizeof(uint32_t));
    l.bytes = l.added + cuda_line_up(tiles * MHA_BACKWARD_CONSUMERS * sizeof(uint32_t));
    return l;
}

struct tensor_view sm90_mha_backward_view(const struct backward_problem *p, const struct token_view *view,
                                          bool of_keys, int64_t d, int32_t columns)
{
    const int64_t ragged = of_keys ? p->ragged_k.tokens : p->ragged_q.tokens,
                  each = of_keys ? p->s_k : p->s_q;
    const int64_t tokens = p->is_ragged ? ragged : each;
    return (struct tensor_view){
        .data = tokens ? view->data : p->workspace, /* else nothing is read */
        .element = p->element,
        .size = {columns, tokens, of_keys ? p->h_kv : p->h_q, d / columns, p->is_ragged ? 1 : p->b},
        .stride = {1, view->token, view->head, columns, view->request},
        .box = {columns, of_keys ? MHA_BACKWARD_SM90_KEYS(p->d_qk) : MHA_BACKWARD_SM90_ROWS(p->d_qk), 1,
                (int32_t)(d / columns), 1},
    };
}

static bool rows_aligned(const struct backward_problem *p, const struct token_view *view, bool of_keys)
{
    const int64_t shape[] = {p->is_ragged ? 1 : p->b, of_keys ? backward_keys(p) : backward_tokens(p),
                             of_keys ? p->h_kv : p->h_q};
    const int64_t stride[] = {view->request, view->token, view->head};
    return !shape[1] || cuda_rows_aligned(view->data, shape, stride, 3, 2, ALIGNMENT);
}

const char *sm90_mha_backward_refuses(const struct backward_problem *p, const char **argument)
{
    const struct {
        const char *name;
        const struct token_view *view;
        bool of_keys, by_tma;
    } tensors[] = {{"q", &p->q, false, true},      {"k", &p->k, true, true},
                   {"v", &p->v, true, true},       {"dout", &p->dout, false, true},
                   {"out", &p->out, false, false}, {"dq", &p->dq, false, false},
                   {"dk", &p->dk, true, false},    {"dv", &p->dv, true, false}};
    *argument = "v";
    if (p->d_v != (p->d_qk == 64 ? 64 : 128))
        return "takes values of 128 where d_qk is 128 or 192, of 64 where it is 64";
    *argument = "q";
    if (sm90_mha_backward_row_tiles(p) > INT32_MAX / p->h_q) return "takes fewer than 2^31 tiles of rows";
    *argument = "k";
    if (sm90_mha_backward_key_blocks(p) > (INT32_MAX - MOST_BLOCKS) / p->h_kv)
        return "takes fewer than 2^31 - 65536 blocks of keys";
    if (!p->b) return NULL;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const bool of_keys = tensors[i].of_keys;
        const int64_t d = tensors[i].view == &p->q || tensors[i].view == &p->k ? p->d_qk : p->d_v;
        *argument = tensors[i].name;
        if (!tensors[i].by_tma) {
            if (!rows_aligned(p, tensors[i].view, of_keys))
                return "takes a tensor whose base and strides are multiples of 16 bytes";
            continue;
        }
        const struct tensor_view view = sm90_mha_backward_view(p, tensors[i].view, of_keys, d, 64);
        if (!tensor_view_possible(&view))
            return "takes a tensor whose base and strides are multiples of 16 bytes, strides of 16 to below "
                   "2^40";
    }
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
