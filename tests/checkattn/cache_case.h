/* SPDX-License-Identifier: MIT
 *
 * Pages of any format, slots in them and their comparison byte by byte (cache.c): what the cases of append, gather and convert
 * share.
 */
#ifndef CHECKATTN_CACHE_CASE_H
#define CHECKATTN_CACHE_CASE_H

#include "axes.h"
#include "kvformat.h"

static inline bool is_16_bit(int64_t format)
{
    return format == FMLA_KV_BF16 || format == FMLA_KV_FP16;
}

/* Are a page's scales behind its tokens, so that they lie one after the other? */
static inline bool in_pieces(int64_t format)
{
    return format > 0 && kv_layout_of((enum kv_format)(format - 1), 512).scale_bytes;
}

extern const float cache_scales[CACHE_SCALES];

struct cache_shape {
    int64_t format, d_qk, page_size, kind; /* kind: CACHE_… */
};

struct made_pages {
    struct kv_layout layout;
    int64_t slots, far_strides[4];
};

/* Makes tensor `which` of a case, with room for more than so many tokens, and names it. Random bytes are everywhere; the scales that a
 * reader may be given are positive and finite. */
void cache_make_pages(struct test_case *c, int which, const struct cache_shape *shape, int64_t tokens,
                      struct made_pages *made);

/* Distinct slots in a random order, by steps that share no divisor with their number; kind: SLOTS_…; any: those that are skipped may
 * be any that are none. */
void cache_fill_slots(struct random_state *random, const struct guarded *to, int64_t tokens, int64_t slots,
                      int64_t kind, bool any);

/* Is the whole memory of a cache as the oracle left a copy of it? */
void cache_compare_bytes(const struct test_case *c, const struct run *run, struct tally *tally,
                         const struct guarded *mine, const unsigned char *theirs);

#endif
