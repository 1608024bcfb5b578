/* SPDX-License-Identifier: MIT */
#include "mha_tiles.h"

#include "launch.h"
#include "mha_splits.h"

#include "../operations.h"

_Static_assert((int)MHA_MOST_SPLITS == (int)MAX_MHA_SPLITS, "the kernels take what the interface allows");

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns a · b, or the largest number if that is larger. */
static int64_t times(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* ---- Tiles ------------------------------------------------------------------------------------ */

/* Heads of a key head share a tile if that makes fewer tiles; as many, if requests of different lengths are likely, since
 * shorter ones then make fewer. Where a tile's keys are split follows from its last row, so bits that do not depend on the
 * batch need tiles that do not: ragged requests are then taken to be as long as the caller says that one may be. */
int32_t mha_heads_of_tile(const struct attention_problem *p, int64_t rows)
{
    const int64_t group = p->h_q / p->h_kv, tokens = rows / group, all = p->ragged_q.tokens;
    const bool alike = !p->ragged_q.starts || (p->batch_dependent && all == times(p->b, p->s_q));
    const int64_t s_q = alike ? p->s_q : p->batch_dependent ? cuda_ceil_div(all, most(p->b, 1)) : p->max_s_q;
    if (group == 1 || !tokens) return 1;
    const int64_t shared = cuda_ceil_div(s_q, tokens), apart = group * cuda_ceil_div(s_q, rows);
    return !s_q || shared < apart || (shared == apart && !alike) ? (int32_t)group : 1;
}

/* Returns the query rows of all requests. */
static int64_t all_rows(const struct attention_problem *p)
{
    return times(p->ragged_q.starts ? p->ragged_q.tokens : times(p->b, p->s_q), p->h_q);
}

/* Returns the ragged requests that may have tokens. */
static int64_t begun(const struct attention_problem *p)
{
    return least(p->ragged_q.tokens, p->b);
}

int64_t mha_tiles(const struct attention_problem *p, int64_t rows)
{
    const int64_t heads = mha_heads_of_tile(p, rows), tokens = rows / heads, units = p->h_q / heads;
    if (!p->ragged_q.starts) return p->b * cuda_ceil_div(p->s_q, tokens) * units;
    return ((p->ragged_q.tokens - begun(p)) / tokens + begun(p)) * units;
}

int64_t mha_tiles_of_requests(const struct attention_problem *p, int64_t rows, int64_t tokens)
{
    const int64_t heads = mha_heads_of_tile(p, rows);
    return times(p->b, cuda_ceil_div(tokens, rows / heads) * (p->h_q / heads));
}

/* ---- Splits ----------------------------------------------------------------------------------- */

/* Returns the splits of `tiles` tiles of `blocks` key blocks. */
static int32_t splits_of(int64_t tiles, int64_t blocks, int32_t slots, int32_t at_most, bool of_batch)
{
    return tiles > INT32_MAX ? 1 : mha_splits((int32_t)tiles, (int32_t)blocks, slots, at_most, of_batch);
}

/* Splits requests by the whole batch: into splits of as many blocks. What the host does not know of ragged requests
 * it takes to be even. A split is not shorter than half of a slot's share of all blocks, because the tile scheduler
 * balances what is longer. Requests that are split have at most twice as many splits as all blocks would make, since
 * each but the last is whole; so ragged ones of any lengths have room. */
static void split_by_batch(const struct attention_problem *p, const struct mha_tiling *t,
                           struct mha_splitting *s)
{
    const int64_t blocks = cuda_ceil_div(p->capacity, t->keys),
                  room = MHA_WAVES_OF_PARTS * t->slots * t->rows;
    int64_t tokens = p->s_q, even_blocks = blocks;
    if (p->ragged_q.starts) {
        tokens = cuda_ceil_div(p->ragged_q.tokens, p->b);
        even_blocks = least(blocks, cuda_ceil_div(cuda_ceil_div(p->ragged_k.tokens, p->b), t->keys));
    }
    const int64_t tiles = least(mha_tiles_of_requests(p, t->rows, tokens), INT32_MAX);
    const int32_t splits = splits_of(tiles, even_blocks, t->slots, MHA_MOST_SPLITS, true);
    int64_t of_split =
        most(cuda_ceil_div(even_blocks, splits), tiles * even_blocks / (MHA_WAVES_OF_SPLITS * t->slots));
    if (p->ragged_q.starts) {
        const int64_t all_blocks = p->ragged_k.tokens / t->keys + p->b,
                      rows = least(times(p->s_q, p->h_q), room);
        of_split = most(of_split, cuda_ceil_div(2 * rows * all_blocks, room));
    }
    if (blocks < of_split + MHA_LEAST_BLOCKS) return;
    s->splits = 0, s->blocks_of_split = (int32_t)of_split;
    s->most_splits = (int32_t)least(cuda_ceil_div(blocks, of_split), MHA_MOST_SPLITS);
    s->part_rows = least(times(all_rows(p), s->most_splits), room);
}

/* Splits each request by its own lengths, if no request has more tiles than there are slots, as far as is known. */
static void split_by_request(const struct attention_problem *p, const struct mha_tiling *t,
                             struct mha_splitting *s)
{
    const int64_t blocks = cuda_ceil_div(p->capacity, t->keys),
                  tokens = p->ragged_q.starts ? p->max_s_q : p->s_q;
    s->most_splits = (int32_t)least(blocks / MHA_LEAST_BLOCKS, MHA_MOST_INVARIANT_SPLITS);
    if (s->most_splits < 2 || !tokens || tokens > t->slots * t->rows || p->h_kv > t->slots) return;
    const int32_t tiles =
        mha_tiles_alone((int32_t)tokens, (int32_t)t->rows, (int32_t)p->h_kv, (int32_t)(p->h_q / p->h_kv));
    if (tiles > t->slots) return;
    const bool one_shape = !p->ragged_q.starts && !p->has_used;
    s->splits =
        !one_shape ? 0 /* the kernel's choice */ : splits_of(tiles, blocks, t->slots, s->most_splits, false);
    if (s->splits) s->most_splits = s->splits;
    if (s->splits != 1) s->part_rows = times(all_rows(p), s->most_splits);
}

struct mha_splitting mha_splitting(const struct attention_problem *p, const struct mha_tiling *t)
{
    const struct mha_splitting none = {.splits = 1, .most_splits = 1};
    struct mha_splitting s = none;
    if (!p->b || !all_rows(p) || !p->capacity) return none;
    if (p->mha_splits)
        s.splits = s.most_splits = p->mha_splits,
        s.part_rows = s.splits > 1 ? times(all_rows(p), s.splits) : 0;
    else if (p->batch_dependent)
        split_by_batch(p, t, &s);
    else
        split_by_request(p, t, &s);
    if (!s.part_rows) return none;
    if (!p->mha_splits && mha_tiles(p, t->rows) > (INT32_MAX - MHA_MOST_BLOCKS) / s.most_splits) return none;
    s.part_rows = least(s.part_rows, MHA_MOST_PART_ROWS);
    return s;
}

int64_t mha_most_part_rows(const struct attention_problem *p, const struct mha_tiling *t)
{
    const int64_t rows = p->b ? all_rows(p) : 0, of_slots = t->slots * t->rows;
    const int64_t wanted = p->mha_splits > 1 ? times(rows, p->mha_splits)
                           : p->mha_splits   ? 0
                           : p->batch_dependent
                               ? least(times(rows, MHA_MOST_SPLITS), MHA_WAVES_OF_PARTS * of_slots)
                               : times(rows, MHA_MOST_INVARIANT_SPLITS);
    return least(wanted, MHA_MOST_PART_ROWS);
}

/* Ragged requests are not known here. The tiles of one are at most those that its rows fill, and one more for each
 * unit of heads; so those of its splits are at most those that the rows of its parts fill, and a unit a split. The
 * splits of all follow from their blocks. */
int64_t mha_most_items(const struct attention_problem *p, int64_t rows, const struct mha_tiling *t,
                       const struct mha_splitting *s)
{
    const int64_t tiles = mha_tiles(p, rows), heads = mha_heads_of_tile(p, rows),
                  all = times(tiles, s->most_splits);
    if (!p->ragged_q.starts || s->splits) return all;
    const int64_t blocks = p->ragged_k.tokens / t->keys + p->b,
                  splits =
                      s->blocks_of_split ? blocks / s->blocks_of_split + begun(p) : blocks / MHA_LEAST_BLOCKS;
    return least(all, tiles + splits * (p->h_q / heads) + s->part_rows / (rows / heads * heads));
}
