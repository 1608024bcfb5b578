/* SPDX-License-Identifier: MIT
 *
 * Checked arguments, as kernels see them: what api.c makes and every back end reads. Pointers have their byte
 * offset applied, strides are in elements, innermost strides are 1, defaults are resolved.
 */
#ifndef FMLA_PROBLEM_H
#define FMLA_PROBLEM_H

#include "flashmla/flashmla.h"

#include "kvformat.h"
#include "plan.h"

#include <stdbool.h>

enum element { ELEMENT_BF16, ELEMENT_FP16, ELEMENT_F32 };

/* What becomes of `out` and `lse` once the attention itself is known; the same for every operation. */
struct result_rules {
    const float *attn_sink; /* [h_q] or NULL */
    float lse_of_empty;     /* +inf or -inf */
    float lse_factor;       /* 1, or log2(e) where logarithms are to base 2 */
};

struct plan_problem {
    int64_t b;
    int64_t capacity;
    const int32_t *seqlens;  /* [b] */
    fmla_device device;      /* of the lengths and of the plan */
    struct plan_costs costs; /* of the device that will use the plan */
    struct plan_tables plan;
    bool sparse; /* for sparse decode, by `topk`; capacity, seqlens and costs are then 0 */
    struct plan_topk topk;
    void *stream;
};

struct dense_decode_problem {
    int64_t b, s_q, h_q, h_kv, d_qk, d_v;
    int64_t pages, page_size;
    int64_t max_pages; /* 1 without a block table */
    int64_t capacity;  /* max_pages · page_size */
    enum element element;
    fmla_device device;
    const uint16_t *q;
    int64_t q_stride[3]; /* request, token, head */
    const uint16_t *kv;
    int64_t kv_stride[3];       /* page, slot, head */
    const int32_t *block_table; /* NULL: page r belongs to request r */
    int64_t block_table_stride; /* request */
    const int32_t *seqlens;
    uint16_t *out;
    int64_t out_stride[3]; /* request, token, head */
    float *lse;            /* NULL: not wanted */
    int64_t lse_stride[2]; /* request, head */
    struct result_rules rules;
    float scale;
    bool causal;
    bool batch_invariant;
    const void *plan; /* NULL: in tables, or planned inside the call */
    size_t plan_size;
    bool plan_in_tables; /* of num_partitions rows; both may be NULL where a size is asked */
    const struct plan_partition *partitions;
    const int32_t *num_splits;
    int32_t num_partitions; /* of the plan made inside the call; 0 = the kernel's choice */
    bool bound; /* asked for its workspace alone: the most of any call up to these sizes; there is no plan */
    void *workspace;
    size_t workspace_size;
    void *stream;
};

/* A cache of sparse decode, and the keys that are named in it. */
struct sparse_cache {
    const uint8_t *data;
    int64_t pages, page_size;
    int64_t page_bytes; /* from one page to the next */
    int64_t slot_bytes; /* from one token to the next; in FP8_584 that of its layout */
    const int32_t *indices;
    int64_t indices_stride[2]; /* request, token */
};

enum { SPARSE_CACHES = 2 };

struct sparse_decode_problem {
    int64_t b, s_q, h_q, d_qk, d_v;
    enum element element; /* of q and out */
    enum kv_format format;
    fmla_device device;
    const uint16_t *q;
    int64_t q_stride[3];                      /* request, token, head */
    struct sparse_cache cache[SPARSE_CACHES]; /* where there is no extra cache, topk.extra_topk is 0 */
    struct plan_topk topk;
    int64_t capacity; /* the longest list of keys that the plan may cut: plan_topk_length */
    uint16_t *out;
    int64_t out_stride[3]; /* request, token, head */
    float *lse;            /* NULL: not wanted */
    int64_t lse_stride[2]; /* request, head */
    struct result_rules rules;
    float scale;
    bool batch_invariant;
    const void *plan; /* NULL: in tables, or planned inside the call */
    size_t plan_size;
    bool plan_in_tables; /* of num_partitions rows; both may be NULL where a size is asked */
    const struct plan_partition *partitions;
    const int32_t *num_splits;
    int32_t num_partitions; /* of the plan made inside the call; 0 = the kernel's choice */
    bool bound;             /* as above */
    void *workspace;
    size_t workspace_size;
    void *stream;
};

/* A token of s_q is what a request of one token is in decode; a flat kv is pages of one slot. */
struct sparse_prefill_problem {
    int64_t s_q, h_q, h_kv, d_qk, d_v, topk;
    enum element element; /* of q and out: ELEMENT_BF16 */
    enum kv_format format;
    fmla_device device;
    const uint16_t *q;
    int64_t q_stride[2];        /* token, head */
    struct sparse_cache kv;     /* of key head 0; indices_stride: token, key head */
    int64_t kv_head_bytes;      /* from one key head to the next */
    const int32_t *topk_length; /* [s_q]; NULL: topk */
    uint16_t *out;
    int64_t out_stride[2];          /* token, head */
    float *max_logits, *lse;        /* NULL: not wanted; heads are without gaps */
    int64_t max_stride, lse_stride; /* token */
    struct result_rules rules;
    float scale;
    bool bound; /* as above */
    void *workspace;
    size_t workspace_size;
    void *stream;
};

/* The page of an index, *slot in it; -1 where there is no key. */
static inline int64_t sparse_page(const struct sparse_cache *cache, int32_t index, int64_t *slot)
{
    if (index < 0 || index >= cache->pages * cache->page_size) return -1;
    *slot = (uint32_t)index % (uint32_t)cache->page_size;
    return (uint32_t)index / (uint32_t)cache->page_size;
}

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

/* New vectors into pages, or vectors out of pages. */
struct cache_problem {
    int64_t tokens;
    int64_t d_qk;
    int64_t page_size;
    int64_t slots_of_cache; /* pages · page_size */
    enum kv_format format;
    struct kv_layout layout; /* of the format */
    enum element element;    /* of the vectors */
    fmla_device device;
    const int64_t *slots; /* [tokens] */
    const void
        *latent; /* append: [tokens][latent_width], and rope the rest of d_qk, NULL where there is none */
    const void *rope;
    int64_t latent_width, latent_stride, rope_stride;
    void *out; /* gather: [tokens][d_qk] */
    int64_t out_stride;
    uint8_t *cache;
    int64_t page_stride, slot_stride; /* bytes */
    float cache_scale;
    void *stream;
};

#endif
