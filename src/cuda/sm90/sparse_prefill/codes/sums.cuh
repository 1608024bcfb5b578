/* SPDX-License-Identifier: MIT
 *
 * The warpgroups of the sums: O of 256 columns each += P·V, and the end of a tile.
 */
#pragma once

#include "../../../device/mma.cuh"
#include "layout.cuh"

#include "../results.cuh"

struct Sums {
    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t base;
    float left[64], right[64]; /* O of 128 columns each */
    bool keeps_half; /* results are still being read from the last block's */

    __device__ __forceinline__ Sums(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), keeps_half(false)
    {
    }

    static __device__ __forceinline__ int lane() { return (int)(fresh_thread() % 32); }
    static __device__ __forceinline__ int half() { return (int)(fresh_thread() / WARPGROUP_THREADS) - 2; }
    static __device__ __forceinline__ int row() { return wgmma_d_row((int)(fresh_thread() % WARPGROUP_THREADS), 0); }
    static __device__ __forceinline__ bool is_first_warp()
    {
        return __all_sync(~0u, fresh_thread() / 32 % WARPS_OF_GROUP == 0);
    }

    __device__ __forceinline__ uint32_t empty_at(uint32_t buffer) const
    {
        return barrier_at(SHARED_AT(base, keys_empty) + buffer * (HALVES * sizeof(Barrier)), half());
    }

    /* A's fragments of the warp's 16 rows. From registers, products leave shared memory to others. */
    static __device__ __forceinline__ void load_weights(uint32_t (&f)[4][4], uint32_t p_tile)
    {
        const uint32_t line = (uint32_t)(row() / 16 * 16 + ldmatrix_tile_row(lane()));
        const uint32_t at = p_tile + swizzle_128(line, (uint32_t)ldmatrix_tile_chunk(lane()));
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) ldmatrix_x4(f[k], at ^ (32 * k));
    }

    __device__ __forceinline__ void add_block(uint32_t count, bool first, bool last)
    {
        const uint32_t buffer = count % BUFFERS;
        mbarrier_wait(barrier_at(SHARED_AT(base, p_full), (int)buffer), count / BUFFERS & 1);
        if (__any_sync(~0u, half() == 1 && !last)) mbarrier_wait(SHARED_AT(base, scored), (count + 1) & 1);
        if (__any_sync(~0u, shared.moved[buffer])) {
            const float factor[2] = {shared.factor[buffer][row()], shared.factor[buffer][row() + 8]};
#pragma unroll
            for (int i = 0; i < 64; i++) left[i] *= factor[i / 2 % 2], right[i] *= factor[i / 2 % 2];
        }
#ifdef RS
        uint32_t weights[4][4];
        load_weights(weights, SHARED_AT(base, p) + buffer * TILE_BYTES);
#define W(k) weights[k]
#else
#define W(k) wgmma_lines(SHARED_AT(base, p) + buffer * TILE_BYTES, k)
#endif
        const uint32_t v = half_at(base, buffer, half());
        hold(left), hold(right);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_128_columns<Bf16>(left, W(k), wgmma_columns(v, k), k > 0 || !first);
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_128_columns<Bf16>(right, W(k), wgmma_columns(v + UNIT_BYTES, k), k > 0 || !first);
        wgmma_commit();
        wgmma_wait<0>();
        hold(left), hold(right);
        if (lane() == 0) {
            mbarrier_arrive(barrier_at(SHARED_AT(base, p_empty), (int)buffer));
            if (!last) mbarrier_arrive(empty_at(buffer)); /* else it is the results' place */
        }
    }

    /* ---- The end of a tile ------------------------------------------------------------------------ */

    /* The row's sum, largest score and reference, from what the scores' warps have. */
    __device__ __forceinline__ RowEnd read_end(int row, float &sum) const
    {
        float largest = -INFINITY;
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS_OF_GROUP; w++)
            sum += shared.sum[w][row], largest = fmaxf(largest, shared.largest[w][row]);
        const float reference = -shared.below[row];
        return RowEnd(reference, sum, reference + largest);
    }

    /* Rows go to where the last block's half of V was, 32 KB, as much as they are. TMA takes them from there. */
    __device__ __forceinline__ void end_tile(const Item &item, uint32_t buffer, uint32_t parity)
    {
        const int first = item.tile * ROWS, my_half = half();
        float sum[2], factor[2];
        mbarrier_wait(SHARED_AT(base, end_full), parity);
        const RowEnd end[2] = {read_end(row(), sum[0]), read_end(row() + 8, sum[1])};
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, end_empty));
#pragma unroll
        for (int i = 0; i < 2; i++)
            factor[i] = row_factor(p.call, min(first + row() + 8 * i, p.call.h_q - 1), end[i], sum[i]);
        barrier_sync(SUMS_BARRIER + my_half, WARPGROUP_THREADS); /* all have multiplied */
        const uint32_t tiles = half_at(base, buffer, my_half), lines = tiles + (uint32_t)(row() / 16 * 16) * LINE_BYTES;
        const Scaled scaled = {factor};
        const uint32_t own = (uint32_t)lane();
        stage_group<Bf16, 0>(left, scaled, 0, lines, own);
        stage_group<Bf16, 32>(left, scaled, 64, lines + TILE_BYTES, own);
        stage_group<Bf16, 0>(right, scaled, 128, lines + 2 * TILE_BYTES, own);
        stage_group<Bf16, 32>(right, scaled, 192, lines + 3 * TILE_BYTES, own);
        fence_async_shared();
        barrier_sync(SUMS_BARRIER + my_half, WARPGROUP_THREADS);
        if (is_first_warp() && elect_one())
#pragma unroll
            for (int unit = 0; unit < HALF_UNITS; unit++)
                store_unit(p, item, my_half * HALF_UNITS + unit, tiles + (uint32_t)unit * UNIT_BYTES);
        __syncwarp();
        if (lane() % 4 == 0)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (first + row() + 8 * i < p.call.h_q)
                    store_row_end(p.call, item, first + row() + 8 * i, my_half, end[i]);
        if (is_first_warp() && elect_one()) { /* in place of every warp */
            bulk_wait_read<0>();
            mbarrier_arrive_for(empty_at(buffer), WARPS_OF_GROUP);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run()
    {
        uint32_t count = 0, tiles = 0;
#pragma unroll
        for (int i = 0; i < 64; i++) left[i] = right[i] = 0.0f;
        for (int i = (int)blockIdx.x; i < p.items; i += (int)gridDim.x) {
            const Item item(p, i);
            if (item.blocks == 0) {
                store_empty(p.call, item, (int)(fresh_thread() - 2 * WARPGROUP_THREADS));
                continue;
            }
            for (int k = 0; __any_sync(~0u, k < item.blocks); k++, count++)
                add_block(count, k == 0, k + 1 == item.blocks);
            end_tile(item, (count - 1) % BUFFERS, tiles & 1);
            tiles++;
        }
    }
};
