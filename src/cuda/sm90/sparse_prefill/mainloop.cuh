/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on Hopper: the schedule of two sides (docs/kernels/sparse-prefill.md draws it,
 * ../latent/mainloop.cuh runs it) over gathered keys.
 *
 * A CTA takes tiles of 64 heads of a token, one after the other, through the keys that the token's list
 * names, 64 at a time. Two sides, a warpgroup each, do the same work on alternate blocks, so that the softmax
 * of one runs beside the products of the other:
 *
 *      warpgroup              task                                                                registers
 *      0, producer            gathers rows of keys (cp.async); issues TMA of queries, unless a side does  56
 *      1, side 0              S and softmax of even blocks; O of columns   0 … 255, of all blocks        224
 *      2, side 1              S and softmax of odd blocks;  O of columns 256 … 511, of all blocks        224
 *
 * Timing and shared memory traffic are those of dense decode (../dense_decode/dense_decode.cuh draws both),
 * except that rows of keys are gathered. Entries that name no key become rows of zeros, and their scores are
 * masked.
 *
 * Barriers: keys_full, keys_empty (a unit of a side's block), rope_full, rope_empty; q_full, q_empty; p_full:
 * P of a block is complete; scored: its Q·Kᵀ has been issued.
 *
 * Shared memory (struct Shared): two blocks of keys 147456 bytes, Q 65536, P of each side 8192.
 *
 * At the end of a tile its rows are staged in the home units of the last block, and TMA stores them to `out`,
 * the first half while the products of the second still run. In a short call the tiles of the last round are
 * divided by keys into splits, whose parts go to the workspace; join_splits.cuh joins them (V::SPLITS).
 *
 * The limit on an H200 is power: with 128 heads the SMs run at 1.4 to 1.7 of 1.98 GHz.
 */
#pragma once

#include "epilogue.cuh"
#include "producer.cuh"

#include "../latent/mainloop.cuh"

namespace sparse_prefill {

enum { WARPS_OF_PRODUCER = WARPGROUP_THREADS / 32 };
enum { THREADS = 3 * WARPGROUP_THREADS, PRODUCER_REGISTERS = 56, SIDE_REGISTERS = 224 };

/* Loads A fragments of Q's rope columns from global memory; heads past the end are zero. */
DEVICE void load_q_rope(uint32_t (&q)[4][4], const struct sparse_prefill_params &p, int token, int head)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool some = head + 8 * i < p.h_q;
        const uint16_t *from = p.q + token * p.q_stride[0] + (some ? head + 8 * i : 0) * p.q_stride[1] + D_V;
        load_rope_row(q, from, some, i);
    }
}

