/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA for a tile of lanes (backward.h) with AVX-512 BF16: all products by vdpbf16ps, with
 * P and dS rounded to bf16.
 *
 *   scratch of a worker                                                                          192/128
 *     x, y    of a part [d / 2][vectors][16] pairs      the lanes' vectors                        4 × 40 KiB
 *     dx, dy  of a part [d][vectors][16] float          their gradients                           4 × 80 KiB
 *     mx, my  [d / 32][32][32] pairs                    vectors met, two a pair                       40 KiB
 *     p, ds   [64][vectors][16] float                   scores, then P; dP, then dS                   32 KiB
 *     pairs   [32][vectors][16] pairs                   P, or dS, rounded to bf16                      8 KiB
 *
 *   Lanes are handled in up to four parts of 64, for which the vectors met are interleaved once.
 *   for each block of 64 vectors met, for each part:
 *     S = mx x, dP = my y  →  P, dS  →  dx += mxᵀ dS; for keys dy += myᵀ P
 */
#include "../backward.h"

#include <math.h>

#include "products.h"
#include "softmax.h"
#include "transpose.h"

enum { PARTS = 4 };

/* Up to PLAN_ROW_TILE lanes of a tile. */
struct part {
    int32_t first_lane, vectors;
    uint32_t *x, *y;
    float *dx, *dy;
    _Alignas(64) float lse[PLAN_ROW_TILE], delta[PLAN_ROW_TILE]; /* where the lanes are rows */
};

struct scratch {
    struct part part[PARTS];
    uint32_t *mx, *my, *pairs;
    float *p, *ds;
};

static size_t scratch_layout(const struct backward_problem *p, uintptr_t base, struct scratch *scratch)
{
    const size_t lanes = PLAN_ROW_TILE, d_qk = (size_t)p->d_qk, d_v = (size_t)p->d_v;
    uintptr_t at = base;
    for (int32_t i = 0; i < PARTS; i++) {
        struct part *part = &scratch->part[i];
        part->first_lane = i * PLAN_ROW_TILE;
        part->x = tile_take(&at, lanes * d_qk * 2), part->y = tile_take(&at, lanes * d_v * 2);
        part->dx = tile_take(&at, lanes * d_qk * 4), part->dy = tile_take(&at, lanes * d_v * 4);
    }
    scratch->mx = tile_take(&at, BLOCK * d_qk * 2), scratch->my = tile_take(&at, BLOCK * d_v * 2);
    scratch->pairs = tile_take(&at, lanes * BLOCK * 2);
    scratch->p = tile_take(&at, lanes * BLOCK * 4), scratch->ds = tile_take(&at, lanes * BLOCK * 4);
    return at - base;
}

static size_t scratch_bytes(const struct backward_problem *p)
{
    struct scratch unused;
    return scratch_layout(p, 0, &unused);
}

/* A block of vectors met, which all parts share. */
struct block {
    const struct cpu_met *met;
    const uint16_t *x[BLOCK], *y[BLOCK];
    bool interleaved[2]; /* x, y: with all vectors */
    struct tile_ahead ahead;
};

/* ---- Weights --------------------------------------------------------------------------------- */

/* Returns which of the vectors met each vector of lanes of a whole part multiplies, in a block of which lanes
 * see different ranges. Edges count from the first vector met that some lane sees. */
static struct stairs stairs_of(const struct cpu_seen *seen, bool are_keys)
{
    const int32_t count = seen->end - seen->begin;
    struct stairs stairs = {.from_below = are_keys};
    stairs.edge[VECTORS] = count;
    for (int v = 0; v < VECTORS; v++) {
        if (are_keys) { /* the first lane of a vector sees most */
            stairs.edge[v] = (seen->from[v * VECTOR] - seen->begin) / STEP * STEP;
            if (stairs.edge[v] > count) stairs.edge[v] = count / STEP * STEP;
        } else { /* the last one does */
            const int32_t end = (seen->to[v * VECTOR + VECTOR - 1] - seen->begin + STEP - 1) / STEP * STEP;
            stairs.edge[v + 1] = end < count ? end : count;
        }
    }
    return stairs;
}

