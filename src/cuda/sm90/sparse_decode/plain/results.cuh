/* SPDX-License-Identifier: MIT
 *
 * The warpgroups of the sums: O of 256 columns each += P V. They also gather: a warpgroup is the first to
 * know when its half of a block's columns is no longer needed, and requests that of the block after next. At
 * the end of a split they store rows to `out`, or to the split's slot.
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "../queries.cuh"
#include "layout.cuh"

template <typename R> struct Sums {
    using Shared = typename R::Shared;
    using Element = typename R::Element;
    enum { ROWS_APART = 16 /* rows that a warpgroup takes at a time, eight lanes each */ };
    enum { PARTS = 2 /* of a side's columns: multiplied, freed and requested one after the other */ };
    enum { PART_TILES = HALF_TILES / PARTS };

    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t base;
    float o[PARTS][64];

    DEVICE Sums(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory))
    {
    }

    /* ---- Gathering --------------------------------------------------------------------------------- */

    /* The thread's row of the first 16, and its chunk. */
    static DEVICE int line() { return (int)(fresh_thread() % WARPGROUP_THREADS / 8); }
    static DEVICE int chunk() { return (int)(fresh_thread() % 8); }

    DEVICE uint32_t tile_at(uint32_t buffer, int tile) const
    {
        return SHARED_AT(base, keys) + buffer * (uint32_t)sizeof(shared.keys[0]) +
               (uint32_t)tile * TILE_BYTES;
    }

    DEVICE uint32_t arrived_at(uint32_t buffer, int group) const
    {
        return SHARED_AT(base, arrived) + (buffer * R::GROUPS + (uint32_t)group) * 8;
    }

    DEVICE uint64_t place_of(uint32_t buffer, int key) const { return shared.place[buffer][key]; }

    static DEVICE void copy_chunk(uint32_t to, uint64_t token, int offset)
    {
        cp_async_16(to, (const uint8_t *)(token & ~NO_KEY) + offset, !(token & NO_KEY));
    }

    /* Gathers the columns that V does not have; each side takes half of the keys. */
    DEVICE void gather_rope(uint32_t buffer)
    {
        if constexpr (!R::HAS_ROPE) return;
        const int first = side() * (KEYS / 2) + line(),
                  from = R::ROPE_TILE * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(buffer, R::ROPE_TILE) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < KEYS / 2 / ROWS_APART; i++)
            copy_chunk(to + (uint32_t)(i * ROWS_APART * LINE_BYTES), place_of(buffer, first + i * ROWS_APART),
                       from);
        cp_async_arrive(arrived_at(buffer, HALF_TILES));
    }

    /* Gathers a part of the side's columns. */
    DEVICE void gather_part(uint32_t buffer, int part)
    {
        enum { ROUNDS = KEYS / ROWS_APART };
        const int first = side() * HALF_TILES + part * PART_TILES;
        const int from = first * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(buffer, first) + swizzle_128((uint32_t)line(), (uint32_t)chunk());
        uint64_t token[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) token[i] = place_of(buffer, line() + i * ROWS_APART) + from;
#pragma unroll
        for (int c = 0; c < PART_TILES; c++) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                copy_chunk(to + (uint32_t)(c * TILE_BYTES + i * ROWS_APART * LINE_BYTES), token[i],
                           c * LINE_BYTES);
            cp_async_arrive(arrived_at(buffer, part * PART_TILES + c));
        }
    }

    /* Requests the queries; called by both sides together. Rows past the last head are zeros. */
    DEVICE void load_queries(int request)
    {
        enum { HEADS_APART = 2 * ROWS_APART };
        const Place place(p);
        const int first = side() * ROWS_APART + line(), heads = p.h_q - place.tile * HEADS;
        const uint16_t *tile = first_query(p, request, place) + CHUNK_ELEMENTS * chunk();
        const uint32_t to = SHARED_AT(base, q) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < HEADS / HEADS_APART; i++) {
            const int head = first + i * HEADS_APART;
            const bool there = head < heads;
            const uint16_t *from = tile + (there ? head : 0) * p.q_stride[2];
#pragma unroll
            for (int c = 0; c < R::TILES; c++)
                cp_async_16(to + (uint32_t)(c * TILE_BYTES + i * HEADS_APART * LINE_BYTES),
                            from + c * LINE_ELEMENTS, there);
        }
        cp_async_arrive(SHARED_AT(base, q_full));
    }

    /* ---- A block ------------------------------------------------------------------------------------ */

    /* Adds P·V of a block. `load`: further requests to issue while the products run. */
    template <typename Load> DEVICE void add_block(uint32_t count, bool first, const Load &load)
    {
        const uint32_t buffer = count & 1;
        mbarrier_wait(SHARED_AT(base, full), count & 1);
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
            const uint32_t v = tile_at(buffer, side() * HALF_TILES + part * PART_TILES);
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++)
                wgmma_128_columns<Element>(o[part], wgmma_lines(SHARED_AT(base, p), k), wgmma_columns(v, k),
                                           k > 0 || !first);
            wgmma_commit();
        }
        gather_rope(buffer); /* the block's scores are done, and so are those with the split's queries */
        load();
        wgmma_wait<1>();
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS); /* no warp reads this part of V any longer */
        gather_part(buffer, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(o[part]);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, empty));
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS);
        gather_part(buffer, 1);
    }

    /* ---- The end of a split --------------------------------------------------------------------------- */

    /* Takes 64 columns of one of the thread's two rows: two of every eight. */
    DEVICE void take_row(float (&x)[16], int tile, bool second) const
    {
        const float *from = o[tile / PART_TILES] + tile % PART_TILES * (LINE_ELEMENTS / 2);
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 4 * (e / 2) + e % 2;
            x[e] = second ? from[at + 2] : from[at];
        }
    }

    static DEVICE uint32_t pack(bool slot, float low, float high)
    {
        return slot ? Fp16::pack(low, high) : Element::pack(low, high);
    }

    /* Stores a row to `out`, or, scaled, to a slot, from the side's first column on. One copy of the code
     * serves both, and both rows, since a call executes it once. `scales`: of a slot's row; NULL
     * otherwise. `empty`: the row saw no key, and is 0 whatever weights of 0 made of V. */
    DEVICE void store_row(uint16_t *to, bool slot, float *scales, bool second, float factor, bool empty,
                          bool there) const
    {
        float down = 0.0f; /* scale of the lane's tile of four */
#pragma unroll
        for (int tile = 0; tile < HALF_TILES; tile++) {
            float x[16], by = factor;
            take_row(x, tile, second);
            if (__any_sync(~0u, slot)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                by *= scale.up;
                if (lane() % 4 == tile) down = scale.down;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t words[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *pair = x + 8 * half + 2 * e;
                    words[e] = empty ? 0u : pack(slot, pair[0] * by, pair[1] * by);
                }
                const uint4 eight = quad_gather_eight(words);
                if (there) *(uint4 *)(to + tile * LINE_ELEMENTS + 32 * half + 8 * (lane() % 4)) = eight;
            }
        }
        if (scales && there) scales[lane() % 4] = down;
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(int i, float sum, float below) const
    {
        const Place place(p);
        const int asked = place.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int column = side() * (D_V / 2), warp = (int)fresh_thread() / 32 - 4;
        const int request = shared.split[warp].request;
        const int64_t slot = shared.split[warp].slot;
        const bool there = asked < p.h_q, stores_end = there && side() == 0 && lane() % 4 == 0;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const RowPlace where = {place.token, head};
        const bool direct = __any_sync(~0u, slot == DIRECT);
        float *scales = NULL;
        uint16_t *to;
        if (direct) {
            const float lse = score_lse(-below, sum);
            if (stores_end) store_lse(p.output, request, where, lse);
            to = p.output.out + out_offset(p.output, request, where);
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t slot_row = slot * ((int64_t)p.h_q * p.s_q) + (int64_t)place.token * p.h_q + head;
            if (stores_end) p.split.slot_end[slot_row] = {-below, sum};
            to = half_row(p.split, slot_row);
            scales = half_row_scales(p.split, slot_row) + column / HALF_ROW_TILE;
        }
        store_row(to + column, !direct, scales, i == 1, factor, sum == 0.0f, there);
    }

    DEVICE void end_split(uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(base, sum_full), parity);
        float sum[2], below[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = row() + 8 * i;
            sum[i] = shared.sum[0][head] + shared.sum[1][head] + shared.sum[2][head] + shared.sum[3][head];
            below[i] = shared.below[head];
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(base, sum_empty));
#pragma unroll 1
        for (int i = 0; i < 2; i++) end_row(i, i ? sum[1] : sum[0], i ? below[1] : below[0]);
        __syncwarp();
    }

    DEVICE int begin_split(int i)
    {
        int length;
        const Split now = list_split(p, shared.list, i, &length);
        const int warp = (int)fresh_thread() / 32 - 4;
        if (lane() == 0) shared.split[warp].slot = now.slot, shared.split[warp].request = now.request;
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
        for (uint32_t buffer = 0; buffer < KEY_BUFFERS; buffer++)
            gather_rope(buffer), gather_part(buffer, 0), gather_part(buffer, 1);
        for (int i = shared.list.first; __any_sync(~0u, i <= shared.list.last); i += shared.list.step) {
            const bool more = shared.list.last - i >= shared.list.step;
            const int blocks = begin_split(i);
            for (int k = 0; __any_sync(~0u, k < blocks); k++, count++)
                add_block(count, k == 0, [&] {
                    if (__any_sync(~0u, more && k == blocks - 1))
                        load_queries(request_of(i + shared.list.step));
                });
            end_split(splits & 1);
            splits++;
        }
        cp_async_wait<0>();
    }
};
