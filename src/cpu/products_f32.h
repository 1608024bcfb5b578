/* SPDX-License-Identifier: MIT
 *
 * The products of the fp32 kernels, for any vector unit, in the compiler's vector arithmetic. The including
 * file gives the width of a vector and the number of sums that its registers hold, and is compiled with the
 * flags of its instruction set.
 *
 *   LANES              floats of a vector
 *   VECTORS            vectors of a group of 16 rows: LANES · VECTORS = 16
 *   WIDE               maximum vectors of a register tile: those of one group, or of two
 *   AT_ONCE(vectors)   keys (in S = K Q) or values (in O += Vᵀ P) of a register tile of so many vectors;
 *                      AT_ONCE · vectors sums stay in registers
 *   LARGER(x, top)     the instruction for x > top ? x : top, where there is one; it ignores a NaN in x
 *   SMALLER(x, top)    the instruction for x < top ? x : top, where there is one
 *
 *   lanes = rows: the rows of a group lie side by side, so the softmax has no horizontal step, and a cached
 *   value, loaded once, is broadcast to all of them.
 */
#ifndef FMLA_CPU_PRODUCTS_F32_H
#define FMLA_CPU_PRODUCTS_F32_H

#include "convert.h"
#include "tile.h"

#include <string.h>

enum { GROUP_ROWS = LANES * VECTORS, BLOCK = PLAN_BLOCK };
enum { TILE_GROUPS = WIDE / VECTORS, MOST_AT_ONCE = 16, TWO = WIDE < 2 ? 1 : 2 /* vectors */ };
enum { FEW = 4 /* for the remainder of AT_ONCE: single sums would wait for each other */ };
_Static_assert(GROUP_ROWS == 16, "a group is 16 rows");

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef int32_t vector_int __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef uint32_t vector_uint __attribute__((vector_size(LANES * sizeof(float)), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* Out of line, so that the addresses of its loops have all registers. */
#define ALONE static __attribute__((noinline))
/* Hides how a number or an address was computed. Otherwise the compiler keeps an address for each of many
 * numbers at equal distances, more addresses than there are registers. */
#define KEEP(x) __asm__("" : "+r"(x))

INLINE vector select(vector_int mask, vector yes, vector no)
{
    return (vector)(((vector_int)yes & mask) | ((vector_int)no & ~mask));
}

#ifndef LARGER
#define LARGER(x, top)  select((vector_int)((x) > (top)), x, top)
#define SMALLER(x, top) select((vector_int)((x) < (top)), x, top)
#endif

/* ---- The next blocks ------------------------------------------------------------------------ */

/* Keys of the next block, converted to fp32 a few at a time while values are added, so that the core
 * multiplies while it waits for the cache lines that the conversion stores to. */
struct coming {
    const struct cpu_key *keys; /* not yet converted */
    int32_t count;
    int32_t due, rate;  /* in keys · 256: overdue keys, and keys per value */
    float *key, *value; /* to the next key and value; value is NULL where keys hold their values */
    int64_t key_step, value_step, d_v;
    bool is_bf16; /* of separate values */
};

/* The conversion of the next block, and the prefetch of the one after it into the L2 cache. */
struct ahead {
    struct tile_ahead bring;
    struct coming coming;
};

static inline void convert_coming(struct coming *coming)
{
    convert_key(coming->key, coming->keys);
    coming->key += coming->key_step;
    if (coming->value) {
        convert(coming->value, (const uint16_t *)(const void *)coming->keys->value, coming->d_v,
                coming->is_bf16);
        coming->value += coming->value_step;
    }
    coming->keys++, coming->count--;
}

/* Converts all keys that are left. */
static inline void convert_rest(struct coming *coming)
{
    while (coming->count) convert_coming(coming);
}

static void convert_due(struct coming *coming)
{
    for (; coming->due > 0 && coming->count; coming->due -= 256) convert_coming(coming);
}

/* Prefetches and converts what is due after `values` more values have been added. */
static inline void look_ahead(struct ahead *ahead, int32_t values)
{
    tile_bring(&ahead->bring, values);
    ahead->coming.due += values * ahead->coming.rate;
    if (ahead->coming.due > 0 && ahead->coming.count) convert_due(&ahead->coming);
}

/* Returns the floats from one key of a block to the next for keys of `width` numbers: an odd number of cache
 * lines, so that equal dimensions of all keys spread over all sets of the L1 cache. */
static inline int64_t step_of(int64_t width)
{
    enum { LINE = CACHE_LINE / (int)sizeof(float) };
    return ((width + LINE - 1) / LINE | 1) * LINE;
}

/* ---- The two products ----------------------------------------------------------------------- */

/* Returns how many vectors of a group to compute where `rows` rows are left for it: those with a row, but
 * four instead of three, which do not justify another copy of the products. The bits of a row do not depend
 * on it. */
static inline int vectors_of(int32_t rows)
{
    /* NOLINTNEXTLINE(bugprone-branch-clone): where VECTORS is 2 */
    const int needed = rows <= LANES ? 1 : rows <= 2 * LANES ? 2 : VECTORS;
    return needed < VECTORS ? needed : VECTORS;
}

/* Returns the offset of vector v of a register tile, whose groups are `apart` floats apart. */
INLINE int64_t vector_at(int v, int64_t apart)
{
    return v / VECTORS * apart + v % VECTORS * LANES;
}

/* Odd multiples of a distance; with scaled indices they reach seven more addresses from one. */
struct multiples {
    int64_t one, three, five, seven;
};

INLINE int64_t times(int n, const struct multiples *distance)
{
    return n == 7   ? distance->seven
           : n == 6 ? 2 * distance->three
           : n == 5 ? distance->five
           : n == 3 ? distance->three
                    : n * distance->one;
}

/* sum[u][v] += Σ_i a[i · step + u · apart] · x[i][v] for `count` numbers u and `vectors` vectors of rows,
 * whose groups are x_apart floats apart. Serves both products. Scores have step 1, and `apart` is the
 * distance of keys. Values have apart 1, and the values of the next tiles, a cache line further, are
 * prefetched into the L1 cache. The last three arguments are compile-time constants. */
INLINE void multiply_add(vector sum[][WIDE], const float *a, int64_t step, int64_t apart, const float *x,
                         int64_t x_apart, int64_t length, const int count, const int vectors,
                         const bool values)
{
    enum { OF_BASE = 8 }; /* numbers addressed from one base */
    const int bases = values ? 1 : (count + OF_BASE - 1) / OF_BASE;
    const float *base[MOST_AT_ONCE / OF_BASE];
    struct multiples distance = {apart, 3 * apart, 5 * apart, 7 * apart};
    KEEP(distance.three);
    KEEP(distance.five);
    KEEP(distance.seven);
    for (int j = 0; j < bases; j++) base[j] = a + j * OF_BASE * apart;
    for (const float *const end = x + length * GROUP_ROWS; x < end; x += GROUP_ROWS) {
        vector row[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = *(const vector *)(x + vector_at(v, x_apart));
        if (values) __builtin_prefetch(base[0] + CACHE_LINE / (int)sizeof(float), 0, 3);
#pragma GCC unroll 16
        for (int u = 0; u < count; u++) {
            /* Loaded once: in the product of a scalar and a vector a sanitizer would check the access for
             * every lane. */
            const float number = values ? base[0][u] : base[u / OF_BASE][times(u % OF_BASE, &distance)];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[u][v] += number * row[v];
        }
        for (int j = 0; j < bases; j++) {
            base[j] += step;
            KEEP(base[j]);
        }
    }
}

/* Arguments of the scores of a register tile. */
struct scored {
    float *s, *top; /* [groups][64][16], [groups][16]; top may be NULL */
    const float *keys, *q;
    int64_t key_step, d_qk; /* key_step: floats from a key to the next */
};

INLINE void score_tile(const struct scored *c, int32_t t, const int count, const int vectors)
{
    vector sum[MOST_AT_ONCE][WIDE];
    float *const s = c->s + t * GROUP_ROWS;
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[u][v] = (vector){0};
    multiply_add(sum, c->keys + t * c->key_step, 1, c->key_step, c->q, c->d_qk * GROUP_ROWS, c->d_qk, count,
                 vectors, false);
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(vector *)(s + u * GROUP_ROWS + vector_at(v, BLOCK * GROUP_ROWS)) = sum[u][v];
    if (!c->top) return;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        vector *const top = (vector *)(c->top + vector_at(v, GROUP_ROWS));
        vector largest = *top;
#pragma GCC unroll 16
        for (int u = 0; u < count; u++) largest = LARGER(sum[u][v], largest);
        *top = largest;
    }
}

INLINE void scores_by(const int vectors, const struct scored *c, int32_t count)
{
    int32_t t = 0;
    for (; t + AT_ONCE(vectors) <= count; t += AT_ONCE(vectors)) score_tile(c, t, AT_ONCE(vectors), vectors);
    for (; t + FEW <= count; t += FEW) score_tile(c, t, FEW, vectors);
    for (; t < count; t++) score_tile(c, t, 1, vectors);
}

ALONE void scores_by_one(const struct scored *c, int32_t count)
{
    scores_by(1, c, count);
}

ALONE void scores_by_two(const struct scored *c, int32_t count)
{
    scores_by(TWO, c, count);
}

ALONE void scores_by_all(const struct scored *c, int32_t count)
{
    scores_by(WIDE, c, count);
}

/* s[group][t][row] = Σ_d keys[t][d] · q[group][d][row] for `vectors` vectors of rows. Where `top` is not
 * NULL, raises top[group][row] to the largest of these scores, ignoring NaN. */
static void scores(int vectors, float *s, float *top, const float *keys, int64_t key_step, const float *q,
                   int32_t count, int64_t d_qk)
{
    const struct scored c = {s, top, keys, q, key_step, d_qk};
    /* NOLINTBEGIN(bugprone-branch-clone): branches are the same where WIDE is 2 */
    if (vectors == 1)
        scores_by_one(&c, count);
    else if (vectors == 2)
        scores_by_two(&c, count);
    else
        scores_by_all(&c, count);
    /* NOLINTEND(bugprone-branch-clone) */
}

/* Arguments of the sums of a register tile. */
struct summed {
    float *o;             /* [groups][width][16] */
    const float *rescale; /* [groups][16] */
    const float *values, *s;
    int64_t value_step, width;
    int32_t keys;
    struct ahead *ahead;
};

/* Adds the values of one register tile. Prefetches the next sums into the L1 cache; these may lie behind the
 * last sums of o. */
INLINE void value_tile(const struct summed *c, int64_t d, const int count, const int vectors)
{
    vector sum[MOST_AT_ONCE][WIDE];
    const int64_t apart = c->width * GROUP_ROWS;
    float *const o = c->o + d * GROUP_ROWS;
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *const at = o + u * GROUP_ROWS + vector_at(v, apart);
            sum[u][v] = *(const vector *)at * *(const vector *)(c->rescale + vector_at(v, GROUP_ROWS));
            if (v % VECTORS == 0) __builtin_prefetch(at + count * GROUP_ROWS, 1, 3);
        }
    multiply_add(sum, c->values + d, c->value_step, 1, c->s, BLOCK * GROUP_ROWS, c->keys, count, vectors,
                 true);
#pragma GCC unroll 16
    for (int u = 0; u < count; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(vector *)(o + u * GROUP_ROWS + vector_at(v, apart)) = sum[u][v];
}

INLINE void add_values_by(const int vectors, const struct summed *c)
{
    int64_t d = 0;
    for (; d + AT_ONCE(vectors) <= c->width; d += AT_ONCE(vectors)) {
        look_ahead(c->ahead, AT_ONCE(vectors) * (vectors > VECTORS ? TILE_GROUPS : 1));
        value_tile(c, d, AT_ONCE(vectors), vectors);
    }
    for (; d + FEW <= c->width; d += FEW) value_tile(c, d, FEW, vectors);
    for (; d < c->width; d++) value_tile(c, d, 1, vectors);
}

ALONE void add_values_by_one(const struct summed *c)
{
    add_values_by(1, c);
}

ALONE void add_values_by_two(const struct summed *c)
{
    add_values_by(TWO, c);
}

ALONE void add_values_by_all(const struct summed *c)
{
    add_values_by(WIDE, c);
}

/* o[group][d][row] = o[group][d][row] · rescale[group][row] + Σ_t values[t][d] · s[group][t][row] for
 * `vectors` vectors of rows and `width` numbers d, over `count` keys. Where a row does not see one of these
 * keys, its weight is 0 and the value must be finite. */
static void add_values(int vectors, float *o, const float *values, int64_t value_step, int64_t width,
                       const float *s, int32_t count, const float *rescale, struct ahead *ahead)
{
    const struct summed c = {o, rescale, values, s, value_step, width, count, ahead};
    /* NOLINTBEGIN(bugprone-branch-clone): as in scores */
    if (vectors == 1)
        add_values_by_one(&c);
    else if (vectors == 2)
        add_values_by_two(&c);
    else
        add_values_by_all(&c);
    /* NOLINTEND(bugprone-branch-clone) */
}

/* Returns whether every one of `width` numbers of vectors [from, to) is finite. */
static bool are_finite(const float *values, int64_t step, int32_t from, int32_t to, int64_t width)
{
    uint32_t infinite = 0;
    for (int32_t t = from; t < to; t++)
        for (int64_t d = 0; d < width; d++) {
            const uint32_t exponent = num_bits(values[t * step + d]) << 1 >> 24;
            infinite |= exponent == 255u;
        }
    return !infinite;
}

/* Adds the value of one key to the rows that see it. The value holds NaN or infinity, so a weight of 0 would
 * not protect the other rows. */
static void add_value_where_seen(float *o, const float *value, const float *s, int64_t width,
                                 const bool sees[GROUP_ROWS], int lanes)
{
    for (int64_t d = 0; d < width; d++)
        for (int l = 0; l < lanes; l++)
            if (sees[l]) o[d * GROUP_ROWS + l] += value[d] * s[l];
}

/* ---- Softmax -------------------------------------------------------------------------------- */

/* Returns 2^x for x below 128. Results below 2^-126 are 0 or, from x = -126.5 on, as exact as subnormals are;
 * NaN stays NaN. x = n + f with |f| ≤ 1/2. 2^f is the polynomial of degree 5 that is 1 at 0 and whose largest
 * relative error, 2^-23.4, is smallest. 2^n is made from its exponent bits, which are 0 for the smallest
 * n. */
INLINE vector exp2_of(vector x)
{
    const vector least = (vector){0} - 127.0f;
    /* Adding it leaves the nearest integer plus the exponent bias in the lowest bits. */
    const vector shifter = (vector){0} + (0x1.8p23f + 127.0f);
    x = LARGER(least, x);
    const vector shifted = x + shifter;
    const vector f = x - (shifted - shifter);
    vector y = f * 1.326472734e-3f + 9.671512772e-3f;
    y = y * f + 5.550733744e-2f;
    y = y * f + 2.402224208e-1f;
    y = y * f + 6.931469776e-1f;
    y = y * f + 1.0f;
    return y * (vector)((vector_uint)shifted << 23);
}

#endif
