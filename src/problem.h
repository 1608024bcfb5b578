/* SPDX-License-Identifier: MIT
 *
 * Checked arguments, as kernels see them: one struct a family of operations, which the public functions make and every
 * back end reads. Pointers have their byte offset applied, strides are in elements where nothing else is said, innermost
 * strides are 1, defaults are resolved.
 */
#ifndef FMLA_PROBLEM_H
#define FMLA_PROBLEM_H

#include "flashmla/flashmla.h"

#include "kvformat.h"
#include "operations.h"
#include "plan.h"
#include "queries.h"

#include <stdbool.h>

static inline const char *operation_name(enum operation operation)
{
    return descriptors[operation].name;
}

/* What becomes of `out` and `lse` once the attention itself is known; the same for every operation. */
struct result_rules {
    const float *attn_sink; /* [h_q] or NULL */
    float lse_of_empty;     /* +inf or -inf */
    float lse_factor;       /* 1, or log2(e) where logarithms are to base 2 */
};

/* ---- Attention ------------------------------------------------------------------------------- */

/* Where the next key of a request is said. */
enum key_kind {
    KEYS_NONE,
    KEYS_PAGED, /* a table has the pages of a request, all of whose tokens see the same keys */
    KEYS_LISTED /* every token has a list of slots, in which an entry may name no key */
};

/* Requests one after the other in one dimension of tokens. */
struct ragged {
    /* [b + 1]: where each begins, and the last one ends. NULL: requests are apart, of one length. */
    const int32_t *starts;
    int64_t tokens; /* of all requests */
};

/* The start of a request, `before` being that of the one before it: none lies before that, or beyond the last token. */
static inline int64_t ragged_start(const struct ragged *ragged, int64_t request, int64_t before)
{
    const int64_t start = ragged->starts[request];
    return start < before ? before : start > ragged->tokens ? ragged->tokens : start;
}

/* Of a request its tokens, its keys, and the first of each among those of all where requests are ragged; else 0. */
struct span {
    int64_t first_token, tokens, first_key, keys;
};

/* The span of a ragged request; `before` is that of the one before it, and of nothing for the first. */
static inline struct span ragged_span(const struct ragged *q, const struct ragged *k, int64_t request,
                                      const struct span *before)
{
    struct span s = {.first_token = ragged_start(q, request, before->first_token + before->tokens),
                     .first_key = ragged_start(k, request, before->first_key + before->keys)};
    s.tokens = ragged_start(q, request + 1, s.first_token) - s.first_token;
    s.keys = ragged_start(k, request + 1, s.first_key) - s.first_key;
    return s;
}

/* Vectors in pages; steps in bytes. In FP8_584 a slot's step is that of its layout, without the scales. */
struct key_view {
    const uint8_t *data; /* of page 0, slot 0, key head 0 */
    int64_t page_bytes, slot_bytes, head_bytes;
};

struct key_source {
    enum key_kind kind;
    enum kv_format format;
    struct key_view k, v;
    bool values_apart; /* else values are the first d_v elements of their keys, and the views are the same */
    int64_t pages, page_size;
    const int32_t *table;    /* pages, NULL: page r is request r's; or lists of slots */
    int64_t table_stride[3]; /* request; of lists also token, key head */
    const int32_t *lengths;  /* [b]: keys, or entries of a list; NULL: capacity */
    int64_t capacity;        /* no length counts as more */
};

enum { KEY_SOURCES = 2 };

/* How requests are cut into pieces, where they are. */
enum cut {
    CUT_BY_PLAN,
    CUT_INVARIANT, /* into chunks, at the same keys whatever stands beside a request */
    CUT_EVENLY,    /* only where there is too little work otherwise; no plan */
    CUT_NEVER      /* the bits of a request depend on nothing else in the batch */
};