/* One side; Seesaw calls its hooks. */
template <typename V> struct Side : Seesaw<Side<V>, V, Shared, RowState> {
    using Base = Seesaw<Side<V>, V, Shared, RowState>;
    using Tile = WorkTile<V>;
    using Base::Base, Base::lane, Base::warp, Base::row, Base::follow_references, Base::order_wait;
    using Base::p, Base::shared, Base::smem, Base::side, Base::own, Base::others, Base::tiles_done;
    using Base::s, Base::left, Base::right, Base::weights, Base::q_rope, Base::state;
    using typename Base::Element;

    int next_number;  /* of the work tile after the current one */
    bool keeps_units; /* results are still being read from the last block's units */
    uint2 valid;      /* Shared::valid of the block */
    struct {
        float factor[2], excess[2], lse[2]; /* of the thread's rows */
    } ending;                               /* computed while their last products run */

    static DEVICE bool is_split(const Tile &tile) { return V::SPLITS && tile.part != WHOLE; }
    static DEVICE bool is_first_warp() { return __all_sync(~0u, warp() == 0); }

    /* ---- Keys ------------------------------------------------------------------------------------ */

    static DEVICE uint32_t keys_full(uint32_t smem, int side, int unit)
    {
        return barrier_at(SHARED_AT(smem, barriers.keys_full), side * UNITS + unit);
    }

    /* Returns which of two units of the block have arrived (bits 0 and 1); these may be multiplied. cp.async
     * writes keys through the generic proxy, as threads do, and wgmma reads them through the async proxy, so
     * a fence must stand between the wait and the product. The fence takes time, more so while products are
     * in flight: one fence serves all units that have arrived. */
    DEVICE uint32_t test_units(int first_unit, int second_unit)
    {
        const bool first = __all_sync(~0u, mbarrier_test(keys_full(smem, side, first_unit), own & 1)),
                   second = __all_sync(~0u, mbarrier_test(keys_full(smem, side, second_unit), own & 1));
        fence_async_shared();
        return (uint32_t)first | (uint32_t)second << 1;
    }

    /* Computes S (+)= Q·Kᵀ over two units; `arrived`: result of test_units. */
    DEVICE void score_units(int first_unit, int second_unit, bool add, uint32_t arrived)
    {
        if (!(arrived & 1)) {
            mbarrier_wait(keys_full(smem, side, first_unit), own & 1);
            arrived = test_units(first_unit, second_unit);
        }
        wgmma_fence(); /* the wait is a branch: without this ptxas adds a fence of its own */
        multiply_keys<Element>(s, smem, side, first_unit, add);
        if (!(arrived & 2)) {
            mbarrier_wait(keys_full(smem, side, second_unit), own & 1);
            fence_async_shared();
        }
        wgmma_fence();
        multiply_keys<Element>(s, smem, side, second_unit, true);
        wgmma_commit();
    }

    DEVICE void score_early(bool follows)
    {
        const int first_unit = first_of_home(side), second_unit = first_of_home(1 - side);
        uint32_t arrived = 0;
        hold(s);
        if constexpr (V::ROPE) {
            mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.rope_full), side), own & 1);
            arrived = test_units(first_unit, second_unit);
            wgmma_fence();
            multiply_rope<Element>(s, q_rope, smem, side);
        }
        if (follows) order_wait();
        score_units(first_unit, second_unit, V::ROPE, arrived);
    }

    /* Tests the other two units; called before products of the other side's block if these come between. */
    DEVICE uint32_t see_late() { return test_units(second_of_home(side), second_of_home(1 - side)); }

    DEVICE void score_late(uint32_t arrived)
    {
        score_units(second_of_home(side), second_of_home(1 - side), true, arrived);
    }

    DEVICE void beside_scores(int k)
    {
        if (side == 0 && k == 0 && keeps_units) release_units(1);
        valid = *(const uint2 *)shared.valid[side];
        state.set_slack();
    }

    /* Sets the scores of entries that name no key to -inf. */
    DEVICE void mask(int, const Tile &)
    {
        const uint2 keys = valid;
        if (__all_sync(~0u, (keys.x & keys.y) == ~0u)) return;
        const int q = lane() % 4, shift = 16 * (q / 2) + 2 * (q % 2);
        const uint32_t named[2] = {keys.x >> shift, keys.y >> shift};
#pragma unroll
        for (int e = 0; e < 32; e++)
            if (!(named[e / 4 % 2] >> (4 * (e / 8) + e % 2) & 1)) s[e] = -INFINITY;
    }

    /* ---- Softmax --------------------------------------------------------------------------------- */

    DEVICE void move_to(const float (&to)[2], bool first)
    {
        move_reference(state, to, left, right, first);
    }

    /* Moves the references to the largest score so far, ignoring NaN, and makes the scores relative to them.
     * `raw`: the scores are not yet scaled and relative to the old references. Above CAREFUL_REFERENCE a
     * reference is rounded coarsely, and scores are rounded alike before the subtraction: raw ones are
     * multiplied by the scale first, others get the old reference added back. */
    DEVICE void move_references(bool first, bool raw)
    {
        float to[2], back[2], by[2], scale = raw ? p.call.scale_log2 : 1.0f;
        row_maxima(s, to);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float most = quad_max(to[i]), reference = state.reference[i];
            to[i] = raw ? fmaxf(most * scale, reference) : reference + fmaxf(most, 0.0f);
            const bool careful = !raw && fabsf(to[i]) > CAREFUL_REFERENCE;
            back[i] = careful ? reference : 0.0f;
            by[i] = raw || careful ? to[i] : to[i] - reference;
        }
        move_to(to, first);
        this->publish_references(to);
        if (raw && state.special) scale_scores(s, scale), scale = 1.0f;
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = fmaf(s[e] + back[e / 2 % 2], scale, -by[e / 2 % 2]);
    }

    DEVICE bool update_references(bool first)
    {
        const bool raw = first | state.special;
        bool moves = raw;
        int excess[2] = {0, 0};
        if (!raw) {
#pragma unroll
            for (int e = 0; e < 32; e++) s[e] = fmaf(s[e], p.call.scale_log2, -state.reference[e / 2 % 2]);
            positive_maxima(s, excess);
            moves = __any_sync(~0u, excess[0] > state.slack[0] || excess[1] > state.slack[1]);
        }
        if (moves) {
            move_references(first, raw);
            excess[0] = excess[1] = 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) state.excess[i] = max(state.excess[i], excess[i]);
        return moves;
    }

    DEVICE void make_weights(uint32_t p_line)
    {
        exponentials(s, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) { /* the next exponentials run while these are used */
            if (k < 3) exponentials(s, k + 1);
            keep_weights<Element>(s, weights, k, p_line, state);
        }
    }

    /* ---- The end of a tile, or of a split ------------------------------------------------------------ */

    /* Multiplies the tile's last block, of either side; its units are then reused to stage the results. */
    DEVICE void multiply_last(const Tile &tile)
    {
        const int owner = (tile.blocks - 1) % 2;
        const bool mine = __all_sync(~0u, owner == side);
        /* The other side has issued its scores when its P arrives; this wait observes every phase of the
         * barrier `scored`. */
        if (!mine) order_wait();
        mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.p_full), owner), (mine ? own - 1 : others) & 1);
        if (!mine) follow_references(), others++;
        multiply_home<Element>(left, right, smem, side, owner, tile.blocks > 1);
        finish_rows(tile);
    }

    /* Adds the sums of the two sides, each over its own blocks; both hold the same references by now. */
    DEVICE void join_sides(float (&excess)[2])
    {
        float2(&ends)[2][ROWS] = shared.end[tiles_done % 2];
        const int barrier = SUMS_BARRIER + 2 * (int)(tiles_done % 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            state.sum[i] = quad_sum(state.sum[i]), excess[i] = quad_max(__int_as_float(state.excess[i]));
            if (lane() % 4 == 0) ends[side][row() + 8 * i] = make_float2(state.sum[i], excess[i]);
        }
        barrier_arrive(barrier + side, 2 * WARPGROUP_THREADS);
        barrier_sync(barrier + 1 - side, 2 * WARPGROUP_THREADS);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 other = ends[1 - side][row() + 8 * i];
            state.sum[i] += other.x, excess[i] = fmaxf(excess[i], other.y);
        }
    }

    /* Writes the rows of a unit's columns through the 64 lines at `at`; all warps' products have read the
     * keys there. */
    DEVICE void store_unit(const float (&o)[64], const float (&factor)[2], const Tile &tile, int unit,
                           uint32_t at)
    {
        const uint32_t lines = at + (uint32_t)(16 * warp()) * LINE_BYTES;
        barrier_sync(SIDE_BARRIER + side, WARPGROUP_THREADS); /* a warp waits only for its own products */
        if (is_split(tile)) {
            float *scales = &part_of(p, tile)->scale[row()][2 * unit];
            stage_half_group<0>(o, factor, scales, lines);
            stage_half_group<32>(o, factor, scales + 1, lines + TILE_BYTES);
        } else {
            stage_rows<Element>(o, factor, lines);
        }
        fence_async_shared();
        barrier_sync(SIDE_BARRIER + side, WARPGROUP_THREADS);
        if (is_first_warp() && elect_one()) {
            if (is_split(tile))
                bulk_store(part_of(p, tile)->units[unit], at, UNIT_BYTES);
            else
                tma_store_once(&p.results, at, {0, tile.head_tile * ROWS, 2 * unit, tile.token, 0});
            bulk_commit();
        }
        __syncwarp();
    }

    /* Side 0 stores the lse, side 1 max_logits. */
    DEVICE void store_row_end(const Tile &tile, int i, float lse, float largest)
    {
        const int my_row = row() + 8 * i, head = tile.head_tile * ROWS + my_row;
        if (is_split(tile)) {
            if (side == 0)
                part_of(p, tile)->end[my_row] = end_above({state.reference[i], state.sum[i]}, largest);
        } else if (head < p.call.h_q) {
            if (side == 0) store_lse(p.call, tile.token, head, lse);
            if (side == 1) store_largest(p.call, tile.token, head, largest);
        }
    }

    /* Computes the factors of the rows while the last products run. */
    DEVICE void finish_rows(const Tile &tile)
    {
        const int head = tile.head_tile * ROWS + row();
        join_sides(ending.excess);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ending.lse[i] = row_lse(state.reference[i], state.sum[i]);
            ending.factor[i] =
                row_factor(p.call, min(head + 8 * i, p.call.h_q - 1),
                           is_split(tile) ? -INFINITY /* no sink yet */ : ending.lse[i], state.sum[i]);
        }
    }

    /* Writes the first unit's rows while the products of the second run. Where tiles are split both units
     * share one code path, since a short call executes it once. */
    DEVICE void store_rows(const Tile &tile, uint32_t staging)
    {
        const int unit = first_of_home(side);
        if constexpr (!V::SPLITS) {
            wgmma_wait<1>();
            hold(left);
            store_unit(left, ending.factor, tile, unit, staging);
            wgmma_wait<0>();
            hold(right);
            return store_unit(right, ending.factor, tile, unit + 1, staging + UNIT_BYTES);
        }
        wgmma_wait<0>();
        hold(left), hold(right);
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            float o[64];
#pragma unroll
            for (int e = 0; e < 64; e++) o[e] = i ? right[e] : left[e];
            store_unit(o, ending.factor, tile, unit + i, staging + (uint32_t)i * UNIT_BYTES);
        }
    }

    /* Epilogue of a work tile: stages rows in the last block's units of these columns, which only this side
     * has read, and stores them from there by TMA. */
    DEVICE void epilogue(const Tile &tile)
    {
        const int owner = (tile.blocks - 1) % 2;
        load_next_rope(next_number);
        store_rows(tile, unit_at(smem, owner, first_of_home(side)));
        if (lane() % 4 == 0)
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_row_end(tile, i, ending.lse[i], row_largest(state.reference[i], ending.excess[i]));
        keeps_units = side == 0 && owner == 1;
        if (!keeps_units) release_units(owner);
    }

    /* Releases the units of `stage` once TMA has read the results from them. The thread that issued the
     * stores arrives for all warps. Side 0 scores the next tile's first block before it waits here, if that
     * block uses the other stage. */
    DEVICE void release_units(int stage)
    {
        const int first = stage * UNITS + 2 * side;
        keeps_units = false;
        if (is_first_warp() && elect_one()) {
            bulk_wait_read<1>();
            mbarrier_arrive_for(barrier_at(SHARED_AT(smem, barriers.keys_empty), first), WARPS_OF_SIDE);
            bulk_wait_read<0>();
            mbarrier_arrive_for(barrier_at(SHARED_AT(smem, barriers.keys_empty), first + 1), WARPS_OF_SIDE);
        }
        __syncwarp();
    }

    DEVICE void load_next_rope(int number)
    {
        if (!V::ROPE || number >= p.items) return;
        const Tile next(p, number);
        load_q_rope(q_rope, p.call, next.token, next.head_tile * ROWS + row());
    }

    DEVICE void run_tile(const Tile &tile, int next)
    {
        if (tile.blocks == 0) {
            if (is_split(tile))
                store_empty_part(part_of(p, tile));
            else
                store_empty(p.call, tile);
            load_next_rope(next);
            return;
        }
        state = {{LEAST_REFERENCE, LEAST_REFERENCE}, {0.0f, 0.0f}, {0, 0}, {0, 0}, false};
        next_number = next;
        if (is_short(p) && side == 1 && is_first_warp()) issue_queries(p, smem, tile);
        this->run_blocks(tile);
        multiply_last(tile);
        epilogue(tile);
        tiles_done++;
    }

    DEVICE void run()
    {
        const int step = (int)gridDim.x;
        keeps_units = false;
        load_next_rope((int)blockIdx.x);
        for (int i = (int)blockIdx.x; i < p.items; i += step) run_tile(Tile(p, i), i + step);
        if (keeps_units) release_units(1);
    }
};

