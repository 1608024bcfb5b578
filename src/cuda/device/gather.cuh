/* SPDX-License-Identifier: MIT
 *
 * Keys of sparse decode and sparse prefill: maps the list that the plan splits to entries of a query token's
 * index lists, and an index to the address of its key. Entries that do not count are never read.
 */
#pragma once

#include "../../kvformat.h"
#include "divide.cuh"
#include "splits.cuh"

#include <stddef.h>

/* Positions in a request's list: [0, count) are entries of the cache, [extra_begin, extra_end) those of the
 * extra cache. */
struct ListEnds {
    int count, extra_begin, extra_end;
};

DEVICE ListEnds list_ends(const struct sparse_decode_params &p, int request)
{
    const int count = topk_count(p.topk.topk, p.topk.length, request);
    ListEnds ends = {count, INT32_MAX, INT32_MAX};
    if (p.topk.extra_topk) {
        ends.extra_begin = topk_extra_begin(count);
        ends.extra_end = ends.extra_begin + topk_count(p.topk.extra_topk, p.topk.extra_length, request);
    }
    return ends;
}

/* The same as the general split_list and list_split, but for even splits without their divisions, which would
 * delay a short kernel. */
DEVICE SplitList split_list(const struct sparse_decode_params &p, unsigned worker)
{
    const struct split_params &split = p.split;
    if (split.partitions || split.split_lanes < split.even_splits)
        return split_list<struct sparse_decode_params>(p, worker);
    SplitList list;
    list.request = fast_divide((int)worker, p.splits_divisor);
    list.first = (int)worker - list.request * split.even_splits, list.step = split.even_splits;
    const bool there = list.first == 0 || list.first * split.split_keys < request_length(p, list.request);
    list.last = there ? list.first : -1;
    return list;
}

DEVICE Split list_split(const struct sparse_decode_params &p, const SplitList &list, int i, int *length)
{
    const int keys = p.split.split_keys, request = p.split.partitions ? i : list.request;
    *length = request_length(p, request);
    if (p.split.partitions) return partition_split(list.partition, i, *length);
    Split split = {};
    split.request = request, split.begin = i * keys;
    split.end = *length - split.begin > keys ? split.begin + keys : *length;
    split.part = *length <= keys ? (int64_t)DIRECT : (int64_t)request * p.split.even_splits + i;
    return split;
}

/* Returns entry `at` of the list; -1 if there is none. */
DEVICE int list_entry(const struct sparse_decode_params &p, const ListEnds &ends, int request, int token,
                      int at)
{
    const bool extra = at >= ends.extra_begin;
    if (at >= (extra ? ends.extra_end : ends.count)) return -1;
    const struct sparse_cache_params &cache = p.cache[extra];
    return __ldg(cache.indices + request * cache.indices_stride[0] + token * cache.indices_stride[1] +
                 (at - (extra ? ends.extra_begin : 0)));
}

/* The address of a key. */
struct KeyAddress {
    const uint8_t *token; /* NULL: the index names none */
    const uint8_t *scales;
};

DEVICE bool names_key(const struct sparse_cache_params &cache, int index)
{
    return (uint32_t)index < cache.slots;
}

/* Returns the address of the key that an index names. */
template <enum kv_format FORMAT>
DEVICE KeyAddress address_of_key(const struct sparse_cache_params &cache, int index)
{
    const struct kv_layout layout = kv_layout_of(FORMAT, 0);
    const int page = fast_divide(index, cache.page_divisor), slot = index - page * cache.page_size;
    const uint8_t *data = cache.data + page * cache.page_bytes, *token = data + slot * cache.slot_bytes;
    return {token, FORMAT == KV_FP8_584 ? data + (int64_t)cache.page_size * layout.token_bytes +
                                              (int64_t)slot * layout.scale_bytes
                                        : token + layout.scale_offset};
}

/* The same for scales that are in tokens or after all tokens of a page, as the cache's parameters say. */
DEVICE KeyAddress address_of_key_at_runtime(const struct sparse_cache_params &cache, int index)
{
    const int page = fast_divide(index, cache.page_divisor), slot = index - page * cache.page_size;
    const uint8_t *data = cache.data + page * cache.page_bytes;
    return {data + slot * cache.slot_bytes, data + cache.scale_base + slot * cache.scale_step};
}
