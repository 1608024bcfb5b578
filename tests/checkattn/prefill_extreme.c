/* SPDX-License-Identifier: MIT
 *
 * Inputs of sparse prefill with extreme scores, one kind next to another: rows of NaN and of -inf, among
 * others and by whole tiles of 64 heads; rows of +inf, and of one +inf among -inf; scores from -6e37 on,
 * in powers of two, alone or with ordinary ones; a largest score that comes last; lists whose first blocks
 * name no key, or only keys of score -inf. No finite score exceeds fp32, and a key with score -inf has
 * finite values.
 */
#include "sparse_case.h"

#include "num.h"

#include <math.h>
#include <string.h>

/* Columns counted from the end of a vector: bf16 in every format, and not part of V in keys of 576. */
enum {
    COLUMN_LOW = 1, /* makes scores low; 0 in ordinary rows and keys */
    COLUMN_LARGE,   /* makes the largest score */
    COLUMN_KEY,     /* -inf in a key, positive in all queries */
    COLUMN_QUERY,   /* ±inf in a query, positive in all keys */
    COLUMN_ONE      /* +inf in a query, positive only in the largest key and negative in the others */
};

static void put(uint8_t *end, int column, float value)
{
    const uint16_t bits = num_to_bf16(value);
    memcpy(end - column * (int)sizeof bits, &bits, sizeof bits);
}

/* Returns true if all values of keys are codes. */
static bool has_codes(const struct sparse_case *s)
{
    const struct kv_layout *layout = &s->pool[0].layout;
    return kv_is_quantised(layout) && !layout->rope;
}

/* Returns the position of a column in such keys: groups have up to 128 values, and the longest leave no
 * group to COLUMN_KEY, which needs none if all columns are in V. */
static int column_at(const struct sparse_case *s, int column)
{
    enum { GROUP = 128 };
    return (int)s->c.d_qk - 1 -
           (column == COLUMN_KEY ? GROUP - 1 : GROUP * (column > COLUMN_KEY ? column - 2 : column - 1));
}

/* Sets a value of a query. */
static void put_query(const struct sparse_case *s, uint8_t *row, int column, float value)
{
    const int64_t from_end = has_codes(s) ? s->c.d_qk - column_at(s, column) : column;
    put(row + (s->c.d_qk - from_end + column) * (int)sizeof(uint16_t), column, value);
}

/* Returns the keys' value in the first of these columns: at most 1 if it is in V, else about half of the
 * magnitude of a low score. All factors are powers of two, so that equal scores are equal in every order
 * of summation. */
static float unit_of(const struct sparse_case *s)
{
    return s->c.d_qk > S_D_V ? 0x1p60f : 1.0f;
}

/* ---- Keys, by slot % KEYS --------------------------------------------------------------------- */

enum key {
    KEY_ORDINARY, /* and the next two */
    KEY_LARGEST = 3,
    KEY_LOW,      /* with a low query: -2^120, before the scale */
    KEY_LOWER,    /* -2^126 */
    KEY_LESS_LOW, /* -2^96 */
    KEY_INFINITE, /* score -inf; ordinary if all columns are in V */
    KEY_STEP,     /* the largest divided by 25.6 */
    KEYS,
    KEY_ANY = -1
};

static int32_t slot_of(const struct sparse_pool *pool, int32_t slot, enum key key)
{
    if (key == KEY_ANY) return slot;
    const int32_t at = (int32_t)key + (key == KEY_ORDINARY ? slot % 3 : 0);
    const int32_t other = slot - slot % KEYS + at;
    return other < pool->s_k ? other : at;
}

/* Writes keys whose values are all codes: the columns are in separate groups, or share one if their values
 * fit it. FP4 has no scale of 2^-30. */
static void put_codes(const struct sparse_case *s, int64_t slot, enum key key, float low, float large)
{
    const struct sparse_pool *pool = &s->pool[0];
    const bool fp4 = pool->layout.element == KV_ELEMENT_E2M1;
    sparse_pool_put_alone(pool, slot, column_at(s, COLUMN_LOW), fp4 && key == KEY_LESS_LOW ? 0x1p-9f : low);
    sparse_pool_put_alone(pool, slot, column_at(s, COLUMN_LARGE), large);
    sparse_pool_put_alone(pool, slot, column_at(s, COLUMN_QUERY), 0.5f);
    sparse_pool_put_alone(pool, slot, column_at(s, COLUMN_ONE), key == KEY_LARGEST ? 0.5f : -0.5f);
}

void prefill_extreme_key(const struct sparse_case *s, uint8_t *token, int64_t slot)
{
    static const float low[KEYS] = {[KEY_LOW] = 0x1p-6f, [KEY_LOWER] = 1.0f, [KEY_LESS_LOW] = 0x1p-30f};
    const enum key key = (enum key)(slot % KEYS);
    const float large = key == KEY_LARGEST ? 1.0f : key == KEY_STEP ? 0x1.4p-5f : 0.0f;
    if (has_codes(s)) {
        put_codes(s, slot, key, low[key], large);
        return;
    }
    uint8_t *end = sparse_pool_end(&s->pool[0], token);
    put(end, COLUMN_LOW, low[key] * unit_of(s));
    put(end, COLUMN_LARGE, large);
    put(end, COLUMN_QUERY, 0.5f);
    put(end, COLUMN_ONE, key == KEY_LARGEST ? 0.5f : -0.5f);
    if (key == KEY_INFINITE && s->c.d_qk > S_D_V) put(end, COLUMN_KEY, -INFINITY);
}

/* ---- Lists, by class % LISTS ------------------------------------------------------------------ */

