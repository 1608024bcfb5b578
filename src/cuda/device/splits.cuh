/* SPDX-License-Identifier: MIT
 *
 * How a call's keys are cut into splits (a range of keys of one request), and which split writes where.
 * Splits follow the split plan, or are even: of equal length but for the last of a request (batch-invariant
 * mode, and sparse decode of few keys). The plan says where requests are split. A request ends at its current
 * length, so a plan made for other lengths still covers every key once. Values read from a plan are clamped,
 * so a damaged plan cannot lead out of bounds.
 */
#pragma once

#include "../params.h"
#include "kernel.cuh"

struct Split {
    int request;
    int begin, end;                   /* keys */
    int64_t part;                     /* index among all; DIRECT if the split is the whole request */
    bool first_of_two, second_of_two; /* of a request that is split once */
};

enum { DIRECT = -1 };

DEVICE int clamp_int(int x, int low, int high)
{
    return min(max(x, low), high);
}

DEVICE int request_length(const struct dense_decode_params &p, int request)
{
    return clamp_int(__ldg(p.seqlens + request), 0, p.capacity);
}

/* Sparse decode: plan_topk_count, plan_extra_begin and plan_topk_length of plan.h in 32 bits, which suffice
 * here for the list of all caches. */
DEVICE int topk_count(int64_t topk, const int32_t *length, int request)
{
    return length ? clamp_int(__ldg(length + request), 0, (int)topk) : (int)topk;
}

DEVICE int topk_extra_begin(int count)
{
    return max((int)PLAN_BLOCK, (count + (PLAN_BLOCK - 1)) & -PLAN_BLOCK);
}

DEVICE int topk_length(const struct plan_topk &topk, int request)
{
    const int count = topk_count(topk.topk, topk.length, request);
    return topk.extra_topk ? topk_extra_begin(count) + topk_count(topk.extra_topk, topk.extra_length, request)
                           : max(count, 1);
}

DEVICE int request_length(const struct sparse_decode_params &p, int request)
{
    return topk_length(p.topk, request);
}

DEVICE int request_length(const struct join_params &p, int request)
{
    return p.seqlens ? clamp_int(__ldg(p.seqlens + request), 0, p.capacity) : topk_length(p.topk, request);
}

/* ---- By the plan ----------------------------------------------------------------------------- */

/* A row of the plan. Partition i makes part 2i of its first request and part 2i + 1 of its last, if that is
 * another. */
struct Partition {
    int index;
    int first, last; /* requests, clamped; last < first if idle */
    int begin_block, end_block;
    bool continued, goes_on; /* the first request began earlier; the last goes on in the next partition */
    bool begins_split_once;  /* the first request is split once, and its second split is here */
    bool ends_split_once;    /* the last request is split once */
};

/* Returns whether this is a plan of this batch with the call's number of partitions. With any other plan
 * requests are taken whole, in turns. For separate tables the caller guarantees it. Here and below all loads
 * are in flight together: if one waited for a comparison with the result of another, the kernel would begin a
 * microsecond later. */
DEVICE bool plan_fits(const struct split_params &split, int b)
{
    if (!split.header) return true;
    const uint32_t magic = split.header->magic;
    const int num_partitions = split.header->num_partitions;
    const int64_t batch = split.header->batch;
    return (magic == PLAN_MAGIC) & (num_partitions == split.num_partitions) & (batch == b);
}

/* Returns whether the last request of a partition goes on in the next one, whose row is `next`. */
DEVICE bool plan_goes_on(const struct plan_partition &row, const struct plan_partition &next)
{
    return (next.begin_request == row.end_request) & (next.begin_split > 0) &
           (row.end_request >= row.begin_request);
}

/* For a request that goes on in partition `row`: returns whether the plan splits it once and the partition
 * has other requests after it. Its second split is then stored long before the first, which is the last split
 * of its own partition. */
DEVICE bool plan_splits_once(const struct plan_partition &row)
{
    return (row.begin_split == 1) & (row.end_request > row.begin_request);
}

/* Returns the fields of row i that are used here; i may be out of range. */
DEVICE struct plan_partition plan_row(const struct split_params &split, int i)
{
    const struct plan_partition *row = split.partitions + clamp_int(i, 0, split.num_partitions - 1);
    struct plan_partition copy;
    copy.begin_request = row->begin_request, copy.end_request = row->end_request;
    copy.begin_block = row->begin_block, copy.end_block = row->end_block;
    copy.begin_split = row->begin_split;
    return copy;
}

