/* SPDX-License-Identifier: MIT
 *
 * The scores' warpgroup: S^T = K Qᵀ, both from shared memory, as the keys arrive; softmax; addresses of the
 * keys of the block after next.
 */
#pragma once

#include "../softmax.cuh"
#include "layout.cuh"

namespace sparse_decode::plain {

/* ---- Indices --------------------------------------------------------------------------------- */

/* Iterates over the lists of keys: a lane has an entry of a block, two blocks ahead of its scores, and
 * publishes the address of that token to the sums' warps, which gather. Splits follow each other without a
 * gap. */
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

/* ---- Scores ---------------------------------------------------------------------------------- */

template <typename R> struct Scores {
    using Shared = typename R::Shared;
    using Element = typename R::Element;

    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;
    Keys<R> keys;
    Softmax<Shared> softmax;
    float s[32];
    uint32_t valid[3]; /* keys of this block and of the next two: Keys::publish_addresses */
    uint32_t count;    /* of blocks */

    DEVICE Scores(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), keys(params, memory),
          softmax(params, memory), count(0)
    {
    }

    DEVICE void multiply_tile(uint32_t kv_stage, int tile, bool first)
    {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_64<Element>(
                s,
                wgmma_lines(SHARED_AT(smem, keys) + kv_stage * (uint32_t)sizeof(shared.keys[0]) +
                                (uint32_t)tile * TILE_BYTES,
                            k),
                wgmma_lines(SHARED_AT(smem, q) + (uint32_t)tile * TILE_BYTES, k), !first || k > 0);
    }

    /* Computes S^T of a block. Rope columns come first: their stage is free before V's is. */
    DEVICE void score_block(uint32_t kv_stage, uint32_t parity)
    {
        hold(s);
#pragma unroll
        for (int i = 0; i < R::GROUPS; i++) {
            const int g = R::HAS_ROPE ? (i + HALF_TILES) % R::GROUPS : i;
            mbarrier_wait(SHARED_AT(smem, arrived) + (kv_stage * R::GROUPS + (uint32_t)g) * 8, parity);
            fence_async_shared(); /* cp.async writes by the generic proxy */
            wgmma_fence();
            if (g == HALF_TILES) {
                multiply_tile(kv_stage, R::ROPE_TILE, i == 0);
            } else {
                multiply_tile(kv_stage, g, i == 0);
                multiply_tile(kv_stage, g + HALF_TILES, false);
            }
            wgmma_commit();
        }
        /* All have read the addresses of this block's keys: those of the block after next
         * replace them. */
        valid[2] = keys.publish_addresses(kv_stage);
        keys.load_index();
        wgmma_wait<0>();
        hold(s);
    }

    /* Masks the scores of entries that name no key. */
    DEVICE void mask()
    {
        const uint32_t all = (1u << Keys<R>::KEYS_OF_WARP) - 1;
        if (__all_sync(~0u, (valid[0] & all) == all)) return;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (!(valid[0] >> (lane() / 4 + 8 * i) & 1))
#pragma unroll
                for (int j = 0; j < 8; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = -INFINITY;
    }

    DEVICE void add_block(bool first)
    {
        score_block(count & 1, count >> 1 & 1);
        mask();
        mbarrier_wait(SHARED_AT(smem, empty), (count & 1) ^ 1);
        softmax.template block<Element>(s, 0, false, first);
        valid[0] = valid[1], valid[1] = valid[2];
        count++;
    }

    /* Passes the sums of the split and its references to the other warpgroups. */
    DEVICE void end_split(uint32_t parity)
    {
        const float2 two = softmax.join_lanes(softmax.sums, [](float a, float b) { return a + b; });
        mbarrier_wait(SHARED_AT(smem, sum_empty), parity ^ 1);
        *(float2 *)&shared.sum[warp()][softmax.pair()] = two;
        if (threadIdx.x < 4)
#pragma unroll
            for (int h = 0; h < 16; h++) shared.below[softmax.head(h)] = softmax.below[h];
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, sum_full));
    }

    DEVICE int blocks_of_split(int i) const
    {
        int length;
        return blocks_of(list_split(p, shared.list, i, &length));
    }

    /* Votes: as in the kernel for FP8 caches. */
    DEVICE void run()
    {
        keys.begin();
        keys.load_index(), valid[0] = keys.publish_addresses(0);
        keys.load_index(), valid[1] = keys.publish_addresses(1);
        keys.load_index();
        barrier_sync(START_BARRIER, 3 * WARPGROUP_THREADS);
        uint32_t splits = 0;
        for (int i = shared.list.first; __any_sync(~0u, i <= shared.list.last); i += shared.list.step) {
            const int blocks = blocks_of_split(i);
            softmax.begin();
            mbarrier_wait(SHARED_AT(smem, q_full), splits & 1);
            for (int k = 0; __any_sync(~0u, k < blocks); k++) add_block(k == 0);
            end_split(splits & 1);
            splits++;
        }
    }
};

} // namespace sparse_decode::plain
