/* SPDX-License-Identifier: MIT
 *
 * Calls made in memory: shuffled pages, keys drawn for every query token, values around 0, ready to run. What differs from
 * one operation to the next is a row of a table in make.c.
 */
#ifndef FLASHMLA_TOOL_MAKE_H
#define FLASHMLA_TOOL_MAKE_H

#include "call.h"
#include "pages.h"

/* Products, and where they are FP8 whether q has values or codes. */
enum { MADE_BF16, MADE_FP8, MADE_CODES, MADE_PRODUCTS };

/* "bf16", "fp8" or "codes". */
const char *products_name(int32_t products);

/* May a call over caches of that format, 0 where they have the type of q, have such products? */
bool products_fit(int32_t products, int32_t format, enum element type);

/* What a call is like. An operation has no use for sizes that its tensors do not name. Without s_q requests of MHA have as many
 * tokens as keys. */
struct shape {
    enum operation op;
    int64_t b, s_q, s_k, h_q, h_kv, d_qk; /* s_k: keys of a request, or of a prompt */
    int64_t page_size;                    /* 0: keys without pages, or of a request in one */
    int64_t topk, extra_topk, extra_page_size,
        extra_s_k; /* extra_topk 0: no second cache; extra_s_k 0: s_k */
    int64_t parts, tokens;
    int64_t d_v;          /* 0: CALL_D_V */
    int32_t format;       /* FMLA_KV_…, of caches */
    int32_t extra_format; /* of the second cache; 0: format */
    int32_t products;     /* MADE_…, of dense decode */
    enum element type;    /* of the vectors; fp32 of merge and the cache operations alone */
    bool norm;            /* of cache append: RMS norm first */
    int32_t turns;        /* of cache append: FMLA_ROPE_…, each token at a position of its own */
    bool causal, sink;
    /* Dense decode: lengths N(s_k, (s_k/2)²) between s_q and 2 · s_k; sparse: topk_length between 0 and topk; MHA: requests
     * one after the other, of s_k/80 to s_k keys. */
    bool varlen;
    bool extra_varlen;      /* the same of the second cache's lists alone */
    bool holes;             /* one index in eight names no key; parts without keys, slots of -1 */
    bool no_lse;            /* merge without lse */
    bool no_forward;        /* gradients of MHA: out and lse are left for make_forward to write on a GPU */
    const int32_t *lengths; /* [b] of dense decode and, with varlen, of MHA; NULL = as above */
    uint64_t seed;
};

/* The scale of an FP8_576 cache. */
extern const float made_cache_scale;

/* The scale of queries that are codes. */
extern const float made_q_scale;

/* "bf16". */
const char *element_name(enum element type);

/* A call that is being made. */
struct making {
    struct call *call;
    const struct shape *shape;
    struct random_state random;
    struct pages pages;
    int32_t *lengths;         /* of dense decode, and of MHA with varlen */
    int64_t size[DIMENSIONS]; /* the elements of a token of a cache aside */
};

/* Bytes of the tensors, to within the rounding of pages. */
double shape_bytes(const struct shape *shape);

/* Makes a call, results included; call_close frees it. */
bool make_call(struct call *call, const struct shape *shape, struct fault *fault);

/* The same in steps, for who writes values to a file: the sizes, lengths and pages, and the inputs without memory; memory;
 * values. make_end frees what is not the call's. */
bool make_begin(struct making *making, struct call *call, const struct shape *shape, struct fault *fault);
bool make_memory(struct making *making, struct fault *fault);
bool make_values(struct making *making, struct fault *fault);
void make_end(struct making *making);

/* Writes out and lse of a call for the gradients of MHA, as the forward operation leaves them, where the call's tensors are. On a
 * GPU it waits. *status is the library's. */
bool make_forward(const struct call *of, fmla_status *status, struct fault *fault);

/* Into fixed[b]: as many keys in all as in lengths[b], and lengths that differ by at most one. */
void make_fixed_lengths(const int32_t *lengths, int64_t b, int32_t *fixed);

#endif
