/* SPDX-License-Identifier: MIT
 *
 * The scores' warpgroup: S^T = K Qᵀ, both from shared memory, as the keys arrive; softmax; addresses of the
 * keys of the block after next.
 */
#pragma once

#include "../softmax.cuh"
#include "producer.cuh"

namespace sparse_decode::plain {

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