/* Computes P and dS of the vectors that some lane sees, from S and dP. lse and delta are those of the lanes
 * where these are rows, and those of the vectors met where the lanes are keys. */
static void weigh(const struct cpu_lanes *lanes, const struct cpu_met *met, const struct cpu_seen *seen,
                  const struct part *part, const struct stairs *stairs, const struct scratch *scratch)
{
    const __m512 scale = _mm512_set1_ps(lanes->problem->scale * TILE_LOG2_E);
    const int64_t stride = (int64_t)part->vectors * VECTOR;
    for (int v = 0; v < part->vectors; v++) {
        __m512 lse = _mm512_load_ps(part->lse + v * VECTOR), delta = _mm512_load_ps(part->delta + v * VECTOR);
        const __m512i from = _mm512_loadu_si512(seen->from + v * VECTOR),
                      to = _mm512_loadu_si512(seen->to + v * VECTOR);
        int32_t begin = seen->begin, end = seen->end;
        if (stairs) {
            stairs_of_vector(stairs, v, &begin, &end);
            begin += seen->begin, end += seen->begin;
        }
        for (int32_t t = begin; t < end; t++) {
            float *const p = scratch->p + t * stride + v * VECTOR, *const ds =
                                                                       scratch->ds + t * stride + v * VECTOR;
            if (lanes->are_keys) lse = _mm512_set1_ps(met->lse[t]), delta = _mm512_set1_ps(met->delta[t]);
            __m512 weight = softmax_exp2(_mm512_fmsub_ps(_mm512_load_ps(p), scale, lse));
            __m512 of_score = _mm512_mul_ps(weight, _mm512_sub_ps(_mm512_load_ps(ds), delta));
            if (t < seen->whole || t >= seen->whole_end) {
                const __m512i now = _mm512_set1_epi32(t);
                const __mmask16 sees = _mm512_cmple_epi32_mask(from, now) & _mm512_cmpgt_epi32_mask(to, now);
                weight = _mm512_maskz_mov_ps(sees, weight), of_score = _mm512_maskz_mov_ps(sees, of_score);
            }
            if (lanes->are_keys) _mm512_store_ps(p, weight);
            _mm512_store_ps(ds, of_score);
        }
    }
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static bool is_whole(const struct cpu_seen *seen, int32_t t)
{
    return t >= seen->whole && t < seen->whole_end;
}

/* Interleaves the vectors met. If one that only some lanes see holds NaN or infinity, all that only some
 * lanes see are replaced by zeros. Returns whether none is replaced. */
static bool bring(uint32_t *to, const uint16_t *const *from, int64_t width, const struct cpu_seen *seen,
                  int32_t count, bool *interleaved)
{
    static const uint16_t zeros[512];
    const uint16_t *some[BLOCK];
    const bool all = are_finite(from, seen->begin, seen->whole, width) &&
                     are_finite(from, seen->whole_end, seen->end, width);
    if (all && *interleaved) return true;
    for (int32_t t = 0; t < count; t++) some[t] = all || is_whole(seen, t) ? from[t] : zeros;
    interleave(to, some, count, width);
    *interleaved = all;
    return all;
}

/* sum[d][lane] += Σ_t of[t][d] · by[t][lane] over the vectors that some lane sees. */
INLINE void add_seen(float *sum, const uint16_t *const *of, uint32_t *pairs_of, const float *by,
                     int64_t width, const struct cpu_seen *seen, const struct scratch *scratch,
                     const struct stairs *stairs, bool *interleaved, struct block *block, const int vectors,
                     const int at_once)
{
    static const _Alignas(64) float ones[PLAN_ROW_TILE] = {
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const int lanes = vectors * VECTOR;
    const bool all = bring(pairs_of, of, width, seen, block->met->count, interleaved);
    softmax_to_bf16(scratch->pairs, by + (int64_t)seen->begin * lanes, seen->end - seen->begin, vectors);
    if (vectors == VECTORS && stairs)
        add_values_of_stairs(sum, pairs_of + (int64_t)seen->begin / 2 * GROUP, width, scratch->pairs, ones,
                             stairs, &block->ahead);
    else
        add_values(sum, pairs_of + (int64_t)seen->begin / 2 * GROUP, width, scratch->pairs, ones,
                   (seen->end - seen->begin + 1) / 2, &block->ahead, vectors, at_once);
    for (int32_t t = seen->begin; t < seen->end && !all; t++) {
        __mmask16 sees[VECTORS];
        if (is_whole(seen, t)) continue;
        for (int v = 0; v < vectors; v++)
            sees[v] =
                _mm512_cmple_epi32_mask(_mm512_loadu_si512(seen->from + v * VECTOR), _mm512_set1_epi32(t)) &
                _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(seen->to + v * VECTOR), _mm512_set1_epi32(t));
        add_value_where_seen(sum, of[t], by + (int64_t)t * lanes, width, sees, vectors);
    }
}

INLINE void meet_vectors(const struct cpu_lanes *lanes, const struct scratch *scratch,
                         const struct part *part, struct block *block, const int vectors,
                         const int met_at_once, const int values_at_once)
{
    const struct backward_problem *p = lanes->problem;
    const int width = vectors * VECTOR;
    struct cpu_seen seen;
    backward_masks(lanes, block->met, part->first_lane, width, &seen);
    if (seen.begin == seen.end) return;
    /* Rounded to whole pairs: no lane sees the vectors added. */
    seen.begin &= ~1;
    if (seen.end % 2 && seen.end < block->met->count) seen.end++;
    const int32_t count = seen.end - seen.begin;
    const int64_t at = (int64_t)seen.begin * width;
    struct stairs cut;
    const struct stairs *stairs = NULL;
    if (vectors == VECTORS && (seen.begin < seen.whole || seen.whole_end < seen.end)) {
        cut = stairs_of(&seen, lanes->are_keys), stairs = &cut;
        scores_of_stairs(scratch->p + at, block->x + seen.begin, part->x, stairs, p->d_qk / 2);
        scores_of_stairs(scratch->ds + at, block->y + seen.begin, part->y, stairs, p->d_v / 2);
    } else {
        scores(scratch->p + at, NULL, block->x + seen.begin, part->x, count, p->d_qk / 2, vectors,
               met_at_once);
        scores(scratch->ds + at, NULL, block->y + seen.begin, part->y, count, p->d_v / 2, vectors,
               met_at_once);
    }
    weigh(lanes, block->met, &seen, part, stairs, scratch);
    add_seen(part->dx, block->x, scratch->mx, scratch->ds, p->d_qk, &seen, scratch, stairs,
             &block->interleaved[0], block, vectors, values_at_once);
    if (lanes->are_keys)
        add_seen(part->dy, block->y, scratch->my, scratch->p, p->d_v, &seen, scratch, stairs,
                 &block->interleaved[1], block, vectors, values_at_once);
}

static void meet(const struct cpu_lanes *lanes, const struct scratch *scratch, const struct part *part,
                 struct block *block)
{
    switch (part->vectors) {
    case 1: meet_vectors(lanes, scratch, part, block, 1, 12, 16); break;
    case 2: meet_vectors(lanes, scratch, part, block, 2, 8, 8); break;
    case 3: meet_vectors(lanes, scratch, part, block, 3, 6, 8); break;
    default: meet_vectors(lanes, scratch, part, block, 4, 4, 4); break;
    }
}

/* ---- A tile ---------------------------------------------------------------------------------- */

static void begin_part(const struct cpu_lanes *lanes, struct part *part)
{
    const struct backward_problem *p = lanes->problem;
    const int32_t left = lanes->count - part->first_lane, count = left < PLAN_ROW_TILE ? left : PLAN_ROW_TILE;
    part->vectors = (count + VECTOR - 1) / VECTOR;
    const int64_t all = part->vectors * VECTOR, first = lanes->first + part->first_lane;
    memset(part->dx, 0, (size_t)(p->d_qk * all) * 4), memset(part->dy, 0, (size_t)(p->d_v * all) * 4);
    memset(part->lse, 0, sizeof part->lse), memset(part->delta, 0, sizeof part->delta);
    for (int32_t l = 0; l < count && !lanes->are_keys; l++)
        part->lse[l] = lanes->lse[first + l], part->delta[l] = lanes->delta[first + l];
    for (int32_t v = 0; v < count; v += VECTOR) {
        const int32_t some = count - v < VECTOR ? count - v : VECTOR;
        const uint16_t *x[VECTOR], *y[VECTOR];
        for (int32_t l = 0; l < some; l++) {
            const struct cpu_key own = backward_vectors(lanes, lanes->are_keys, first + v + l);
            x[l] = (const uint16_t *)(const void *)own.token,
            y[l] = (const uint16_t *)(const void *)own.value;
        }
        pack_pairs(part->x + v, x, some, p->d_qk, all);
        pack_pairs(part->y + v, y, some, p->d_v, all);
    }
}

/* Writes the gradients of a part. `dx` and `dy` have room for 16 rows. */
static void finish_part(const struct cpu_lanes *lanes, const struct part *part, float *dx, float *dy)
{
    const struct backward_problem *p = lanes->problem;
    const int64_t all = part->vectors * VECTOR;
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int32_t v = 0; v < all; v += VECTOR) {
        const int32_t first = part->first_lane + v, left = lanes->count - first,
                      count = left < VECTOR ? left : VECTOR;
        unpack_rows(dx, part->dx + v, count, p->d_qk, all, one, (__mmask16)-1);
        if (lanes->are_keys) unpack_rows(dy, part->dy + v, count, p->d_v, all, one, (__mmask16)-1);
        for (int32_t l = 0; l < count; l++)
            backward_store(lanes, first + l, dx + l * p->d_qk, dy + l * p->d_v);
    }
}

