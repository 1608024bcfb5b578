/* SPDX-License-Identifier: MIT */
#include "stress.h"

#include "../checkattn/axes.h"
#include "../checkattn/decode_case.h"
#include "../checkattn/sparse_case.h"

#include <string.h>

/* ---- Numbers --------------------------------------------------------------------------------- */

#define ONE_OF(random, ...)                                                                                  \
    ((const int64_t[]){                                                                                      \
        __VA_ARGS__})[random_between(random, 0, COUNT_OF(((const int64_t[]){__VA_ARGS__})) - 1)]

/* Returns one of `kinds` kinds, from 0 on. */
static int64_t kind(struct random_state *random, int64_t kinds)
{
    return random_between(random, 0, kinds - 1);
}

/* Returns a size up to `most`: primes, and values next to borders of tiles and blocks; occasionally 0. */
static int64_t size_of(struct random_state *random, int64_t most)
{
    static const int64_t sizes[] = {1,   2,   3,   5,   7,   8,   11,  13,  16,  17,   31,  32,  61,
                                    63,  64,  65,  67,  101, 127, 128, 129, 131, 191,  192, 193, 257,
                                    320, 321, 509, 512, 513, 577, 640, 641, 769, 1024, 1025};
    int64_t count = 0;
    while (count < COUNT_OF(sizes) && sizes[count] <= most) count++;
    if (!random_between(random, 0, 11)) return 0;
    return random_between(random, 0, 4) ? sizes[random_between(random, 0, count - 1)]
                                        : random_between(random, 1, most);
}

static int64_t heads_of(struct random_state *random)
{
    return ONE_OF(random, 1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 33, 61, 63, 64, 65, 80, 127, 128);
}

static int64_t page_of(struct random_state *random)
{
    return ONE_OF(random, 1, 2, 3, 7, 16, 31, 61, 64, 64, 64, 67, 128, 131);
}

/* ---- Operations: what is not drawn from the grid's values ------------------------------------ */

/* Most rows · keys of a case, which the oracle computes. */
enum { MOST_WORK = 12000 };

static void draw_dense(struct random_state *random, int32_t types, bool gpu, int64_t *v)
{
    if (gpu && v[A_DTYPE] > 0) v[A_CACHE] = CACHE_OF_Q; /* a GPU has no kernel for fp16 queries over bytes */
    const bool bytes = v[A_CACHE] != CACHE_OF_Q;
    if (v[A_CACHE] != CACHE_656 && v[A_CACHE] != CACHE_576) v[A_PRODUCTS] = OF_BF16;
    if (v[A_CACHE] == CACHE_656 && v[A_PRODUCTS] == OF_CODES) v[A_PRODUCTS] = OF_FP8;
    if (v[A_PRODUCTS]) v[A_DTYPE] = 0;
    do {
        v[A_B] = ONE_OF(random, 0, 1, 1, 2, 3, 5, 7);
        v[A_SQ] = ONE_OF(random, 1, 1, 2, 3, 5, 7);
        v[A_SK] = size_of(random, 1025);
        v[A_HKV] = bytes ? 1 : ONE_OF(random, 1, 1, 1, 2, 3);
        v[A_HQ] = v[A_HKV] * heads_of(random);
    } while (v[A_B] * v[A_SQ] * v[A_HQ] * (v[A_SK] + 1) > MOST_WORK);
    v[A_PAGE] = kind(random, 5) ? page_of(random) : 0 /* contiguous */;
    if (!(types & FMLA_TAKES_FP16)) v[A_DTYPE] = 0;
    v[A_PARTITIONS] = ONE_OF(random, 0, 0, 1, 2, 3, 7, 78);
    v[A_INPUTS] = kind(random, INPUTS_BEYOND + 1);
    if (!bytes) v[A_CODES] = S_CODES_WRITTEN;
    if (bytes) v[A_DQK] = v[A_CACHE] == CACHE_584 ? 512 : 576;
    /* Codes have no infinity, and with a single scale no value exceeds fp16. */
    if (v[A_CACHE] == CACHE_576 && v[A_INPUTS] == INPUTS_INFINITE) v[A_INPUTS] = INPUTS_NORMAL;
    if (v[A_CACHE] == CACHE_576 && v[A_CODES] == S_CODES_BEYOND) v[A_CODES] = S_CODES_SCALES;
}

