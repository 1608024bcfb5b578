/* SPDX-License-Identifier: MIT
 *
 * Attention over a row tile in plain C, for any processor.
 *
 *   lanes = rows: 16 rows (query heads of a token, as a rule) stand side by side in a vector, so that the
 *   softmax has no horizontal step and a cached value is read once and multiplied into all of them.
 *
 *   scratch of a worker (floats)
 *     q         [groups][d_qk][16]   Q of the tile, scaled, lanes innermost       64 × 576 × 4 B = 144 KiB
 *     keys      [64][d_qk]           one block of keys, converted once            64 × 576 × 4 B = 144 KiB
 *     o         [groups][d_v][16]    unnormalised output                          64 × 512 × 4 B = 128 KiB
 *     s         [64][16]             scores, then probabilities of one group and block
 *     max, sum  [groups][16]         running maximum and sum of the softmax
 *
 *   for each block of 64 keys:  convert
 *     for each group of 16 rows:  S = K Q  →  softmax step  →  O += Vᵀ P
 *
 *   Limit: the two products, 2 · (d_qk + d_v) FLOP per row and key, at the rate of the compiler's baseline
 *   vectors.
 */
#include "../cpu.h"

#include "../../num.h"

#include <math.h>
#include <string.h>

enum { LANES = 16, GROUPS = PLAN_ROW_TILE / LANES, BLOCK = 64 };
enum { UNROLL = 2 }; /* vectors summed at a time: 2 × 16 floats fill half of sixteen 128-bit registers */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), may_alias));

struct scratch {
    float *q, *keys, *o, *s, *max, *sum;
};

static size_t scratch_floats(const struct dense_decode_problem *p, float *base, struct scratch *scratch)
{
    const size_t rows = PLAN_ROW_TILE;
    const size_t d_qk = ((size_t)p->d_qk + LANES - 1) / LANES * LANES, d_v = (size_t)p->d_v;
    size_t at = 0;
    scratch->q = base + at, at += rows * d_qk;
    scratch->keys = base + at, at += BLOCK * d_qk;
    scratch->o = base + at, at += rows * d_v;
    scratch->s = base + at, at += BLOCK * LANES;
    scratch->max = base + at, at += rows;
    scratch->sum = base + at, at += rows;
    return at;
}

static size_t scratch_bytes(const struct dense_decode_problem *p)
{
    static float base[1];
    struct scratch unused;
    return scratch_floats(p, base, &unused) * sizeof(float);
}

