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

/* ---- Inner kernels -------------------------------------------------------------------------- */

/* A row tile: up to PLAN_ROW_TILE rows of one request that read the same key head, over a range of keys.
 * Row i of the key head is query token i / group, query head kv_head · group + i % group, with group = h_q /
 * h_kv. */
struct cpu_tile {
    const struct dense_decode_problem *problem;
    int64_t request;
    int64_t kv_head;
    int64_t first_row;
    int32_t rows;
    int64_t begin_key, end_key; /* end_key ≤ length */
    int64_t length;             /* keys of the request: what causal masks count from */
    float *out;                 /* [rows][d_v], written: softmax(S) V over the range */
    float *lse;                 /* [rows], written: natural; -inf where no key of the range is seen */
};

/* One instruction set's attention over a tile. */
struct cpu_attention {
    size_t (*scratch_bytes)(const struct dense_decode_problem *problem); /* of one worker; a multiple of 64 */
    void (*attend)(const struct cpu_tile *tile, void *scratch);          /* scratch is 64-byte aligned */
};

/* Where the build has them: FMLA_AVX512_BF16, FMLA_AVX512, FMLA_AVX2. */
extern const struct cpu_attention cpu_avx512bf16_attention, cpu_avx512_attention, cpu_avx2_attention;
extern const struct cpu_attention cpu_generic_attention;

/* The end of the keys that row `row` of a tile sees: the first one it does not. */
static inline int64_t cpu_visible_end(const struct cpu_tile *tile, int32_t row)
{
    const struct dense_decode_problem *p = tile->problem;
    if (!p->causal) return tile->end_key;
    const int64_t token = (tile->first_row + row) / (p->h_q / p->h_kv);
    const int64_t end = tile->length - p->s_q + token + 1;
    return end < tile->end_key ? end : tile->end_key;
}

/* Where key `key` of key head `kv_head` of a request is. */
static inline const uint16_t *cpu_key(const struct dense_decode_problem *p, int64_t request, int64_t kv_head,
                                      int64_t key)
{
    const int64_t index = key / p->page_size;
    const int64_t page = p->block_table ? p->block_table[request * p->block_table_stride + index] : request;
    return p->kv + page * p->kv_stride[0] + (key % p->page_size) * p->kv_stride[1] +
           kv_head * p->kv_stride[2];
}

/* One instruction set's way of a token into a cache and out of it. */
struct cpu_cache {
    void (*store)(const struct cache_problem *problem, int64_t token, int64_t slot);
    void (*load)(const struct cache_problem *problem, int64_t token, int64_t slot); /* slot -1: zeros */
};

/* Where the build has them: FMLA_AVX512, FMLA_AVX2. */
extern const struct cpu_cache cpu_avx512_cache, cpu_avx2_cache, cpu_generic_cache;

/* ---- Operations (plan.c aside: decode.c, merge.c, cache.c) ---------------------------------- */

fmla_status cpu_decode_plan(const struct plan_problem *problem);
fmla_status cpu_dense_decode_size(const struct kernel *kernel, const struct dense_decode_problem *problem,
                                  size_t *bytes, size_t *alignment);
fmla_status cpu_dense_decode(const struct kernel *kernel, const struct dense_decode_problem *problem);
fmla_status cpu_merge(const struct merge_problem *problem);
fmla_status cpu_cache_append(const struct kernel *kernel, const struct cache_problem *problem);
fmla_status cpu_cache_gather(const struct kernel *kernel, const struct cache_problem *problem);

#endif
