/* SPDX-License-Identifier: MIT
 *
 * The warpgroup with the scores, where keys are the first factor: computes S^T = K Q^T block after block and
 * stores it to shared memory. Other warps turn it into weights (softmax.cuh), so that the products of the
 * next block begin at once.
 *
 * `Products` computes S^T: ConvertedKeys or ByLines (key_products.cuh).
 */
#pragma once

#include "../../device/shared.cuh"
#include "../latent/epilogue.cuh"
#include "convert.cuh"
#include "key_products.cuh"
#include "layout.cuh"
#include "queries.cuh"

namespace dense_decode_fp8 {

template <typename V, typename Products> struct KeyScores {
    using Shared = SharedOf<V>;
    /* Whether the next block is prepared before S^T of this one is stored, if its keys are there. Over
     * FP8_656 this makes calls of 64 rows a tile 3 % longer. */
    static constexpr bool BEGINS_EARLY = !V::SCALED;
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t smem;
    float s[V::ROWS / 2];
    Products products;
    Ring<V::KV_STAGES> kv_stage;
    uint32_t splits = 0, parity = 1;
    int visible_last; /* keys of the last block that some row sees */
    int masked; /* keys at the end of the split, the last block's rest included, that some row does not see */
    const ScoreAddress<V> scores;

    DEVICE KeyScores(const struct dense_decode_fp8_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), scores(SHARED_AT(smem, s))
    {
    }

    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    DEVICE static int warp() { return (int)(fresh_thread() / 32 % 4); }
    DEVICE static void sync() { barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); }

    /* Clears codes and values of keys from … 63, which some row does not see: they must not reach the
     * products of P and V. */
    DEVICE void clear(uint32_t keys, int from, int end, bool fits)
    {
        sync(); /* every warp's products have read the block */
        clear_codes(keys, from);
        /* Values that fit in fp16 are finite, and those of keys that no row sees have scales of 0. */
        if (V::SCALED && !fits) clear_values(keys, from, end);
        fence_async_shared();
        sync();
    }

    /* Waits until S^T of the previous block has been read. */
    DEVICE void wait_for_scores_read() const { mbarrier_wait(SHARED_AT(smem, s_empty), parity); }

    DEVICE void store()
    {
        wait_for_scores_read();
        parity ^= 1;
        scores.store(s);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, s_full));
    }

    /* The task of the current split, in shared memory; every warp has its own copy. */
    DEVICE Task &task() const { return shared.task[warp()]; }

    /* Prepares a block for its products: reads the first fragments, or converts its scales to fp16.
     * `left`: blocks of the split after it. */
    DEVICE void begin(int index, int left)
    {
        const uint32_t keys = keys_at(index);
        if constexpr (V::SCALED) {
            const bool fits = halve_scales(keys, half_scales_at(index), left > 0 ? (int)KEYS : visible_last);
            if (lane() == 0) ((volatile uint8_t *)&shared.fits[index])[warp()] = fits;
            __syncwarp();
            if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, scales_full), index));
        } else {
            products.begin(keys);
        }
    }

    DEVICE uint32_t keys_at(int index) const
    {
        return SHARED_AT(smem, keys) + (uint32_t)(index * V::KEYS_BYTES);
    }

    DEVICE uint32_t half_scales_at(int index) const
    {
        return SHARED_AT(smem, half_scales) + (uint32_t)(index * HALF_SCALES_BYTES);
    }

    /* `begun`: the block is already prepared. Returns whether the next one is. */
    DEVICE bool run_block(int left, bool begun)
    {
        const Ring<V::KV_STAGES> own = kv_stage;
        kv_stage.advance();
        if (!begun) {
            mbarrier_wait(barrier_at(SHARED_AT(smem, keys_full), own.index), own.parity);
            begin(own.index, left);
        }
        bool fits = true;
        if constexpr (V::SCALED) {
            mbarrier_wait(barrier_at(SHARED_AT(smem, scales_full), own.index), own.parity);
            fits = __all_sync(~0u, shared.fits[own.index] == ALL_FIT);
            if (SELDOM(!fits)) wait_for_scores_read();
        }
        const uint32_t keys = keys_at(own.index);
        products.score(p, s, keys, smem, (int)(splits & 1), half_scales_at(own.index), fits, scores);
        if (SELDOM(__any_sync(~0u, KEYS * left < masked))) {
            const Task &task = this->task();
            const int first_key = task.split.begin + (blocks_of(task) - 1 - left) * KEYS;
            clear(keys, max(task.all_see - first_key, 0), task.end - first_key, fits);
        }
        const uint32_t next_full = barrier_at(SHARED_AT(smem, keys_full), kv_stage.index);
        const bool begins =
            BEGINS_EARLY && __all_sync(~0u, left > 0 && mbarrier_test(next_full, kv_stage.parity));
        if (begins) begin(kv_stage.index, left - 1);
        store();
        return begins;
    }

    DEVICE void run_split(const WorkTile &work, int i)
    {
        if (__all_sync(~0u, work.blocks == 0)) {
            store_empty(p.dense.call, work.task, V::ROWS);
            return;
        }
        masked = masked_keys(work);
        visible_last = work.task.end - work.task.split.begin - (work.blocks - 1) * KEYS;
        __syncwarp();
        if (lane() == 0) task() = work.task;
        if constexpr (!V::JOIN_IN_KERNEL) {
            sync(); /* all warps have scored the previous split */
            load_queries<V>(p, task(), {warp(), WARPGROUP_THREADS / 32}, smem, (int)(splits & 1));
            prefetch_next_queries(p, shared, i);
            sync();
        }
        bool begun = false;
#pragma unroll 1
        for (int left = work.blocks - 1; __all_sync(~0u, left >= 0); left--) begun = run_block(left, begun);
        splits++;
    }

    DEVICE void run()
    {
        for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
            run_split(work_tile_of<V>(p.dense, shared, i, CtaCoord(p.dense)), i);
    }
};

} // namespace dense_decode_fp8
