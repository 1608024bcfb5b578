/* SPDX-License-Identifier: MIT
 *
 * Attention over a row tile in fp32, for any vector unit: the code of the kernels cpu-generic, cpu-avx2 and
 * cpu-avx512, in the compiler's vector arithmetic. The including file gives the width of a vector and the
 * number of sums that its registers hold, and is compiled with the flags of its instruction set.
 *
 *   ATTENTION_NAME     the struct cpu_attention to define
 *   LANES, VECTORS, WIDE, AT_ONCE, LARGER: products_f32.h
 *
 *   scratch of a worker (floats), for 64 rows; in MHA up to 256 rows share a block of keys
 *     q         [groups][d_qk][16]   Q of the tile, scaled, lanes innermost       64 × 576 × 4 B = 144 KiB
 *     keys      [2][64][step_of(d_qk)]   this block and the next, in fp32    2 × 64 × 592 × 4 B = 296 KiB
 *     values    [2][64][step_of(d_v)]    the same for values that lie apart from their keys
 *     o         [groups][d_v][16]    unnormalised output                          64 × 512 × 4 B = 128 KiB
 *     s         [2][64][16]          scores, then probabilities, of two groups and a block
 *     max, sum  [groups][16]         running maximum (base 2, scaled) and sum of the softmax
 *
 *   for each block of 64 keys:
 *     for each group of 16 rows, or two where a register tile has two:
 *       S = K Q  →  softmax step  →  O = O · rescale + Vᵀ P
 *       during the last: convert the next block to fp32, prefetch the one after it
 *
 *   Limit: the two products, 2 · (d_qk + d_v) FLOP per row and key, at the rate of the multiply-adds.
 */
#include "products_f32.h"
#include "result.h"

enum { ROWS_OF_HEADS = 4 * PLAN_ROW_TILE };

struct scratch {
    float *q, *keys[2], *values[2], *o, *s, *max, *sum;
    int64_t key_step, value_step; /* floats from one key, or value, to the next */
};

/* Lays out a worker's scratch from `base` on; returns its bytes. Base 0 only counts. */
static size_t scratch_layout(const struct cpu_call *call, uintptr_t base, struct scratch *scratch)
{
    const struct attention_problem *p = call->problem;
    const size_t rows = (size_t)call->tile_rows * sizeof(float), d_qk = ((size_t)p->d_qk + 15) / 16 * 16;
    uintptr_t at = base;
    scratch->q = tile_take(&at, rows * d_qk);
    scratch->key_step = step_of(p->d_qk);
    scratch->value_step = call->value_bytes ? step_of(p->d_v) : scratch->key_step;
    for (int i = 0; i < 2; i++) {
        scratch->keys[i] = scratch->values[i] =
            tile_take(&at, BLOCK * (size_t)scratch->key_step * sizeof(float));
        if (call->value_bytes)
            scratch->values[i] = tile_take(&at, BLOCK * (size_t)scratch->value_step * sizeof(float));
    }
    scratch->o = tile_take(&at, rows * (size_t)p->d_v);
    scratch->s = tile_take(&at, TILE_GROUPS * BLOCK * GROUP_ROWS * sizeof(float));
    scratch->max = tile_take(&at, rows);
    scratch->sum = tile_take(&at, rows);
    return at - base;
}

static size_t scratch_bytes(const struct cpu_call *call)
{
    struct scratch unused;
    return scratch_layout(call, 0, &unused);
}

/* Packs Q of the tile with lanes innermost, multiplied by the softmax scale in base 2; lanes without a row
 * are 0. `row` has room for d_qk floats. */
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

/* One step of the online softmax over s[0 … count): row l sees the first visible[l] keys, and every row sees
 * the keys below `fewest`. `largest` holds the maximum of these scores and of older ones, and counts only
 * where every row sees every key. Turns scores into probabilities relative to the new maximum, and writes to
 * `rescale` the factors for older sums. */
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
        vector total = {0}, odd = {0}; /* two independent sums hide the latency of additions */
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

/* A block of keys in fp32. */
struct block {
    const float *keys, *values;
    int64_t begin;
    int32_t count;
};

/* Adds the values of keys [from, to), which only some rows of a group see, key by key: one of them holds NaN
 * or infinity. */
static void add_few(const struct cpu_tile *tile, const struct scratch *scratch, const struct block *block,
                    float *o, const float *s, int32_t from, int32_t to, const int32_t visible[GROUP_ROWS],
                    int vectors)
{
    for (int32_t t = from; t < to; t++) {
        bool sees[GROUP_ROWS];
        for (int l = 0; l < GROUP_ROWS; l++) sees[l] = t < visible[l];
        add_value_where_seen(o, block->values + t * scratch->value_step, s + t * GROUP_ROWS,
                             tile->call->problem->d_v, sees, vectors * LANES);
    }
}

