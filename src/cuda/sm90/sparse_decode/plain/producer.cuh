/* SPDX-License-Identifier: MIT
 *
 * Iteration of the scores' warps over the lists of keys: a lane has an entry of a block, two blocks ahead of
 * its scores, and publishes the address of that token to the sums' warps, which gather. Splits follow each
 * other without a gap.
 */
#pragma once

#include "layout.cuh"

namespace sparse_decode::plain {

template <typename R> struct Keys {
    using Shared = typename R::Shared;
    enum { KEYS_OF_WARP = 16 };

    const struct sparse_decode_params &p;
    Shared &shared;
    const int32_t *entries[2]; /* of the token, in either cache, by list position */
    int count, extra_begin, extra_end, end, at;
    int next_split, index;
    bool done, of_extra; /* no split is left; the index is of the extra cache */

    DEVICE Keys(const struct sparse_decode_params &params, Shared &memory) : p(params), shared(memory) {}

    /* Returns the lane's key of a block; both halves of the warp have the same keys. */
    static DEVICE int key() { return KEYS_OF_WARP * (int)(fresh_thread() / 32) + lane() % KEYS_OF_WARP; }

    DEVICE void enter_split()
    {
        int length;
        const Split split = list_split(p, shared.list, next_split, &length);
        const ListEnds ends = list_ends(p, split.request);
        const CtaCoord cta(p);
        count = ends.count, extra_begin = ends.extra_begin, extra_end = ends.extra_end;
        at = split.begin, end = split.end;
#pragma unroll
        for (int i = 0; i < 2; i++)
            entries[i] = p.cache[i].indices + split.request * p.cache[i].indices_stride[0] +
                         cta.token * p.cache[i].indices_stride[1] - (i ? ends.extra_begin : 0);
    }

    /* Loads the lane's index of a block. A block begins at a multiple of 64 of the list, so that its
     * entries are of one cache. */
    DEVICE void load_index()
    {
        index = -1;
        if (__any_sync(~0u, done)) return;
        of_extra = at >= extra_begin;
        const int entry = at + key();
        if (entry < min(end, of_extra ? extra_end : count))
            index = __ldg((of_extra ? entries[1] : entries[0]) + entry);
        at += KEYS;
        if (__any_sync(~0u, at >= end)) {
            next_split += shared.list.step;
            done = next_split > shared.list.last;
            if (__any_sync(~0u, !done)) enter_split();
        }
    }

    /* Publishes the addresses of the block whose index was loaded; returns which of the warp's keys exist,
     * one bit each. */
    DEVICE uint32_t publish_addresses(uint32_t kv_stage)
    {
        const struct sparse_cache_params &cache = p.cache[of_extra];
        const bool valid = names_key(cache, index);
        const uint8_t *token = address_of_key<R::FORMAT>(cache, valid ? index : 0).token;
        if (lane() < KEYS_OF_WARP) shared.address[kv_stage][key()] = (uint64_t)token | (valid ? 0 : NO_KEY);
        return __ballot_sync(~0u, valid);
    }

    DEVICE void begin()
    {
        next_split = shared.list.first, done = false, of_extra = false;
        enter_split();
    }
};

} // namespace sparse_decode::plain
