/* SPDX-License-Identifier: MIT
 *
 * Attention over a row tile in fp32, for any vector unit: the text of the kernels cpu-generic, cpu-avx2 and
 * cpu-avx512. A file that includes it says how wide a vector is and how many sums its registers hold, and is compiled
 * with the flags of its instruction set; the operations themselves are the compiler's vector arithmetic.
 *
 *   ATTENTION_NAME     the struct cpu_attention to define
 *   LANES, VECTORS, AT_ONCE, LARGER: products_f32.h
 *
 *   scratch of a worker (floats), of 64 rows; of a head's keys up to 256 rows meet them at a time
 *     q         [groups][d_qk][16]   Q of the tile, scaled, lanes innermost       64 × 576 × 4 B = 144 KiB
 *     keys      [64][d_qk]           one block of keys, converted once            64 × 576 × 4 B = 144 KiB
 *     values    [64][d_v]            … and of values, where they lie apart
 *     o         [groups][d_v][16]    unnormalised output                          64 × 512 × 4 B = 128 KiB
 *     s         [64][16]             scores, then probabilities of one group and block
 *     max, sum  [groups][16]         running maximum (base 2, scaled) and sum of the softmax
 *
 *   for each block of 64 keys:  convert
 *     for each group of 16 rows:  S = K Q  →  softmax step  →  O = O · rescale + Vᵀ P
 *
 *   Limit: the two products, 2 · (d_qk + d_v) FLOP per row and key, at the rate of the multiply-adds.
 */
#include "products_f32.h"
#include "result.h"

enum { ROWS_OF_HEADS = 4 * PLAN_ROW_TILE };

struct scratch {
    float *q, *keys, *values, *o, *s, *max, *sum;
    int64_t value_step; /* floats from one value to the next */
};

/* Lays the scratch of a worker out from `base` on; returns its bytes. With base 0 it only counts. */
static size_t scratch_layout(const struct cpu_call *call, uintptr_t base, struct scratch *scratch)
{
    const struct attention_problem *p = call->problem;
    const size_t rows = (size_t)call->tile_rows * sizeof(float), d_qk = ((size_t)p->d_qk + 15) / 16 * 16;
    uintptr_t at = base;
    scratch->q = tile_take(&at, rows * d_qk);
    scratch->keys = tile_take(&at, BLOCK * d_qk * sizeof(float));
    scratch->values = scratch->keys, scratch->value_step = p->d_qk;
    if (call->value_bytes) {
        scratch->values = tile_take(&at, BLOCK * (size_t)p->d_v * sizeof(float));
        scratch->value_step = p->d_v;
    }
    scratch->o = tile_take(&at, rows * (size_t)p->d_v);
    scratch->s = tile_take(&at, BLOCK * GROUP_ROWS * sizeof(float));
    scratch->max = tile_take(&at, rows);
    scratch->sum = tile_take(&at, rows);
    return at - base;
}

static size_t scratch_bytes(const struct cpu_call *call)
{
    struct scratch unused;
    return scratch_layout(call, 0, &unused);
}

/* Q of the tile with lanes innermost, the softmax scale in base 2 folded in; lanes without a row are 0. `row` has room
 * for d_qk floats. */
