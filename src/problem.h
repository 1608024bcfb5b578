/* SPDX-License-Identifier: MIT
 *
 * Checked arguments as kernels see them: one struct per family of operations, filled by the public functions
 * and read by every back end. Byte offsets are applied to pointers, strides are in elements unless noted,
 * innermost strides are 1, and defaults are resolved.
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

/* The rules that turn the attention result into `out` and `lse`; the same for every operation. */
struct result_rules {
    const float *attn_sink; /* [h_q] or NULL */
    float lse_of_empty;     /* lse of a row without keys: +inf or -inf */
    float lse_factor;       /* 1, or log2(e) for logarithms to base 2 */
};

/* ---- Attention ------------------------------------------------------------------------------- */

/* How the keys of a request are named. */
enum key_kind {
    KEYS_NONE,
    KEYS_PAGED, /* by a table of the request's pages; all its tokens see the same keys */
    KEYS_LISTED /* by a list of slots per token, in which an entry may name no key */
};

/* The tokens, or the keys, of dense MHA's requests. Ragged ones are packed one after the other in one dimension. */
struct ragged {
    /* [b + 1]: the start of each request, then the end of the last. NULL: all requests have one extent. */
    const int32_t *starts;
    int64_t tokens; /* of all ragged requests */
    /* [b]: how many of a request's are in use, the first ones; what follows is padding. NULL: all. */
    const int32_t *used;
};

/* Returns starts[request] clamped to [before, tokens]; `before` bounds it by the preceding requests. */
static inline int64_t ragged_start(const struct ragged *ragged, int64_t request, int64_t before)
{
    const int64_t start = ragged->starts[request];
    return start < before ? before : start > ragged->tokens ? ragged->tokens : start;
}

/* Returns how many of a request's tokens, or keys, are in use; `extent`: all that it has. */
static inline int64_t ragged_used(const struct ragged *ragged, int64_t request, int64_t extent)
{
    const int64_t used = ragged->used ? ragged->used[request] : extent;
    return used < 0 ? 0 : used > extent ? extent : used;
}

/* The tokens and keys of a request that are in use. In ragged batches first_token and first_key are their offsets
 * among those of all requests, else 0. Padding follows them. */
struct span {
    int64_t first_token, tokens, first_key, keys;
    int64_t padding_tokens, padding_keys;
};

/* Returns the span of a request; s_q and s_k are its extents where requests are not ragged. `before` is the span of
 * the preceding request, all zero for the first. */
static inline struct span span_of(const struct ragged *q, const struct ragged *k, int64_t s_q, int64_t s_k,
                                  int64_t request, const struct span *before)
{
    struct span s = {0};
    if (q->starts) {
        s.first_token =
            ragged_start(q, request, before->first_token + before->tokens + before->padding_tokens);
        s.first_key = ragged_start(k, request, before->first_key + before->keys + before->padding_keys);
        s_q = ragged_start(q, request + 1, s.first_token) - s.first_token;
        s_k = ragged_start(k, request + 1, s.first_key) - s.first_key;
    }
    s.tokens = ragged_used(q, request, s_q), s.padding_tokens = s_q - s.tokens;
    s.keys = ragged_used(k, request, s_k), s.padding_keys = s_k - s.keys;
    return s;
}

/* Vectors in pages; steps in bytes. In FP8_584 slot_bytes is the step of the layout, without the scales. */
struct key_view {
    const uint8_t *data; /* of page 0, slot 0, key head 0 */
    int64_t page_bytes, slot_bytes, head_bytes;
};

struct key_source {
    enum key_kind kind;
    enum kv_format format;
    struct key_view k, v;
    /* false: values are the first d_v elements of their keys, and the views are the same */
    bool values_apart;
    int64_t pages, page_size;
    const int32_t *table;    /* of pages, NULL: page r is request r's; or of lists of slots */
    int64_t table_stride[3]; /* request; for lists also token, key head */
    const int32_t *lengths;  /* [b]: keys, or entries of a list; NULL: all have `capacity` */
    int64_t capacity;        /* upper limit of every length */
};

