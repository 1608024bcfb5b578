/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../launch.h"

enum { ALIGNMENT = 16 };

/* Most tile blocks per SM for which the kernel of small tiles takes a plan. (On an H200 with 128 heads and
 * 128 + 1024 entries, of which half count on average: at 4.4 of them 17.9 µs, the large kernel 20.8.) */
enum { SMALL_MOST_TILE_BLOCKS = 6 };

/* Most tile blocks per SM for which it takes splits of one block. With two the large kernel is no slower. */
static const double SMALL_MOST_TILE_BLOCKS_AT_ONCE = 1.5;

/* FEW_BLOCKS: up to so many blocks per split, the plan's overhead per request would cut splits unevenly. */
enum { FEW_BLOCKS = 8, MOST_PARTITIONS = 65536 };

/* Cost of splitting by a plan, in blocks: two splits instead of one, and the join. Requests that are not
 * split, or are all alike, may leave the time of so many blocks unused on some SMs. */
enum { SPLITTING_BLOCKS = 2 };

static bool cache_aligned(const struct key_view *keys)
{
    const int64_t several[] = {2, 2}, steps[] = {keys->page_bytes, keys->slot_bytes};
    return cuda_rows_aligned(keys->data, several, steps, 2, 1, ALIGNMENT);
}

struct sm90_sparse_formats sm90_sparse_decode_formats(const struct attention_problem *p)
{
    const enum kv_format first = kv_unsplit(p->keys[0].format), second = kv_unsplit(p->keys[1].format);
    if (first != KV_FP4_288 && second != KV_FP4_288) return (struct sm90_sparse_formats){first, false};
    const enum kv_format other = first == KV_FP4_288 ? second : first;
    return (struct sm90_sparse_formats){other == KV_FP4_288 ? KV_FP8_528 : other, true};
}

/* Returns whether both caches have one format, or FP4_288 beside a format whose kernels take it. */
static bool formats_go_together(const struct attention_problem *p)
{
    const struct sm90_sparse_formats formats = sm90_sparse_decode_formats(p);
    if (formats.some_fp4) return formats.format == KV_FP8_528 || formats.format == KV_FP8_528_F32;
    return kv_unsplit(p->keys[0].format) == kv_unsplit(p->keys[1].format);
}

