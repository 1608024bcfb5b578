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

struct made_pages {
    struct kv_layout layout;
    int64_t slots, far_strides[4];
};

/* Makes tensor `which` of a case with room for more than `tokens` tokens, and sets its argument. The
 * memory is random bytes; scales that a reader may see are positive and finite. */
void cache_make_pages(struct test_case *c, int which, const struct cache_shape *shape, int64_t tokens,
                      struct made_pages *made);

/* Fills in distinct slots in a random order, by steps coprime to their number; kind: SLOTS_…; any: skipped
 * tokens may have any invalid slot. */
void cache_fill_slots(struct random_state *random, const struct guarded *to, int64_t tokens, int64_t slots,
                      int64_t kind, bool any);

/* Compares the whole memory of a cache with the oracle's copy. */
void cache_compare_bytes(const struct test_case *c, const struct run *run, struct tally *tally,
                         const struct guarded *mine, const unsigned char *theirs);

#endif
