/* SPDX-License-Identifier: MIT */
#include "lengths.h"

#include "random.h"

#include <inttypes.h>
#include <stdlib.h>

bool lengths_any_given(const struct lengths *l)
{
    return l->batch_given || l->seq_len_given || l->min_given || l->max_given || l->list_given;
}

static bool check(const struct lengths *l, int64_t least, struct reason *reason)
{
    const bool random = l->min_given || l->max_given;
    if (l->list_given && (l->batch_given || l->seq_len_given || random))
        return reason_set(reason,
                          "--seq-lens: cannot be combined with --batch, --seq-len, --min-len or --max-len");
    if (l->seq_len_given && random)
        return reason_set(reason, "--seq-len: cannot be combined with --min-len or --max-len");
    if (!l->list_given && !l->seq_len_given && least > l->max_len)
        return reason_set(reason, "--min-len: %" PRId64 " must not exceed --max-len %" PRId64, least,
                          l->max_len);
    return true;
}

int32_t *lengths_make(const struct lengths *l, int64_t *batch, struct reason *reason)
{
    /* --max-len alone is an upper bound, even below the default of --min-len. */
    const int64_t least = !l->min_given && l->max_len < l->min_len ? (l->max_len > 0) : l->min_len;
    struct random_state random = {(uint64_t)l->seed};
    if (!check(l, least, reason)) return NULL;
    *batch = l->list_given ? l->list.count : l->batch;
    int32_t *lengths = malloc((size_t)(*batch + 1) * sizeof *lengths);
    if (!lengths) {
        reason_set(reason, "no memory for %" PRId64 " lengths", *batch);
        return NULL;
    }
    for (int64_t r = 0; r < *batch; r++)
        lengths[r] = (int32_t)(l->list_given      ? l->list.items[r]
                               : l->seq_len_given ? l->seq_len
                                                  : random_between(&random, least, l->max_len));
    return lengths;
}
