/* SPDX-License-Identifier: MIT
 *
 * Attention over a row tile with AMX: both products on tiles of bf16, the softmax between them with AVX-512.
 *
 *   A row tile has up to 16 groups of 16 rows. A block has up to 192 keys, so that the sums of O, which lie
 *   in memory, are loaded and stored once for six products each.
 *
 *   scores   S[16 keys][16 rows] += K[16 keys][32 d] · Q[32 d][16 rows]   K as cached, Q in pairs along d
 *   softmax  lanes are rows; weights to bf16, in pairs along keys, and transposed: P[16 rows][32 keys]
 *   values   O[16 rows][16 d]   += P[16 rows][32 keys] · V[32 keys][16 d]   V in pairs of keys: interleaved
 *
 *   for each block:
 *       find K  →  for two groups at a time: S = K Q, softmax  →  for 32 d at a time, all groups: O += P V
 *       during the products:  prefetch the next block's keys       interleave V of the next 32 d
 *
 *                          Q of group a   Q of group b                            V of d      V of d + 16
 *                         ┌─────────────┬─────────────┐                         ┌───────────┬───────────┐
 *      K of keys 0 … 15   │  S, tile 0  │  S, tile 1  │      P of group a       │ O, tile 0 │ O, tile 1 │
 *      K of keys 16 … 31  │      2      │      3      │      P of group b       │     2     │     3     │
 *                         └─────────────┴─────────────┘                         └───────────┴───────────┘
 *      Four tile loads take 32 of the 64 cycles of four products. A row tile of one group: 4 × 1 tiles of
 *      S, 1 × 4 of O, 64 dimensions at a time.
 *
 *   Weights of a row are relative to a reference (`base`), which is raised to the largest score only when
 *   that exceeds it by more than 8: P stays below 2^8, which bf16 holds as exactly as values below 1, and O
 *   is rescaled seldom, row by row, in memory.
 *
 *   scratch of a worker, 128 rows
 *     q       of a group [d_qk / 2][16] pairs                       128 × 576 × 2 B = 144 KiB
 *     o       of a group [d_v / 16][16 rows][16] float              128 × 512 × 4 B = 256 KiB
 *     max, base, sum   of a group [16] float
 *     s       of two groups [192][16] float                          32 × 192 × 4 B =  24 KiB
 *     p       of a group [6][16 rows][16] pairs                     128 × 192 × 2 B =  48 KiB
 *     keys    [192][d_qk + 32] bf16     keys that cannot be loaded as a tile in place = 228 KiB
 *     values  twice [6][2 or 4][16 pairs][16] pairs               2 × 192 × 64 × 2 B =  48 KiB
 *
 *   Limit: docs/kernels/cpu-attention.md. The tile unit does 16384 FLOP in 16 cycles; it waits for the
 *   sums of O, and while the softmax runs.
 */
#include "../convert.h"
#include "../result.h"

#include <math.h>

#include "../avx512bf16/products.h"
#include "../avx512bf16/softmax.h"
#include "../avx512bf16/transpose.h"
#include "tiles.h"

enum {
    KEYS = 192,               /* of a block */
    WIDTH = 64,               /* maximum dimensions of values at a time */
    DEPTH = 32,               /* of a product: dimensions of scores, keys of values */
    TILE_WORDS = TILE * TILE, /* 32-bit numbers of a tile */
    MOST_ROWS = 256,
    GROUPS = MOST_ROWS / TILE,
    WIDEST = 576,
};

struct scratch {
    uint32_t *q, *p, *values;
    float *o, *max, *base, *sum, *s;
    uint16_t *keys;
};

/* Returns the bf16 numbers from one key of `keys` to the next, padded so that the rows of a tile lie in
 * different sets of the L1 cache. */
static int64_t key_step(const struct attention_problem *p)
{
    return p->d_qk + DEPTH;
}

