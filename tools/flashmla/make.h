/* SPDX-License-Identifier: MIT
 *
 * Generates calls in memory: shuffled pages, keys chosen for every query token, values around 0, ready to
 * run. The differences between operations are a table in make.c.
 */
#ifndef FLASHMLA_TOOL_MAKE_H
#define FLASHMLA_TOOL_MAKE_H

#include "call.h"
#include "pages.h"

/* Type of the products; FP8 with q as values or as codes. */
enum { MADE_BF16, MADE_FP8, MADE_CODES, MADE_PRODUCTS };

/* Returns "bf16", "fp8" or "codes". */
const char *products_name(int32_t products);

/* Returns true if a call may have such products over caches of that format, where 0 means the type of q. */
bool products_fit(int32_t products, int32_t format, enum element type);

/* The shape of a call. An operation ignores sizes that its tensors do not name. If s_q is 0, requests of
 * MHA have as many tokens as keys. */
struct shape {
    enum operation op;
    int64_t b, s_q, s_k, h_q, h_kv, d_qk; /* s_k: keys of a request or a prefill */
    int64_t page_size;                    /* 0: keys without pages, or one page per request */
    int64_t topk, extra_topk, extra_page_size,
        extra_s_k; /* extra_topk 0: no second cache; extra_s_k 0: s_k */
    int64_t parts, tokens;
    int64_t d_v;          /* 0: CALL_D_V */
    int32_t format;       /* FMLA_KV_…, of the caches */
    int32_t extra_format; /* of the second cache; 0: format */
    int32_t products;     /* MADE_…, of dense decode */
    enum element type;    /* of the vectors; fp32 only for merge and the cache operations */
    bool norm;            /* cache append: RMS norm first */
    int32_t turns;        /* cache append: FMLA_ROPE_…, each token at its own position */
    bool causal, sink, dlse;
    /* Dense decode: lengths N(s_k, (s_k/2)²) between s_q and 2 · s_k; sparse: topk_length between 0 and
     * topk; MHA: concatenated requests of s_k/80 to s_k keys. */
    bool varlen;
    bool extra_varlen; /* likewise, only for the second cache's lists */
    bool holes;        /* one index in eight is invalid; parts without keys; slots of -1 */
    /* MHA: the first 0 to all tokens and keys of a request are in use, equally many where s_q is 0; the
     * padding after them is NaN. */
    bool used;
    bool no_lse;            /* merge without lse */
    bool last;              /* merge with one part more, at pointers of its own */
    int64_t part;           /* merge: 1 + the part whose contribution is computed; 0: all are merged */
    bool no_forward;        /* gradients of MHA: out and lse are left to make_forward, on a GPU */
    const int32_t *lengths; /* [b], dense decode and, with varlen, MHA; NULL = as above */
    uint64_t seed;
};

/* Scale of an FP8_576 cache. */
extern const float made_cache_scale;

/* Scale of queries given as codes. */
extern const float made_q_scale;

/* Returns for example "bf16". */
const char *element_name(enum element type);

/* A call under construction. */
struct making {
    struct call *call;
    const struct shape *shape;
    struct random_state random;
    struct pages pages;
    int32_t *lengths;         /* dense decode, and MHA with varlen */
    int64_t size[DIMENSIONS]; /* except the elements of a cache's token */
};

/* Returns the bytes of the tensors, up to the rounding of pages. */
double shape_bytes(const struct shape *shape);

/* Makes a call with its results; call_close frees it. */
bool make_call(struct call *call, const struct shape *shape, struct reason *reason);

/* The same in steps, for callers that write values to a file: make_begin sets sizes, lengths and pages,
 * and the inputs without memory; then memory; then values. make_end frees what the call does not own. */
bool make_begin(struct making *making, struct call *call, const struct shape *shape, struct reason *reason);
bool make_memory(struct making *making, struct reason *reason);
bool make_values(struct making *making, struct reason *reason);
void make_end(struct making *making);

/* Writes out and lse of a call for the gradients of MHA, as the forward operation does, where the call's
 * tensors are. On a GPU it waits. *status is the library's. */
bool make_forward(const struct call *of, fmla_status *status, struct reason *reason);

/* Fills fixed[b] with the same total as lengths[b], and lengths that differ by at most one. */
void make_fixed_lengths(const int32_t *lengths, int64_t b, int32_t *fixed);

#endif
