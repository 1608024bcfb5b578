/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../attention.h"
#include "../../variants.h"

enum {
    MOST_BLOCKS = 65536, /* CTAs: they take numbers past the last work tile */
    GROUPED = 128,       /* key blocks of all groups that are processed together; an H200 has 132 SMs */
    LEAST_GROUP = 32,
    MOST_GROUP = 64,                 /* as many CTAs must run at the same time */
    GROUPED_BYTES = 40 * 1000 * 1000 /* of L2, for the rows of heads whose groups are processed together */
};

_Static_assert(MOST_GROUP < 256, "pack_group has eight bits for it");

struct backward_tiles sm90_mha_backward_tiles(const struct backward_problem *p)
{
    return (struct backward_tiles){
        MHA_BACKWARD_SM90_ROWS(p->d_qk), MHA_BACKWARD_SM90_KEYS(p->d_qk), MHA_BACKWARD_SM90_DQ_PARTS(p->d_qk),
        p->causal ? 1 : (int32_t)(p->h_q / p->h_kv),
        p->causal ? 4 * MHA_BACKWARD_CONSUMERS * MHA_BACKWARD_SM90_CTAS(p->d_qk) : 0};
}

int32_t sm90_mha_backward_group(const struct backward_problem *p, int32_t sms)
{
    const int64_t tokens = p->is_ragged ? p->max_s_q : p->s_q, /* the same in any batch */
        of_row = 2 * (p->d_qk + p->d_v) + 4 * p->d_qk;         /* bytes of Q, dO, and the sums of dQ */
    int32_t group = LEAST_GROUP;
    if (!p->deterministic || p->causal || !MHA_BACKWARD_SM90_HAS_GROUPS(p->d_qk)) return 1;
    /* A group waits for the one before it of the same head: all heads of a set should have as many. What all read and add
     * to should stay in L2. */
    while (group < MOST_GROUP &&
           (p->h_kv % (GROUPED / group) || tokens > GROUPED_BYTES / of_row / (GROUPED / group)))
        group *= 2;
    return group <= sms ? group : 1;
}

int32_t sm90_mha_backward_heads(const struct backward_problem *p, int32_t sms)
{
    const int64_t group = sm90_mha_backward_group(p, sms);
    if (group == 1) return backward_heads(p, sm90_mha_backward_tiles(p), sms);
    const int64_t blocks = cuda_ceil_div(p->s_k, MHA_BACKWARD_SM90_KEYS(p->d_qk)),
                  together = blocks && blocks < group ? blocks : group, heads = sms / together;
    return (int32_t)(heads < p->h_kv ? heads : p->h_kv);
}

struct tensor_view sm90_mha_backward_view(const struct backward_problem *p, const struct token_view *view,
                                          bool of_keys, int64_t d, int32_t columns, int32_t box_columns)
{
    const int64_t ragged = of_keys ? p->ragged_k.tokens : p->ragged_q.tokens,
                  each = of_keys ? p->s_k : p->s_q;
    const int64_t tokens = p->is_ragged ? ragged : each;
    return (struct tensor_view){
        .data = tokens ? view->data : p->workspace, /* without tokens nothing is read */
        .element = p->element,
        .size = {columns, tokens, of_keys ? p->h_kv : p->h_q, d / columns, p->is_ragged ? 1 : p->b},
        .stride = {1, view->token, view->head, columns, view->request},
        .box = {columns,
                of_keys ? MHA_BACKWARD_SM90_KEYS(p->d_qk) / MHA_BACKWARD_SM90_CTAS(p->d_qk)
                        : MHA_BACKWARD_SM90_ROWS(p->d_qk),
                1, box_columns / columns, 1},
    };
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
    const struct backward_tiles tiles = sm90_mha_backward_tiles(p);
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    *argument = "q";
    if (backward_row_tiles(p, tiles) > INT32_MAX / p->h_q) return "takes fewer than 2^31 tiles of rows";
    *argument = "k";
    if (backward_key_blocks(p, tiles) > (INT32_MAX - MOST_BLOCKS) / p->h_q)
        return "takes fewer than 2^31 - 65536 blocks of keys";
    if (!p->b) return NULL;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const bool of_keys = tensors[i].of_keys;
        const int64_t d = tensors[i].view == &p->q || tensors[i].view == &p->k ? p->d_qk : p->d_v;
        *argument = tensors[i].name;
        if (!tensors[i].by_tma) {
            if (!backward_rows_aligned(p, tensors[i].view, of_keys))
                return "takes a tensor whose base and strides are multiples of 16 bytes";
            continue;
        }
        const struct tensor_view view =
            sm90_mha_backward_view(p, tensors[i].view, of_keys, d, d % 64 ? 32 : 64, (int32_t)d);
        if (!tensor_view_possible(&view))
            return "takes a tensor whose base and strides are multiples of 16 bytes, strides of 16 to below "
                   "2^40";
    }
    *argument = "dlse";
    if (p->dlse && p->rules.attn_sink &&
        p->d_qk >= 192) /* P is in fp16 until dS (device/backward_rows.cuh) */
        return "takes attn_sink with dlse only at d_qk/d_v of 128/128, 96/64 and 64/64";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}
