/* SPDX-License-Identifier: MIT
 *
 * A decode batch made in memory: shuffled pages, values N(0, 0.1²), ready to call.
 */
#ifndef FLASHMLA_TOOL_BATCH_H
#define FLASHMLA_TOOL_BATCH_H

#include "pages.h"

#include "flashmla/flashmla.h"

enum { BATCH_D_V = 512 };

struct batch_shape {
    int64_t b, s_q, s_k, h_q, h_kv, d_qk, page_size;
    bool fp16, causal, varlen, sink, contiguous;
    const int32_t *lengths; /* [b]; NULL = s_k, or with varlen N(s_k, (s_k/2)²) between s_q and 2 · s_k */
};

struct batch {
    int32_t *lengths;
    struct pages pages;
    void *memory[4]; /* q, kv_cache, out, lse */
    float *sink_values;
    int64_t q_shape[4], cache_shape[4], table_shape[2], out_shape[4], lse_shape[3], b[1], h_q[1];
    fmla_tensor q, cache, table, seqlens, sink, out, lse;
    fmla_dense_decode_args args; /* without workspace */
};

/* Into fixed[b]: as many keys in all as in lengths[b], and lengths that differ by at most one. */
void batch_fixed_lengths(const int32_t *lengths, int64_t b, int32_t *fixed);

/* Bytes of the tensors, to within the rounding of pages. */
double batch_bytes(const struct batch_shape *shape);

bool batch_make(struct batch *batch, const struct batch_shape *shape, struct fault *fault);

/* Also frees args.workspace. */
void batch_free(struct batch *batch);

/* `count` values N(0, 0.1²), clamped to [-1, 1], copied from random places of a pool: drawing each would take longer
 * than computing with it. Whole vectors of `length` values. */
void batch_fill(void *to, fmla_dtype dtype, int64_t count, int64_t length, struct random_state *random);

/* The same, N(mean, 0.1²). */
void batch_fill_around(float mean, void *to, fmla_dtype dtype, int64_t count, int64_t length,
                       struct random_state *random);

#endif