/* Lays out a worker's scratch from `base` on; returns its bytes. Base 0 only counts. */
static size_t scratch_layout(const struct cpu_call *call, uintptr_t base, struct scratch *scratch)
{
    const size_t rows = (size_t)call->tile_rows, d_qk = (size_t)call->problem->d_qk,
                 d_v = (size_t)call->problem->d_v;
    uintptr_t at = base;
    scratch->q = tile_take(&at, rows * d_qk * 2);
    scratch->o = tile_take(&at, rows * d_v * 4);
    scratch->max = tile_take(&at, rows * 4);
    scratch->base = tile_take(&at, rows * 4);
    scratch->sum = tile_take(&at, rows * 4);
    scratch->s = tile_take(&at, (size_t)2 * TILE * KEYS * 4);
    scratch->p = tile_take(&at, rows * KEYS * 2);
    scratch->keys = tile_take(&at, KEYS * (size_t)key_step(call->problem) * 2);
    scratch->values = tile_take(&at, (size_t)2 * KEYS * WIDTH * 2);
    return at - base;
}

static size_t scratch_bytes(const struct cpu_call *call)
{
    struct scratch unused;
    return scratch_layout(call, 0, &unused);
}

/* ---- A block of keys ------------------------------------------------------------------------- */

/* 16 keys as a tile load takes them: the first key, and the bytes from one to the next. */
struct key_tile {
    const uint16_t *at;
    int64_t bytes;
};

/* A block of keys, which all groups share. */
struct block {
    struct key_tile keys[KEYS / TILE + 3]; /* padded with the last tile: products take up to four at once */
    const uint16_t *values[KEYS];
    int64_t begin;
    int32_t count, fewest;      /* keys; keys that every row sees */
    int32_t visible[MOST_ROWS]; /* keys that each row sees */
    struct tile_ahead ahead;
};

/* Copies up to a block of keys; returns their number. */
static int32_t next_block(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key *keys)
{
    int32_t count = 0;
    while (count + PLAN_BLOCK <= KEYS) {
        const int32_t more = tile->call->next_keys(tile, at, end, keys + count);
        count += more;
        if (more < PLAN_BLOCK) break;
    }
    return count;
}

/* Returns whether the 16 keys can be loaded as a tile in place. */
static bool is_tile(const struct cpu_key *from)
{
    const int64_t bytes = from[1].token - from[0].token;
    bool is = from[0].layout->element == KV_ELEMENT_BF16;
    for (int t = 1; t < TILE; t++)
        is &= from[t].layout->element == KV_ELEMENT_BF16 && from[t].token - from[t - 1].token == bytes;
    return is;
}

/* Copies a key as bf16. */
static void copy_key(uint16_t *to, const struct cpu_key *from, int64_t d_qk)
{
    _Alignas(64) float row[WIDEST];
    if (from->layout->element == KV_ELEMENT_BF16) {
        memcpy(to, from->token, (size_t)d_qk * sizeof *to);
        return;
    }
    convert_key(row, from);
    for (int64_t d = 0; d < d_qk; d += 32)
        _mm512_store_si512(
            to + d, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(row + d + 16), _mm512_load_ps(row + d)));
}

static const uint16_t *as_bf16(const uint8_t *bytes)
{
    return (const uint16_t *)(const void *)bytes;
}

/* Returns `count` keys, up to 16, as a tile, and their values: in place, or copied to `memory`. */
static struct key_tile find_tile(const struct cpu_call *call, const struct cpu_key *from, int32_t count,
                                 uint16_t *memory, const uint16_t **values)
{
    const int64_t d_qk = call->problem->d_qk, step = key_step(call->problem);
    for (int32_t t = 0; t < count; t++) values[t] = as_bf16(from[t].value);
    if (count == TILE && is_tile(from))
        return (struct key_tile){as_bf16(from[0].token), from[1].token - from[0].token};
    for (int32_t t = 0; t < count; t++) {
        copy_key(memory + t * step, &from[t], d_qk);
        if (from[t].layout->element != KV_ELEMENT_BF16) values[t] = memory + t * step;
    }
    memset(memory + count * step, 0, (size_t)((TILE - count) * step) * sizeof *memory);
    return (struct key_tile){memory, step * (int64_t)sizeof *memory};
}

/* Finds the keys of a block, which has at least one. */
static void find_keys(const struct cpu_call *call, const struct cpu_key *from, uint16_t *memory,
                      struct block *block)
{
    int32_t t = 0;
    do {
        const int32_t left = block->count - t;
        block->keys[t / TILE] = find_tile(call, from + t, left < TILE ? left : TILE,
                                          memory + t * key_step(call->problem), block->values + t);
        t += TILE;
    } while (t < block->count);
    for (int32_t i = 0; i < 3; i++) block->keys[t / TILE + i] = block->keys[t / TILE - 1];
}