enum { KEY_SOURCES = 2 };

/* How requests are split, if they are. */
enum splitting {
    SPLIT_BY_PLAN,
    SPLIT_BATCH_INVARIANT, /* at the same keys of a request, whatever the rest of the batch */
    SPLIT_EVENLY,          /* only if there is too little work without splits; no plan */
    SPLIT_BY_LENGTHS       /* each request by its own, so that its bits depend on nothing else in the batch */
};

/* A problem of attention. In sparse prefill every token is a request of one token: b is the number of tokens
 * and s_q is 1. */
struct attention_problem {
    enum operation operation;
    int64_t b, s_q, h_q, h_kv, d_qk, d_v; /* ragged requests: s_q is the caller's upper bound */
    struct ragged ragged_q, ragged_k;     /* a ragged request is in page 0, from its start on */
    bool has_used;                        /* one of them has `used`; also in a query, which has no data */
    enum element element;                 /* of q and out; BF16 if q has codes */
    enum kv_format format;                /* of keys[0] */
    const float *kv_scale;                /* pointer to the scale of an FP8_576 cache; NULL: the scale is 1 */
    int32_t products;                     /* FMLA_PRODUCTS_… */
    fmla_device device;
    const uint16_t *q;
    int64_t q_stride[3];    /* request, token, head */
    const uint8_t *q_codes; /* NULL: q has the values; else q is NULL, and q_stride counts bytes */
    const float *q_scale;   /* pointer to the scale of q_codes; NULL: the scale is 1 */
    uint16_t *out;
    int64_t out_stride[3];                /* request, token, head */
    float *lse, *max_logits;              /* NULL: not wanted */
    int64_t lse_stride[2], max_stride[2]; /* request, head; tokens are contiguous */
    struct key_source keys[KEY_SOURCES];  /* a request has the keys of the first, then those of the second */
    int64_t capacity;                     /* the longest key list that may be split (attention_length) */
    struct result_rules rules;
    float scale;
    bool causal;
    enum splitting splitting;
    /* Dense MHA: on a GPU requests are split by all of them, or each by its own lengths; into how many splits, 0:
     * as many as take the least time. */
    bool batch_dependent;
    int32_t mha_splits;
    int64_t max_s_q;  /* of ragged requests, as the caller gives it: 0 = not known */
    const void *plan; /* NULL: in tables, or planned inside the call */
    size_t plan_size;
    bool plan_in_tables; /* with num_partitions rows; both may be NULL in a size query */
    const struct plan_partition *partitions;
    const int32_t *num_splits;
    int32_t num_partitions; /* of a plan made inside the call; 0 = the kernel's choice */
    bool bound; /* workspace query only: the most of any call up to these sizes; there is no plan */
    void *workspace;
    void *stream;
};

/* Writes to `to`, [d_qk], the bf16 values that represent a query in FP8 products. */
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

/* Returns the lists that the plan of a call splits. */
static inline struct plan_topk attention_lists(const struct attention_problem *p)
{
    return (struct plan_topk){p->keys[0].capacity, p->keys[1].capacity, p->keys[0].lengths,
                              p->keys[1].lengths};
}

/* Returns the length that is split: the keys of a request, or the entries of its lists, where those of the
 * second source begin at a block boundary. */
static inline int64_t attention_length(const struct attention_problem *p, int64_t request)
{
    const struct key_source *first = &p->keys[0], *second = &p->keys[1];
    const int64_t count = plan_topk_count(first->capacity, first->lengths, request);
    if (!second->capacity) return count;
    return plan_extra_begin(count) + plan_topk_count(second->capacity, second->lengths, request);
}

/* Returns the page of a slot and its place there in *in_page; -1 if it names no key. */
static inline int64_t key_page(const struct key_source *source, int32_t slot, int64_t *in_page)
{
    if (slot < 0 || slot >= source->pages * source->page_size) return -1;
    *in_page = (uint32_t)slot % (uint32_t)source->page_size;
    return (uint32_t)slot / (uint32_t)source->page_size;
}

