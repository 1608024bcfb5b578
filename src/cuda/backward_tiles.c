/* SPDX-License-Identifier: MIT */
#include "backward_tiles.h"

#include "attention.h"

enum { ALIGNMENT = 16, NUMBERS = 2 /* per row: lse and delta */ };

static int64_t numbers_of(const struct backward_problem *p, int64_t tokens, int64_t each, int32_t size)
{
    return p->is_ragged ? tokens / size + p->b + 2 : p->b * cuda_ceil_div(each, size);
}

int64_t backward_row_tiles(const struct backward_problem *p, struct backward_tiles tiles)
{
    return numbers_of(p, p->ragged_q.tokens, p->s_q, tiles.rows);
}

int64_t backward_key_blocks(const struct backward_problem *p, struct backward_tiles tiles)
{
    return numbers_of(p, p->ragged_k.tokens, p->s_k, tiles.keys);
}

int32_t backward_heads(const struct backward_problem *p, struct backward_tiles tiles, int32_t sms)
{
    const int64_t blocks = cuda_ceil_div(p->s_k, tiles.keys),
                  of_key_head = cuda_ceil_div(p->s_q, tiles.rows) * tiles.heads;
    int64_t heads = blocks ? 2 * sms / blocks : p->h_kv;
    /* The key blocks of a head add to a tile one after the other. Causal: each block begins at another tile. Full: all
     * begin with the first tile (but in groups: sm90/mha_backward/choice.c), and enough heads are taken together that
     * the next block starts about a tile later. */
    if (p->deterministic) heads = p->causal || !of_key_head ? 1 : cuda_ceil_div(sms, of_key_head);
    return (int32_t)(heads < 1 ? 1 : heads < p->h_kv ? heads : p->h_kv);
}

/* Returns the key heads whose dK and dV are summed over query heads in the workspace; if `bound`, the most of any call
 * up to these sizes. */
static int64_t summed_key_heads(const struct backward_problem *p, struct backward_tiles tiles)
{
    if (!tiles.warps) return 0;
    if (p->bound) return p->h_kv < p->h_q / 2 ? p->h_kv : p->h_q / 2;
    return p->h_kv < p->h_q ? p->h_kv : 0;
}

struct backward_layout backward_layout(const struct backward_problem *p, struct backward_tiles tiles)
{
    const size_t count = (size_t)(backward_row_tiles(p, tiles) * p->h_q), rows = count * (size_t)tiles.rows;
    struct backward_layout l = {0};
    l.dq_sums = l.rows + cuda_line_up(rows * NUMBERS * sizeof(float));
    l.taken = l.dq_sums + cuda_line_up(rows * (size_t)p->d_qk * sizeof(float));
    l.added = l.taken + cuda_line_up(sizeof(uint32_t));
    l.head_sums = l.added + cuda_line_up(count * (size_t)tiles.counters * sizeof(uint32_t));
    const int64_t summed = summed_key_heads(p, tiles);
    if (summed) {
        const size_t blocks = (size_t)(backward_key_blocks(p, tiles) * summed);
        l.head_counters = (int64_t)(blocks * (size_t)tiles.warps);
        l.heads_added = l.head_sums + cuda_line_up(blocks * (size_t)tiles.keys * (size_t)(p->d_qk + p->d_v) *
                                                   sizeof(float));
    } else {
        l.heads_added = l.head_sums;
    }
    l.of_dsink = l.heads_added + cuda_line_up((size_t)l.head_counters * sizeof(uint32_t));
    l.bytes = l.of_dsink + cuda_line_up(count * sizeof(float));
    return l;
}

bool backward_rows_aligned(const struct backward_problem *p, const struct token_view *view, bool of_keys)
{
    const int64_t shape[] = {p->is_ragged ? 1 : p->b, of_keys ? backward_keys(p) : backward_tokens(p),
                             of_keys ? p->h_kv : p->h_q};
    const int64_t stride[] = {view->request, view->token, view->head};
    return !shape[1] || cuda_rows_aligned(view->data, shape, stride, 3, 2, ALIGNMENT);
}