/* Interleaves dimensions d … d + width - 1 of the values of two keys each, for `count` keys and then zeros up
 * to `after`: to[32 keys][16 d][pair][d] = (v[2 pair][d], v[2 pair + 1][d]). */
struct pairing {
    uint32_t *to;
    const uint16_t *const *from;
    int32_t next, count, after; /* keys; `next` is the first that is left */
    int32_t width, at_once;     /* 32 or 64; pairs of keys per four products */
    int64_t d;
};

/* Interleaves up to `pairs` more pairs of keys. */
INLINE void pair_some(struct pairing *pairing, int32_t pairs)
{
    const __m512i zero = _mm512_setzero_si512();
    const int32_t left = pairing->after - pairing->next,
                  end = pairing->next + (2 * pairs < left ? 2 * pairs : left);
    for (int32_t t = pairing->next; t < end; t += 2) {
        uint32_t *to = pairing->to + t / DEPTH * (pairing->width / TILE) * TILE_WORDS + t % DEPTH / 2 * TILE;
        for (int64_t d = pairing->d; d < pairing->d + pairing->width; d += DEPTH, to += 2 * TILE_WORDS) {
            const __m512i x = t < pairing->count ? _mm512_loadu_si512(pairing->from[t] + d) : zero,
                          y = t + 1 < pairing->count ? _mm512_loadu_si512(pairing->from[t + 1] + d) : zero;
            _mm512_store_si512(to, pair_first(x, y));
            _mm512_store_si512(to + TILE_WORDS, pair_second(x, y));
        }
    }
    pairing->next = end;
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Tiles 0 to 3 hold the sums. */
INLINE void zero_sums(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

INLINE void load_sums(const float *first, const float *second, const float *third, const float *fourth)
{
    TILE_LOAD(0, first, TILE_BYTES);
    TILE_LOAD(1, second, TILE_BYTES);
    TILE_LOAD(2, third, TILE_BYTES);
    TILE_LOAD(3, fourth, TILE_BYTES);
}

INLINE void store_sums(float *first, float *second, float *third, float *fourth)
{
    TILE_STORE(0, first);
    TILE_STORE(1, second);
    TILE_STORE(2, third);
    TILE_STORE(3, fourth);
}

/* Computes s[group][key][row] for the keys of `tiles` tiles, two at a time, and two groups, in `steps` steps
 * of 32 dimensions. */
static void scores_of_two(float *s, const struct key_tile *keys, int32_t tiles, const uint32_t *q,
                          int64_t steps, struct tile_ahead *ahead)
{
    float *const s2 = s + KEYS * TILE;
    const uint32_t *const q2 = q + steps * TILE_WORDS;
    tiles_see_memory();
    for (int32_t t = 0; t < tiles; t += 2) {
        zero_sums();
        for (int64_t i = 0; i < steps; i++) {
            tile_bring(ahead, 1);
            TILE_LOAD(4, keys[t].at + i * DEPTH, keys[t].bytes);
            TILE_LOAD(6, q + i * TILE_WORDS, TILE_BYTES);
            TILE_ADD(0, 4, 6);
            TILE_LOAD(7, q2 + i * TILE_WORDS, TILE_BYTES);
            TILE_ADD(1, 4, 7);
            TILE_LOAD(5, keys[t + 1].at + i * DEPTH, keys[t + 1].bytes);
            TILE_ADD(2, 5, 6);
            TILE_ADD(3, 5, 7);
        }
        store_sums(s + t * TILE_WORDS, s2 + t * TILE_WORDS, s + (t + 1) * TILE_WORDS,
                   s2 + (t + 1) * TILE_WORDS);
    }
}

/* The same for one group, four tiles of keys at a time. */
static void scores_of_one(float *s, const struct key_tile *keys, int32_t tiles, const uint32_t *q,
                          int64_t steps, struct tile_ahead *ahead)
{
    tiles_see_memory();
    for (int32_t t = 0; t < tiles; t += 4) {
        zero_sums();
        for (int64_t i = 0; i < steps; i++) {
            tile_bring(ahead, 1);
            TILE_LOAD(7, q + i * TILE_WORDS, TILE_BYTES);
            TILE_LOAD(4, keys[t].at + i * DEPTH, keys[t].bytes);
            TILE_ADD(0, 4, 7);
            TILE_LOAD(5, keys[t + 1].at + i * DEPTH, keys[t + 1].bytes);
            TILE_ADD(1, 5, 7);
            TILE_LOAD(6, keys[t + 2].at + i * DEPTH, keys[t + 2].bytes);
            TILE_ADD(2, 6, 7);
            TILE_LOAD(4, keys[t + 3].at + i * DEPTH, keys[t + 3].bytes);
            TILE_ADD(3, 4, 7);
        }
        store_sums(s + t * TILE_WORDS, s + (t + 1) * TILE_WORDS, s + (t + 2) * TILE_WORDS,
                   s + (t + 3) * TILE_WORDS);
    }
}

/* Adds the values of 32 · steps keys to o[group][32 d][row][d] of two groups, with d_v numbers per row, and
 * interleaves dimensions of `next`. `empty`: O holds nothing yet. */
static void values_of_two(float *o, const uint32_t *p, const uint32_t *values, int64_t d_v, int32_t steps,
                          bool empty, struct tile_ahead *ahead, struct pairing *next)
{
    float *const o2 = o + d_v * TILE;
    const uint32_t *const p2 = p + KEYS / DEPTH * TILE_WORDS;
    if (empty)
        zero_sums();
    else
        load_sums(o, o + TILE_WORDS, o2, o2 + TILE_WORDS);
    for (int32_t i = 0; i < steps; i++) {
        const uint32_t *v = values + i * 2 * TILE_WORDS;
        tile_bring(ahead, 1);
        pair_some(next, next->at_once);
        TILE_LOAD(4, p + i * TILE_WORDS, TILE_BYTES);
        TILE_LOAD(6, v, TILE_BYTES);
        TILE_ADD(0, 4, 6);
        TILE_LOAD(7, v + TILE_WORDS, TILE_BYTES);
        TILE_ADD(1, 4, 7);
        TILE_LOAD(5, p2 + i * TILE_WORDS, TILE_BYTES);
        TILE_ADD(2, 5, 6);
        TILE_ADD(3, 5, 7);
    }
    store_sums(o, o + TILE_WORDS, o2, o2 + TILE_WORDS);
}

/* The same for o[64 d][row][d] of one group. */
static void values_of_one(float *o, const uint32_t *p, const uint32_t *values, int32_t steps, bool empty,
                          struct tile_ahead *ahead, struct pairing *next)
{
    if (empty)
        zero_sums();
    else
        load_sums(o, o + TILE_WORDS, o + 2 * TILE_WORDS, o + 3 * TILE_WORDS);
    for (int32_t i = 0; i < steps; i++) {
        const uint32_t *v = values + i * 4 * TILE_WORDS;
        tile_bring(ahead, 1);
        pair_some(next, next->at_once);
        TILE_LOAD(7, p + i * TILE_WORDS, TILE_BYTES);
        TILE_LOAD(4, v, TILE_BYTES);
        TILE_ADD(0, 7, 4);
        TILE_LOAD(5, v + TILE_WORDS, TILE_BYTES);
        TILE_ADD(1, 7, 5);
        TILE_LOAD(6, v + 2 * TILE_WORDS, TILE_BYTES);
        TILE_ADD(2, 7, 6);
        TILE_LOAD(4, v + 3 * TILE_WORDS, TILE_BYTES);
        TILE_ADD(3, 7, 4);
    }
    store_sums(o, o + TILE_WORDS, o + 2 * TILE_WORDS, o + 3 * TILE_WORDS);
}

/* ---- Softmax of a group ---------------------------------------------------------------------- */

/* Scales the scores of keys [from, to) in place and sets those that a row does not see to -inf; returns the
 * largest of them and of `top` per row. */
static __m512 mask_scores(float *s, int32_t from, int32_t to, __m512 factor, __m512i visible, __m512 top)
{
    for (int32_t t = from; t < to; t++) {
        const __mmask16 sees = _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(t));
        const __m512 x =
            _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), sees, _mm512_load_ps(s + t * TILE), factor);
        _mm512_store_ps(s + t * TILE, x);
        top = _mm512_max_ps(x, top); /* in this order a NaN does not become the maximum; it reaches the sum */
    }
    return top;
}

