/* SPDX-License-Identifier: MIT
 *
 * Attention over a row tile with AVX-512 BF16: both products by vdpbf16ps, which multiplies pairs of bf16 and
 * adds both products to an fp32 lane.
 *
 *   lanes = rows. A vector holds 16 rows, a part up to 4 vectors. A cached value is broadcast to all of them,
 *   so the cache is read as it lies, and the softmax has no horizontal step.
 *
 *   scores   S[t][rows] += (q[2i], q[2i+1])[rows] · (k[t][2i], k[t][2i+1])   pairs along d, as in a key
 *   values   O[d][rows] += (p[2j], p[2j+1])[rows] · (v[2j][d], v[2j+1][d])   pairs along t: interleaved
 *
 *   A row tile consists of parts of 64 rows: one in decode, up to two in sparse prefill, up to four in MHA.
 *   Keys are gathered once for all parts.
 *
 *   scratch of a worker
 *     q       of a part [d_qk / 2][vectors][16] pairs   Q                            64 × 576 × 2 B =  72 KiB
 *     o       of a part [d_v][vectors][16] float        unnormalised output          64 × 512 × 4 B = 128 KiB
 *     max, sum, rescale, of a part [vectors][16] float
 *     s       [64][vectors][16] float            scores of one block                 64 ×  64 × 4 B =  16 KiB
 *     p       [32][vectors][16] pairs            probabilities, rounded to bf16      64 ×  64 × 2 B =   8 KiB
 *     values  [d_v / 32][32][32] pairs           the block's values, two keys a pair 64 × 512 × 2 B =  64 KiB
 *     keys    [64][d_qk] bf16                    converted keys of other formats     64 × 576 × 2 B =  72 KiB
 *
 *   for each block of 64 keys:
 *     interleave V; for each part:  S = K Q  →  softmax step, P to bf16  →  O = O · rescale + Vᵀ P
 *
 *   Registers: 4 vectors × 4 keys (or 4 values) of sums, 4 of Q (or P), 1 broadcast. With fewer vectors, more
 *   keys, so that enough sums are in flight to cover the latency of vdpbf16ps.
 *   Limit: the issue rate of vdpbf16ps, 64 FLOP each.
 */
#include "../convert.h"
#include "../result.h"

#include <math.h>

#include "products.h"
#include "softmax.h"
#include "transpose.h"

enum { PARTS = 4, WIDEST_FP8 = 576 };

/* Up to PLAN_ROW_TILE rows of a tile. */
struct part {
    int32_t first_row, vectors;
    uint32_t *q;
    float *o, *max, *sum, *rescale;
};

struct scratch {
    struct part part[PARTS];
    uint32_t *p, *values;
    uint16_t *keys;
    float *s;
};

/* Lays out a worker's scratch from `base` on; returns its bytes. Base 0 only counts. */
static size_t scratch_layout(const struct cpu_call *call, uintptr_t base, struct scratch *scratch)
{
    const size_t rows = PLAN_ROW_TILE, d_qk = (size_t)call->problem->d_qk, d_v = (size_t)call->problem->d_v;
    uintptr_t at = base;
    for (int32_t i = 0; i < PARTS; i++) {
        const size_t some = i * PLAN_ROW_TILE < call->tile_rows ? rows : 0;
        scratch->part[i] = (struct part){.first_row = i * PLAN_ROW_TILE,
                                         .q = tile_take(&at, some * d_qk * 2),
                                         .o = tile_take(&at, some * d_v * 4),
                                         .max = tile_take(&at, some * 4),
                                         .sum = tile_take(&at, some * 4),
                                         .rescale = tile_take(&at, some * 4)};
    }
    scratch->s = tile_take(&at, rows * BLOCK * 4);
    scratch->p = tile_take(&at, rows * BLOCK * 2);
    scratch->values = tile_take(&at, BLOCK * d_v * 2);
    bool as_they_lie = true;
    for (int i = 0; i < KEY_SOURCES; i++) as_they_lie &= call->layouts[i].element == KV_ELEMENT_BF16;
    scratch->keys = tile_take(&at, as_they_lie ? 0 : BLOCK * d_qk * 2);
    return at - base;
}

static size_t scratch_bytes(const struct cpu_call *call)
{
    struct scratch unused;
    return scratch_layout(call, 0, &unused);
}

