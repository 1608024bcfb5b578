/* SPDX-License-Identifier: MIT
 *
 * The CPU back end: what dispatch sees of it, and the contract between its driver (decode.c) and the inner
 * kernels, one folder an instruction set.
 */
#ifndef FMLA_CPU_H
#define FMLA_CPU_H

#include "../dispatch.h"
#include "../plan.h"
#include "../threads.h"

/* ---- A call --------------------------------------------------------------------------------- */

struct cpu_tile;
struct cpu_key;

/* What dense decode, sparse decode and sparse prefill have in common, as the driver and the inner kernels see it. Query rows
 * that read the same keys are a set: in sparse decode those of a query token, otherwise those of a key head. A token of
 * sparse prefill is a request of one token. */
struct cpu_decode {
    const struct dense_decode_problem *dense; /* one of these three */
    const struct sparse_decode_problem *sparse;
    const struct sparse_prefill_problem *prefill;
    /* cpu_next_keys of the sparse operations; NULL in dense decode. */
    int32_t (*next_keys)(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key *keys);
    const char *operation;
    int64_t b, s_q, h_q, d_qk, d_v;
    int64_t sets, set_rows; /* sets · set_rows = s_q · h_q */
    int32_t tile_rows;      /* most rows of a tile */
    int64_t capacity;       /* the most keys of a request: entries of a list in sparse operations */
    enum element element;   /* of q and out */
    struct kv_layout layout;
    const uint16_t *q;
    const int64_t *q_stride; /* request, token, head */
    uint16_t *out;
    const int64_t *out_stride; /* request, token, head */
    float *lse;                /* NULL: not wanted */
    const int64_t *lse_stride; /* request, head */
    float *max_logits;         /* of sparse prefill, heads without gaps; NULL: not wanted */
    int64_t max_stride;        /* request */
    const struct result_rules *rules;
    float scale;
    bool batch_invariant;
    const void *plan; /* NULL: in tables, or planned inside the call */
    bool plan_in_tables;
    const struct plan_partition *partitions;
    int32_t num_partitions; /* of the plan made inside the call; 0 = by the threads */
    bool bound;             /* asked for its workspace alone: the most of any call up to these sizes */
    void *workspace;
    size_t workspace_size;
};

struct cpu_row {
    int64_t token, head;
};

/* Which query row is row `row` of a set. */
static inline struct cpu_row cpu_row_of(const struct cpu_decode *call, int64_t set, int64_t row)
{
    if (call->sparse) return (struct cpu_row){set, row};
    const int64_t group = call->h_q / call->sets;
    return (struct cpu_row){row / group, set * group + row % group};
}

/* ---- Inner kernels -------------------------------------------------------------------------- */

/* A row tile: up to tile_rows rows of one set, over a range of the request's keys (in sparse operations: of the entries
 * of the token's list, which name a key each, or none). */
struct cpu_tile {
    const struct cpu_decode *call;
    int64_t request;
    int64_t set;
    int64_t first_row; /* of the set */
    int32_t rows;
    int64_t begin_key, end_key; /* end_key ≤ length */
    int64_t length;             /* keys of the request: what causal masks count from */
    float *out;                 /* [rows][d_v], written: softmax(S) V over the range */
    float *lse; /* [rows], written: natural, relative to max; -inf where no key of the range is seen */
    float *max; /* [rows], written: the largest score; -inf where no key of the range is seen */
};

/* One instruction set's attention over a tile. */
struct cpu_attention {
    int32_t most_rows;                                          /* of a tile: a multiple of PLAN_ROW_TILE */
    size_t (*scratch_bytes)(const struct cpu_decode *call);     /* of one worker; a multiple of 64 */
    void (*attend)(const struct cpu_tile *tile, void *scratch); /* scratch is 64-byte aligned */
};

/* Where the build has them: FMLA_AVX512_BF16, FMLA_AVX512, FMLA_AVX2. */
extern const struct cpu_attention cpu_avx512bf16_attention, cpu_avx512_attention, cpu_avx2_attention;
extern const struct cpu_attention cpu_generic_attention;

/* The query of a row of a tile. */
static inline const uint16_t *cpu_query(const struct cpu_tile *tile, int32_t row)
{
    const struct cpu_decode *call = tile->call;
    const struct cpu_row at = cpu_row_of(call, tile->set, tile->first_row + row);
    return call->q + tile->request * call->q_stride[0] + at.token * call->q_stride[1] +
           at.head * call->q_stride[2];
}

