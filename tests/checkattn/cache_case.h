/* SPDX-License-Identifier: MIT
 *
 * Pages of any format, their slots and their comparison byte by byte (cache.c), shared by append, gather
 * and convert.
 */
#ifndef CHECKATTN_CACHE_CASE_H
#define CHECKATTN_CACHE_CASE_H

#include "axes.h"
#include "kvformat.h"

static inline bool is_16_bit(int64_t format)
{
    return format == FMLA_KV_BF16 || format == FMLA_KV_FP16;
}

/* Returns true if a page stores its scales after its tokens, which are then contiguous. */
static inline bool contiguous_pages(int64_t format)
{
    return format > 0 && kv_layout_of((enum kv_format)(format - 1), 512).scale_bytes;
}

extern const float cache_scales[CACHE_SCALES];

struct cache_shape {
    int64_t format, d_qk, page_size, kind; /* kind: CACHE_… */
};

/* The pages of a cache, and the tensors of a case that are the cache and its list of slots. */
struct made_pages {
    int cache, list;
    struct kv_layout layout;
    int64_t slots;
};

/* Convert has a source and a destination. */
struct cache_case {
    struct test_case c;
    int caches;
    struct made_pages pages[2];
};

/* Makes tensor `which` of a case with room for more than the case's tokens, and sets its argument. The
 * memory is random bytes; scales that a reader may see are positive and finite. */
void cache_make_pages(struct test_case *c, int which, const struct cache_shape *shape,
                      struct made_pages *made);

/* Makes tensor `which`, the list of these pages: distinct slots in a random order, by steps coprime to their
 * number; kind: SLOTS_…; any: skipped tokens may have any invalid slot. */
void cache_make_slots(struct test_case *c, int which, enum layout layout, struct made_pages *pages,
                      int64_t kind, bool any);

/* Compares every byte of the written cache with the oracle's result on a copy of the original cache. A GPU
 * skips tokens whose slot or position does not exist; the oracle is a CPU kernel, which refuses them. */
void cache_compare(struct test_case *c, uint64_t inputs, struct oracle *oracle);

/* For a grid. */
_Static_assert((int)C_TOKENS == (int)V_TOKENS, "their axes of tokens have one index");
bool cache_counts(const int64_t *v, int i, int j);
double cache_cost(const int64_t *v);

#endif