/* ---- Gradients of attention ------------------------------------------------------------------ */

/* The vectors of tokens or of keys; strides in elements. `request` is 0 for ragged requests. */
struct token_view {
    uint16_t *data;
    int64_t request, token, head;
};

struct backward_problem {
    int64_t b, s_q, s_k; /* ragged requests: s_q and s_k are the caller's upper bounds */
    int64_t max_s_q;     /* of ragged requests, as the caller gives it: 0 = not known */
    int64_t h_q, h_kv, d_qk, d_v;
    bool is_ragged;
    struct ragged ragged_q, ragged_k; /* with starts if is_ragged */
    enum element element;             /* of every tensor but those of lse and of the sink */
    fmla_device device;
    struct token_view q, k, v, out, dout;  /* read */
    struct token_view dq, dk, dv;          /* written */
    const float *lse, *dlse;               /* dlse: NULL: 0 */
    int64_t lse_stride[2], dlse_stride[2]; /* request, head; tokens are contiguous */
    float *d_attn_sink;                    /* [h_q]; NULL: not wanted */
    struct result_rules rules;             /* of the forward call */
    float scale;
    bool causal;
    bool deterministic; /* dq has the same bits in every run, as dk and dv always have */
    bool bound;         /* workspace query only: the most of any call up to these sizes */
    void *workspace;
    void *stream;
};

/* Return the tokens, or the keys, of all requests together; below 2^62. */
static inline int64_t backward_tokens(const struct backward_problem *p)
{
    return p->is_ragged ? p->ragged_q.tokens : p->b * p->s_q;
}

static inline int64_t backward_keys(const struct backward_problem *p)
{
    return p->is_ragged ? p->ragged_k.tokens : p->b * p->s_k;
}

static inline struct span backward_span(const struct backward_problem *p, int64_t request,
                                        const struct span *before)
{
    return span_of(&p->ragged_q, &p->ragged_k, p->s_q, p->s_k, request, before);
}

/* ---- The other families ---------------------------------------------------------------------- */

struct plan_problem {
    int64_t b;
    enum key_kind kind;      /* what the plan splits: paged keys, or lists */
    struct plan_topk lists;  /* paged keys use only the first list, with lengths */
    fmla_device device;      /* of the lengths and of the plan */
    struct plan_costs costs; /* of the device that will use the plan; zero for lists */
    struct plan_tables plan;
    void *stream;
};

struct merge_problem {
    int64_t n, b, s_q, h_q, d_v;  /* n: of all parts, also of one apart from the others */
    int64_t out_first, out_count; /* the parts whose out is added: the first, and how many */
    int64_t last;                 /* the part at out_last and lse_last; -1: none */
    fmla_device device;
    enum element part_element, out_element;
    const void *out_parts;       /* begins with part out_first */
    int64_t out_parts_stride[4]; /* part, request, token, head */
    const float *lse_parts;
    int64_t lse_parts_stride[3]; /* part, request, head */
    const void *out_last;
    int64_t out_last_stride[3]; /* request, token, head */
    const float *lse_last;
    int64_t lse_last_stride[2]; /* request, head */
    void *out;
    int64_t out_stride[3]; /* request, token, head */
    float *lse;            /* NULL: not wanted */
    int64_t lse_stride[2]; /* request, head */
    struct result_rules rules;
    void *stream;
};

static inline float merge_part_lse(const struct merge_problem *p, int64_t part, int64_t request,
                                   int64_t token, int64_t head)
{
    const int64_t *const last = p->lse_last_stride, *const stride = p->lse_parts_stride;
    if (part == p->last) return p->lse_last[request * last[0] + head * last[1] + token];
    return p->lse_parts[part * stride[0] + request * stride[1] + head * stride[2] + token];
}

