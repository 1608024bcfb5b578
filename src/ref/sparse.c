/* SPDX-License-Identifier: MIT */
#include "sparse.h"

#include "../kvformat.h"

#include <math.h>
#include <string.h>

fmla_status ref_memory_size(const char *operation, size_t most_keys, int64_t d_qk, int64_t d_v, size_t *bytes)
{
    size_t doubles;
    if (__builtin_mul_overflow(most_keys, (size_t)d_qk + 1, &doubles) ||
        __builtin_add_overflow(doubles, (size_t)(d_v + d_qk), &doubles) ||
        __builtin_mul_overflow(doubles, sizeof(double), bytes))
        return fail(FMLA_UNSUPPORTED, "%s: indices: %zu keys of a token would not fit into memory", operation,
                    most_keys);
    return FMLA_OK;
}

struct ref_memory ref_memory_of(void *workspace, size_t most_keys, int64_t d_qk, int64_t d_v)
{
    struct ref_memory m = {.keys = workspace};
    m.scores = m.keys + most_keys * (size_t)d_qk;
    m.sum = m.scores + most_keys;
    m.q = m.sum + d_v;
    return m;
}

int64_t ref_count(int64_t topk, const int32_t *lengths, int64_t i)
{
    const int64_t count = lengths ? lengths[i] : topk;
    return count < 0 ? 0 : count > topk ? topk : count;
}

int64_t ref_list_keys(const struct sparse_cache *cache, enum kv_format format, int64_t d_qk,
                      const int32_t *indices, int64_t count, double *keys, int64_t listed)
{
    const struct kv_layout layout = kv_layout_of(format, (int32_t)d_qk);
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = indices[i];
        if (index < 0 || index >= cache->pages * cache->page_size) continue;
        const uint8_t *page = cache->data + index / cache->page_size * cache->page_bytes;
        int64_t page_size = cache->page_size, slot = index % page_size;
        if (!layout.scale_bytes) { /* tokens may lie apart: each is a page of one slot */
            page += slot * cache->slot_bytes;
            page_size = 1, slot = 0;
        }
        double *key = keys + listed++ * d_qk;
        for (int64_t d = 0; d < d_qk; d++)
            key[d] = (double)kv_load(&layout, page, page_size, slot, (int32_t)d, 1.0f);
    }
    return listed;
}

static double load(const struct ref_row *row, const uint16_t *at)
{
    return (double)(row->element == ELEMENT_BF16 ? num_from_bf16(*at) : num_from_fp16(*at));
}

static void store(const struct ref_row *row, uint16_t *at, double x)
{
    *at = row->element == ELEMENT_BF16 ? num_to_bf16((float)x) : num_to_fp16((float)x);
}

void ref_attend(const struct ref_row *row, const struct ref_memory *m, int64_t count)
{
    const struct result_rules *rules = row->rules;
    for (int64_t d = 0; d < row->d_qk; d++) m->q[d] = load(row, row->q + d);
    double most = -INFINITY;
    for (int64_t t = 0; t < count; t++) {
        const double *key = m->keys + t * row->d_qk;
        double dot = 0.0;
        for (int64_t d = 0; d < row->d_qk; d++) dot += m->q[d] * key[d];
        m->scores[t] = (double)row->scale * dot;
        if (m->scores[t] > most) most = m->scores[t];
    }
    /* No key, or no score above -inf: every exp below is 0 (or NaN). */
    const double max = most == -INFINITY ? 0.0 : most;

    double total = 0.0;
    memset(m->sum, 0, (size_t)row->d_v * sizeof *m->sum);
    for (int64_t t = 0; t < count; t++) {
        const double *key = m->keys + t * row->d_qk;
        const double e = exp(m->scores[t] - max);
        total += e;
        for (int64_t d = 0; d < row->d_v; d++) m->sum[d] += e * key[d];
    }

    const bool empty = total == 0.0;
    const double lse = max + log(total); /* natural */
    double factor = 1.0;
    if (rules->attn_sink && !empty) factor = 1.0 / (1.0 + exp((double)rules->attn_sink[row->head] - lse));
    for (int64_t d = 0; d < row->d_v; d++) store(row, row->out + d, empty ? 0.0 : m->sum[d] / total * factor);
    if (row->max_logit) *row->max_logit = (float)(most * (double)rules->lse_factor);
    if (row->lse) *row->lse = empty ? rules->lse_of_empty : (float)(lse * (double)rules->lse_factor);
}
