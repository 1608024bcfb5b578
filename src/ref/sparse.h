/* SPDX-License-Identifier: MIT
 *
 * What the sparse operations of the oracle have in common: the keys that a query token names, and a row over them.
 */
#ifndef FMLA_REF_SPARSE_H
#define FMLA_REF_SPARSE_H

#include "ref.h"

/* Workspace: the keys of one query token; the scores of one row, its output, and its query. */
struct ref_memory {
    double *keys; /* [most_keys][d_qk] */
    double *scores, *sum, *q;
};

/* Bytes of it. */
fmla_status ref_memory_size(const char *operation, size_t most_keys, int64_t d_qk, int64_t d_v,
                            size_t *bytes);
struct ref_memory ref_memory_of(void *workspace, size_t most_keys, int64_t d_qk, int64_t d_v);

/* Entries of a list of `topk` that count, by lengths that may be NULL. */
int64_t ref_count(int64_t topk, const int32_t *lengths, int64_t i);

/* Appends the keys that `count` indices name in a cache to `keys`; returns how many there are then. */
int64_t ref_list_keys(const struct sparse_cache *cache, enum kv_format format, int64_t d_qk,
                      const int32_t *indices, int64_t count, double *keys, int64_t listed);

/* One row, and where its results go. */
struct ref_row {
    int64_t d_qk, d_v, head;
    enum element element;
    float scale;
    const struct result_rules *rules;
    const uint16_t *q;
    uint16_t *out;
    float *max_logit, *lse; /* NULL: not wanted */
};

/* Over the first `count` keys of the memory. */
void ref_attend(const struct ref_row *row, const struct ref_memory *memory, int64_t count);

#endif