DEVICE Partition partition_of(const struct split_params &split, int i, int b)
{
    const struct plan_partition before = plan_row(split, i - 1), row = plan_row(split, i),
                                after = plan_row(split, i + 1);
    Partition partition;
    const bool continues = plan_goes_on(before, row) & (i > 0);
    partition.index = i;
    partition.first = clamp_int(row.begin_request, 0, b);
    partition.last = clamp_int(row.end_request, -1, b - 1);
    partition.begin_block = clamp_int(row.begin_block, 0, INT32_MAX / PLAN_BLOCK);
    partition.end_block = clamp_int(row.end_block, 0, INT32_MAX / PLAN_BLOCK);
    partition.continued = (row.begin_request == partition.first) & continues;
    partition.goes_on =
        (row.end_request == partition.last) & (i + 1 < split.num_partitions) & plan_goes_on(row, after);
    partition.begins_split_once = partition.continued & plan_splits_once(row);
    partition.ends_split_once = partition.goes_on & plan_splits_once(after) &
                                !(partition.continued & (partition.first == partition.last));
    return partition;
}

DEVICE Split partition_split(const Partition &partition, int request, int length)
{
    const bool continued = partition.continued && request == partition.first;
    const bool goes_on = partition.goes_on && request == partition.last;
    Split split;
    split.request = request;
    split.begin = continued ? min(partition.begin_block * PLAN_BLOCK, length) : 0;
    split.end = goes_on ? clamp_int(partition.end_block * PLAN_BLOCK, split.begin, length) : length;
    split.part = !continued && !goes_on ? (int64_t)DIRECT
                                        : 2 * (int64_t)partition.index + (request == partition.first ? 0 : 1);
    split.first_of_two = partition.ends_split_once && request == partition.last;
    split.second_of_two = partition.begins_split_once && request == partition.first;
    return split;
}

/* Returns the ready flags of a partition's first request, which may be the second split of a request that is
 * split once. */
DEVICE uint32_t *ready_flags_of(const struct split_params &split, int64_t partition)
{
    return split.ready_flags + partition * split.tiles * READY_FLAGS_OF_TILE;
}

/* ---- Even splits ----------------------------------------------------------------------------- */

/* A compile-time constant for dense decode. */
DEVICE int keys_of_split(const struct dense_decode_params &)
{
    return INVARIANT_SPLIT_KEYS;
}

template <typename Params> DEVICE int keys_of_split(const Params &p)
{
    return p.split.split_keys;
}

template <typename Params> DEVICE int even_splits_of(const Params &p, int length)
{
    return length ? (length - 1) / keys_of_split(p) + 1 : 1; /* a sum could overflow near 2^31 */
}

template <typename Params> DEVICE Split even_split_of(const Params &p, int request, int i, int length)
{
    const int keys = keys_of_split(p);
    Split split;
    split.request = request;
    split.begin = i * keys;
    split.end = length - split.begin > keys ? split.begin + keys : length;
    split.part =
        even_splits_of(p, length) == 1 ? (int64_t)DIRECT : (int64_t)request * p.split.even_splits + i;
    split.first_of_two = split.second_of_two = false;
    return split;
}

/* ---- Either: the splits of one worker --------------------------------------------------------- */

/* With a plan: the requests of a partition, or, if the plan does not fit, every step-th request. Without:
 * every step-th split of one request. */
struct SplitList {
    int first, last, step;
    int request; /* without a plan */
    Partition partition;
};

template <typename Params> DEVICE SplitList split_list(const Params &p, unsigned worker)
{
    SplitList list;
    if (p.split.partitions) {
        list.partition = partition_of(p.split, (int)worker, p.b); /* its loads overlap those of the header */
        const bool fits = plan_fits(p.split, p.b);
        list.partition.continued &= fits, list.partition.goes_on &= fits;
        list.partition.begins_split_once &= fits, list.partition.ends_split_once &= fits;
        list.first = fits ? list.partition.first : (int)worker;
        list.last = fits ? list.partition.last : p.b - 1;
        list.step = fits ? 1 : p.split.num_partitions;
    } else {
        const unsigned lanes = (unsigned)p.split.split_lanes;
        list.request = (int)(worker / lanes);
        list.first = (int)(worker % lanes), list.step = p.split.split_lanes;
        list.last = even_splits_of(p, request_length(p, list.request)) - 1;
    }
    return list;
}

template <typename Params> DEVICE Split list_split(const Params &p, const SplitList &list, int i, int *length)
{
    *length = request_length(p, p.split.partitions ? i : list.request);
    return p.split.partitions ? partition_split(list.partition, i, *length)
                              : even_split_of(p, list.request, i, *length);
}