/* Returns the largest scaled score of keys [0, count), a multiple of 32, and of `top`, per row. */
static __m512 largest_score(const float *s, int32_t count, __m512 factor, __m512 top)
{
    __m512 second = top;
    for (int32_t t = 0; t < count; t += 2) {
        top = _mm512_max_ps(_mm512_mul_ps(_mm512_load_ps(s + t * TILE), factor), top);
        second = _mm512_max_ps(_mm512_mul_ps(_mm512_load_ps(s + (t + 1) * TILE), factor), second);
    }
    return _mm512_max_ps(top, second);
}

/* Computes the weights of 32 keys as a tile p[row][pair of keys]; returns `total` plus their sum. */
static __m512 weigh(uint32_t *p, const float *s, __m512 factor, __m512 base, __m512 total)
{
    __m512i r[TILE];
    for (int j = 0; j < TILE; j++) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(s + 2 * j * TILE), factor),
                     y = _mm512_mul_ps(_mm512_load_ps(s + (2 * j + 1) * TILE), factor);
        const __m512 a = softmax_exp2(_mm512_sub_ps(x, base)), b = softmax_exp2(_mm512_sub_ps(y, base));
        _mm512_store_si512(p + j * TILE, softmax_pairs(a, b));
        total = _mm512_add_ps(total, _mm512_add_ps(a, b));
    }
