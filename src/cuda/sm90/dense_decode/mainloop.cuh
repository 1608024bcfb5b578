/* SPDX-License-Identifier: MIT
 *
 * The main loop of a side: the hooks of the seesaw (../latent/mainloop.cuh), and the iteration over splits.
 *
 * V of keys that a row does not see must not reach its result. Such a key has weight 0 in that row, but 0 ×
 * NaN is NaN:
 * - Keys that no row of the tile sees may hold anything: they are zeroed before they are multiplied.
 * - Keys that only some rows see (causal, several tokens) count in those rows, whatever they hold. An
 *   infinity or a NaN among them poisons the split: it is redone row by row after all other splits.
 */
#pragma once

#include "../../device/by_rows.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "../latent/mainloop.cuh"
#include "epilogue.cuh"
#include "layout.cuh"
#include "second_part.cuh"
#include "softmax.cuh"

namespace dense_decode {

/* ---- Scores, computed as the keys arrive --------------------------------------------------------- */

/* Loads the A fragments of Q's rope columns from memory; rows past the end are zero. `row`: of the key
 * head. */
DEVICE void load_q_rope(uint32_t (&q)[4][4], const struct dense_decode_params &p, const Task &task, int row)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const RowCoord coord = row_coord(p, row + 8 * i, task.kv_head);
        const uint16_t *from = p.q + task.split.request * p.q_stride[0] + coord.token * p.q_stride[1] +
                               coord.head * p.q_stride[2] + D_V;
        load_rope_row(q, from, row + 8 * i < p.rows, i);
    }
}

/* S = Q·Kᵀ over the rope columns. */
template <typename Element>
DEVICE void score_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t smem, int side, uint32_t parity)
{
    mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.rope_full), side), parity);
    hold(s);
    wgmma_fence();
    multiply_rope<Element>(s, q, smem, side);
}

/* S (+)= Q·Kᵀ over one unit; waits until the unit has arrived. */
template <typename Element>
DEVICE void score_unit(float (&s)[32], uint32_t smem, int side, int unit, uint32_t parity, bool add = true)
{
    mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.keys_full), side * UNITS + unit), parity);
    if (!add) hold(s);
    wgmma_fence(); /* the wait is a branch: without this fence ptxas adds one of its own */
    multiply_keys<Element>(s, smem, side, unit, add);
}

/* ---- Poison ------------------------------------------------------------------------------------ */

/* Zeroes keys from … 63 of a block; called by all threads of the side. */
DEVICE void clear_keys(uint32_t smem, int side, int from)
{
    constexpr int CHUNKS = D_V / CHUNK_ELEMENTS;
#pragma unroll 1
    for (int i = (int)(fresh_thread() % WARPGROUP_THREADS); i < (KEYS - from) * CHUNKS;
         i += WARPGROUP_THREADS)
        store_zero_16(unit_at(smem, side, 0) + (uint32_t)(i / 8 % 8) * TILE_BYTES +
                      (uint32_t)(from + i / CHUNKS) * LINE_BYTES + (uint32_t)(i % 8) * CHUNK_BYTES);
}

/* Returns true in the threads of a side that found an infinity or a NaN in keys from … to - 1 of its
 * block. */
template <typename Element> DEVICE bool not_finite(uint32_t smem, int side, int from, int to)
{
    constexpr int WORDS = D_V / 2;
    bool found = false;
#pragma unroll 1
    for (int i = (int)(fresh_thread() % WARPGROUP_THREADS); i < (to - from) * WORDS; i += WARPGROUP_THREADS)
        found |= any_not_finite<Element>(
            load_shared_4(unit_at(smem, side, 0) + (uint32_t)(i / 32 % 8) * TILE_BYTES +
                          (uint32_t)(from + i / WORDS) * LINE_BYTES + (uint32_t)(i % 32) * 4));
    return found;
}

/* Returns whether a split is poisoned. Every warp checks for itself, in the cache. */
template <typename Element> DEVICE bool poisoned(const struct dense_decode_params &p, const Task &task)
{
    bool found = false;
    for (int key = max(task.split.begin, task.all_see); key < task.end; key++) {
        const uint32_t *words = (const uint32_t *)key_of(p, task, key);
        for (int i = (int)threadIdx.x % 32; i < D_V / 2; i += 32) found |= any_not_finite<Element>(words[i]);
    }
    return __any_sync(~0u, found);
}

/* Rewrites the results of the poisoned splits; called by the warps of both sides after the last split. */
template <typename Element>
DEVICE void redo_poisoned(const struct dense_decode_sm90_params &p, const SplitList &list,
                          const CtaCoord &cta)
{
    const int warp = (int)(threadIdx.x - WARPGROUP_THREADS) / 32, warps = 2 * WARPGROUP_THREADS / 32;
#pragma unroll 1
    for (int i = list.first; i <= list.last; i += list.step) {
        const WorkTile work(p, list, i, cta.kv_head, cta.tile * ROWS, ROWS);
        if (poisoned<Element>(p.call, work.task))
            attend_by_rows<Element>(p.call, work.task, ROWS, warp, warps);
    }
}

