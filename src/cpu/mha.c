/* SPDX-License-Identifier: MIT
 *
 * Dense MHA on the CPU: its requests, their row tiles, and the splits of their keys.
 *
 * A request that has few row tiles itself is split, so that one long request occupies all threads. Splits follow
 * from its own tokens and keys, never from its batch or the number of threads, and so do its bits:
 *
 *   few tiles in the call    a work item is a split of a tile and writes a part to the workspace; a second pass
 *                            joins the parts of each tile
 *   many                     a work item is a tile: it takes the splits one after the other and joins each to those
 *                            before, with one part in the worker's scratch
 *
 * Both join the same parts in the same order. A split of which a causal mask hides every key has no part.
 */
#include "attention.h"

#include "cost.h"

#include <math.h>
#include <string.h>

enum {
    /* Of a split. Beside so many, its part and their join take about 1 % of the time. */
    LEAST_KEYS = 4096,
    /* A request of so many tiles, of PLAN_ROW_TILE rows, is not split; those of one with fewer get about
     * WANTED_SPLITS splits together, and at most MOST_SPLITS each. */
    MANY_TILES = 64,
    WANTED_SPLITS = 256,
    MOST_SPLITS = 64,
    /* Of fewer tiles a worker, splits are items of their own. */
    TILES_A_WORKER = 8,
    /* The parts, of PLAN_ROW_TILE rows, for which there is room: of a request at most so many, and for each worker
     * some more. */
    PARTS_OF_REQUEST = WANTED_SPLITS + MANY_TILES,
    PARTS_OF_WORKER = 64
};

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t times(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* ---- Splits --------------------------------------------------------------------------------- */

int64_t cpu_mha_most_splits(const struct attention_problem *p)
{
    return p->mha_splits ? least(p->mha_splits, ceil_div(p->capacity, PLAN_BLOCK))
                         : least(MOST_SPLITS, p->capacity / LEAST_KEYS);
}

int64_t cpu_mha_part_rows(const struct attention_problem *p, int32_t workers)
{
    const int64_t most = cpu_mha_most_splits(p),
                  rows = times(p->ragged_q.starts ? p->ragged_q.tokens : times(p->b, p->s_q), p->h_q),
                  of_requests = p->mha_splits ? INT64_MAX : times(p->b, PARTS_OF_REQUEST),
                  room = PARTS_OF_REQUEST + (int64_t)workers * PARTS_OF_WORKER;
    if (most < 2 || workers < 2) return 0;
    return least(times(rows, most), PLAN_ROW_TILE * least(of_requests, room));
}

/* Returns the splits of a request, and the keys of each but the last. */
static int64_t splits_of(const struct attention_problem *p, const struct span *span, int64_t *keys)
{
    const int64_t tiles = p->h_kv * ceil_div(span->tokens * (p->h_q / p->h_kv), PLAN_ROW_TILE);
    int64_t splits = p->mha_splits;
    *keys = span->keys;
    if (!splits && tiles && tiles < MANY_TILES)
        splits = least(least(ceil_div(WANTED_SPLITS, tiles), span->keys / LEAST_KEYS), MOST_SPLITS);
    if (splits < 2 || !span->keys || cpu_mha_most_splits(p) < 2) return 1;
    *keys = PLAN_BLOCK * ceil_div(ceil_div(span->keys, PLAN_BLOCK), splits);
    return ceil_div(span->keys, *keys);
}

/* ---- Requests and items --------------------------------------------------------------------- */

static int64_t set_rows_of(const struct work *w, const struct span *span)
{
    return span->tokens * (w->call.problem->h_q / w->call.problem->h_kv);
}

static int64_t tiles_of_request(const struct work *w, const struct span *span)
{
    return w->call.sets * tiles_of(w, set_rows_of(w, span));
}

/* Fills the spans with tiles as items; returns the cost of all requests. */
static double find_spans(const struct work *w)
{
    const struct attention_problem *p = w->call.problem;
    struct span span = {0};
    int64_t tiles = 0;
    double cost = 0;
    for (int64_t r = 0; r < p->b; r++) {
        span = span_of(&p->ragged_q, &p->ragged_k, p->s_q, p->keys[0].capacity, r, &span);
        w->spans[r] = (struct cpu_span){span, tiles};
        tiles += tiles_of_request(w, &span);
        cost += cost_of_attention((double)span.tokens * (double)p->h_q, (double)span.keys, p->d_qk, p->d_v);
    }
    w->spans[p->b].first_item = tiles;
    return cost;
}

/* Returns the rows of all parts; more than the workspace has room for: at least one more. */
static int64_t rows_of_parts(const struct work *w)
{
    const struct attention_problem *p = w->call.problem;
    int64_t rows = 0, keys;
    for (int64_t r = 0; r < p->b && rows <= w->part_rows; r++) {
        const struct span *span = &w->spans[r].span;
        const int64_t splits = splits_of(p, span, &keys);
        if (splits > 1) rows += least(times(splits, times(span->tokens, p->h_q)), w->part_rows + 1);
    }
    return rows;
}

/* Makes the splits items. */
static void split_items(const struct work *w)
{
    const struct attention_problem *p = w->call.problem;
    int64_t items = 0, rows = 0, keys;
    for (int64_t r = 0; r < p->b; r++) {
        const struct span *span = &w->spans[r].span;
        const int64_t splits = splits_of(p, span, &keys);
        w->spans[r].first_item = items, w->first_rows[r] = rows;
        items += tiles_of_request(w, span) * splits;
        if (splits > 1) rows += splits * span->tokens * p->h_q;
    }
    w->spans[p->b].first_item = items;
}

/* A work item: a row tile over all its keys, and which of its splits, where these are items. */
struct item {
    struct cpu_tile tile;
    int64_t split, splits, keys; /* keys of each split but the last */
};

static struct item item_at(const struct work *w, int64_t index)
{
    const struct attention_problem *p = w->call.problem;
    const int64_t request = cpu_span_at(w->spans, p->b, index);
    const struct span *span = &w->spans[request].span;
    const int64_t tiles = tiles_of_request(w, span), at = index - w->spans[request].first_item;
    struct item item = {.tile = tile_of(w, request, span, set_rows_of(w, span), at % tiles),
                        .split = at / tiles};
    item.splits = splits_of(p, span, &item.keys);
    return item;
}

/* Returns the end of the keys that some row of a tile sees. */
static int64_t seen_end(const struct cpu_tile *tile)
{
    return cpu_visible_end(tile, tile->rows - 1);
}

/* Narrows the item's tile to a split. */
static struct cpu_tile tile_of_split(const struct item *item, int64_t split)
{
    struct cpu_tile tile = item->tile;
    tile.begin_key = split * item->keys, tile.end_key = least(tile.begin_key + item->keys, tile.end_key);
    return tile;
}

/* Has the tile of a split write its part to the workspace, or finds it there. */
static void place_part(const struct work *w, struct cpu_tile *tile, int64_t split)
{
    const struct attention_problem *p = w->call.problem;
    const int64_t set_rows = tile->tokens * (p->h_q / p->h_kv);
    place_in_parts(w, tile,
                   w->first_rows[tile->request] + (split * p->h_kv + tile->set) * set_rows + tile->first_row);
}

/* ---- Joining -------------------------------------------------------------------------------- */

/* The sums of a tile's rows over the parts so far: of weights times values, [rows][d_v]; of weights; and the largest
 * score, which weights are relative to. */
struct joined {
    float *values, *weights, *max;
};

static struct joined joined_in(const struct work *w, int32_t rows, int32_t worker)
{
    const int64_t most = w->call.tile_rows, d_v = w->call.problem->d_v;
    float *const memory = (float *)(void *)scratch_of(w, worker);
    const struct joined j = {memory, memory + most * d_v, memory + most * (d_v + 1)};
    memset(j.values, 0, (size_t)(rows * d_v) * sizeof(float));
    for (int32_t i = 0; i < rows; i++) j.weights[i] = 0.0f, j.max[i] = -INFINITY;
    return j;
}

/* Adds the part of one more split. Out of line, so that both kinds of items have the same instructions. */
static __attribute__((noinline)) void join_part(const struct joined *j, const struct cpu_tile *part)
{
    const int64_t d_v = part->call->problem->d_v;
    for (int32_t i = 0; i < part->rows; i++) {
        if (isinf(part->lse[i])) continue; /* the row sees no key of the split */
        const float max = fmaxf(j->max[i], part->max[i]);
        const float older = j->weights[i] == 0.0f ? 0.0f : expf(base_of(j->max[i]) - base_of(max)),
                    weight = expf(base_of(part->max[i]) - base_of(max) + part->lse[i]);
        float *const values = j->values + i * d_v;
        const float *const more = part->out + i * d_v;
        for (int64_t d = 0; d < d_v; d++) values[d] = values[d] * older + more[d] * weight;
        j->weights[i] = j->weights[i] * older + weight, j->max[i] = max;
    }
}

static void write_joined(const struct work *w, const struct joined *j, const struct cpu_tile *tile)
{
    const int64_t d_v = w->call.problem->d_v;
    for (int32_t i = 0; i < tile->rows; i++) {
        float *const values = j->values + i * d_v;
        for (int64_t d = 0; d < d_v && j->weights[i] != 0.0f; d++) values[d] /= j->weights[i];
        j->weights[i] = logf(j->weights[i]);
    }
    cpu_write_rows(w, tile, j->values, j->weights, j->max);
}

/* ---- Items ---------------------------------------------------------------------------------- */

/* Attends to all keys of a tile at once. */
static void run_unsplit(const struct work *w, struct cpu_tile *tile, int32_t worker)
{
    char *const scratch = scratch_of(w, worker);
    place_in(tile, (float *)(void *)scratch);
    w->attention->attend(tile, scratch + w->attend_offset);
    cpu_write_rows(w, tile, tile->out, tile->lse, tile->max);
}

static void run_tile(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    struct item item = item_at(w, index);
    if (item.splits == 1) {
        run_unsplit(w, &item.tile, worker);
        return;
    }
    char *const scratch = scratch_of(w, worker);
    const struct joined joined = joined_in(w, item.tile.rows, worker);
    const int64_t end = seen_end(&item.tile);
    for (int64_t split = 0; split * item.keys < end; split++) {
        struct cpu_tile tile = tile_of_split(&item, split);
        place_in(&tile, (float *)(void *)(scratch + w->attend_offset / 2));
        w->attention->attend(&tile, scratch + w->attend_offset);
        join_part(&joined, &tile);
    }
    write_joined(w, &joined, &item.tile);
}

static void run_split(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    struct item item = item_at(w, index);
    struct cpu_tile tile = tile_of_split(&item, item.split);
    if (item.splits == 1) {
        run_unsplit(w, &item.tile, worker);
    } else if (tile.begin_key < seen_end(&item.tile)) {
        place_part(w, &tile, item.split);
        w->attention->attend(&tile, scratch_of(w, worker) + w->attend_offset);
    }
}

/* Joins the splits of a tile: the item of its first split does. */
static void join_splits(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    struct item item = item_at(w, index);
    if (item.splits == 1 || item.split) return;
    const struct joined joined = joined_in(w, item.tile.rows, worker);
    const int64_t end = seen_end(&item.tile);
    for (int64_t split = 0; split * item.keys < end; split++) {
        struct cpu_tile tile = tile_of_split(&item, split);
        place_part(w, &tile, split);
        join_part(&joined, &tile);
    }
    write_joined(w, &joined, &item.tile);
}

/* Writes the results of a request's padding, those of rows without keys. */
static void run_padding(void *data, int64_t request, int32_t worker)
{
    const struct work *w = data;
    const struct attention_problem *p = w->call.problem;
    const struct span *span = &w->spans[request].span;
    const int64_t first = span->first_token + span->tokens;
    (void)worker;
    for (int64_t token = first; token < first + span->padding_tokens; token++)
        for (int64_t h = 0; h < p->h_q; h++) {
            memset(p->out + request * p->out_stride[0] + token * p->out_stride[1] + h * p->out_stride[2], 0,
                   (size_t)p->d_v * sizeof *p->out);
            if (p->lse)
                p->lse[request * p->lse_stride[0] + h * p->lse_stride[1] + token] = p->rules.lse_of_empty;
        }
}

void cpu_mha_run(const struct work *work)
{
    struct work w = *work;
    const struct attention_problem *p = w.call.problem;
    const int64_t b = p->b;
    w.spans = (struct cpu_span *)(void *)(w.workspace + w.spans_offset);
    w.first_rows = (int64_t *)(void *)(w.workspace + w.first_rows_offset);
    const double cost = find_spans(&w);
    if (p->ragged_q.used) {
        double rows = 0;
        for (int64_t r = 0; r < b; r++) rows += (double)w.spans[r].span.padding_tokens * (double)p->h_q;
        threads_run(&w.pool, b, cost_of_moving(rows * (double)p->d_v * sizeof *p->out), run_padding, &w);
    }
    const int64_t tiles = w.spans[b].first_item, rows = rows_of_parts(&w);
    if (!rows || rows > w.part_rows || tiles >= TILES_A_WORKER * (int64_t)w.pool.workers) {
        threads_run(&w.pool, tiles, cost, run_tile, &w);
        return;
    }
    split_items(&w);
    const int64_t items = w.spans[b].first_item;
    threads_run(&w.pool, items, cost, run_split, &w);
    threads_run(&w.pool, items, cost_of_moving((double)rows * (double)p->d_v * sizeof(float)), join_splits,
                &w);
}
