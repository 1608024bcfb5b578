/* SPDX-License-Identifier: MIT
 *
 * The main loop of the warpgroups of the sums: O of 256 columns each += P V. They also gather: a warpgroup is
 * the first to know when its half of a block's columns is no longer needed, and requests that of the block
 * after next.
 */
#pragma once

#include "../queries.cuh"
#include "epilogue.cuh"
#include "layout.cuh"

namespace sparse_decode::plain {

template <typename R> struct Mainloop : Epilogue<R> {
    using Base = Epilogue<R>;
    using typename Base::Element, typename Base::Shared;
    enum { ROWS_AT_ONCE = 16 /* rows that a warpgroup takes at a time, eight lanes each */ };

    using Base::Base, Base::p, Base::shared, Base::smem, Base::PARTS, Base::PART_TILES;
    typename Base::Sums o;

    /* ---- Gathering --------------------------------------------------------------------------------- */

    /* The thread's row of the first 16, and its chunk. */
    static DEVICE int line() { return (int)(fresh_thread() % WARPGROUP_THREADS / 8); }
    static DEVICE int chunk() { return (int)(fresh_thread() % 8); }

    DEVICE uint32_t tile_at(uint32_t kv_stage, int tile) const
    {
        return SHARED_AT(smem, keys) + kv_stage * (uint32_t)sizeof(shared.keys[0]) +
               (uint32_t)tile * TILE_BYTES;
    }

    DEVICE uint32_t arrived_at(uint32_t kv_stage, int group) const
    {
        return SHARED_AT(smem, arrived) + (kv_stage * R::GROUPS + (uint32_t)group) * 8;
    }

    DEVICE uint64_t address_of(uint32_t kv_stage, int key) const { return shared.address[kv_stage][key]; }

    static DEVICE void copy_chunk(uint32_t to, uint64_t token, int offset)
    {
        cp_async_16(to, (const uint8_t *)(token & ~NO_KEY) + offset, !(token & NO_KEY));
    }

    /* Gathers the columns that V does not have; each side takes half of the keys. */
    DEVICE void gather_rope(uint32_t kv_stage)
    {
        if constexpr (!R::HAS_ROPE) return;
        const int first = side() * (KEYS / 2) + line(),
                  from = R::ROPE_TILE * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(kv_stage, R::ROPE_TILE) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < KEYS / 2 / ROWS_AT_ONCE; i++)
            copy_chunk(to + (uint32_t)(i * ROWS_AT_ONCE * LINE_BYTES),
                       address_of(kv_stage, first + i * ROWS_AT_ONCE), from);
        cp_async_arrive(arrived_at(kv_stage, HALF_TILES));
    }

    /* Gathers a part of the side's columns. */
    DEVICE void gather_part(uint32_t kv_stage, int part)
    {
        enum { ROUNDS = KEYS / ROWS_AT_ONCE };
        const int first = side() * HALF_TILES + part * PART_TILES;
        const int from = first * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(kv_stage, first) + swizzle_128((uint32_t)line(), (uint32_t)chunk());
        uint64_t token[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) token[i] = address_of(kv_stage, line() + i * ROWS_AT_ONCE) + from;
#pragma unroll
        for (int c = 0; c < PART_TILES; c++) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                copy_chunk(to + (uint32_t)(c * TILE_BYTES + i * ROWS_AT_ONCE * LINE_BYTES), token[i],
                           c * LINE_BYTES);
            cp_async_arrive(arrived_at(kv_stage, part * PART_TILES + c));
        }
    }

    /* Requests the queries; called by both sides together. Rows past the last head are zeros. */
    DEVICE void load_queries(int request)
    {
        enum { HEADS_AT_ONCE = 2 * ROWS_AT_ONCE };
        const CtaCoord cta(p);
        const int first = side() * ROWS_AT_ONCE + line(), heads = p.h_q - cta.tile * HEADS;
        const uint16_t *tile = first_query(p, request, cta) + CHUNK_ELEMENTS * chunk();
        const uint32_t to = SHARED_AT(smem, q) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < HEADS / HEADS_AT_ONCE; i++) {
            const int head = first + i * HEADS_AT_ONCE;
            const bool valid = head < heads;
            const uint16_t *from = tile + (valid ? head : 0) * p.q_stride[2];
#pragma unroll
            for (int c = 0; c < R::TILES; c++)
                cp_async_16(to + (uint32_t)(c * TILE_BYTES + i * HEADS_AT_ONCE * LINE_BYTES),
                            from + c * LINE_ELEMENTS, valid);
        }
        cp_async_arrive(SHARED_AT(smem, q_full));
    }

    /* ---- A block ------------------------------------------------------------------------------------ */

    /* Adds P·V of a block. `load`: further requests to issue while the products run. */
    template <typename Load> DEVICE void add_block(uint32_t count, bool first, const Load &load)
    {
        const uint32_t kv_stage = count & 1;
        mbarrier_wait(SHARED_AT(smem, full), count & 1);
        if (__any_sync(~0u, shared.block[0] & BLOCK_MOVED)) {
            const float factor[2] = {shared.factor[0][row()], shared.factor[0][row() + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(o[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint32_t v = tile_at(kv_stage, side() * HALF_TILES + part * PART_TILES);
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++)
                wgmma_128_columns<Element>(o[part], wgmma_lines(SHARED_AT(smem, p), k), wgmma_columns(v, k),
                                           k > 0 || !first);
            wgmma_commit();
        }
        gather_rope(kv_stage); /* the block's scores are done, and so are those with the split's queries */
        load();
        wgmma_wait<1>();
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS); /* no warp reads this part of V any longer */
        gather_part(kv_stage, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(o[part]);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, empty));
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS);
        gather_part(kv_stage, 1);
    }

    /* ---- All splits --------------------------------------------------------------------------------- */

    DEVICE int begin_split(int i)
    {
        int length;
        const Split now = list_split(p, shared.list, i, &length);
        const int warp = (int)fresh_thread() / 32 - 4;
        if (lane() == 0) shared.split[warp].part = now.part, shared.split[warp].request = now.request;
        __syncwarp();
        return blocks_of(now);
    }

    DEVICE int request_of(int i) const
    {
        return p.split.partitions ? i : shared.list.request;
    }

    /* Past the last block two more are gathered, of zeros: the scores' warps mark all their places with
     * NO_KEY. */
    DEVICE void run()
    {
        uint32_t count = 0, splits = 0;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
        load_queries(request_of(shared.list.first));
        barrier_sync(START_BARRIER, 3 * WARPGROUP_THREADS);
#pragma unroll 1
        for (uint32_t kv_stage = 0; kv_stage < KV_STAGES; kv_stage++)
            gather_rope(kv_stage), gather_part(kv_stage, 0), gather_part(kv_stage, 1);
        for (int i = shared.list.first; __any_sync(~0u, i <= shared.list.last); i += shared.list.step) {
            const bool more = shared.list.last - i >= shared.list.step;
            const int blocks = begin_split(i);
            for (int k = 0; __any_sync(~0u, k < blocks); k++, count++)
                add_block(count, k == 0, [&] {
                    if (__any_sync(~0u, more && k == blocks - 1))
                        load_queries(request_of(i + shared.list.step));
                });
            this->end_split(o, splits & 1);
            splits++;
        }
        cp_async_wait<0>();
    }
};

} // namespace sparse_decode::plain