enum list {
    LIST_ANY,
    LIST_LOW,
    LIST_RISING, /* lower, low, less low, then one not low */
    LIST_LARGEST_LAST,
    LIST_FRONT_EMPTY, /* keys only in the last block */
    LIST_FRONT_EMPTY_LOW,
    LIST_INFINITE,
    LIST_FRONT_INFINITE, /* the first half is infinite */
    LIST_STEPS,          /* the largest comes last, for QUERY_STEPS */
    LISTS
};

/* Returns the kind of the n-th of `keys` keys. */
static enum key key_of(enum list list, int64_t n, int64_t keys)
{
    const bool last = n + 1 == keys;
    switch (list) {
    case LIST_LOW:
    case LIST_FRONT_EMPTY_LOW: return n % 2 ? KEY_LOWER : KEY_LOW;
    case LIST_RISING:
        return last ? KEY_ORDINARY : n < keys / 3 ? KEY_LOWER : n < keys / 3 * 2 ? KEY_LOW : KEY_LESS_LOW;
    case LIST_LARGEST_LAST: return last ? KEY_LARGEST : KEY_ORDINARY;
    case LIST_STEPS: return last ? KEY_LARGEST : KEY_STEP;
    case LIST_INFINITE: return KEY_INFINITE;
    case LIST_FRONT_INFINITE: return n < keys / 2 ? KEY_INFINITE : KEY_ORDINARY;
    default: return KEY_ANY;
    }
}

static enum list list_of(int64_t token)
{
    return (enum list)(token % PREFILL_CLASSES % LISTS);
}

void prefill_extreme_list(const struct sparse_case *s, int64_t class, int64_t key_head)
{
    enum { BLOCK = 64 };
    const enum list list = list_of(class);
    const bool front_empty = list == LIST_FRONT_EMPTY || list == LIST_FRONT_EMPTY_LOW;
    int32_t *entries = sparse_list(&s->c, 0, 0, class, key_head);
    int64_t keys = 0, last = 0;
    for (int64_t i = 0; i < sparse_count(&s->c, 0, 0, class); i++)
        if (sparse_pool_is_key(&s->pool[0], entries[i])) keys++, last = i;
    for (int64_t i = 0, n = 0; n < keys; i++) {
        int32_t *entry = &entries[i];
        if (!sparse_pool_is_key(&s->pool[0], *entry)) continue;
        *entry = front_empty && i / BLOCK < last / BLOCK
                     ? -1
                     : slot_of(&s->pool[0], *entry, key_of(list, n, keys));
        n++;
    }
}

/* ---- Queries ---------------------------------------------------------------------------------- */

enum query {
    QUERY_NAN,
    QUERY_INFINITE, /* all scores -inf */
    QUERY_LOW,
    QUERY_LESS_LOW, /* by 2^-20: scores near -1e30 */
    QUERY_LARGE,    /* the largest score's weight exceeds the others by 2^46 */
    QUERY_LARGEST,  /* the same by 2^(7e30) */
    QUERY_ABOVE,    /* all scores +inf */
    QUERY_ONE,      /* the largest key's score is +inf, the others are -inf */
    QUERY_ORDINARY, /* the same by 2^11; also the next value */
    QUERIES = QUERY_ORDINARY + 2,
    /* With LIST_STEPS: scores slightly above 2^26 and then above 2^31, in powers of two, whose differences
     * are below 2^31 and rounded less than the scores. */
    QUERY_STEPS
};

/* Tiles of a single kind are followed by as many of all kinds, plus one: a number coprime to that of the
 * lists. */
static enum query query_of(struct sparse_case *s, int64_t token, int64_t head)
{
    enum { TILE = 64, UNIFORM = 3, TILES = 7 };
    if (!token && !head) s->first_kind = random_between(&s->c.random, 0, TILES - 1);
    if (list_of(token) == LIST_STEPS)
        return random_between(&s->c.random, 0, 1) ? QUERY_STEPS : QUERY_ORDINARY;
    const int64_t tile = (s->first_kind + token + 3 * (head / TILE)) % TILES;
    return (enum query)(tile < UNIFORM ? tile : random_between(&s->c.random, 0, QUERIES - 1));
}

static float large_of(struct sparse_case *s, enum query query)
{
    static const double log2_e = 1.44269504088896341;
    switch (query) {
    case QUERY_LARGE: return 64.0f;
    case QUERY_LARGEST: return 0x1p103f;
    case QUERY_STEPS: /* within the bounds even when rounded to bf16 */
        return (float)(0x1p31 * (1.005 + 0.025 * random_unit(&s->c.random)) /
                       (s->c.args.sparse_prefill.softmax_scale * log2_e));
    default: return 16.0f;
    }
}

void prefill_extreme_query(struct sparse_case *s, uint8_t *row, int64_t token, int64_t head)
{
    static const uint16_t nan = 0x7fff; /* differs from the fill of outputs */
    const enum query query = query_of(s, token, head);
    const float low = query == QUERY_LOW ? 0x1p126f : query == QUERY_LESS_LOW ? 0x1p106f : 0.0f;
    put_query(s, row, COLUMN_LOW, -low / unit_of(s));
    put_query(s, row, COLUMN_LARGE, large_of(s, query));
    put_query(s, row, COLUMN_KEY, 0.25f);
    put_query(s, row, COLUMN_ONE, query == QUERY_ONE ? INFINITY : 0.0f);
    if (query == QUERY_INFINITE || query == QUERY_ABOVE)
        put_query(s, row, COLUMN_QUERY, query == QUERY_ABOVE ? INFINITY : -INFINITY);
    if (query == QUERY_NAN)
        memcpy(row + 2 * random_between(&s->c.random, 0, s->c.d_qk - 1), &nan, sizeof nan);
}
