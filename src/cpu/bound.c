/* SPDX-License-Identifier: MIT
 *
 * Computes the most rows that the parts of any call up to given sizes have. The partitions of decode (the
 * fewest for which partitions × row tiles is a multiple of the threads) and the splits of sparse prefill may
 * fall as a call grows, so every size that may have the maximum is tried.
 */
#include "cpu.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Returns the rows of two parts per partition, for `tiles` row tiles and `rows` rows; 0 if there is one
 * partition. */
static int64_t planned_rows(int32_t workers, int64_t tiles, int64_t rows)
{
    const int64_t partitions = plan_even_partitions(workers, 1, tiles * PLAN_ROW_TILE, 1);
    return partitions > 1 ? 2 * partitions * rows : 0;
}

/* Returns the smallest count to try: the number of partitions repeats with every `workers` tiles, and the
 * larger count has more rows. */
static int64_t first_of(int64_t most, int32_t workers)
{
    return most > workers ? most - workers + 1 : 1;
}

/* Returns the maximum of calls with a plan. The number of sets is h_kv, times the number of tokens if each
 * token has its own list. */
static int64_t plan_rows(const struct cpu_call *call, int32_t workers)
{
    const int64_t h_kv = call->problem->h_kv, most_sets = call->sets / h_kv;
    const int64_t most_tiles = (call->set_rows + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE;
    int64_t best = 0;
    for (int64_t tiles = most_tiles; tiles >= first_of(most_tiles, workers); tiles--)
        for (int64_t sets = most_sets; sets >= first_of(most_sets, workers); sets--) {
            const int64_t rows = h_kv * sets * least(call->set_rows, tiles * PLAN_ROW_TILE);
            if (2 * workers * rows <= best) break;
            const int64_t some = planned_rows(workers, h_kv * sets * tiles, rows);
            if (some > best) best = some;
        }
    return best;
}

/* Returns the maximum of sparse prefill, which splits lists if there are fewer than 7 row tiles per worker.
 * The longest list, and as many rows as the tiles hold, give the maximum. */
static int64_t even_rows(const struct cpu_call *call, int32_t most_rows, int32_t workers)
{
    const struct attention_problem *p = call->problem;
    const int64_t blocks = (p->capacity + PLAN_BLOCK - 1) / PLAN_BLOCK, most = most_rows;
    const int64_t few = 7 * (int64_t)workers - 1, most_tiles = least((call->set_rows + most - 1) / most, few);
    int64_t best = 0;
    for (int64_t tiles = 1; tiles <= most_tiles; tiles++) {
        const int64_t rows = call->sets * least(call->set_rows, tiles * most);
        const int64_t most_tokens = least(p->b, few / (tiles * call->sets));
        for (int64_t tokens = 1; tokens <= most_tokens; tokens++) {
            const int64_t splits = cpu_even_splits(tokens * tiles * call->sets, workers, blocks);
            if (splits > 1 && tokens * splits * rows > best) best = tokens * splits * rows;
        }
    }
    return best;
}

int64_t cpu_most_slot_rows(const struct cpu_call *call, int32_t most_rows, int32_t workers)
{
    return call->problem->splitting == SPLIT_EVENLY ? even_rows(call, most_rows, workers)
                                                    : plan_rows(call, workers);
}