#pragma GCC unroll 16
    for (int j = 0; j < TILE; j++) r[j] = _mm512_load_si512(p + j * TILE);
    transpose(r);
#pragma GCC unroll 16
    for (int j = 0; j < TILE; j++) _mm512_store_si512(p + j * TILE, r[j]);
    return total;
}

/* Multiplies the rows of O in the mask `which` by their factors. */
static void rescale(float *o, int64_t d_v, __mmask16 which, __m512 factors)
{
    _Alignas(64) float factor[TILE];
    _mm512_store_ps(factor, factors);
    for (unsigned rows = which; rows; rows &= rows - 1) {
        const int row = __builtin_ctz(rows);
        const __m512 by = _mm512_set1_ps(factor[row]);
        for (int64_t d = 0; d < d_v; d += TILE) {
            float *at = o + d * TILE + row * TILE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), by));
        }
    }
}

/* Runs a step of the online softmax of group `g` over `count` scores, of which every row of the group sees
 * the first `fewest`. */
static void softmax_of_group(const struct scratch *scratch, int32_t g, float *s, int32_t count,
                             int32_t fewest, const int32_t *visible, float scale, int64_t d_v, bool empty)
{
    const __m512 factor = _mm512_set1_ps(scale), room = _mm512_set1_ps(8.0f);
    const int32_t after = (count + DEPTH - 1) / DEPTH * DEPTH, whole = fewest / DEPTH * DEPTH;
    float *const max = scratch->max + g * TILE, *const base = scratch->base + g * TILE,
                 *const sum = scratch->sum + g * TILE;
    uint32_t *p = scratch->p + (int64_t)g * (KEYS / DEPTH) * TILE_WORDS;
    const __m512 top = mask_scores(s, whole, after, factor, _mm512_loadu_si512(visible),
                                   largest_score(s, whole, factor, _mm512_load_ps(max)));

    const __m512 old = _mm512_load_ps(base);
    const __mmask16 raised = _mm512_cmp_ps_mask(top, _mm512_add_ps(old, room), _CMP_GT_OQ);
    const __m512 now = _mm512_mask_mov_ps(old, raised, top), zero_or_now = softmax_base(now);
    __m512 total = _mm512_setzero_ps();
    for (int32_t t = 0; t < after; t += DEPTH)
        total = weigh(p + t / DEPTH * TILE_WORDS, s + t * TILE, t < whole ? factor : _mm512_set1_ps(1.0f),
                      zero_or_now, total);
    __m512 older = _mm512_load_ps(sum);
    if (raised) {
        const __m512 by = softmax_exp2(_mm512_sub_ps(old, now));
        older = _mm512_mask_mul_ps(older, raised, older, by);
        if (!empty) rescale(scratch->o + g * TILE * d_v, d_v, raised, by);
    }
    _mm512_store_ps(max, top);
    _mm512_store_ps(base, now);
    _mm512_store_ps(sum, _mm512_add_ps(older, total));
}

/* ---- A tile of rows -------------------------------------------------------------------------- */

/* The groups of a tile, one or an even number, and which of them have met a key; O of the others holds
 * nothing. */
struct groups {
    int32_t count;
    bool begun[GROUPS];
};