static void draw_sparse(struct random_state *random, int32_t types, int64_t *v)
{
    int64_t topk, extra;
    do {
        v[S_B] = ONE_OF(random, 0, 1, 1, 2, 3, 5);
        v[S_SQ] = ONE_OF(random, 1, 1, 2, 3);
        v[S_HQ] = heads_of(random);
        topk = size_of(random, 641), extra = kind(random, 2) ? size_of(random, 193) : 0;
    } while (v[S_B] * v[S_SQ] * v[S_HQ] * (topk + extra + 1) > MOST_WORK);
    v[S_SHAPE] = axis_shape(size_of(random, 1025), topk, page_of(random));
    v[S_EXTRA] = kind(random, 2) ? 1 + axis_shape(size_of(random, 257), extra, page_of(random)) : 0;
    while (sparse_formats[v[S_FORMAT]].fp16 && !(types & FMLA_TAKES_FP16))
        v[S_FORMAT] = kind(random, S_FORMATS);
    while (!sparse_is_sound(v)) v[S_EXTRA_FORMAT] = kind(random, S_EXTRA_FORMATS);
    v[S_INPUTS] = kind(random, S_BEYOND + 1);
    v[S_PARTITIONS] = ONE_OF(random, 0, 0, 1, 2, 3, 7, 78);
}

static void draw_prefill(struct random_state *random, int64_t *v)
{
    int64_t topk;
    const bool flat = v[PREFILL_SOURCE] == PREFILL_FLAT || v[PREFILL_SOURCE] == PREFILL_FLAT_GAPS;
    do {
        v[PREFILL_SQ] = ONE_OF(random, 0, 1, 2, 3, 5, 7, 11, 13, 31, 61, 62, 67);
        v[PREFILL_HKV] = flat ? ONE_OF(random, 1, 1, 2, 3) : 1;
        v[PREFILL_HQ] = v[PREFILL_HKV] * heads_of(random);
        topk = size_of(random, 641);
    } while (v[PREFILL_SQ] * v[PREFILL_HQ] * (topk + 1) > MOST_WORK);
    v[PREFILL_SHAPE] = axis_shape(size_of(random, 1025), topk, 0);
    if (prefill_has_codes(v[PREFILL_SOURCE]))
        v[PREFILL_DQK] = cache_formats[prefill_formats[v[PREFILL_SOURCE]]].d_qk;
    v[PREFILL_PAGE] = page_of(random);
    v[PREFILL_INPUTS] = ONE_OF(random, S_NORMAL, S_SPIKED, S_STEEP, S_BEYOND, PREFILL_EXTREME);
    /* As in the grid: with few keys of values ±1 some sums are almost 0, and tolerances do not cover
     * those. */
    if (v[PREFILL_INPUTS] == PREFILL_EXTREME && v[PREFILL_CODES] == S_CODES_EXTREME)
        v[PREFILL_CODES] = S_CODES_WRITTEN;
}

static void draw_mha(struct random_state *random, int32_t types, bool gpu, int64_t *v)
{
    int64_t s_q, s_k, h_q, h_kv;
    do {
        v[H_B] = ONE_OF(random, 0, 1, 1, 2, 3, 5, 7);
        s_q = size_of(random, 321), s_k = size_of(random, 1025);
        h_kv = ONE_OF(random, 1, 1, 1, 2, 3, 7, 16), h_q = h_kv * ONE_OF(random, 1, 1, 1, 2, 3, 7, 16);
    } while (v[H_B] * s_q * h_q * (s_k + 1) > 3 * MOST_WORK); /* MHA rows are shorter */
    /* Hopper's kernels multiply values hidden from some rows of a tile by weights of 0, which NaN
     * survives. */
    if (gpu) v[H_INPUTS] = kind(random, INPUTS_NAN_ENDS); /* those before it */
    v[H_SHAPE] = axis_shape(s_q, s_k, 0), v[H_HEADS] = axis_shape(h_q, h_kv, 0);
    if (!(types & FMLA_TAKES_FP16)) v[H_DTYPE] = 0;
}