/* The groups of a register tile beside a block of keys: what they see, and where their numbers are. */
struct register_tile {
    int32_t groups;
    int vectors[TILE_GROUPS];
    int32_t visible[TILE_GROUPS][GROUP_ROWS], fewest[TILE_GROUPS], most[TILE_GROUPS];
    int32_t added[TILE_GROUPS]; /* keys whose values all rows of a group add, some with weight 0 */
    int64_t q_apart, o_apart;   /* floats from one group to the next */
    float *q, *o, *s, *max, *sum;
    _Alignas(64) float rescale[TILE_GROUPS * GROUP_ROWS];
};

static struct register_tile register_tile_of(const struct cpu_tile *tile, const struct scratch *scratch,
                                             int32_t group, const struct block *block)
{
    const struct attention_problem *p = tile->call->problem;
    const int32_t left = (tile->rows - group * GROUP_ROWS + GROUP_ROWS - 1) / GROUP_ROWS;
    struct register_tile t = {.groups = left < TILE_GROUPS ? left : TILE_GROUPS,
                              .q_apart = p->d_qk * GROUP_ROWS,
                              .o_apart = p->d_v * GROUP_ROWS,
                              .s = scratch->s,
                              .max = scratch->max + group * GROUP_ROWS,
                              .sum = scratch->sum + group * GROUP_ROWS};
    t.q = scratch->q + group * t.q_apart, t.o = scratch->o + group * t.o_apart;
    for (int32_t g = 0; g < t.groups; g++) {
        const int32_t row = (group + g) * GROUP_ROWS;
        tile_visible(tile, row, block->begin, block->count, GROUP_ROWS, t.visible[g], &t.fewest[g],
                     &t.most[g]);
        t.vectors[g] = vectors_of(tile->rows - row);
    }
    return t;
}

/* Returns whether two groups are multiplied together, given the keys of each. */
static bool multiplies_two(const struct register_tile *t, const int32_t keys[TILE_GROUPS])
{
    return TILE_GROUPS > 1 && t->groups > 1 && keys[0] == keys[TILE_GROUPS - 1];
}

/* Computes the scores and raises `largest`, the rows' maxima, to them. */
static void score_block(const struct register_tile *t, const struct scratch *scratch,
                        const struct block *block, int64_t d_qk, float *largest)
{
    if (multiplies_two(t, t->most)) {
        scores(WIDE, t->s, largest, block->keys, scratch->key_step, t->q, t->most[0], d_qk);
        return;
    }
    for (int32_t g = 0; g < t->groups; g++)
        scores(t->vectors[g], t->s + g * BLOCK * GROUP_ROWS, largest + g * GROUP_ROWS, block->keys,
               scratch->key_step, t->q + g * t->q_apart, t->most[g], d_qk);
}

/* Turns the scores into probabilities. A row has weight 0 for a key that it does not see, which suffices
 * where the value is finite. */
static void weigh_block(struct register_tile *t, const struct scratch *scratch, const struct block *block,
                        int64_t d_v, const float *largest)
{
    for (int32_t g = 0; g < t->groups; g++) {
        const int32_t at = g * GROUP_ROWS;
        if (!t->most[g]) continue;
        softmax_step(t->s + at * BLOCK, largest + at, t->most[g], t->fewest[g], t->visible[g], t->max + at,
                     t->sum + at, t->rescale + at, t->vectors[g]);
        const bool finite = are_finite(block->values, scratch->value_step, t->fewest[g], t->most[g], d_v);
        t->added[g] = finite ? t->most[g] : t->fewest[g];
    }
}

static void add_block(const struct register_tile *t, const struct scratch *scratch, const struct block *block,
                      int64_t d_v, struct ahead *ahead)
{
    if (t->most[0] && t->most[TILE_GROUPS - 1] && multiplies_two(t, t->added)) {
        add_values(WIDE, t->o, block->values, scratch->value_step, d_v, t->s, t->added[0], t->rescale, ahead);
        return;
    }
    for (int32_t g = 0; g < t->groups; g++)
        if (t->most[g])
            add_values(t->vectors[g], t->o + g * t->o_apart, block->values, scratch->value_step, d_v,
                       t->s + g * BLOCK * GROUP_ROWS, t->added[g], t->rescale + g * GROUP_ROWS, ahead);
}