static void pack_q(const struct cpu_tile *tile, float *q, float *row)
{
    const struct attention_problem *p = tile->call->problem;
    const int32_t groups = (tile->rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const float scale = p->scale * TILE_LOG2_E;
    cpu_fetch_queries(tile, 0, tile->rows);
    memset(q, 0, (size_t)groups * (size_t)p->d_qk * GROUP_ROWS * sizeof(float));
    for (int32_t i = 0; i < tile->rows; i++) {
        convert(row, cpu_query(tile, i), p->d_qk, p->element == ELEMENT_BF16);
        float *to = q + i / GROUP_ROWS * p->d_qk * GROUP_ROWS + i % GROUP_ROWS;
        for (int64_t d = 0; d < p->d_qk; d++) to[d * GROUP_ROWS] = row[d] * scale;
    }
}

/* ---- Softmax -------------------------------------------------------------------------------- */

/* One step of the online softmax over s[0 … count): row l sees the first visible[l] of them, and below `fewest` every
 * row sees the key. `largest` is of all of them and of older ones. Turns scores into probabilities against the new maximum and gives in `rescale` what older sums must
 * be multiplied by. */
static void softmax_step(float *s, const float *largest, int32_t count, int32_t fewest,
                         const int32_t visible[GROUP_ROWS], float *max, float *sum, float *rescale,
                         int vectors)
{
    const vector nothing = (vector){0} - INFINITY;
    for (int v = 0; v < vectors; v++) {
        vector *const at = (vector *)(s + v * LANES);
        const vector old = *(const vector *)(max + v * LANES);
        vector_int sees;
        memcpy(&sees, visible + v * LANES, sizeof sees);
        vector top = old;
        if (fewest == count) {
            top = *(const vector *)(largest + v * LANES);
        } else {
            for (int32_t t = 0; t < count; t++) {
                if (t >= fewest) at[t * VECTORS] = select((vector_int)(sees > t), at[t * VECTORS], nothing);
                top =
                    LARGER(at[t * VECTORS], top); /* a NaN does not become the maximum; it reaches the sum */
            }
        }
        const vector base =
            select((vector_int)(top == nothing), (vector){0}, top); /* keeps exp(-inf - base) at 0 */
        vector total = {0}, odd = {0}; /* two sums that do not wait for each other */
        int32_t t = 0;
        for (; t + 2 <= count; t += 2) {
            const vector e = exp2_of(at[t * VECTORS] - base), f = exp2_of(at[(t + 1) * VECTORS] - base);
            at[t * VECTORS] = e, at[(t + 1) * VECTORS] = f;
            total += e, odd += f;
        }
        if (t < count) total += at[t * VECTORS] = exp2_of(at[t * VECTORS] - base);
        total += odd;
        const vector older = exp2_of(old - base);
        *(vector *)(rescale + v * LANES) = older;
        *(vector *)(max + v * LANES) = top;
        *(vector *)(sum + v * LANES) = *(const vector *)(sum + v * LANES) * older + total;
    }
}

/* ---- A tile --------------------------------------------------------------------------------- */

static void attend_block(const struct cpu_tile *tile, const struct scratch *scratch, int32_t group,
                         int64_t begin, int32_t count, struct tile_ahead *ahead)
{
    const struct attention_problem *p = tile->call->problem;
    int32_t visible[GROUP_ROWS], fewest, most;
    tile_visible(tile, group * GROUP_ROWS, begin, count, GROUP_ROWS, visible, &fewest, &most);
    if (!most) return;
    _Alignas(64) float rescale[GROUP_ROWS], largest[GROUP_ROWS];
    float *o = scratch->o + group * p->d_v * GROUP_ROWS;
    const float *q = scratch->q + group * p->d_qk * GROUP_ROWS;
    const int vectors = vectors_of(tile->rows - group * GROUP_ROWS);
    memcpy(largest, scratch->max + group * GROUP_ROWS, sizeof largest);
    scores(vectors, scratch->s, largest, scratch->keys, q, most, p->d_qk);
    softmax_step(scratch->s, largest, most, fewest, visible, scratch->max + group * GROUP_ROWS,
                 scratch->sum + group * GROUP_ROWS, rescale, vectors);
    if (are_finite(scratch->values, scratch->value_step, fewest, most, p->d_v))
        fewest = most; /* a row that does not see a key has weight 0 for it */
    add_values(vectors, o, scratch->values, scratch->value_step, p->d_v, scratch->s, fewest, rescale, ahead);
    for (int32_t t = fewest; t < most; t++) {
        bool sees[GROUP_ROWS];
        for (int l = 0; l < GROUP_ROWS; l++) sees[l] = t < visible[l];
        add_value_where_seen(o, scratch->values + t * scratch->value_step, scratch->s + t * GROUP_ROWS,
                             p->d_v, sees, vectors * LANES);
    }
}

static void attend(const struct cpu_tile *tile, void *memory)
{
    const struct attention_problem *p = tile->call->problem;
    const int32_t groups = (tile->rows + GROUP_ROWS - 1) / GROUP_ROWS;
    struct scratch scratch;
    scratch_layout(tile->call, (uintptr_t)memory, &scratch);
    memset(scratch.o, 0, (size_t)groups * (size_t)p->d_v * GROUP_ROWS * sizeof(float));
    for (int32_t i = 0; i < groups * GROUP_ROWS; i++) scratch.max[i] = -INFINITY, scratch.sum[i] = 0.0f;

    pack_q(tile, scratch.q, scratch.keys);
    const int64_t end = cpu_visible_end(tile, tile->rows - 1); /* the last row sees most */
    struct cpu_key keys[2][BLOCK];                             /* of this block and the next */
    int64_t begin, at = tile->begin_key;
    begin = at;
    int32_t count = tile->call->next_keys(tile, &at, end, keys[0]);
    for (int now = 0; count; now ^= 1) {
        const int64_t next_begin = at;
        const int32_t next = tile->call->next_keys(tile, &at, end, keys[now ^ 1]);
        struct tile_ahead ahead =
            tile_ahead_of_call(tile->call, keys[now ^ 1], next, (groups + 1) / 2 * p->d_v);
        for (int32_t t = 0; t < count; t++) {
            convert_key(scratch.keys + t * p->d_qk, &keys[now][t]);
            if (tile->call->value_bytes)
                convert(scratch.values + t * p->d_v, (const uint16_t *)(const void *)keys[now][t].value,
                        p->d_v, p->element == ELEMENT_BF16);
        }
        for (int32_t g = 0; g < groups; g++) attend_block(tile, &scratch, g, begin, count, &ahead);
        begin = next_begin, count = next;
    }
    for (int32_t g = 0; g < groups; g++)
        tile_write(tile, g * GROUP_ROWS, GROUP_ROWS, scratch.o + g * p->d_v * GROUP_ROWS, GROUP_ROWS,
                   scratch.max + g * GROUP_ROWS, scratch.sum + g * GROUP_ROWS);
}

const struct cpu_attention ATTENTION_NAME = {PLAN_ROW_TILE, ROWS_OF_HEADS, scratch_bytes, attend,
                                             result_round};