/* ---- The kernel -------------------------------------------------------------------------------- */

DEVICE void prepare(const struct sparse_prefill_sm90_params &p, Shared &shared)
{
    tma_prefetch_map(&p.queries), tma_prefetch_map(&p.results);
    const auto arrivals = [](int side, int unit) {
        return WARPGROUP_THREADS + (unit == last_unit(side) ? (int)WARPS_OF_PRODUCER : 0);
    };
    shared.barriers.init_blocks(arrivals, WARPGROUP_THREADS);
    shared.barriers.init_queries();
    mbarrier_fence_init();
    fence_async_shared();
}

template <typename V> DEVICE void kernel(const struct sparse_prefill_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) prepare(p, shared);
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    if (SELDOM(threadIdx.x >= WARPGROUP_THREADS)) { /* placed behind the producer's code */
        take_registers<SIDE_REGISTERS>();
        Side<V>(p, shared).run();
    } else {
        give_registers<PRODUCER_REGISTERS>();
        Producer<V>(p, shared).run();
    }
}

} // namespace sparse_prefill

#define SPARSE_PREFILL_KERNEL(NAME, D_QK, SPLITS)                                                            \
    DEFINE_KERNEL(NAME, sparse_prefill_sm90_params, (sparse_prefill::THREADS, 1),                            \
                  sparse_prefill::kernel<sparse_prefill::Variant<D_QK, SPLITS>>(p))