/* ---- A side ------------------------------------------------------------------------------------ */

/* The keys of a split, as Seesaw needs them. all_see: those before it are visible to all rows. */
struct Span {
    int blocks, begin, all_see;

    DEVICE int first_key() const { return begin; }
};

/* One side; Seesaw calls its hooks. */
template <typename V> struct Side : Seesaw<Side<V>, V, Shared, RowState> {
    using Base = Seesaw<Side<V>, V, Shared, RowState>;
    using Base::Base, Base::lane, Base::row, Base::follow_references, Base::order_wait;
    using Base::p, Base::shared, Base::smem, Base::side, Base::own, Base::others, Base::tiles_done;
    using Base::s, Base::left, Base::right, Base::weights, Base::q_rope, Base::state;
    using Base::wait_for_weights, Base::release_unit;
    using typename Base::Element;

    /* The task of the current split, in shared memory; every warp has its own copy. */
    DEVICE Task &task() const { return shared.task[threadIdx.x / 32 - WARPGROUP_THREADS / 32]; }

    /* ---- Keys ------------------------------------------------------------------------------------ */

    DEVICE void score_early(bool follows)
    {
        if constexpr (V::ROPE) score_rope<Element>(s, q_rope, smem, side, own & 1);
        if (follows) order_wait();
        score_unit<Element>(s, smem, side, first_of_home(side), own & 1, V::ROPE);
        score_unit<Element>(s, smem, side, first_of_home(1 - side), own & 1);
        if constexpr (V::EARLY_UNITS == 3) score_unit<Element>(s, smem, side, second_of_home(side), own & 1);
        wgmma_commit();
    }

    /* TMA writes keys through the async proxy, so wgmma may read them without a fence. */
    DEVICE uint32_t see_late() { return 0; }

    DEVICE void score_late(uint32_t)
    {
        if constexpr (V::EARLY_UNITS == 2) score_unit<Element>(s, smem, side, second_of_home(side), own & 1);
        score_unit<Element>(s, smem, side, second_of_home(1 - side), own & 1);
        wgmma_commit();
    }

    DEVICE void beside_scores(int) { state.set_limits(p.call.scale_log2); }

    /* Masks scores that do not count and clears keys that must not reach P·V. All warps of the side call
     * it, between the last product with K and the first with V. */
    DEVICE void mask_and_clear(int first_key)
    {
        mask_scores(s, p.call, task(), first_key, row());
        const int end = clamp_int(task().end - first_key, 0, KEYS),
                  all_see = clamp_int(task().all_see - first_key, 0, end);
        barrier_sync(SIDE_BARRIER + side, WARPGROUP_THREADS); /* every warp's Q·Kᵀ has read the block */
        if (__any_sync(~0u, not_finite<Element>(smem, side, all_see, end))) shared.poisoned = 1;
        clear_keys(smem, side, end);
        fence_async_shared();
        barrier_sync(SIDE_BARRIER + side, WARPGROUP_THREADS);
    }

    DEVICE void mask(int first_key, const Span &span)
    {
        if (span.all_see - first_key < KEYS) mask_and_clear(first_key);
    }

    /* ---- Softmax --------------------------------------------------------------------------------- */

    /* Moves the references to the rows' maxima if one has fallen behind. */
    DEVICE bool update_references(bool first)
    {
        float most[2];
        row_maxima(s, most);
        const bool moves = __any_sync(~0u, most[0] > state.limit[0] || most[1] > state.limit[1]) || first;
        if (moves) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                most[i] = fmaxf(fmaxf(state.reference[i], quad_max(most[i])), LEAST_SCORE);
            move_to(most, first);
            this->publish_references(most);
        }
        return moves;
    }

    DEVICE void move_to(const float (&to)[2], bool)
    {
        move_reference(state, to, left, right, p.call.scale_log2);
    }

    DEVICE void make_weights(uint32_t p_line)
    {
        exponentials<Element>(s, weights, p_line, p.call.scale_log2, state);
    }

    /* ---- The end of a split ---------------------------------------------------------------------- */

    /* Multiplies the last block of the split if the other side owns it. */
    DEVICE void multiply_last(int blocks)
    {
        if (__any_sync(~0u, (blocks - 1) % 2 == side)) return;
        order_wait(); /* ends before P arrives; the wait observes every phase */
        wait_for_weights();
        follow_references();
        multiply_home<Element>(left, right, smem, side, 1 - side, blocks > 1);
        wgmma_wait<0>();
        hold(left), hold(right);
        release_unit(1 - side, first_of_home(side));
        release_unit(1 - side, second_of_home(side));
        others++;
    }

    /* Adds the other side's sums: each side has summed its own blocks, and both hold the same references
     * by now. */
    DEVICE void join_sums(int my_row)
    {
        float *own_sums = shared.sum[tiles_done % 2][side],
              *other_sums = shared.sum[tiles_done % 2][1 - side];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            state.sum[i] = quad_sum(state.sum[i]);
            if (lane() % 4 == 0) own_sums[my_row + 8 * i] = state.sum[i];
        }
        barrier_sync(SPLIT_BARRIER, 2 * WARPGROUP_THREADS);