const char *sm90_sparse_decode_refuses(const struct attention_problem *p, const char **argument)
{
    const int64_t shape[] = {p->b, p->s_q, p->h_q};
    if (!p->b) return NULL;
    *argument = "q";
    if (p->element != ELEMENT_BF16 && p->format != KV_FP16)
        return "takes float16 queries only with FP16 caches";
    if (!cuda_rows_aligned(p->q, shape, p->q_stride, 3, 2, ALIGNMENT))
        return "takes queries whose base and strides are multiples of 16 bytes";
    *argument = "kv_cache";
    if (!cache_aligned(&p->keys[0].k))
        return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "extra_kv_format";
    if (!formats_go_together(p))
        return "takes two caches of one format, or of FP4_288 and FP8_528 or FP8_528_F32, split or not";
    *argument = "extra_kv_cache";
    /* Checked without entries too, so that a request's kernel does not depend on the room that its lists
     * have. */
    if (!cache_aligned(&p->keys[1].k))
        return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "out";
    if (!cuda_rows_aligned(p->out, shape, p->out_stride, 3, 2, ALIGNMENT))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

bool sm90_sparse_decode_leaves(const struct attention_problem *p)
{
    enum {
        FEW_HEADS = 32,
        FEW_HEADS_MOST_KEYS = 65536,
        MOST_TILES = 16,
        MOST_KEYS = 4096,
        MOST_LISTED = 1024
    };
    const bool rows = p->format == KV_BF16 || p->format == KV_FP16;
    if (!rows || p->splitting == SPLIT_BATCH_INVARIANT || !p->b || p->capacity > FEW_HEADS_MOST_KEYS)
        return false;
    const int64_t tokens = p->b * p->s_q;
    if (p->h_q <= FEW_HEADS) return tokens <= FEW_HEADS_MOST_KEYS / p->capacity;
    const int64_t tiles = tokens * cuda_ceil_div(p->h_q, SM90_SPARSE_DECODE_HEADS);
    return p->capacity <= MOST_LISTED && tiles <= MOST_TILES && tiles * p->capacity <= MOST_KEYS;
}

struct sm90_sparse_shape sm90_sparse_shape_of(const struct attention_problem *p, int32_t sms)
{
    return (struct sm90_sparse_shape){.b = p->b,
                                      .s_q = p->s_q,
                                      .h_q = p->h_q,
                                      .topk = p->keys[0].capacity,
                                      .extra_topk = p->keys[1].capacity,
                                      .sms = sms,
                                      .lengths = p->keys[0].lengths || p->keys[1].lengths};
}

static int64_t blocks_of(const struct sm90_sparse_shape *shape)
{
    return cuda_ceil_div(plan_topk_length(shape->topk, shape->extra_topk, shape->extra_topk), PLAN_BLOCK);
}

/* Returns how many workers the GPU has room for at a time, if each has `tiles` CTAs of `heads` heads. */
static int64_t workers_of_tiles(const struct sm90_sparse_shape *shape, int64_t tiles, int64_t heads)
{
    const int64_t of_sm = heads == SM90_SPARSE_DECODE_SMALL_HEADS ? SM90_SPARSE_DECODE_SMALL_BLOCKS_OF_SM : 1;
    const int64_t fit = of_sm * shape->sms / tiles;
    return fit > 1 ? fit : 1;
}

static int64_t workers_at_once(const struct sm90_sparse_shape *shape, int64_t heads)
{
    return workers_of_tiles(shape, shape->s_q * cuda_ceil_div(shape->h_q, heads), heads);
}

/* Returns the fewest blocks per split with which all splits begin at once, or 0 if there are too many
 * requests. */
static int64_t even_split(const struct sm90_sparse_shape *shape, int64_t heads)
{
    const int64_t at_once = workers_at_once(shape, heads), blocks = blocks_of(shape);
    if (!shape->b || shape->b > at_once) return 0;
    return blocks ? cuda_ceil_div(blocks, at_once / shape->b) : 1;
}

int32_t sm90_sparse_decode_split_keys(const struct sm90_sparse_shape *shape, int heads)
{
    const int64_t split = even_split(shape, heads), at_once = workers_at_once(shape, heads);
    const bool as_even_as_a_plan =
        split <= FEW_BLOCKS || (split - SPLITTING_BLOCKS) * at_once <= shape->b * blocks_of(shape);
    return as_even_as_a_plan ? (int32_t)split * PLAN_BLOCK : 0;
}

/* Returns the tile blocks per SM as if all lists were full. A tile block is a block of 64 keys for a tile of
 * 16 heads. */
static double tile_blocks_of_sm(const struct sm90_sparse_shape *shape)
{
    const double tiles = (double)shape->b * (double)shape->s_q *
                         (double)cuda_ceil_div(shape->h_q, SM90_SPARSE_DECODE_SMALL_HEADS);
    return tiles * (double)blocks_of(shape) / shape->sms;
}

/* Returns whether a plan is for the kernel of small tiles. */
static bool few_tile_blocks(const struct sm90_sparse_shape *shape)
{
    return shape->h_q <= SM90_SPARSE_DECODE_SMALL_HEADS ||
           (shape->b && tile_blocks_of_sm(shape) <= SMALL_MOST_TILE_BLOCKS);
}

/* The kernel of small tiles takes a call if each of its CTAs has one tile block and these are few: with two
 * the large kernel is faster, since every tile converts the keys for itself. It also takes a call of
 * few tile blocks that goes by a plan. */
bool sm90_sparse_decode_is_small(const struct sm90_sparse_shape *shape, bool batch_invariant)
{
    if (shape->h_q <= SM90_SPARSE_DECODE_SMALL_HEADS) return true;
    if (batch_invariant || !shape->b) return false;
    if (even_split(shape, SM90_SPARSE_DECODE_SMALL_HEADS) == 1 &&
        tile_blocks_of_sm(shape) <= SMALL_MOST_TILE_BLOCKS_AT_ONCE)
        return true;
    const int32_t keys = sm90_sparse_decode_split_keys(shape, SM90_SPARSE_DECODE_HEADS);
    if (keys && (!shape->lengths || keys <= SM90_SPARSE_DECODE_FEW_KEYS)) return false;
    return few_tile_blocks(shape);
}

int32_t sm90_sparse_decode_partitions(const struct sm90_sparse_shape *shape)
{
    const int64_t heads = few_tile_blocks(shape) ? SM90_SPARSE_DECODE_SMALL_HEADS : SM90_SPARSE_DECODE_HEADS;
    const int64_t split = even_split(shape, heads), b = shape->b, blocks = blocks_of(shape);
    if (!split || split > FEW_BLOCKS) return (int32_t)workers_at_once(shape, heads);
    if (split >= blocks) return (int32_t)b; /* no request is split */
    /* The planner then splits after at most `split` blocks; surplus partitions stay idle. */
    const int64_t partitions = cuda_ceil_div(b * (blocks + PLAN_OVERHEAD), split);
    return (int32_t)(partitions < MOST_PARTITIONS ? partitions : MOST_PARTITIONS);
}

/* Returns the fewest blocks per split for which a kernel gets a plan: if one block would do for large
 * tiles, there are few tile blocks. */
static int64_t least_split(int64_t heads)
{
    return heads == SM90_SPARSE_DECODE_SMALL_HEADS ? 1 : 2;
}

/* Returns the most partitions of one of the kernels. Among batches in which each request has equally many
 * workers, the largest has most. */
static int64_t rows_of(struct sm90_sparse_shape shape, int64_t heads)
{
    const int64_t at_once = workers_at_once(&shape, heads), blocks = blocks_of(&shape);
    int64_t most = at_once;
    for (shape.b = at_once / 2; shape.b >= 1; shape.b = at_once / (at_once / shape.b + 1)) {
        const int64_t split = even_split(&shape, heads);
        if (split < least_split(heads) || split > FEW_BLOCKS || split >= blocks) continue;
        const int64_t partitions = cuda_ceil_div(shape.b * (blocks + PLAN_OVERHEAD), split);
        if (partitions > most) most = partitions;
    }
    return most;
}

int32_t sm90_sparse_decode_rows(const struct sm90_sparse_shape *shape)
{
    int64_t most = rows_of(*shape, SM90_SPARSE_DECODE_SMALL_HEADS);
    if (shape->h_q > SM90_SPARSE_DECODE_SMALL_HEADS) {
        const int64_t large = rows_of(*shape, SM90_SPARSE_DECODE_HEADS);
        if (large > most) most = large;
    }
    return (int32_t)(most < MOST_PARTITIONS ? most : MOST_PARTITIONS);
}

/* Splits of the fewest possible blocks leave the most partitions idle. */
int32_t sm90_sparse_decode_most_partitions(const struct sm90_sparse_shape *shape, int64_t tiles, int heads)
{
    const int64_t at_once = workers_of_tiles(shape, tiles, heads), blocks = blocks_of(shape);
    const int64_t split = least_split(heads);
    int64_t most = at_once;
    for (int64_t b = 1; b <= at_once / 2; b++) {
        const int64_t of_request = split * (at_once / b), some = of_request < blocks ? of_request : blocks;
        const int64_t partitions = some > split ? cuda_ceil_div(b * (some + PLAN_OVERHEAD), split) : b;
        if (partitions > most) most = partitions;
    }
    return (int32_t)(most < MOST_PARTITIONS ? most : MOST_PARTITIONS);
}