/* ---- A tile --------------------------------------------------------------------------------- */

/* Initialises a part of `rows` rows, which have met no key yet. */
static void begin_part(const struct cpu_tile *tile, struct part *part, int32_t rows)
{
    const struct attention_problem *p = tile->call->problem;
    const int64_t lanes = (rows + VECTOR - 1) / VECTOR * VECTOR;
    cpu_fetch_queries(tile, part->first_row, rows);
    part->vectors = (int32_t)lanes / VECTOR;
    memset(part->o, 0, (size_t)(p->d_v * lanes) * sizeof(float));
    for (int64_t i = 0; i < lanes; i++) part->max[i] = -INFINITY, part->sum[i] = 0.0f;
    for (int32_t i = 0; i < rows; i += VECTOR) {
        const int32_t count = rows - i < VECTOR ? rows - i : VECTOR;
        const uint16_t *row[VECTOR];
        for (int32_t l = 0; l < count; l++) row[l] = cpu_query(tile, part->first_row + i + l);
        pack_pairs(part->q + i, row, count, p->d_qk, lanes);
    }
}

/* A block of keys, which all parts share. */
struct block {
    const uint16_t *keys[BLOCK], *values[BLOCK];
    int64_t begin;
    int32_t count, interleaved;
    struct tile_ahead ahead;
};

/* Finds the keys of a block as bf16: in place, or converted to `memory` from other formats. */
static void find_keys(const struct cpu_call *call, const struct cpu_key *from, uint16_t *memory,
                      struct block *block)
{
    const int64_t d_qk = call->problem->d_qk;
    _Alignas(64) float row[WIDEST_FP8];
    for (int32_t t = 0; t < block->count; t++) {
        if (from[t].layout->element == KV_ELEMENT_BF16) {
            block->keys[t] = (const uint16_t *)(const void *)from[t].token;
            block->values[t] = (const uint16_t *)(const void *)from[t].value;
            continue;
        }
        uint16_t *to = memory + t * d_qk;
        convert_key(row, &from[t]);
        for (int64_t d = 0; d < d_qk; d += 32)
            _mm512_store_si512(
                to + d, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(row + d + 16), _mm512_load_ps(row + d)));
        block->keys[t] = block->values[t] = to;
    }
}

/* Returns which keys the vectors of a whole part take, in a block of which some row sees `most` keys and
 * others fewer. */
static struct stairs stairs_of(const int32_t *visible, int32_t most)
{
    struct stairs stairs = {.from_below = false};
    for (int v = 0; v < VECTORS; v++) { /* the last row of a vector sees most */
        const int32_t end = (visible[v * VECTOR + VECTOR - 1] + STEP - 1) / STEP * STEP;
        stairs.edge[v + 1] = end < most ? end : most;
    }
    return stairs;
}

INLINE void attend_vectors(const struct cpu_tile *tile, const struct scratch *scratch,
                           const struct part *part, struct block *block, const int vectors,
                           const int keys_at_once, const int values_at_once)
{
    const struct attention_problem *p = tile->call->problem;
    const int lanes = vectors * VECTOR;
    const float scale = p->scale * TILE_LOG2_E;
    int32_t visible[PLAN_ROW_TILE], fewest, most;
    tile_visible(tile, part->first_row, block->begin, block->count, lanes, visible, &fewest, &most);
    if (!most) return;
    const bool is_stairs = vectors == VECTORS && fewest < most;
    int32_t counts[VECTORS] = {most, most, most, most};
    struct stairs stairs = {0};
    __m512 tops[VECTORS];
    if (is_stairs) {
        stairs = stairs_of(visible, most);
        for (int v = 0; v < VECTORS; v++) counts[v] = stairs.edge[v + 1];
        scores_of_stairs(scratch->s, block->keys, part->q, &stairs, p->d_qk / 2);
    } else {
        scores(scratch->s, tops, block->keys, part->q, most, p->d_qk / 2, vectors, keys_at_once);
    }
    uint32_t *weights = (uint32_t *)(void *)scratch->s;
    bool all = true; /* keys that only some rows see are added with the others */
    if (fewest < most || !softmax_step_to_bf16(weights, scratch->s, tops, most, scale, vectors, part->max,
                                               part->sum, part->rescale)) {
        softmax_step(scratch->s, counts, fewest, visible, scale, vectors, part->max, part->sum,
                     part->rescale);
        all = are_finite(block->values, fewest, most,
                         p->d_v); /* a row has weight 0 for a key that it does not see */
        if (all) fewest = most;
        weights = scratch->p;
        softmax_to_bf16(scratch->p, scratch->s, fewest, vectors);
    }
    if (fewest != block->interleaved) {
        interleave(scratch->values, block->values, fewest, p->d_v);
        block->interleaved = fewest;
    }
    if (is_stairs && all)
        add_values_of_stairs(part->o, scratch->values, p->d_v, scratch->p, part->rescale, &stairs,
                             &block->ahead);
    else
        add_values(part->o, scratch->values, p->d_v, weights, part->rescale, (fewest + 1) / 2, &block->ahead,
                   vectors, values_at_once);
    for (int32_t t = fewest; t < most; t++) {
        __mmask16 sees[VECTORS];
        for (int v = 0; v < vectors; v++)
            sees[v] = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(visible + v * VECTOR), _mm512_set1_epi32(t));
        add_value_where_seen(part->o, block->values[t], scratch->s + (int64_t)t * lanes, p->d_v, sees,
                             vectors);
    }
}