#pragma unroll
        for (int i = 0; i < 2; i++) state.sum[i] += other_sums[my_row + 8 * i];
    }

    DEVICE void end_split()
    {
        const int my_row = row();
        const int column = side * (D_V / 2), first_row = my_row / 16 * 16; /* the warp's first row */
        const uint32_t lines = weights_at(smem, side) + (uint32_t)(first_row * LINE_BYTES);
        const bool stores_end = side == 0 && lane() % 4 == 0;
        const bool looks = !V::JOIN_IN_KERNEL && __any_sync(~0u, looks_for_second_part(p.call, task().split));
        join_sums(my_row);
        part_end end[2];
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            end[i] = {state.reference[i] * p.call.scale_log2, state.sum[i]};
            factor[i] = state.sum[i] == 0.0f ? 0.0f : 1.0f / state.sum[i];
        }
        if constexpr (V::JOIN_IN_KERNEL) {
#pragma unroll
            for (int i = 0; i < 2; i++) finish_row(p.call, task(), false, end[i], my_row + 8 * i, stores_end);
            store_part_to_join<Element>(p.call, task(), left, right, factor, first_row, column);
            return;
        }
        if (looks) mbarrier_wait(SHARED_AT(smem, second_full), 0);
        /* A poisoned split is written again later. */
        if (__all_sync(~0u, looks & (shared.second_part != 0) & !shared.poisoned)) {
            WithSecond both(shared, my_row, column + part_position_of_lane(lane()), end, factor);
#pragma unroll
            for (int i = 0; i < 2; i++)
                both.factor[i] =
                    finish_row(p.call, task(), true, both.parts[i].whole, my_row + 8 * i, stores_end);
            store_out<Element>(p.call, task(), left, right, both, first_row, column, lines);
            if (threadIdx.x == WARPGROUP_THREADS) set_joined(p.call);
            return;
        }
        const bool direct = __any_sync(~0u, task().split.part == DIRECT);
#pragma unroll
        for (int i = 0; i < 2; i++)
            factor[i] *= finish_row(p.call, task(), direct, end[i], my_row + 8 * i, stores_end);
        if (direct) {
            Scaled scaled = {factor};
            store_out<Element>(p.call, task(), left, right, scaled, first_row, column, lines);
        } else {
            store_part(p.call, task(), left, right, factor, first_row, column);
            if (__any_sync(~0u, (p.call.split.ready_flags != NULL) & task().split.second_of_two &
                                    !shared.poisoned))
                set_ready(p.call, (int)(fresh_thread() - WARPGROUP_THREADS) / 32);
        }
    }

    DEVICE void run_split(const WorkTile &work)
    {
        const Span span = {work.blocks, work.task.split.begin, work.task.all_see};
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
        if (span.blocks == 0) {
            if (side == 0) store_empty(p.call, task(), ROWS);
            return;
        }
        state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {-INFINITY, -INFINITY}};
        if constexpr (V::ROPE) load_q_rope(q_rope, p.call, task(), task().first_row + row());
        this->run_blocks(span);
        multiply_last(span.blocks);
        end_split();
        tiles_done++;
    }

    DEVICE void run(const SplitList &list)
    {
        if constexpr (V::JOIN_IN_KERNEL)
            run_and_join();
        else
            run_all(list);
    }

    DEVICE void run_all(const SplitList &list)
    {
        for (int i = list.first; i <= list.last; i += list.step) {
            const CtaCoord cta(p);
            run_split(WorkTile(p, list, i, cta.kv_head, cta.tile * ROWS, ROWS));
        }
        barrier_sync(SPLIT_BARRIER, 2 * WARPGROUP_THREADS);
        if (SELDOM(__any_sync(~0u, shared.poisoned))) redo_poisoned<Element>(p, list, CtaCoord(p));
    }

    DEVICE void run_and_join()
    {
        const CtaCoord cta(p);
        /* The thread that will arrive at the group barrier prepares it while the first keys are in flight. */
        if (fresh_thread() == WARPGROUP_THREADS)
            cta_group_barrier_begin(cta_group_barrier(p, cta, shared.one.request), p.ticket);
        __syncwarp();
        run_split(WorkTile(p, shared.one, cta.kv_head, cta.tile * ROWS, ROWS));
        const JoinRange<true> range(p.call, shared.one, cta.kv_head, cta.tile * ROWS, ROWS);
        constexpr int DEPTH = MOST_PARTS_JOINED_IN_KERNEL / JOIN_RANGE_WARPS;
        static_assert(join_range_bytes<IN_24_BITS<Element>>(DEPTH) <= sizeof(SideTiles::keys),
                      "it lies where the keys were");
        join_range<Element, DEPTH>(range, cta_group_barrier(p, cta, range.request), smem, WARPGROUP_THREADS,
                                   SPLIT_BARRIER);
    }
};

} // namespace dense_decode
