/* SPDX-License-Identifier: MIT
 *
 * The CPU back end: its interface to dispatch, and the contract between its driver (attention.c) and the
 * microkernels, one folder per instruction set.
 */
#ifndef FMLA_CPU_H
#define FMLA_CPU_H

#include "../kernel.h"
#include "../threads.h"

enum { CACHE_LINE = 64 };

/* Goes beside prefetches. GCC drops calls of functions that have no effect, and does not count a prefetch as one. */
#define CPU_HAS_EFFECT() __asm__ volatile("")

static inline int64_t cpu_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static inline size_t cpu_line_up(size_t bytes)
{
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* ---- Requests of any length ------------------------------------------------------------------ */

/* A request and the index of its first work item. An array of spans ends with one more, whose first_item is
 * the number of items. */
struct cpu_span {
    struct span span;
    int64_t first_item;
};

/* Returns the request that holds an item: the last one whose first_item is not above it. */
static inline int64_t cpu_span_at(const struct cpu_span *spans, int64_t requests, int64_t item)
{
    int64_t request = 0, after = requests;
    while (after - request > 1) {
        const int64_t middle = request + (after - request) / 2;
        *(spans[middle].first_item <= item ? &request : &after) = middle;
    }
    return request;
}

/* ---- A call --------------------------------------------------------------------------------- */

struct cpu_tile;

/* The addresses of one key. */
struct cpu_key {
    const uint8_t *token;
    const uint8_t *scales; /* of quantised formats; for FP8_576 a scale of 1 */
    const uint8_t *value;  /* equals token where values are the first elements of their keys */
    const struct kv_layout *layout;
};

/* A problem as the driver and the microkernels see it. A set is the query rows that read the same keys: the
 * rows of a key head, or, where every token has lists of its own, those of one token and key head. */
struct cpu_call {
    const struct attention_problem *problem;
    struct kv_layout layouts[KEY_SOURCES];
    /* Copies up to a block of the tile's keys, from entry *at on and before `end`, moves *at past them and
     * returns their number. Entries without a key are skipped, so the last block may be short or empty. */
    int32_t (*next_keys)(const struct cpu_tile *tile, int64_t *at, int64_t end,
                         struct cpu_key keys[PLAN_BLOCK]);
    int64_t tokens_of_set;
    int64_t sets, set_rows; /* sets · set_rows = s_q · h_q; for ragged requests the maximum */
    int32_t tile_rows;      /* maximum rows of a tile */
    int32_t value_bytes;    /* of a value that is stored apart from its key; else 0 */
    bool keys_at_once;      /* prefetch a block's keys at once: few rows use them, or they have two layouts */
};

struct cpu_row {
    int64_t token, head;
};

/* Maps row `row` of a set to its token and head. Sets are ordered by token, then by key head. */
static inline struct cpu_row cpu_row_of(const struct cpu_call *call, int64_t set, int64_t row)
{
    const int64_t h_kv = call->problem->h_kv, group = call->problem->h_q / h_kv;
    return (struct cpu_row){set / h_kv * call->tokens_of_set + row / group, set % h_kv * group + row % group};
}

/* ---- Microkernels --------------------------------------------------------------------------- */

/* A row tile: up to tile_rows rows of one set, over a range of the request's keys. With lists, the range
 * counts list entries, each of which names a key or none. */
struct cpu_tile {
    const struct cpu_call *call;
    int64_t request;
    int64_t tokens; /* of the request */
    /* The first token and key of a ragged request in the packed tensors; else 0. */
    int64_t first_token, first_key;
    int64_t set;
    int64_t first_row; /* of the set */
    int32_t rows;
    int64_t begin_key, end_key; /* end_key ≤ length */
    int64_t length;             /* keys of the request; causal masks count back from it */
    float *out;                 /* [rows][d_v], written: softmax(S) V over the range */
    float *lse; /* [rows], written: natural, relative to max; -inf where the row sees no key of the range */
    float *max; /* [rows], written: the largest score; -inf where the row sees no key of the range */
};

/* Attention over a tile, for one instruction set. */
struct cpu_attention {
    struct kernel_driver driver;
    int32_t most_rows;                                    /* of a tile: PLAN_ROW_TILE times a power of two */
    int32_t most_rows_of_heads;                           /* the same for SPLIT_BY_LENGTHS */
    size_t (*scratch_bytes)(const struct cpu_call *call); /* per worker; a multiple of 64 */
    void (*attend)(const struct cpu_tile *tile, void *scratch); /* scratch is 64-byte aligned */
    /* Rounds values · factor to bf16 or fp16. */
    void (*round)(uint16_t *to, const float *values, float factor, int64_t count, enum element element);
};

/* Defined if the build has FMLA_AMX, FMLA_AVX512_BF16, FMLA_AVX512, FMLA_AVX2, in this order. */
extern const struct cpu_attention cpu_amx_attention, cpu_avx512bf16_attention, cpu_avx512_attention,
    cpu_avx2_attention;
extern const struct cpu_attention cpu_generic_attention;

/* Returns the query of a row of a tile. */
static inline const uint16_t *cpu_query(const struct cpu_tile *tile, int32_t row)
{
    const struct cpu_call *call = tile->call;
    const struct attention_problem *p = call->problem;
    const struct cpu_row at = cpu_row_of(call, tile->set, tile->first_row + row);
    return p->q + tile->request * p->q_stride[0] + (tile->first_token + at.token) * p->q_stride[1] +
           at.head * p->q_stride[2];
}

/* Prefetches the queries of `rows` rows of a tile: they lie too far apart for the hardware prefetcher. */
static inline void cpu_fetch_queries(const struct cpu_tile *tile, int32_t first_row, int32_t rows)
{
    CPU_HAS_EFFECT();
    for (int32_t i = 0; i < rows; i++) {
        const uint16_t *row = cpu_query(tile, first_row + i);
        for (int64_t d = 0; d < tile->call->problem->d_qk; d += CACHE_LINE / 2) __builtin_prefetch(row + d);
    }
}

/* Returns the end of the keys that row `row` of a tile sees: the first key that it does not see. */
static inline int64_t cpu_visible_end(const struct cpu_tile *tile, int32_t row)
{
    const struct cpu_call *call = tile->call;
    if (!call->problem->causal) return tile->end_key;
    const int64_t end =
        tile->length - tile->tokens + cpu_row_of(call, tile->set, tile->first_row + row).token + 1;
    return end < tile->end_key ? end : tile->end_key;
}

/* ---- The driver of attention (attention.c) --------------------------------------------------- */

/* next_keys of each kind of key source (keys.c). */
int32_t cpu_paged_keys(const struct cpu_tile *tile, int64_t *at, int64_t end,
                       struct cpu_key keys[PLAN_BLOCK]);
int32_t cpu_listed_keys(const struct cpu_tile *tile, int64_t *at, int64_t end,
                        struct cpu_key keys[PLAN_BLOCK]);

/* Checks that every page that will be read lies in the cache; FMLA_INVALID_ARGUMENT where one does not. */
fmla_status cpu_check_pages(const struct attention_problem *problem);

/* Returns the number of splits per list: the fewest that keep the workers busy for 7/8 of the time if all
 * lists are full, at most `most`; where none do, those that keep them busiest. `tiles` counts the row tiles
 * of all lists. */
int64_t cpu_even_splits(int64_t tiles, int64_t workers, int64_t most);

/* Returns the most rows that all parts together have in any call up to these sizes that is not
 * batch-invariant and has the default number of partitions (bound.c). */
int64_t cpu_most_slot_rows(const struct cpu_call *call, int32_t most_rows, int32_t workers);

/* ---- Cache operations ------------------------------------------------------------------------ */

/* Cache operations on one token, for one instruction set. */
struct cpu_cache {
    struct kernel_driver driver;
    void (*store)(const struct cache_problem *problem, int64_t token, int64_t slot);
    void (*load)(const struct cache_problem *problem, int64_t token, int64_t slot); /* slot -1: zeros */
    void (*convert)(const struct cache_problem *problem, int64_t token, int64_t slot);
};

/* Defined if the build has FMLA_AVX512, FMLA_AVX2. */
extern const struct cpu_cache cpu_avx512_cache, cpu_avx2_cache, cpu_generic_cache;

/* ---- Drivers (attention.c, merge.c, cache.c, plan.c) ------------------------------------------ */

driver_prepare cpu_attention_prepare;
driver_run cpu_attention_run, cpu_cache_run;
#define CPU_ATTENTION_DRIVER                                                                                 \
    {                                                                                                        \
        .prepare = cpu_attention_prepare, .run = cpu_attention_run                                           \
    }
#define CPU_CACHE_DRIVER                                                                                     \
    {                                                                                                        \
        .run = cpu_cache_run                                                                                 \
    }

extern const struct kernel_driver cpu_plan_driver;

#endif