static void tile(const struct cpu_lanes *lanes, void *memory)
{
    const struct backward_problem *p = lanes->problem;
    const int32_t parts = (lanes->count + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE;
    const int64_t end = backward_end(lanes), widths = p->d_qk + (lanes->are_keys ? p->d_v : 0);
    struct cpu_met met[2]; /* of this block and the next */
    struct scratch scratch;
    scratch_layout(p, (uintptr_t)memory, &scratch);
    backward_fetch(lanes);
    for (int32_t i = 0; i < parts; i++) begin_part(lanes, &scratch.part[i]);
    int64_t at = backward_begin(lanes);
    backward_meet(lanes, &at, end, &met[0]);
    for (int now = 0; met[now].count; now ^= 1) {
        const struct cpu_met *next = &met[now ^ 1];
        struct block block = {.met = &met[now]};
        backward_meet(lanes, &at, end, &met[now ^ 1]);
        block.ahead = tile_ahead_of(next->vectors, next->count, (int32_t)(p->d_qk * 2), (int32_t)(p->d_v * 2),
                                    (parts + 1) / 2 * widths);
        for (int32_t t = 0; t < block.met->count; t++) {
            block.x[t] = (const uint16_t *)(const void *)block.met->vectors[t].token;
            block.y[t] = (const uint16_t *)(const void *)block.met->vectors[t].value;
        }
        for (int32_t i = 0; i < parts; i++) meet(lanes, &scratch, &scratch.part[i], &block);
    }
    for (int32_t i = 0; i < parts; i++)
        finish_part(lanes, &scratch.part[i], (float *)(void *)scratch.mx, (float *)(void *)scratch.my);
}

const struct cpu_gradients cpu_avx512bf16_gradients = {CPU_BACKWARD_DRIVER, PARTS *PLAN_ROW_TILE,
                                                       scratch_bytes, backward_delta, tile};
