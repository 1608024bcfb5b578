/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../launch.h"
#include "../../mha_splits.h"
#include "../../variants.h"

#include "../../../operations.h"

_Static_assert((int)MHA_MOST_SPLITS == (int)MAX_MHA_SPLITS, "the kernels take what the interface allows");

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
    return ((p->ragged_q.tokens - begun) / tokens + begun) * units;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns the splits of `tiles` tiles of `blocks` key blocks. */
static int32_t splits_of(int64_t tiles, int64_t blocks, int32_t sms, int32_t at_most, bool of_batch)
{
    return tiles > INT32_MAX ? 1 : mha_splits((int32_t)tiles, (int32_t)blocks, sms, at_most, of_batch);
}

/* Returns a · b, or the largest number if that is larger. */
static int64_t times(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* Returns the query rows of all requests. */
static int64_t all_rows(const struct attention_problem *p)
{
    return times(p->ragged_q.starts ? p->ragged_q.tokens : times(p->b, p->s_q), p->h_q);
}

static int64_t tiles_of_request(const struct attention_problem *p, int64_t tokens)
{
    return cuda_ceil_div(tokens, sm90_mha_forward_tokens(p)) * (p->h_q / sm90_mha_forward_heads(p));
}

/* Splits requests by the whole batch: into splits of as many blocks. What the host does not know of ragged requests
 * it takes to be even. A split is not shorter than half of an SM's share of all blocks, because the tile scheduler
 * balances what is longer. Requests that are split have at most twice as many splits as all blocks would make, since
 * each but the last is whole; so ragged ones of any lengths have room. */
static void split_by_batch(const struct attention_problem *p, int32_t sms, struct sm90_mha_splitting *s)
{
    const int64_t block = MHA_SM90_KEYS(p->d_qk), blocks = cuda_ceil_div(p->capacity, block),
                  room = (int64_t)MHA_WAVES_OF_PARTS * sms * MHA_SM90_ROWS(p->d_qk);
    int64_t tokens = p->s_q, even_blocks = blocks;
    if (p->ragged_q.starts) {
        tokens = cuda_ceil_div(p->ragged_q.tokens, p->b);
        even_blocks = least(blocks, cuda_ceil_div(cuda_ceil_div(p->ragged_k.tokens, p->b), block));
    }
    const int64_t tiles = least(times(p->b, tiles_of_request(p, tokens)), INT32_MAX);
    const int32_t splits = splits_of(tiles, even_blocks, sms, MHA_MOST_SPLITS, true);
    int64_t of_split =
        most(cuda_ceil_div(even_blocks, splits), tiles * even_blocks / (MHA_WAVES_OF_SPLITS * sms));
    if (p->ragged_q.starts) {
        const int64_t all_blocks = p->ragged_k.tokens / block + p->b,
                      rows = least(times(p->s_q, p->h_q), room);
        of_split = most(of_split, cuda_ceil_div(2 * rows * all_blocks, room));
    }
    if (blocks < of_split + MHA_LEAST_BLOCKS) return;
    s->splits = 0, s->blocks_of_split = (int32_t)of_split;
    s->most_splits = (int32_t)least(cuda_ceil_div(blocks, of_split), MHA_MOST_SPLITS);
    s->part_rows = least(times(all_rows(p), s->most_splits), room);
}

/* Splits each request by its own lengths, if no request has more tiles than there are SMs, as far as is known. */
static void split_by_request(const struct attention_problem *p, int32_t sms, struct sm90_mha_splitting *s)
{
    const int64_t blocks = cuda_ceil_div(p->capacity, MHA_SM90_KEYS(p->d_qk)), rows = MHA_SM90_ROWS(p->d_qk),
                  tokens = p->ragged_q.starts ? p->max_s_q : p->s_q;
    s->most_splits = (int32_t)least(blocks / MHA_LEAST_BLOCKS, MHA_MOST_INVARIANT_SPLITS);
    if (s->most_splits < 2 || !tokens || tokens > sms * rows || p->h_kv > sms) return;
    const int32_t tiles =
        mha_tiles_alone((int32_t)tokens, (int32_t)rows, (int32_t)p->h_kv, (int32_t)(p->h_q / p->h_kv));
    if (tiles > sms) return;
    const bool one_shape = !p->ragged_q.starts && !p->has_used;
    s->splits =
        !one_shape ? 0 /* the kernel's choice */ : splits_of(tiles, blocks, sms, s->most_splits, false);
    if (s->splits) s->most_splits = s->splits;
    if (s->splits != 1) s->part_rows = times(all_rows(p), s->most_splits);
}

struct sm90_mha_splitting sm90_mha_forward_splitting(const struct attention_problem *p, int32_t sms)
{
    const struct sm90_mha_splitting none = {.splits = 1, .most_splits = 1};
    struct sm90_mha_splitting s = none;
    if (!p->b || !all_rows(p) || !p->capacity) return none;
    if (p->mha_splits)
        s.splits = s.most_splits = p->mha_splits,
        s.part_rows = s.splits > 1 ? times(all_rows(p), s.splits) : 0;
    else if (p->batch_dependent)
        split_by_batch(p, sms, &s);
    else
        split_by_request(p, sms, &s);
    if (!s.part_rows) return none;
    if (!p->mha_splits && sm90_mha_forward_tiles(p) > (INT32_MAX - MOST_BLOCKS) / s.most_splits) return none;
    s.part_rows = least(s.part_rows, MHA_MOST_PART_ROWS);
    return s;
}

int64_t sm90_mha_forward_most_part_rows(const struct attention_problem *p, int32_t sms)
{
    const int64_t rows = p->b ? all_rows(p) : 0, of_sms = (int64_t)sms * MHA_SM90_ROWS(p->d_qk);
    const int64_t wanted = p->mha_splits > 1 ? times(rows, p->mha_splits)
                           : p->mha_splits   ? 0
                           : p->batch_dependent
                               ? least(times(rows, MHA_MOST_SPLITS), MHA_WAVES_OF_PARTS * of_sms)
                               : times(rows, MHA_MOST_INVARIANT_SPLITS);
    return least(wanted, MHA_MOST_PART_ROWS);
}

bool sm90_mha_forward_takes_splits_kernel(const struct attention_problem *p, int32_t sms)
{
    enum { MOST_BLOCKS_OF_SM = 96 };
    if (!p->b) return false;
    if (p->ragged_q.used) return true;
    if (p->d_qk != 128) return false;
    if (p->rules.attn_sink) return true;
    const int64_t tokens = p->ragged_q.starts ? p->max_s_q : p->s_q,
                  tiles = times(p->b, tiles_of_request(p, tokens));
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

struct tensor_view sm90_mha_forward_q_view(const struct attention_problem *p)
{
    const bool ragged = p->ragged_q.starts;
    return (struct tensor_view){
        .data = p->q,
        .element = p->element,
        .size = {GROUP, p->h_q, ragged ? p->ragged_q.tokens : p->s_q, column_tiles(p->d_qk),
                 ragged ? 1 : p->b},
        .stride = {1, p->q_stride[2], p->q_stride[1], column_step(p->d_qk), p->q_stride[0]},
        .box = {GROUP, sm90_mha_forward_heads(p), sm90_mha_forward_tokens(p), 1, 1},
    };
}

struct tensor_view sm90_mha_forward_key_view(const struct attention_problem *p, const struct key_view *view,
                                             int64_t d)
{
    const int64_t columns = column_tiles(d);
    return (struct tensor_view){
        .data = p->keys[0].page_size ? view->data
                                     : (const uint8_t *)(const void *)p->q, /* without keys nothing is read */
        .element = p->element,
        .size = {GROUP, p->keys[0].page_size, p->h_kv, columns, p->ragged_k.starts ? 1 : p->b},
        .stride = {1, view->slot_bytes / 2, view->head_bytes / 2, column_step(d), view->page_bytes / 2},
        .box = {GROUP, MHA_SM90_KEYS(p->d_qk), 1, (int32_t)columns, 1},
    };
}

const char *sm90_mha_forward_refuses(const struct attention_problem *p, const char **argument)
{
    const struct key_source *keys = &p->keys[0];
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    if (!p->b || !p->s_q) return NULL;
    *argument = "q";
    if (sm90_mha_forward_tiles(p) > (INT32_MAX - MOST_BLOCKS) / (p->mha_splits ? p->mha_splits : 1))
        return "takes fewer than 2^31 - 65536 tiles of rows, and of splits of them";
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
