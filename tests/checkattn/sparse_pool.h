/* SPDX-License-Identifier: MIT
 *
 * Keys that lists of indices name, or pages of dense decode hold: memory in every format, NaN wherever no key was put, and what
 * keys are drawn from.
 */
#ifndef CHECKATTN_SPARSE_POOL_H
#define CHECKATTN_SPARSE_POOL_H

#include "case.h"
#include "kvformat.h"

enum { S_D_V = 512, SPARSE_WIDEST = 576 };

/* What cases draw from. */
enum { S_LENGTHS_NONE, S_LENGTHS_FULL, S_LENGTHS_VARIED, S_LENGTHS_ZERO, S_LENGTHS_BEYOND };
enum {
    S_INDICES_SOME /* one in eight names no key */,
    S_INDICES_ALL,
    S_INDICES_NONE,
    S_INDICES_TWICE,
    S_INDICES_BLOCKS /* half of the blocks of 64 name none */,
    S_INDICES_ANY /* half of the entries are any number */
};
enum {
    S_NORMAL,
    S_SPIKED, /* entries at borders weigh more */
    S_STEEP,  /* scores of some ±200 */
    /* Not of a grid: scores of +inf, all of a row, or one among others; a softmax_scale of 3e38, whose scores fp32 does not
     * hold. Sparse prefill has the former among its extreme ones. */
    S_INFINITE,
    S_BEYOND
};

/* What FP8 keys are made of. */
enum {
    S_CODES_WRITTEN, /* as cache writers leave them: scales are powers of two */
    S_CODES_SCALES,  /* any scales, where the format has others */
    S_CODES_EXTREME, /* subnormals, ±448, zeros of both signs */
    S_CODES_BEYOND,  /* as written, and now and then a scale, a rope value or a query that is none in fp16 */
    S_CODES_NAN      /* as written, and one key that is seen has a NaN */
};

/* 1e5, which is beyond fp16. */
enum { SPARSE_LARGE_BF16 = 0x47c3 };

/* A cache, and the keys that are named in it. */
struct sparse_pool {
    enum kv_format format;
    struct kv_layout layout;
    int64_t d_qk;
    int64_t s_k, topk, page_size, pages;       /* topk 0: there is none */
    struct guarded *memory, *indices, *length; /* of the case; NULL: the cache was not given */
    fmla_tensor *view;                         /* of memory, or of far pages */
    int64_t shape[4], strides[4];
    int64_t page_bytes, slot_bytes; /* in memory */
    int64_t head_bytes;             /* from a key head to the next, where there are more */
    float scale;                    /* of the whole cache; read for FP8_576 alone */
    bool has_length;
    int64_t *count; /* of each request: indices that count */
};

/* Draws what keys are copied from: values N(mean, 0.1²), clamped to ±1. */
void sparse_pool_draw(struct random_state *random, float mean);

/* The cache, its indices and lengths are the tensors of a case from `first` on; their names come later. */
void sparse_pool_in(struct sparse_pool *pool, struct test_case *c, int first);

/* Format, d_qk, pages and page_size are set: memory of the cache, and the view of it that is the argument. */
void sparse_pool_make(struct sparse_pool *pool, struct random_state *random, enum layout layout);

int64_t sparse_pool_slots(const struct sparse_pool *pool);

/* Is there a key of that index? */
bool sparse_pool_is_key(const struct sparse_pool *pool, int32_t index);

/* The first of so many entries of a list that names a key; -1: none does. */
int64_t sparse_pool_first(const struct sparse_pool *pool, const int32_t *list, int64_t count);

/* Where the bytes of a slot are in memory, and its scales where they are apart. */
uint8_t *sparse_pool_token(const struct sparse_pool *pool, int64_t slot);
uint8_t *sparse_pool_scales(const struct sparse_pool *pool, int64_t slot);

/* The end of the token's last values, which are 16 bits wide where not all have codes. */
uint8_t *sparse_pool_end(const struct sparse_pool *pool, uint8_t *token);

/* The scale of a cache whose keys are made of such codes. */
float sparse_pool_scale(struct random_state *random, int64_t codes);

/* A drawn key into a slot. */
void sparse_pool_put(const struct sparse_pool *pool, struct random_state *random, int64_t codes, int64_t slot,
                     int64_t key_head, bool spike);

/* The last values of a key that has codes for all, and scales: their groups are written again. */
void sparse_pool_put_end(const struct sparse_pool *pool, int64_t slot, const float *last, int count);

/* … or one whose group is otherwise 0, exactly: a small power of two times 1 or 1.25, which in FP4 is one of e4m3. */
void sparse_pool_put_alone(const struct sparse_pool *pool, int64_t slot, int column, float value);

/* One value of a key that is seen: NaN, by its code or by its scale. */
void sparse_pool_put_nan(const struct sparse_pool *pool, struct random_state *random, uint8_t *token,
                         uint8_t *scales);

/* A whole key of NaN. */
void sparse_pool_put_nans(const struct sparse_pool *pool, uint8_t *token);

/* The values of a key, as attention takes them: d_qk of them, from the bytes of its token. */
void sparse_pool_values(const struct sparse_pool *pool, const uint8_t *token, int64_t slot, float *values);

/* Copies the pages to where they are more than 2^31 bytes apart, and sets the view to that. Returns the stride of pages
 * before. */
int64_t sparse_pool_spread(struct sparse_pool *pool);

/* What a row with these values of q sees by the first entries of a list. */
void sparse_pool_magnitude(const struct sparse_pool *pool, const int32_t *list, int64_t count,
                           int64_t key_head, double scale, const struct guarded *q, const uint16_t *row,
                           struct magnitude *magnitude);

/* A defect into entry i of a list of which `count` count; false where there is no place for it. */
bool sparse_pool_plant(const struct sparse_pool *pool, enum defect fault, int32_t *list, int64_t i,
                       int64_t count, int32_t *length, struct patch *patch);

#endif
