/* SPDX-License-Identifier: MIT */
#include "call.h"

#include <stdlib.h>

fmla_status call_workspace(fmla_dense_decode_args *args)
{
    size_t bytes = 0, alignment = 1;
    args->workspace = NULL, args->workspace_size = 0;
    const fmla_status status = fmla_dense_decode_workspace_size(args, &bytes, &alignment);
    if (status != FMLA_OK) return status;
    const size_t unit = alignment > sizeof(void *) ? alignment : sizeof(void *);
    args->workspace = aligned_alloc(unit, (bytes / unit + 1) * unit);
    args->workspace_size = bytes;
    return FMLA_OK;
}

int64_t call_length(const fmla_dense_decode_args *args, int64_t r)
{
    const int64_t pages = args->block_table ? args->block_table->shape[1] : 1;
    const int64_t capacity = pages * args->kv_cache->shape[1];
    const int32_t length = ((const int32_t *)args->seqlens->data)[r];
    return length < 0 ? 0 : length > capacity ? capacity : length;
}

int64_t call_visible(const fmla_dense_decode_args *args, int64_t r, int64_t j)
{
    const int64_t length = call_length(args, r);
    const int64_t seen = args->causal ? length - args->q->shape[1] + j + 1 : length;
    return seen < 0 ? 0 : seen;
}

struct call_work call_work(const fmla_dense_decode_args *args)
{
    const int64_t *q = args->q->shape, *cache = args->kv_cache->shape;
    const double row = (double)(q[3] + args->out->shape[3]);
    struct call_work work = {0};
    for (int64_t r = 0; r < q[0]; r++) {
        work.keys += call_length(args, r);
        for (int64_t j = 0; j < q[1]; j++) work.pairs += (double)call_visible(args, r, j) * (double)q[2];
    }
    work.flop = 2.0 * work.pairs * row;
    work.bytes = 2.0 * ((double)work.keys * (double)cache[2] * (double)cache[3] +
                        (double)q[0] * (double)q[1] * (double)q[2] * row);
    return work;
}

int call_by_value(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}