/* Initialises the rows of the groups, which have met no key yet. */
static struct groups begin_rows(const struct cpu_tile *tile, const struct scratch *scratch)
{
    const struct attention_problem *p = tile->call->problem;
    const bool one = tile->rows <= TILE;
    const struct groups groups = {.count = one ? 1 : (tile->rows + 2 * TILE - 1) / (2 * TILE) * 2};
    cpu_fetch_queries(tile, 0, tile->rows);
    for (int32_t i = 0; i < groups.count * TILE; i++)
        scratch->max[i] = scratch->base[i] = -INFINITY, scratch->sum[i] = 0.0f;
    for (int32_t i = 0; i < groups.count * TILE; i += TILE) {
        const int32_t left = tile->rows - i, count = left < 0 ? 0 : left < TILE ? left : TILE;
        const uint16_t *row[TILE];
        for (int32_t l = 0; l < count; l++) row[l] = cpu_query(tile, i + l);
        pack_pairs(scratch->q + i * p->d_qk / 2, row, count, p->d_qk, TILE);
    }
    return groups;
}

/* Returns how many keys some row of the two groups from `g` on, or of the only group, sees: the last row sees
 * most. */
static int32_t seen_by(const struct block *block, const struct groups *groups, int32_t g)
{
    const int32_t last = groups->count == 1 ? 0 : g + 1;
    return block->visible[last * TILE + TILE - 1];
}

static void score_and_weigh(const struct cpu_call *call, const struct scratch *scratch, struct block *block,
                            const struct groups *groups)
{
    const struct attention_problem *p = call->problem;
    const int64_t steps = p->d_qk / DEPTH;
    for (int32_t g = 0; g < groups->count; g += 2) {
        const int32_t count = seen_by(block, groups, g), tiles = (count + TILE - 1) / TILE;
        const int32_t of_tile = groups->count > 1 ? 2 : 1;
        const uint32_t *q = scratch->q + g * steps * TILE_WORDS;
        if (!count) continue;
        if (of_tile == 2)
            scores_of_two(scratch->s, block->keys, tiles, q, steps, &block->ahead);
        else
            scores_of_one(scratch->s, block->keys, tiles, q, steps, &block->ahead);
        for (int32_t i = 0; i < of_tile; i++)
            softmax_of_group(scratch, g + i, scratch->s + i * KEYS * TILE, count,
                             block->visible[(g + i) * TILE], block->visible + (g + i) * TILE,
                             p->scale * TILE_LOG2_E, p->d_v, !groups->begun[g]);
    }
}

/* Adds the values of a block. All rows take the first `together` keys, with weight 0 where a row does not see
 * one. */
static void add_values_of_block(const struct cpu_call *call, const struct scratch *scratch,
                                struct block *block, const struct groups *groups, int32_t together)
{
    const int64_t d_v = call->problem->d_v;
    const int32_t pairs = (groups->count + 1) / 2, width = groups->count == 1 ? WIDTH : WIDTH / 2;
    struct pairing pairing = {.from = block->values,
                              .count = together,
                              .after = (block->count + DEPTH - 1) / DEPTH * DEPTH,
                              .width = width,
                              .at_once = (DEPTH / 2 + pairs - 1) / pairs};
    uint32_t *values = scratch->values, *other = values + KEYS * WIDTH / 2;
    pairing.to = values;
    pair_some(&pairing, KEYS);
    for (int64_t d = 0; d < d_v; d += width) {
        pairing.to = other, pairing.d = d + width, pairing.next = d + width < d_v ? 0 : pairing.after;
        tiles_see_memory();
        for (int32_t g = 0; g < groups->count; g += 2) {
            const int32_t count = seen_by(block, groups, g), steps = (count + DEPTH - 1) / DEPTH;
            float *o = scratch->o + g * TILE * d_v + d * TILE;
            const uint32_t *p = scratch->p + (int64_t)g * (KEYS / DEPTH) * TILE_WORDS;
            if (!count) continue;
            if (groups->count == 1)
                values_of_one(o, p, values, steps, !groups->begun[g], &block->ahead, &pairing);
            else
                values_of_two(o, p, values, d_v, steps, !groups->begun[g], &block->ahead, &pairing);
        }
        pair_some(&pairing, KEYS);
        other = values, values = pairing.to;
    }
}