/* Every token of a prefill is a request of one token: b is their number and s_q is 1. */
struct attention_problem {
    enum operation operation;
    int64_t b, s_q, h_q, h_kv, d_qk, d_v; /* of ragged requests s_q is the most, as the caller says */
    struct ragged ragged_q, ragged_k;     /* a ragged request is in page 0, from its start on */
    enum element element;                 /* of q and out; BF16 where q has codes */
    enum kv_format format;                /* of keys[0] */
    const float *kv_scale;                /* where the scale of an FP8_576 cache lies; NULL: it is 1 */
    int32_t products;                     /* FMLA_PRODUCTS_… */
    fmla_device device;
    const uint16_t *q;
    int64_t q_stride[3]; /* request, token, head */
    const uint8_t
        *q_codes;         /* NULL: the queries are values, in q; else q is NULL, and q_stride counts bytes */
    const float *q_scale; /* where the scale of q_codes lies; NULL: it is 1 */
    uint16_t *out;
    int64_t out_stride[3];                /* request, token, head */
    float *lse, *max_logits;              /* NULL: not wanted */
    int64_t lse_stride[2], max_stride[2]; /* request, head; tokens are without gaps */
    struct key_source keys[KEY_SOURCES];  /* a request has the first one's keys, then the second one's */
    int64_t capacity;                     /* the longest list of keys that may be cut (attention_length) */
    struct result_rules rules;
    float scale;
    bool causal;
    enum cut cut;
    const void *plan; /* NULL: in tables, or planned inside the call */
    size_t plan_size;
    bool plan_in_tables; /* of num_partitions rows; both may be NULL where a size is asked */
    const struct plan_partition *partitions;
    const int32_t *num_splits;
    int32_t num_partitions; /* of the plan made inside the call; 0 = the kernel's choice */
    bool bound; /* asked for its workspace alone: the most of any call up to these sizes; there is no plan */
    void *workspace;
    void *stream;
};

/* The bf16 values that stand for a query where products are FP8, to `to`, [d_qk]. */
static inline void attention_quantise(const struct attention_problem *p, int64_t request, int64_t token,
                                      int64_t head, uint16_t *to)
{
    const int64_t at = request * p->q_stride[0] + token * p->q_stride[1] + head * p->q_stride[2];
    const int32_t width = (int32_t)p->d_qk;
    if (p->q_codes)
        query_of_codes(to, p->q_codes + at, p->q_scale ? *p->q_scale : 1.0f, width);
    else
        query_quantise(to, p->q + at, query_quantised(p->format), width);
}

/* What the plan of a call cuts. */
static inline struct plan_topk attention_lists(const struct attention_problem *p)
{
    return (struct plan_topk){p->keys[0].capacity, p->keys[1].capacity, p->keys[0].lengths,
                              p->keys[1].lengths};
}

/* Keys of a request, or entries of its lists as they are cut: those of the second source begin at a block's edge. */
static inline int64_t attention_length(const struct attention_problem *p, int64_t request)
{
    const struct key_source *first = &p->keys[0], *second = &p->keys[1];
    const int64_t count = plan_topk_count(first->capacity, first->lengths, request);
    if (!second->capacity) return count;
    return plan_extra_begin(count) + plan_topk_count(second->capacity, second->lengths, request);
}

/* The page of a slot, *in_page its place there; -1 where there is no key. */
static inline int64_t key_page(const struct key_source *source, int32_t slot, int64_t *in_page)
{
    if (slot < 0 || slot >= source->pages * source->page_size) return -1;
    *in_page = (uint32_t)slot % (uint32_t)source->page_size;
    return (uint32_t)slot / (uint32_t)source->page_size;
}

/* ---- Gradients of attention ------------------------------------------------------------------ */

/* The heads of tokens, or of keys; steps in elements. That of requests is 0 where they are ragged. */
struct token_view {
    uint16_t *data;
    int64_t request, token, head;
};

struct backward_problem {
    int64_t b, s_q, s_k; /* of ragged requests s_q and s_k are the most, as the caller says */
    int64_t h_q, h_kv, d_qk, d_v;
    bool is_ragged;
    struct ragged ragged_q, ragged_k; /* where requests are ragged */
    enum element element;             /* of every tensor but lse */
    fmla_device device;
    struct token_view q, k, v, out, dout; /* read */
    struct token_view dq, dk, dv;         /* written */
    const float *lse;
    int64_t lse_stride[2]; /* request, head; tokens are without gaps */
    float lse_factor;      /* 1, or log2(e) where logarithms are to base 2 */
    float scale;
    bool causal;
    bool deterministic; /* dq has the same bits in every run; dk and dv always have */
    bool bound;         /* asked for its workspace alone: the most of any call up to these sizes */
    void *workspace;
    void *stream;
};

/* Tokens, or keys, of all requests together; below 2^62. */
static inline int64_t backward_tokens(const struct backward_problem *p)
{
    return p->is_ragged ? p->ragged_q.tokens : p->b * p->s_q;
}

static inline int64_t backward_keys(const struct backward_problem *p)
{
    return p->is_ragged ? p->ragged_k.tokens : p->b * p->s_k;
}

/* The span of a request, whether or not it is ragged. */
static inline struct span backward_span(const struct backward_problem *p, int64_t request,
                                        const struct span *before)
{
    if (!p->is_ragged) return (struct span){.tokens = p->s_q, .keys = p->s_k};
    return ragged_span(&p->ragged_q, &p->ragged_k, request, before);
}

/* ---- The other families ---------------------------------------------------------------------- */

