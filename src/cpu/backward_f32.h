/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA for a tile of lanes in fp32 (backward.h), for any vector unit: the code of the
 * kernels cpu-generic, cpu-avx2 and cpu-avx512. The including file defines GRADIENTS_NAME, the struct
 * cpu_gradients to define, and LANES, VECTORS, WIDE, AT_ONCE and LARGER (products_f32.h).
 *
 *   scratch of a worker (floats)                                                   192/128
 *     x, y     [groups][d_qk][16], [groups][d_v][16]   the lanes' vectors            80 KiB
 *     dx, dy   the same                                their gradients               80 KiB
 *     mx, my   [64][d_qk], [64][d_v]                   vectors met, converted once   80 KiB
 *     p, ds    [64][16]                                scores, then P; dP, then dS    8 KiB
 *
 *   for each block of 64 vectors met:  convert
 *     for each group of 16 lanes:  S = mx x, dP = my y  →  P, dS  →  dx += mxᵀ dS; for keys dy += myᵀ P
 */
#include "backward.h"
#include "products_f32.h"

enum { MOST_LANES = 2 * PLAN_ROW_TILE };

struct scratch {
    float *x, *y, *dx, *dy, *mx, *my, *p, *ds;
};

static size_t scratch_layout(const struct backward_problem *p, uintptr_t base, struct scratch *scratch)
{
    const size_t lanes = MOST_LANES * sizeof(float), d_qk = (size_t)p->d_qk, d_v = (size_t)p->d_v;
    uintptr_t at = base;
    scratch->x = tile_take(&at, lanes * d_qk), scratch->y = tile_take(&at, lanes * d_v);
    scratch->dx = tile_take(&at, lanes * d_qk), scratch->dy = tile_take(&at, lanes * d_v);
    scratch->mx = tile_take(&at, BLOCK * sizeof(float) * d_qk);
    scratch->my = tile_take(&at, BLOCK * sizeof(float) * d_v);
    scratch->p = tile_take(&at, BLOCK * GROUP_ROWS * sizeof(float));
    scratch->ds = tile_take(&at, BLOCK * GROUP_ROWS * sizeof(float));
    return at - base;
}

static size_t scratch_bytes(const struct backward_problem *p)
{
    struct scratch unused;
    return scratch_layout(p, 0, &unused);
}

/* Packs one vector, times a factor, into lane `lane` of its group; `row` has room for the vector. */
static void pack(float *to, const uint8_t *from, int64_t width, int32_t lane, float factor, bool is_bf16,
                 float *row)
{
    convert(row, (const uint16_t *)(const void *)from, width, is_bf16);
    float *at = to + lane / GROUP_ROWS * width * GROUP_ROWS + lane % GROUP_ROWS;
    for (int64_t d = 0; d < width; d++) at[d * GROUP_ROWS] = row[d] * factor;
}

/* Computes P and dS of the vectors that some lane sees, from S and dP. lse and delta are those of the lanes
 * where these are rows, and those of the vectors met where the lanes are keys. */
static void weigh(const struct cpu_lanes *lanes, const struct cpu_met *met, const struct cpu_seen *seen,
                  const float *lane_lse, const float *lane_delta, const struct scratch *scratch, int vectors)
{
    const vector most = (vector){0} + 128.0f; /* 2^x is infinite from there on */
    for (int v = 0; v < vectors; v++) {
        vector lse = *(const vector *)(lane_lse + v * LANES),
               delta = *(const vector *)(lane_delta + v * LANES);
        vector_int from, to;
        memcpy(&from, seen->from + v * LANES, sizeof from), memcpy(&to, seen->to + v * LANES, sizeof to);
        for (int32_t t = seen->begin; t < seen->end; t++) {
            vector *const p = (vector *)(scratch->p + t * GROUP_ROWS + v * LANES),
                          *const ds = (vector *)(scratch->ds + t * GROUP_ROWS + v * LANES);
            if (lanes->are_keys) lse = (vector){0} + met->lse[t], delta = (vector){0} + met->delta[t];
            const vector above = *p - lse;
            const vector weight = exp2_of(SMALLER(most, above));
            vector of_score = weight * (*ds - delta);
            *p = weight;
            if (t < seen->whole || t >= seen->whole_end) {
                const vector_int sees = (vector_int)(from <= t) & (vector_int)(to > t);
                of_score = select(sees, of_score, (vector){0});
                *p = select(sees, weight, (vector){0});
            }
            *ds = of_score;
        }
    }
}