static void draw_merge(struct random_state *random, int64_t *v)
{
    do {
        v[M_N] = ONE_OF(random, 0, 1, 2, 3, 5, 17, 67);
        v[M_B] = ONE_OF(random, 0, 1, 2, 3, 7);
        v[M_SQ] = ONE_OF(random, 1, 2, 3, 5);
        v[M_HQ] = heads_of(random);
        v[M_DV] = ONE_OF(random, 1, 2, 3, 61, 64, 67, 127, 512, 513, 577);
        if (!v[M_N] || v[M_LAST]) v[M_PART] = 0;
    } while (v[M_N] * v[M_B] * v[M_SQ] * v[M_HQ] * v[M_DV] > 50 * MOST_WORK);
}

static void draw_cache(struct random_state *random, bool gather, bool gpu, int64_t *v)
{
    const bool wide = v[C_FORMAT] == FMLA_KV_BF16 || v[C_FORMAT] == FMLA_KV_FP16;
    v[C_TOKENS] = size_of(random, 193);
    v[C_PAGE_SIZE] = page_of(random);
    const bool contiguous_pages = kv_layout_of(cache_formats[v[C_FORMAT]].format, 0).scale_bytes;
    v[C_CACHE] = kind(random, contiguous_pages ? CACHE_SPREAD : CACHE_SPREAD + 1);
    v[C_D_QK] = wide ? ONE_OF(random, 1, 2, 3, 61, 64, 67, 130, 512, 576, 577, 1040) : 512;
    v[C_ROPE] = !gather && v[C_D_QK] > 64 && kind(random, 2);
    v[C_SCALE] = v[C_FORMAT] == FMLA_KV_FP8_576 ? kind(random, CACHE_SCALES) : 0;
    v[C_GRAPH] = 0;
    if (gather || (wide && v[C_D_QK] != 512 && v[C_D_QK] != 576)) v[C_NORM] = v[C_TURN] = 0;
    v[C_SLOTS] = kind(random, gpu && !gather ? SLOTS_TWICE : SLOTS_TWICE + 1);
}

/* Draws formats of one d_qk. */
static void draw_convert(struct random_state *random, const struct subject *op, int64_t *v)
{
    do {
        for (int i = 0; i < op->axes; i++) v[i] = op->axis[i].values[kind(random, op->axis[i].count)];
        v[V_GRAPH] = 0;
    } while (!op->grid.possible(v));
    v[V_TOKENS] = size_of(random, 193), v[V_FROM_PAGE] = page_of(random), v[V_TO_PAGE] = page_of(random);
}

void draw_case(struct random_state *random, enum operation operation, int32_t types, bool gpu,
               int64_t v[GRID_AXES])
{
    const struct subject *const op = subjects[operation];
    memset(v, 0, GRID_AXES * sizeof *v);
    for (int i = 0; i < op->axes; i++) v[i] = op->axis[i].values[kind(random, op->axis[i].count)];
    if (operation == OP_DENSE_DECODE) draw_dense(random, types, gpu, v);
    if (operation == OP_SPARSE_DECODE) draw_sparse(random, types, v);
    if (operation == OP_SPARSE_PREFILL) draw_prefill(random, v);
    if (operation_is_mha(operation)) draw_mha(random, types, gpu, v);
    if (operation == OP_MERGE) draw_merge(random, v);
    if (operation == OP_CACHE_APPEND || operation == OP_CACHE_GATHER)
        draw_cache(random, operation == OP_CACHE_GATHER, gpu, v);
    if (operation == OP_CACHE_CONVERT) draw_convert(random, op, v);
}