static void to_float(float *to, const uint16_t *from, int64_t count, enum element element)
{
    if (element == ELEMENT_BF16)
        for (int64_t i = 0; i < count; i++) to[i] = num_from_bf16(from[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = num_from_fp16(from[i]);
}

/* Q of the tile with lanes innermost, the softmax scale folded in; lanes without a row are 0. `row` has d_qk
 * floats. */
static void pack_q(const struct cpu_tile *tile, float *q, float *row)
{
    const struct dense_decode_problem *p = tile->problem;
    const int64_t group = p->h_q / p->h_kv;
    const int32_t groups = (tile->rows + LANES - 1) / LANES;
    memset(q, 0, (size_t)groups * (size_t)p->d_qk * LANES * sizeof(float));
    for (int32_t i = 0; i < tile->rows; i++) {
        const int64_t token = (tile->first_row + i) / group,
                      head = tile->kv_head * group + (tile->first_row + i) % group;
        to_float(row, p->q + tile->request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2],
                 p->d_qk, p->element);
        float *to = q + (i / LANES) * p->d_qk * LANES + i % LANES;
        for (int64_t d = 0; d < p->d_qk; d++) to[d * LANES] = row[d] * p->scale;
    }
}

/* s[t][lane] = Σ_d keys[t][d] · q[d][lane], for `count` keys. */
static void scores(float *s, const float *keys, const float *q, int32_t count, int64_t d_qk)
{
    int32_t t = 0;
    for (; t + UNROLL <= count; t += UNROLL) {
        lanes sum[UNROLL] = {{0}};
        for (int64_t d = 0; d < d_qk; d++) {
            const lanes x = *(const lanes *)(q + d * LANES);
            for (int u = 0; u < UNROLL; u++) sum[u] += keys[(t + u) * d_qk + d] * x;
        }
        for (int u = 0; u < UNROLL; u++) *(lanes *)(s + (t + u) * LANES) = sum[u];
    }
    for (; t < count; t++) {
        lanes sum = {0};
        for (int64_t d = 0; d < d_qk; d++) sum += keys[t * d_qk + d] * *(const lanes *)(q + d * LANES);
        *(lanes *)(s + t * LANES) = sum;
    }
}

/* One step of the online softmax over s[0 … count): lane l sees the first visible[l] of them. Turns scores
 * into probabilities against the new maximum and returns in `rescale` what older sums must be multiplied by.
 */
static void softmax_step(float *s, int32_t count, const int32_t visible[LANES], float *max, float *sum,
                         float rescale[LANES])
{
    float top[LANES], base[LANES], total[LANES] = {0};
    memcpy(top, max, sizeof top);
    for (int32_t t = 0; t < count; t++)
        for (int l = 0; l < LANES; l++) {
            float *x = &s[t * LANES + l];
            *x = t < visible[l] ? *x : -INFINITY;
            top[l] =
                *x > top[l] ? *x : top[l]; /* a NaN score does not become the maximum; it reaches the sum */
        }
    for (int l = 0; l < LANES; l++) {
        base[l] = top[l] == -INFINITY ? 0.0f : top[l]; /* nothing seen yet: keeps exp(-inf - base) at 0 */
        rescale[l] = expf(max[l] - base[l]);
        max[l] = top[l];
    }
    for (int32_t t = 0; t < count; t++)
        for (int l = 0; l < LANES; l++) {
            const float e = expf(s[t * LANES + l] - base[l]);
            s[t * LANES + l] = e;
            total[l] += e;
        }
    for (int l = 0; l < LANES; l++) sum[l] = sum[l] * rescale[l] + total[l];
}

/* o[d][lane] = o[d][lane] · rescale[lane] + Σ_t keys[t][d] · s[t][lane], over keys that every lane sees. */
static void add_values(float *o, const float *keys, const float *s, int32_t count, int64_t d_qk, int64_t d_v,
                       const float rescale[LANES])
{
    lanes factor;
    memcpy(&factor, rescale, sizeof factor);
    int64_t d = 0;
    for (; d + UNROLL <= d_v; d += UNROLL) {
        lanes sum[UNROLL] = {{0}};
        for (int32_t t = 0; t < count; t++) {
            const lanes x = *(const lanes *)(s + t * LANES);
            for (int u = 0; u < UNROLL; u++) sum[u] += keys[t * d_qk + d + u] * x;
        }
        for (int u = 0; u < UNROLL; u++) {
            lanes *to = (lanes *)(o + (d + u) * LANES);
            *to = *to * factor + sum[u];
        }
    }
    for (; d < d_v; d++) {
        lanes sum = {0};
        for (int32_t t = 0; t < count; t++) sum += keys[t * d_qk + d] * *(const lanes *)(s + t * LANES);
        lanes *to = (lanes *)(o + d * LANES);
        *to = *to * factor + sum;
    }
}

/* The same for one key that only some lanes see: the others must not meet it, as it may hold NaN or infinity.
 */
static void add_value_where_seen(float *o, const float *key, const float *s, int64_t d_v, int32_t t,
                                 const int32_t visible[LANES])
{
    for (int64_t d = 0; d < d_v; d++)
        for (int l = 0; l < LANES; l++)
            if (t < visible[l]) o[d * LANES + l] += key[d] * s[l];
}

static int32_t clamp_count(int64_t count)
{
    return count < 0 ? 0 : count > BLOCK ? BLOCK : (int32_t)count;
}

static void attend_block(const struct cpu_tile *tile, const struct scratch *scratch, int32_t group,
                         int64_t begin)
{
    const struct dense_decode_problem *p = tile->problem;
    int32_t visible[LANES], fewest = BLOCK, most = 0;
    for (int32_t l = 0; l < LANES; l++) {
        const int32_t row = group * LANES + l;
        visible[l] = clamp_count(cpu_visible_end(tile, row < tile->rows ? row : tile->rows - 1) - begin);
        if (visible[l] < fewest) fewest = visible[l];
        if (visible[l] > most) most = visible[l];
    }
    if (!most) return;
    float rescale[LANES];
    float *o = scratch->o + group * p->d_v * LANES;
    scores(scratch->s, scratch->keys, scratch->q + group * p->d_qk * LANES, most, p->d_qk);
    softmax_step(scratch->s, most, visible, scratch->max + group * LANES, scratch->sum + group * LANES,
                 rescale);
    add_values(o, scratch->keys, scratch->s, fewest, p->d_qk, p->d_v, rescale);
    for (int32_t t = fewest; t < most; t++)
        add_value_where_seen(o, scratch->keys + t * p->d_qk, scratch->s + t * LANES, p->d_v, t, visible);
}

static void write_tile(const struct cpu_tile *tile, const struct scratch *scratch)
{
    const int64_t d_v = tile->problem->d_v;
    for (int32_t i = 0; i < tile->rows; i++) {
        const float max = scratch->max[i], sum = scratch->sum[i];
        const float *o = scratch->o + (i / LANES) * d_v * LANES + i % LANES;
        float *out = tile->out + i * d_v;
        if (sum == 0.0f) { /* no key, or none whose score is above -inf */
            memset(out, 0, (size_t)d_v * sizeof(float));
            tile->lse[i] = -INFINITY;
            continue;
        }
        for (int64_t d = 0; d < d_v; d++) out[d] = o[d * LANES] / sum;
        tile->lse[i] = (max == -INFINITY ? 0.0f : max) + logf(sum);
    }
}

static void attend(const struct cpu_tile *tile, void *memory)
{
    const struct dense_decode_problem *p = tile->problem;
    const int32_t groups = (tile->rows + LANES - 1) / LANES;
    struct scratch scratch;
    scratch_floats(p, memory, &scratch);
    memset(scratch.o, 0, (size_t)groups * (size_t)p->d_v * LANES * sizeof(float));
    for (int32_t i = 0; i < groups * LANES; i++) scratch.max[i] = -INFINITY, scratch.sum[i] = 0.0f;

    pack_q(tile, scratch.q, scratch.keys);
    const int64_t end = cpu_visible_end(tile, tile->rows - 1); /* the last row sees most */
    for (int64_t begin = tile->begin_key; begin < end; begin += BLOCK) {
        const int64_t count = end - begin < BLOCK ? end - begin : BLOCK;
        for (int64_t t = 0; t < count; t++)
            to_float(scratch.keys + t * p->d_qk, cpu_key(p, tile->request, tile->kv_head, begin + t), p->d_qk,
                     p->element);
        for (int32_t g = 0; g < groups; g++) attend_block(tile, &scratch, g, begin);
    }
    write_tile(tile, &scratch);
}

const struct cpu_attention cpu_generic_attention = {scratch_bytes, attend};