/* Adds the value of key `t` to the rows that see it. The value holds NaN or infinity, so a weight of 0 would
 * not protect the other rows. */
static void add_value_to_rows(const struct scratch *scratch, const struct block *block, int32_t t,
                              int32_t rows, int64_t d_v)
{
    for (int32_t row = 0; row < rows; row++) {
        if (block->visible[row] <= t) continue;
        const uint16_t *p =
            (const uint16_t *)(const void *)(scratch->p +
                                             (row / TILE * (KEYS / DEPTH) + t / DEPTH) * TILE_WORDS);
        const float weight = num_from_bf16(p[row % TILE * DEPTH + t % DEPTH]);
        float *o = scratch->o + row / TILE * TILE * d_v + row % TILE * TILE;
        for (int64_t d = 0; d < d_v; d++)
            o[d / TILE * TILE_WORDS + d % TILE] += weight * num_from_bf16(block->values[t][d]);
    }
}

static void attend_block(const struct cpu_tile *tile, const struct scratch *scratch, struct block *block,
                         struct groups *groups)
{
    const int64_t d_v = tile->call->problem->d_v;
    const bool finite = are_finite(block->values, block->fewest, block->count, d_v);
    const int32_t together = finite ? block->count : block->fewest;
    score_and_weigh(tile->call, scratch, block, groups);
    add_values_of_block(tile->call, scratch, block, groups, together);
    for (int32_t t = together; t < block->count; t++) add_value_to_rows(scratch, block, t, tile->rows, d_v);
    for (int32_t g = 0; g < groups->count; g++) groups->begun[g] |= seen_by(block, groups, g / 2 * 2) != 0;
}

/* Writes the rows of a group. A sum of 0 means that there was no key, or none whose score is above -inf. */
static void finish_group(const struct cpu_tile *tile, const struct scratch *scratch, int32_t g)
{
    const int64_t d_v = tile->call->problem->d_v;
    const int32_t first = g * TILE;
    const float *o = scratch->o + first * d_v;
    float *const max = scratch->max + first, *const sum = scratch->sum + first;
    for (int32_t l = 0; l < TILE && first + l < tile->rows; l++) {
        const bool some = sum[l] != 0.0f;
        const __m512 factor = _mm512_set1_ps(some ? 1.0f / sum[l] : 0.0f);
        for (int64_t d = 0; d < d_v; d += TILE)
            _mm512_storeu_ps(
                tile->out + (first + l) * d_v + d,
                _mm512_maskz_mul_ps(some ? 0xffff : 0, _mm512_load_ps(o + d * TILE + l * TILE), factor));
        if (some) sum[l] *= exp2f(scratch->base[first + l] - max[l]);
    }
    tile_write_lse(tile, first, TILE, max, sum);
}

static void attend(const struct cpu_tile *tile, void *memory)
{
    const struct attention_problem *p = tile->call->problem;
    struct scratch scratch;
    scratch_layout(tile->call, (uintptr_t)memory, &scratch);
    struct groups groups = begin_rows(tile, &scratch);
    const int64_t end = cpu_visible_end(tile, tile->rows - 1); /* the last row sees most */
    struct cpu_key found[2][KEYS];                             /* of this block and the next */
    struct block block = {.begin = tile->begin_key};
    int64_t at = block.begin;
    block.count = next_block(tile, &at, end, found[0]);
    tiles_begin();
    for (int now = 0; block.count > 0; now ^= 1) {
        const int64_t next_begin = at;
        const int32_t next = next_block(tile, &at, end, found[now ^ 1]);
        int32_t most;
        block.ahead = tile_ahead_of_call(tile->call, found[now ^ 1], next,
                                         groups.count * block.count * (p->d_qk + p->d_v) / 2048 + 1);
        find_keys(tile->call, found[now], scratch.keys, &block);
        tile_visible(tile, 0, block.begin, block.count, groups.count * TILE, block.visible, &block.fewest,
                     &most);
        attend_block(tile, &scratch, &block, &groups);
        block.begin = next_begin, block.count = next;
    }
    tiles_end();
    for (int32_t g = 0; g < groups.count; g++) finish_group(tile, &scratch, g);
}

const struct cpu_attention cpu_amx_attention = {
    CPU_ATTENTION_DRIVER, 2 * PLAN_ROW_TILE, MOST_ROWS, scratch_bytes, attend, result_round};