/* Returns the memory of a part's out, where its row begins at element *at. */
static inline const void *merge_part_out(const struct merge_problem *p, int64_t part, int64_t request,
                                         int64_t token, int64_t head, int64_t *at)
{
    const bool is_last = part == p->last;
    const int64_t *const stride = is_last ? p->out_last_stride : p->out_parts_stride + 1;
    *at = (is_last ? 0 : (part - p->out_first) * p->out_parts_stride[0]) + request * stride[0] +
          token * stride[1] + head * stride[2];
    return is_last ? p->out_last : p->out_parts;
}

/* The pages of a cache and their layout. */
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

/* Cache append, gather and convert. */
struct cache_problem {
    enum operation operation; /* OP_CACHE_APPEND, OP_CACHE_GATHER or OP_CACHE_CONVERT */
    int64_t tokens;
    int64_t d_qk;
    enum element element; /* of the vectors; convert: a type that holds the source's values */
    fmla_device device;
    const int64_t *slots; /* [tokens], in `cache` */
    struct cache_pages cache;
    const void *latent; /* append: [tokens][latent_width]; rope has the rest of d_qk, or is NULL */
    const void *rope;
    int64_t latent_width, latent_stride, rope_stride;
    /* Append: transforms of the values before they are written (new_token.h). */
    const void *norm_weight; /* [NORM_WIDTH], in type `element`; NULL: no norm */
    float norm_eps;
    int32_t rope_pairs;    /* FMLA_ROPE_…; 0: no RoPE, and the members below are unused */
    const void *positions; /* [tokens], of 4 or 8 bytes each */
    int32_t position_bytes;
    const float *rope_table; /* [table_rows][ROPE_WIDTH] */
    int64_t table_rows, table_stride;
    const int64_t *source_slots; /* convert: [tokens], in `source` */
    struct cache_pages source;
    void *out; /* gather: [tokens][d_qk] */
    int64_t out_stride;
    void *stream;
};

/* Returns whether append transforms the values before it quantises them. d_qk is then 512 or 576. */
static inline bool cache_append_is_fused(const struct cache_problem *p)
{
    return p->norm_weight || p->rope_pairs;
}

static inline int64_t cache_position(const struct cache_problem *p, int64_t token)
{
    return p->position_bytes == 8 ? ((const int64_t *)p->positions)[token]
                                  : ((const int32_t *)p->positions)[token];
}

/* A tensor that passed its checks, with byte offset applied and strides filled in. */
struct checked_tensor {
    const char *name; /* NULL: the tensor is absent */
    void *data;
    int64_t shape[MAX_DIMENSIONS];
    int64_t stride[MAX_DIMENSIONS];
    enum element element; /* of floating types; for bytes, of the decoded values: bf16 */
    bool of_bytes;
    bool empty; /* it has no element */
    int32_t element_bytes;
    fmla_device device; /* pinned host memory counts as CPU */
};

/* A call that passed the checks of its descriptor. */
struct checked_call {
    const char *operation;
    const void *args; /* the copy of the caller's struct */
    bool shape_only;  /* size query: tensor data is not read and may be NULL */
    bool flat;        /* the tensors with OR_FLAT have all tokens in one dimension */
    int32_t kv_format, second_format, products;
    const struct cache_format *format;          /* of the first cache; NULL without one */
    const struct cache_format *second;          /* of the cache with IS_SECOND, if present */
    const struct checked_tensor *first;         /* first tensor that is present; its device is the call's */
    struct checked_tensor tensors[MAX_TENSORS]; /* indexed by TENSOR_<op>_<member> */
    int64_t size[DIMENSIONS];                   /* 0 if nothing binds the name */
    const struct checked_tensor *bound_by[DIMENSIONS];
    int bound_at[DIMENSIONS]; /* the dimension that bound it */
};

/* A problem of any family; NULL: none. */
union problem {
    const struct attention_problem *attention;
    const struct backward_problem *backward;
    const struct plan_problem *plan;
    const struct merge_problem *merge;
    const struct cache_problem *cache;
    const struct checked_call *alone; /* of an operation without a family: its checked call */
};

#endif