struct plan_problem {
    int64_t b;
    enum key_kind kind;      /* what is cut: keys in pages, or lists */
    struct plan_topk lists;  /* of paged keys the first alone, and its lengths are given */
    fmla_device device;      /* of the lengths and of the plan */
    struct plan_costs costs; /* of the device that will use the plan; none of lists */
    struct plan_tables plan;
    void *stream;
};

struct merge_problem {
    int64_t n, b, s_q, h_q, d_v;
    fmla_device device;
    enum element part_element, out_element;
    const void *out_parts;
    int64_t out_parts_stride[4]; /* part, request, token, head */
    const float *lse_parts;
    int64_t lse_parts_stride[3]; /* part, request, head */
    void *out;
    int64_t out_stride[3]; /* request, token, head */
    float *lse;            /* NULL: not wanted */
    int64_t lse_stride[2]; /* request, head */
    struct result_rules rules;
    void *stream;
};

/* The pages of a cache, and how tokens lie in them. */
struct cache_pages {
    enum kv_format format;
    struct kv_layout layout; /* of the format */
    int64_t page_size;
    int64_t slots; /* pages · page_size */
    uint8_t *data;
    int64_t page_stride, slot_stride; /* bytes */
    float scale;                      /* of FP8_576 */
};

static inline bool cache_has(const struct cache_pages *cache, int64_t slot)
{
    return slot >= 0 && slot < cache->slots;
}

/* New vectors into pages, vectors out of pages, or tokens from pages into others. */
struct cache_problem {
    enum operation operation; /* OP_CACHE_APPEND, OP_CACHE_GATHER or OP_CACHE_CONVERT */
    int64_t tokens;
    int64_t d_qk;
    enum element element; /* of the vectors; of convert the type that holds the source's values */
    fmla_device device;
    const int64_t *slots; /* [tokens], of cache */
    struct cache_pages cache;
    const void
        *latent; /* append: [tokens][latent_width], and rope the rest of d_qk, NULL where there is none */
    const void *rope;
    int64_t latent_width, latent_stride, rope_stride;
    /* Append, what becomes of the values before (new_token.h): */
    const void *norm_weight; /* [NORM_WIDTH], of `element`; NULL: no norm */
    float norm_eps;
    int32_t rope_pairs;    /* FMLA_ROPE_…; 0: no RoPE, and no more of it */
    const void *positions; /* [tokens], of 4 or 8 bytes */
    int32_t position_bytes;
    const float *rope_table; /* [table_rows][ROPE_WIDTH] */
    int64_t table_rows, table_stride;
    const int64_t *source_slots; /* convert: [tokens], of source */
    struct cache_pages source;
    void *out; /* gather: [tokens][d_qk] */
    int64_t out_stride;
    void *stream;
};

/* Does append do more than to quantise? Then d_qk is 512 or 576. */
static inline bool cache_append_is_fused(const struct cache_problem *p)
{
    return p->norm_weight || p->rope_pairs;
}

static inline int64_t cache_position(const struct cache_problem *p, int64_t token)
{
    return p->position_bytes == 8 ? ((const int64_t *)p->positions)[token]
                                  : ((const int32_t *)p->positions)[token];
}

/* A tensor that passed: byte offset applied, strides given. */
struct checked_tensor {
    const char *name; /* NULL: there is none */
    void *data;
    int64_t shape[MAX_DIMENSIONS];
    int64_t stride[MAX_DIMENSIONS];
    enum element element; /* of floating types; of bytes that of their values, bf16 */
    bool of_bytes;
    int32_t element_bytes;
    fmla_device device; /* pinned host memory counts as cpu */
};

/* A call that passed all that its descriptor says. */
struct checked_call {
    const char *operation;
    const void *args; /* the copy of the caller's struct */
    bool shape_only;  /* a size is asked: data is not looked at, and may be NULL */
    bool flat;        /* the tensors that may be have all tokens in one dimension */
    int32_t kv_format, second_format, products;
    const struct cache_format *format;          /* of the first cache; NULL where the operation has none */
    const struct cache_format *second;          /* of the cache that IS_SECOND, if it is there */
    const struct checked_tensor *first;         /* of those that are there: its device is the call's */
    struct checked_tensor tensors[MAX_TENSORS]; /* by TENSOR_<op>_<member> */
    int64_t size[DIMENSIONS];                   /* 0 where nothing binds the name */
    const struct checked_tensor *bound_by[DIMENSIONS];
    int bound_at[DIMENSIONS]; /* its dimension */
};

/* A problem of whichever family; NULL: none. */
union problem {
    const struct attention_problem *attention;
    const struct backward_problem *backward;
    const struct plan_problem *plan;
    const struct merge_problem *merge;
    const struct cache_problem *cache;
    const struct checked_call *alone; /* of an operation of no family: what its descriptor says */
};

#endif
