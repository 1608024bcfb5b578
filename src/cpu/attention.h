/* SPDX-License-Identifier: MIT
 *
 * Row tiles of attention on the CPU: what the driver (attention.c) and dense MHA's items (mha.c) share.
 */
#ifndef FMLA_CPU_ATTENTION_H
#define FMLA_CPU_ATTENTION_H

#include "cpu.h"

struct work {
    struct cpu_call call;
    const struct cpu_attention *attention;
    struct thread_pool pool;
    const struct plan_partition *partitions; /* [num_partitions]; NULL without a plan */
    int64_t row_tiles;                       /* of a request: sets × tiles of a set */
    int64_t split_keys;                      /* 0: split by the plan, or not at all */
    int64_t even_splits;                     /* maximum splits of a request */
    int64_t parts;
    int32_t num_partitions;
    int64_t part_rows; /* of dense MHA: for which there is room */
    size_t part_out_offset, part_lse_offset, part_max_offset, spans_offset, first_rows_offset, queries_offset,
        scratch_offset;
    size_t scratch_bytes, attend_offset; /* of a worker; from there on the microkernel's */
    float value_scale; /* the scale of an FP8_576 cache, which microkernels leave out; else 1 */
    float *part_out, *part_lse, *part_max; /* of part 0 */
    char *workspace;
    /* Dense MHA (mha.c): [b + 1] requests, whose items are row tiles or, if these are apart, their splits; [b], the
     * first row of a request's parts. */
    struct cpu_span *spans;
    int64_t *first_rows;
};

static inline int64_t tiles_of(const struct work *w, int64_t rows)
{
    return (rows + w->call.tile_rows - 1) / w->call.tile_rows;
}

/* Returns the reference that scores are relative to: their maximum, or 0 where none is above -inf. */
static inline float base_of(float max)
{
    return max == -INFINITY ? 0.0f : max;
}

struct tile_rows {
    int64_t set, first_row;
    int32_t rows;
};

/* Returns row tile `row_tile` of sets of `set_rows` rows each. */
static inline struct tile_rows tile_rows(const struct work *w, int64_t set_rows, int64_t row_tile)
{
    const int32_t most = w->call.tile_rows;
    const int64_t tiles = tiles_of(w, set_rows), first = row_tile % tiles * most, left = set_rows - first;
    return (struct tile_rows){row_tile / tiles, first, left < most ? (int32_t)left : most};
}

/* Returns a row tile of a request over all its keys, without a place for its results. A set has `set_rows` rows. */
static inline struct cpu_tile tile_of(const struct work *w, int64_t request, const struct span *span,
                                      int64_t set_rows, int64_t row_tile)
{
    const struct tile_rows t = tile_rows(w, set_rows, row_tile);
    return (struct cpu_tile){
        .call = &w->call,
        .request = request,
        .tokens = span->tokens,
        .first_token = span->first_token,
        .first_key = span->first_key,
        .set = t.set,
        .first_row = t.first_row,
        .rows = t.rows,
        .end_key = span->keys,
        .length = span->keys,
    };
}

/* Has a tile write its results to memory for the rows of a tile. */
static inline void place_in(struct cpu_tile *tile, float *memory)
{
    const int64_t most = tile->call->tile_rows, d_v = tile->call->problem->d_v;
    tile->out = memory, tile->lse = memory + most * d_v, tile->max = memory + most * (d_v + 1);
}

/* Has a tile write its results to the parts, from row `at` of all parts on. */
static inline void place_in_parts(const struct work *w, struct cpu_tile *tile, int64_t at)
{
    tile->out = w->part_out + at * w->call.problem->d_v;
    tile->lse = w->part_lse + at, tile->max = w->part_max + at;
}

static inline char *scratch_of(const struct work *w, int32_t worker)
{
    return w->workspace + w->scratch_offset + (size_t)worker * w->scratch_bytes;
}

/* Writes the rows of a tile to the caller's tensors: [rows][d_v] of values, lse relative to max, and max. */
void cpu_write_rows(const struct work *w, const struct cpu_tile *tile, const float *values,
                    const float *relative_lse, const float *max);

/* ---- Dense MHA (mha.c) ------------------------------------------------------------------------ */

/* Returns the most splits of a request of the problem. */
int64_t cpu_mha_most_splits(const struct attention_problem *p);

/* Returns the rows of parts for which a workspace has room; calls that need more do without. Grows with every size. */
int64_t cpu_mha_part_rows(const struct attention_problem *p, int32_t workers);

/* Runs all requests. */
void cpu_mha_run(const struct work *w);

#endif
