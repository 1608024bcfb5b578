/* SPDX-License-Identifier: MIT
 *
 * A batch of sparse decode made in memory: shuffled pages, keys drawn for every query token, ready to call.
 */
#ifndef FLASHMLA_TOOL_SPARSE_BATCH_H
#define FLASHMLA_TOOL_SPARSE_BATCH_H

#include "pages.h"

#include "flashmla/flashmla.h"

enum { SPARSE_CACHES = 2, SPARSE_D_V = 512 };

/* A cache, and how many of a request's keys in it each of its tokens names; topk 0 and s_k 0: there is none. */
struct sparse_cache_shape {
    int64_t s_k, topk, page_size;
};

struct sparse_shape {
    int64_t b, s_q, h_q, d_qk;
    int32_t format; /* FMLA_KV_… */
    struct sparse_cache_shape cache[SPARSE_CACHES];
    bool sink;
    bool holes;        /* one index in eight names no key */
    bool varlen;       /* topk_length between 0 and topk; else none is given */
    bool extra_varlen; /* the same of the second cache alone */
    uint64_t seed;
};

struct sparse_cache_memory {
    int64_t cache_shape[4], indices_shape[3];
    fmla_tensor cache, indices, length;
    size_t cache_bytes, indices_bytes;
};

struct sparse_batch {
    int64_t q_shape[4], out_shape[4], lse_shape[3], b[1], h_q[1];
    fmla_tensor q, sink, out, lse;
    struct sparse_cache_memory cache[SPARSE_CACHES];
    fmla_sparse_decode_args args; /* without workspace */
};

/* Is the format bytes? */
bool sparse_is_bytes(int32_t format);

/* A tensor in host memory of its own, which free() frees; `data` is NULL without memory. *size, where wanted: its bytes. */
fmla_tensor sparse_tensor(fmla_dtype dtype, int32_t ndim, const int64_t *shape, size_t *size);

/* A fault: indices as many as these are more than there is memory for. */
bool sparse_no_indices(const fmla_tensor *indices, struct fault *fault);

/* Every slot of a cache of bytes: tokens of values N(mean, 0.1²), clamped to [-1, 1]. */
void sparse_fill_bytes(int32_t format, float mean, const fmla_tensor *cache, struct random_state *random);

/* Bytes of the tensors, to within the rounding of pages. */
double sparse_batch_bytes(const struct sparse_shape *shape);

bool sparse_batch_make(struct sparse_batch *batch, const struct sparse_shape *shape, struct fault *fault);

/* Also frees args.workspace. */
void sparse_batch_free(struct sparse_batch *batch);

/* ---- A call (of any tensors in host memory, without gaps) ------------------------------------ */

/* As call_workspace. */
fmla_status sparse_call_workspace(fmla_sparse_decode_args *args);

/* Does the index name a key of the cache? */
bool sparse_is_key(const fmla_tensor *cache, int32_t index);

/* How many entries count of a request's lists in a cache, which is absent where `indices` is NULL. */
int64_t sparse_count(const fmla_tensor *indices, const fmla_tensor *length, int64_t request);

struct sparse_work {
    double keys; /* that tokens name, each once a token */
    double flop;
    double bytes; /* of those keys, Q and out */
};

struct sparse_work sparse_work(const fmla_sparse_decode_args *args);

#endif