static void attend_part(const struct cpu_tile *tile, const struct scratch *scratch, const struct part *part,
                        struct block *block)
{
    switch (part->vectors) {
    case 1: attend_vectors(tile, scratch, part, block, 1, 12, 16); break;
    case 2: attend_vectors(tile, scratch, part, block, 2, 8, 8); break;
    case 3: attend_vectors(tile, scratch, part, block, 3, 6, 8); break;
    default: attend_vectors(tile, scratch, part, block, 4, 4, 4); break;
    }
}

/* Writes the rows of a part. A sum of 0 means that there was no key, or none whose score is above -inf. */
static void finish_part(const struct cpu_tile *tile, const struct part *part)
{
    const int64_t d_v = tile->call->problem->d_v, lanes = (int64_t)part->vectors * VECTOR;
    for (int32_t v = 0; v < part->vectors; v++) {
        const int32_t first = part->first_row + v * VECTOR, left = tile->rows - first;
        const __m512 sum = _mm512_load_ps(part->sum + v * VECTOR);
        const __mmask16 some = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        unpack_rows(tile->out + first * d_v, part->o + v * VECTOR, left, d_v, lanes,
                    _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), sum), some);
        tile_write_lse(tile, first, VECTOR, part->max + v * VECTOR, part->sum + v * VECTOR);
    }
}

static void attend(const struct cpu_tile *tile, void *memory)
{
    const struct attention_problem *p = tile->call->problem;
    const int32_t parts = (tile->rows + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE;
    struct scratch scratch;
    scratch_layout(tile->call, (uintptr_t)memory, &scratch);
    for (int32_t i = 0; i < parts; i++) {
        const int32_t left = tile->rows - i * PLAN_ROW_TILE;
        begin_part(tile, &scratch.part[i], left < PLAN_ROW_TILE ? left : PLAN_ROW_TILE);
    }

    const int64_t end = cpu_visible_end(tile, tile->rows - 1); /* the last row sees most */
    struct cpu_key found[2][BLOCK];                            /* of this block and the next */
    struct block block = {.begin = tile->begin_key};
    int64_t at = block.begin;
    block.count = tile->call->next_keys(tile, &at, end, found[0]);
    for (int now = 0; block.count; now ^= 1) {
        const int64_t next_begin = at;
        const int32_t next = tile->call->next_keys(tile, &at, end, found[now ^ 1]);
        block.ahead = tile_ahead_of_call(tile->call, found[now ^ 1], next, (parts + 1) / 2 * p->d_v);
        find_keys(tile->call, found[now], scratch.keys, &block);
        block.interleaved = -1;
        for (int32_t i = 0; i < parts; i++) attend_part(tile, &scratch, &scratch.part[i], &block);
        block.begin = next_begin, block.count = next;
    }
    for (int32_t i = 0; i < parts; i++) finish_part(tile, &scratch.part[i]);
}

const struct cpu_attention cpu_avx512bf16_attention = {
    CPU_ATTENTION_DRIVER, 2 * PLAN_ROW_TILE, PARTS *PLAN_ROW_TILE, scratch_bytes, attend, result_round};