static inline bool cpu_causal(const struct cpu_decode *call)
{
    return call->dense && call->dense->causal;
}

/* The end of the keys that row `row` of a tile sees: the first one it does not. */
static inline int64_t cpu_visible_end(const struct cpu_tile *tile, int32_t row)
{
    const struct cpu_decode *call = tile->call;
    if (!cpu_causal(call)) return tile->end_key;
    const int64_t end =
        tile->length - call->s_q + cpu_row_of(call, tile->set, tile->first_row + row).token + 1;
    return end < tile->end_key ? end : tile->end_key;
}

/* Where a key is. */
struct cpu_key {
    const uint8_t *token;
    const uint8_t *scales; /* of FP8 formats */
};

/* Up to a block of the keys of a tile from entry *at on, which it moves past them; before `end`. In dense decode that is
 * one key an entry, otherwise entries without a key are passed over, and the last keys may be fewer, or none. */
static inline int32_t cpu_next_keys(const struct cpu_tile *tile, int64_t *at, int64_t end,
                                    struct cpu_key keys[PLAN_BLOCK])
{
    const struct dense_decode_problem *dense = tile->call->dense;
    if (!dense) return tile->call->next_keys(tile, at, end, keys);
    int32_t count = 0;
    for (; *at < end && count < PLAN_BLOCK; ++*at) {
        const int64_t index = *at / dense->page_size;
        const int64_t page = dense->block_table
                                 ? dense->block_table[tile->request * dense->block_table_stride + index]
                                 : tile->request;
        keys[count++].token = (const uint8_t *)(dense->kv + page * dense->kv_stride[0] +
                                                (*at % dense->page_size) * dense->kv_stride[1] +
                                                tile->set * dense->kv_stride[2]);
    }
    return count;
}

/* Appends to `count` keys those that entries [*at, end) of a list name in a cache, until there are PLAN_BLOCK, and moves *at
 * past them; `indices` begins with entry `first`. (sparse.c) */
int32_t cpu_gather_keys(const struct kv_layout *layout, const struct sparse_cache *cache,
                        const int32_t *indices, int64_t first, int64_t *at, int64_t end,
                        struct cpu_key keys[PLAN_BLOCK], int32_t count);

/* ---- The driver of decode (decode.c) --------------------------------------------------------- */

/* Workspace of a call, and the call. */
fmla_status cpu_decode_size(const struct kernel *kernel, const struct cpu_decode *p, size_t *bytes,
                            size_t *alignment);
fmla_status cpu_decode_run(const struct kernel *kernel, const struct cpu_decode *p);

/* The chunks of a list: as few as keep the workers busy for 7/8 of the time, if all lists are full; `tiles`: of all lists. */
int64_t cpu_even_chunks(int64_t tiles, int64_t workers, int64_t most);

/* Rows of all slots together, the most of any call up to these sizes, not batch-invariant, whose partitions are those of the
 * default (bound.c). */
int64_t cpu_most_slot_rows(const struct kernel *kernel, const struct cpu_decode *p, int32_t workers);

/* ---- Cache operations ------------------------------------------------------------------------ */

/* One instruction set's way of a token into a cache and out of it. */
struct cpu_cache {
    void (*store)(const struct cache_problem *problem, int64_t token, int64_t slot);
    void (*load)(const struct cache_problem *problem, int64_t token, int64_t slot); /* slot -1: zeros */
};

/* Where the build has them: FMLA_AVX512, FMLA_AVX2. */
extern const struct cpu_cache cpu_avx512_cache, cpu_avx2_cache, cpu_generic_cache;

/* ---- Operations (dense.c, sparse.c, sparse_prefill.c, merge.c, cache.c) ---------------------- */

fmla_status cpu_decode_plan(const struct plan_problem *problem);
fmla_status cpu_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *problem,
                                  size_t *bytes, size_t *alignment);
fmla_status cpu_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *problem);
fmla_status cpu_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *problem,
                                   size_t *bytes, size_t *alignment);
fmla_status cpu_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *problem);
fmla_status cpu_sparse_prefill_size(const struct kernel *kernel, const struct sparse_prefill_problem *problem,
                                    size_t *bytes, size_t *alignment);
fmla_status cpu_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *problem);
fmla_status cpu_merge(const struct merge_problem *problem);
fmla_status cpu_cache_append(const struct kernel *kernel, const struct cache_problem *problem);
fmla_status cpu_cache_gather(const struct kernel *kernel, const struct cache_problem *problem);

#endif