/* sum[d][lane] += Σ_t of[t][d] · by[t][lane] over the vectors [begin, end). */
static void add_met(int vectors, float *sum, const float *of, const float *by, int64_t width, int32_t begin,
                    int32_t end, struct ahead *ahead)
{
    static const _Alignas(64) float ones[GROUP_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    if (begin < end)
        add_values(vectors, sum, of + begin * width, width, width, by + begin * GROUP_ROWS, end - begin, ones,
                   ahead);
}

/* The same over the vectors that some lane sees. A vector that only some lanes see is added to these lanes
 * alone if any such vector holds NaN or infinity. */
static void add_seen(int vectors, float *sum, const float *of, const float *by, int64_t width,
                     const struct cpu_seen *seen, bool all_finite, struct ahead *ahead)
{
    if (all_finite) {
        add_met(vectors, sum, of, by, width, seen->begin, seen->end, ahead);
        return;
    }
    add_met(vectors, sum, of, by, width, seen->whole, seen->whole_end, ahead);
    for (int32_t t = seen->begin; t < seen->end; t++) {
        bool sees[GROUP_ROWS];
        if (t >= seen->whole && t < seen->whole_end) continue;
        for (int l = 0; l < GROUP_ROWS; l++) sees[l] = seen->from[l] <= t && t < seen->to[l];
        add_value_where_seen(sum, of + t * width, by + t * GROUP_ROWS, width, sees, vectors * LANES);
    }
}

static bool partly_finite(const float *of, int64_t width, const struct cpu_seen *seen)
{
    return are_finite(of, width, seen->begin, seen->whole, width) &&
           are_finite(of, width, seen->whole_end, seen->end, width);
}

static void meet(const struct cpu_lanes *lanes, const struct scratch *scratch, const struct cpu_met *met,
                 int32_t group, const float *lse, const float *delta, struct ahead *ahead)
{
    const struct backward_problem *p = lanes->problem;
    const int64_t x = (int64_t)group * GROUP_ROWS * p->d_qk, y = (int64_t)group * GROUP_ROWS * p->d_v;
    const int vectors = vectors_of(lanes->count - group * GROUP_ROWS);
    struct cpu_seen seen;
    backward_masks(lanes, met, group * GROUP_ROWS, GROUP_ROWS, &seen);
    const int32_t count = seen.end - seen.begin, at = seen.begin;
    if (!count) return;
    scores(vectors, scratch->p + at * GROUP_ROWS, NULL, scratch->mx + at * p->d_qk, p->d_qk, scratch->x + x,
           count, p->d_qk);
    scores(vectors, scratch->ds + at * GROUP_ROWS, NULL, scratch->my + at * p->d_v, p->d_v, scratch->y + y,
           count, p->d_v);
    weigh(lanes, met, &seen, lse + group * GROUP_ROWS, delta + group * GROUP_ROWS, scratch, vectors);
    add_seen(vectors, scratch->dx + x, scratch->mx, scratch->ds, p->d_qk, &seen,
             partly_finite(scratch->mx, p->d_qk, &seen), ahead);
    if (lanes->are_keys)
        add_seen(vectors, scratch->dy + y, scratch->my, scratch->p, p->d_v, &seen,
                 partly_finite(scratch->my, p->d_v, &seen), ahead);
}

/* Transposes the lanes of a group into rows. */
static void unpack(float *to, const float *from, int64_t width)
{
    for (int64_t d = 0; d < width; d++)
        for (int l = 0; l < GROUP_ROWS; l++) to[l * width + d] = from[d * GROUP_ROWS + l];
}

static void finish(const struct cpu_lanes *lanes, const struct scratch *scratch)
{
    const struct backward_problem *p = lanes->problem;
    float *dx = scratch->mx, *dy = scratch->my; /* rows of a group */
    for (int32_t l = 0; l < lanes->count; l++) {
        const int64_t group = l / GROUP_ROWS, lane = l % GROUP_ROWS;
        if (!lane) {
            unpack(dx, scratch->dx + group * p->d_qk * GROUP_ROWS, p->d_qk);
            if (lanes->are_keys) unpack(dy, scratch->dy + group * p->d_v * GROUP_ROWS, p->d_v);
        }
        backward_store(lanes, l, dx + lane * p->d_qk, dy + lane * p->d_v);
    }
}

static void tile(const struct cpu_lanes *lanes, void *memory)
{
    const struct backward_problem *p = lanes->problem;
    const bool is_bf16 = p->element == ELEMENT_BF16;
    const int32_t groups = (lanes->count + GROUP_ROWS - 1) / GROUP_ROWS;
    const size_t all = (size_t)groups * GROUP_ROWS * sizeof(float);
    const int64_t end = backward_end(lanes);
    _Alignas(64) float lse[MOST_LANES] = {0}, delta[MOST_LANES] = {0};
    struct cpu_met met[2]; /* of this block and the next */
    struct scratch s;
    scratch_layout(p, (uintptr_t)memory, &s);
    backward_fetch(lanes);
    memset(s.x, 0, all * (size_t)p->d_qk), memset(s.y, 0, all * (size_t)p->d_v);
    memset(s.dx, 0, all * (size_t)p->d_qk), memset(s.dy, 0, all * (size_t)p->d_v);
    for (int32_t l = 0; l < lanes->count; l++) {
        const struct cpu_key own = backward_vectors(lanes, lanes->are_keys, lanes->first + l);
        pack(s.x, own.token, p->d_qk, l, p->scale * TILE_LOG2_E, is_bf16, s.mx);
        pack(s.y, own.value, p->d_v, l, 1.0f, is_bf16, s.mx);
        if (!lanes->are_keys)
            lse[l] = lanes->lse[lanes->first + l], delta[l] = lanes->delta[lanes->first + l];
    }
    int64_t at = backward_begin(lanes);
    backward_meet(lanes, &at, end, &met[0]);
    for (int now = 0; met[now].count; now ^= 1) {
        const struct cpu_met *block = &met[now], *next = &met[now ^ 1];
        backward_meet(lanes, &at, end, &met[now ^ 1]);
        struct ahead ahead = {
            .bring = tile_ahead_of(next->vectors, next->count, (int32_t)(p->d_qk * 2), (int32_t)(p->d_v * 2),
                                   (groups + 1) / 2 * (p->d_qk + (lanes->are_keys ? p->d_v : 0)))};
        for (int32_t t = 0; t < block->count; t++) {
            convert(s.mx + t * p->d_qk, (const uint16_t *)(const void *)block->vectors[t].token, p->d_qk,
                    is_bf16);
            convert(s.my + t * p->d_v, (const uint16_t *)(const void *)block->vectors[t].value, p->d_v,
                    is_bf16);
        }
        for (int32_t g = 0; g < groups; g++) meet(lanes, &s, block, g, lse, delta, &ahead);
    }
    finish(lanes, &s);
}

const struct cpu_gradients GRADIENTS_NAME = {CPU_BACKWARD_DRIVER, MOST_LANES, scratch_bytes, backward_delta,
                                             tile};
