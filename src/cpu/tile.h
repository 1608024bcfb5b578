/* SPDX-License-Identifier: MIT
 *
 * Code that the microkernels of every instruction set share: causal masks, prefetching, and the epilogue
 * that turns the sums of an online softmax into rows. Maxima are in base 2 and scaled: max = softmax_scale ·
 * log2 e · S.
 */
#ifndef FMLA_CPU_TILE_H
#define FMLA_CPU_TILE_H

#include "cpu.h"

#include <math.h>

#define TILE_LOG2_E 1.44269504088896341f
#define TILE_LN_2   0.693147180559945309f

/* Returns the next `bytes` of a worker's scratch and moves *at past them. */
static inline void *tile_take(uintptr_t *at, size_t bytes)
{
    void *const here = (void *)*at;
    *at += bytes;
    return here;
}

/* Counts, for each of `lanes` rows of the tile from `first_row` on, the keys that it sees of the `count` keys
 * of the block at `begin`; also returns the smallest and the largest count. Lanes without a row get the count
 * of the last row. */
static inline void tile_visible(const struct cpu_tile *tile, int32_t first_row, int64_t begin, int32_t count,
                                int lanes, int32_t *visible, int32_t *fewest, int32_t *most)
{
    /* The first row sees the fewest keys. */
    if (!tile->call->problem->causal || cpu_visible_end(tile, first_row) - begin >= count) {
        for (int l = 0; l < lanes; l++) visible[l] = count;
        *fewest = *most = count;
        return;
    }
    *fewest = count, *most = 0;
    for (int l = 0; l < lanes; l++) {
        const int32_t row = first_row + l < tile->rows ? first_row + l : tile->rows - 1;
        const int64_t end = cpu_visible_end(tile, row) - begin;
        visible[l] = (int32_t)cpu_clamp(end, 0, count);
        if (visible[l] < *fewest) *fewest = visible[l];
        if (visible[l] > *most) *most = visible[l];
    }
}

/* Prefetches keys into the L2 cache. */
static inline void tile_prefetch(const struct cpu_call *call, const struct cpu_key *keys, int32_t count)
{
    CPU_HAS_EFFECT();
    for (int32_t t = 0; t < count; t++) {
        for (int32_t byte = 0; byte < keys[t].layout->token_bytes; byte += CACHE_LINE)
            __builtin_prefetch(keys[t].token + byte, 0, 2);
        for (int32_t byte = 0; byte < call->value_bytes; byte += CACHE_LINE)
            __builtin_prefetch(keys[t].value + byte, 0, 2);
        if (keys[t].layout->scale_bytes) __builtin_prefetch(keys[t].scales, 0, 2);
    }
}

/* Prefetches the keys of the next block a few lines at a time while values are added: all lines at once
 * exceed the outstanding misses of a core, and the scores then stall on lost prefetches. Where the call sets
 * keys_at_once, all are prefetched before anything else is done: scattered keys take longer to arrive than
 * few rows take to add the values of a block. */
struct tile_ahead {
    const struct cpu_key *keys; /* not yet prefetched */
    int32_t count, byte;        /* … and bytes of the first key already prefetched */
    int32_t due, rate;          /* in lines · 256: overdue lines, and lines per value */
    int32_t token_bytes, bytes; /* of a key; of a key and its separate value */
    bool has_scales;
};

/* Spreads the prefetch over `values` values of the current block. A key has token_bytes, a separate value
 * value_bytes. */
static inline struct tile_ahead tile_ahead_of(const struct cpu_key *keys, int32_t count, int32_t token_bytes,
                                              int32_t value_bytes, int64_t values)
{
    const int32_t bytes = token_bytes + value_bytes;
    const int64_t lines = (int64_t)count * (bytes / CACHE_LINE + 1);
    return (struct tile_ahead){.keys = keys,
                               .count = count,
                               .rate = (int32_t)(lines * 256 / values) + 1,
                               .token_bytes = token_bytes,
                               .bytes = bytes};
}

/* The same for the keys of a call. `values` is half the values of all its rows, since the last lines need
 * time to arrive. Calls with keys of two layouts set keys_at_once. */
static inline struct tile_ahead tile_ahead_of_call(const struct cpu_call *call, const struct cpu_key *keys,
                                                   int32_t count, int64_t values)
{
    if (call->keys_at_once) {
        tile_prefetch(call, keys, count);
        return (struct tile_ahead){0};
    }
    const struct kv_layout *layout = &call->layouts[0];
    struct tile_ahead ahead = tile_ahead_of(keys, count, layout->token_bytes, call->value_bytes, values);
    ahead.has_scales = layout->scale_bytes != 0;
    return ahead;
}

/* Prefetches the lines that are due after `values` more values have been added. */
static inline void tile_bring(struct tile_ahead *ahead, int32_t values)
{
    ahead->due += values * ahead->rate;
    if (ahead->due <= 0 || !ahead->count) return;
    struct tile_ahead now = *ahead;
    for (; now.due > 0 && now.count; now.due -= 256) {
        __builtin_prefetch(now.byte < now.token_bytes ? now.keys->token + now.byte
                                                      : now.keys->value + (now.byte - now.token_bytes),
                           0, 2);
        now.byte += CACHE_LINE;
        if (now.byte < now.bytes) continue;
        if (now.has_scales) __builtin_prefetch(now.keys->scales, 0, 2);
        now.byte = 0, now.keys++, now.count--;
    }
    *ahead = now;
}

/* Writes lse and the largest score of up to `lanes` rows of a tile from first_row on, given the maxima and
 * sums of the softmax. A sum of 0 means that there was no key, or none whose score is above -inf. */
static inline void tile_write_lse(const struct cpu_tile *tile, int32_t first_row, int lanes, const float *max,
                                  const float *sum)
{
    for (int l = 0; l < lanes && first_row + l < tile->rows; l++) {
        tile->max[first_row + l] = max[l] * TILE_LN_2;
        tile->lse[first_row + l] = sum[l] == 0.0f ? -INFINITY : logf(sum[l]);
    }
}

/* Writes lse, the largest score and the values of these rows, with the values in o[d · stride + lane]. */
static inline void tile_write(const struct cpu_tile *tile, int32_t first_row, int lanes, const float *o,
                              int64_t stride, const float *max, const float *sum)
{
    const int64_t d_v = tile->call->problem->d_v;
    tile_write_lse(tile, first_row, lanes, max, sum);
    for (int l = 0; l < lanes && first_row + l < tile->rows; l++) {
        float *out = tile->out + (first_row + l) * d_v;
        if (sum[l] == 0.0f) {
            for (int64_t d = 0; d < d_v; d++) out[d] = 0.0f;
            continue;
        }
        const float factor = 1.0f / sum[l];
        for (int64_t d = 0; d < d_v; d++) out[d] = o[d * stride + l] * factor;
    }
}

#endif