/* Attends to a block of keys with the groups of a register tile, from group `group` on. */
static void attend_block(const struct cpu_tile *tile, const struct scratch *scratch, int32_t group,
                         const struct block *block, struct ahead *ahead)
{
    const struct attention_problem *p = tile->call->problem;
    struct register_tile t = register_tile_of(tile, scratch, group, block);
    _Alignas(64) float largest[TILE_GROUPS * GROUP_ROWS];
    memcpy(largest, t.max, (size_t)t.groups * GROUP_ROWS * sizeof *largest);
    score_block(&t, scratch, block, p->d_qk, largest);
    weigh_block(&t, scratch, block, p->d_v, largest);
    add_block(&t, scratch, block, p->d_v, ahead);
    for (int32_t g = 0; g < t.groups; g++)
        if (t.most[g])
            add_few(tile, scratch, block, t.o + g * t.o_apart, t.s + g * BLOCK * GROUP_ROWS, t.added[g],
                    t.most[g], t.visible[g], t.vectors[g]);
}

/* Returns the conversion of a block's keys into half `half` of the scratch while `values` values are
 * added. */
static struct coming coming_of(const struct cpu_tile *tile, const struct scratch *scratch, int half,
                               const struct cpu_key *keys, int32_t count, int64_t values)
{
    const struct attention_problem *p = tile->call->problem;
    return (struct coming){.keys = keys,
                           .count = count,
                           .rate = (int32_t)(count * 256 / values) + 1,
                           .key = scratch->keys[half],
                           .value = tile->call->value_bytes ? scratch->values[half] : NULL,
                           .key_step = scratch->key_step,
                           .value_step = scratch->value_step,
                           .d_v = p->d_v,
                           .is_bf16 = p->element == ELEMENT_BF16};
}

static void attend(const struct cpu_tile *tile, void *memory)
{
    /* Three blocks of keys: this one, the next, which is converted, and the one after it, which is prefetched. */
    enum { BLOCKS = 3 };
    const struct attention_problem *p = tile->call->problem;
    const int32_t groups = (tile->rows + GROUP_ROWS - 1) / GROUP_ROWS;
    struct scratch scratch;
    scratch_layout(tile->call, (uintptr_t)memory, &scratch);
    memset(scratch.o, 0, (size_t)groups * (size_t)p->d_v * GROUP_ROWS * sizeof(float));
    for (int32_t i = 0; i < groups * GROUP_ROWS; i++) scratch.max[i] = -INFINITY, scratch.sum[i] = 0.0f;

    pack_q(tile, scratch.q, scratch.keys[0]);
    const int64_t end = cpu_visible_end(tile, tile->rows - 1); /* the last row sees most */
    struct cpu_key keys[BLOCKS][BLOCK];
    int64_t begins[BLOCKS], at = tile->begin_key;
    int32_t counts[BLOCKS];
    for (int i = 0; i < 2; i++) {
        begins[i] = at, counts[i] = tile->call->next_keys(tile, &at, end, keys[i]);
        tile_prefetch(tile->call, keys[i], counts[i]);
    }
    struct coming first = coming_of(tile, &scratch, 0, keys[0], counts[0], p->d_v);
    convert_rest(&first);
    int now = 0, next = 1, after = 2;
    for (int half = 0; counts[now]; half ^= 1) {
        begins[after] = at, counts[after] = tile->call->next_keys(tile, &at, end, keys[after]);
        struct ahead ahead = {
            .bring = tile_ahead_of_call(tile->call, keys[after], counts[after], (groups + 1) / 2 * p->d_v),
            .coming = coming_of(tile, &scratch, half ^ 1, keys[next], counts[next], groups * p->d_v)};
        const struct block block = {scratch.keys[half], scratch.values[half], begins[now], counts[now]};
        for (int32_t g = 0; g < groups; g += TILE_GROUPS) attend_block(tile, &scratch, g, &block, &ahead);
        convert_rest(&ahead.coming);
        const int done = now;
        now = next, next = after, after = done;
    }
    for (int32_t g = 0; g < groups; g++)
        tile_write(tile, g * GROUP_ROWS, GROUP_ROWS, scratch.o + g * p->d_v * GROUP_ROWS, GROUP_ROWS,
                   scratch.max + g * GROUP_ROWS, scratch.sum + g * GROUP_ROWS);
}

const struct cpu_attention ATTENTION_NAME = {CPU_ATTENTION_DRIVER, PLAN_ROW_TILE, ROWS_OF_HEADS,
                                             scratch_bytes,        attend,        result_round};
