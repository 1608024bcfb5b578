/* SPDX-License-Identifier: MIT
 *
 * Keys named by lists of indices, or stored in pages of dense decode: memory in every format, NaN in all
 * slots without a key, and the values that keys are drawn from.
 */
#ifndef CHECKATTN_SPARSE_POOL_H
#define CHECKATTN_SPARSE_POOL_H

#include "case.h"
#include "kvformat.h"

enum { S_D_V = 512, SPARSE_WIDEST = 576 };

/* Choices of the cases. */
enum { S_LENGTHS_NONE, S_LENGTHS_FULL, S_LENGTHS_VARIED, S_LENGTHS_ZERO, S_LENGTHS_BEYOND };
enum {
    S_INDICES_SOME /* one in eight is invalid */,
    S_INDICES_ALL,
    S_INDICES_NONE,
    S_INDICES_TWICE,
    S_INDICES_BLOCKS /* half of the blocks of 64 are invalid */,
    S_INDICES_ANY /* half of the entries are random numbers */
};
enum {
    S_NORMAL,
    S_SPIKED, /* entries at borders weigh more */
    S_STEEP,  /* scores of about ±200 */
    /* Not in a grid: scores of +inf, a whole row or one among others; a softmax_scale of 3e38, whose
     * scores exceed fp32. Sparse prefill has the former among its extreme inputs. */
    S_INFINITE,
    S_BEYOND
};

/* The values of FP8 keys. */
enum {
    S_CODES_WRITTEN, /* as cache writers leave them: scales are powers of two */
    S_CODES_SCALES,  /* scales other than powers of two, if the format has them */
    S_CODES_EXTREME, /* subnormals, ±448, zeros of both signs */
    S_CODES_BEYOND,  /* as written, with an occasional scale, rope value or query outside fp16's range */
    S_CODES_NAN      /* as written, with a NaN in one visible key */
};

/* 1e5, which exceeds fp16. */
enum { SPARSE_LARGE_BF16 = 0x47c3 };

/* A cache and its named keys. */
struct sparse_pool {
    enum kv_format format;
    struct kv_layout layout;
    int64_t d_qk;
    int64_t s_k, topk, page_size, pages;       /* topk 0: no such cache */
    struct guarded *memory, *indices, *length; /* of the case; NULL: no cache given */
    fmla_tensor *view;                         /* of memory or of far pages */
    int64_t shape[4], strides[4];
    int64_t page_bytes, slot_bytes; /* in memory */
    int64_t head_bytes;             /* stride between key heads, if several */
    float scale;                    /* of the whole cache; used only for FP8_576 */
    bool has_length;
    int64_t *count; /* per request: indices that count */
};

/* Draws the values that keys are copied from: N(mean, 0.1²), clamped to ±1. */
void sparse_pool_draw(struct random_state *random, float mean);

/* Makes the memory of the cache and the view that is the argument; format, d_qk, pages and page_size are
 * already set. */
void sparse_pool_make(struct sparse_pool *pool, struct random_state *random, enum layout layout);

int64_t sparse_pool_slots(const struct sparse_pool *pool);

/* Returns true if a key has that index. */
bool sparse_pool_is_key(const struct sparse_pool *pool, int32_t index);

/* Return the addresses of a slot's bytes, and of its scales if they are stored apart. */
uint8_t *sparse_pool_token(const struct sparse_pool *pool, int64_t slot);
uint8_t *sparse_pool_scales(const struct sparse_pool *pool, int64_t slot);

/* Returns the end of the token's last values, which have 16 bits unless all values are codes. */
uint8_t *sparse_pool_end(const struct sparse_pool *pool, uint8_t *token);

/* Returns the scale of a cache whose keys have such codes. */
float sparse_pool_scale(struct random_state *random, int64_t codes);

/* Puts a random key into a slot. */
void sparse_pool_put(const struct sparse_pool *pool, struct random_state *random, int64_t codes, int64_t slot,
                     int64_t key_head, bool spike);

/* Puts the last values of a key that has codes for all values, and scales: re-encodes their groups. */
void sparse_pool_put_end(const struct sparse_pool *pool, int64_t slot, const float *last, int count);

/* Puts one value into a group that is otherwise 0, exactly: a small power of two times 1 or 1.25, which
 * FP4 represents with an e4m3 scale. */
void sparse_pool_put_alone(const struct sparse_pool *pool, int64_t slot, int column, float value);

/* Makes one value of a visible key NaN, by its code or by its scale. */
void sparse_pool_put_nan(const struct sparse_pool *pool, struct random_state *random, uint8_t *token,
                         uint8_t *scales);

/* Makes a whole key NaN. */
void sparse_pool_put_nans(const struct sparse_pool *pool, uint8_t *token);

/* Sets the values of a key as attention uses them: d_qk of them, from the bytes of its token. */
void sparse_pool_values(const struct sparse_pool *pool, const uint8_t *token, int64_t slot, float *values);

/* Plants a defect into entry i of a list of which `count` entries count; returns false if there is no
 * place for it. */
bool sparse_pool_plant(const struct sparse_pool *pool, enum defect fault, int32_t *list, int64_t i,
                       int64_t count, int32_t *length, struct patch *patch);

#endif
