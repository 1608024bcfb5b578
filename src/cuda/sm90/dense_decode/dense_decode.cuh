/* SPDX-License-Identifier: MIT
 *
 * Dense decode on Hopper: the schedule of two sides (docs/kernels/dense-decode.md draws it,
 * ../sides/schedule.cuh runs it), with keys that TMA loads.
 *
 * A CTA takes a tile of 64 rows of one key head through the keys of its splits, 64 keys at a time. Two
 * sides, one warpgroup each, do the same work on alternate blocks of keys, so that one side's softmax
 * overlaps the other's products:
 *
 *      who                    task                                                              registers
 *      warpgroup 0, producer  one thread issues TMA loads of keys, one of queries; never drains        40
 *      warpgroup 1, side 0    S and softmax of even blocks; O of columns   0 … 255, of all blocks     232
 *      warpgroup 2, side 1    S and softmax of odd blocks;  O of columns 256 … 511, of all blocks     232
 *
 * Timeline of blocks k - 1 (side 1) and k (side 0). A unit is 128 columns; a side's home units are the two
 * that hold its columns of V:
 *
 *      side 0   early Q·Kᵀ k | P·V k-1, home | late Q·Kᵀ k | softmax k | P·V k, home | …
 *      side 1   … softmax k-1 | P·V k-1, home | early Q·Kᵀ k+1 | P·V k | late Q·Kᵀ k+1 | softmax k+1 …
 *
 * A side keeps P of its own block in registers and passes it to the other side through shared memory. The
 * sides also share the references that both sum relative to: when a warp moves its reference, it tells the
 * warp of the other side that has the same rows. V is the first 512 columns of K: a block of keys is loaded
 * once, and both products use the same copy in shared memory. Its units are released one by one, in the
 * order in which the block after next needs them. Only K's rope columns pass through shared memory: Q's stay
 * in registers.
 *
 * Shared memory (struct Shared): two blocks of keys 147456 bytes, Q 65536, P of either side 8192. All
 * addresses are constants.
 *
 * On an H200 the kernel is limited by power with many rows (the SMs run at 1.4 to 1.75 of 1.98 GHz), and by
 * memory bandwidth with one tile of rows.
 */
#pragma once

#include "layout.cuh"
#include "one_split.cuh"
#include "poison.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "results.cuh"
#include "second_part.cuh"
#include "softmax.cuh"

#include "../sides/schedule.cuh"

enum { THREADS = 3 * WARPGROUP_THREADS, PRODUCER_REGISTERS = 40, SIDE_REGISTERS = 232 };

/* The keys of a split, as Schedule needs them. all_see: those before it are visible to all rows. */
struct Span {
    int blocks, begin, all_see;

    DEVICE int first_key() const { return begin; }
};

/* One side; Schedule calls its hooks. */
template <typename V> struct Side : Schedule<Side<V>, V> {
    using Base = Schedule<Side<V>, V>;
    using Base::Base, Base::lane, Base::row, Base::follow_references;
    using Base::p, Base::shared, Base::base, Base::side, Base::own, Base::others, Base::items;
    using Base::s, Base::left, Base::right, Base::weights, Base::q_rope, Base::state;
    using typename Base::Element;

    /* The task of the current split, in shared memory; every warp has its own copy. */
    DEVICE Task &task() const { return shared.task[threadIdx.x / 32 - WARPGROUP_THREADS / 32]; }

    /* ---- Keys ------------------------------------------------------------------------------------ */

    DEVICE void score_early(bool follows)
    {
        if constexpr (V::ROPE) score_rope<Element>(s, q_rope, base, side, own & 1);
        if (follows) wait_for_turn(base, side, others);
        score_unit<Element>(s, base, side, first_of_home(side), own & 1, V::ROPE);
        score_unit<Element>(s, base, side, first_of_home(1 - side), own & 1);
        if constexpr (V::EARLY_UNITS == 3) score_unit<Element>(s, base, side, second_of_home(side), own & 1);
        wgmma_commit();
    }

    /* TMA writes keys through the async proxy, so wgmma may read them without a fence. */
    DEVICE uint32_t see_late() { return 0; }

    DEVICE void score_late(uint32_t)
    {
        if constexpr (V::EARLY_UNITS == 2) score_unit<Element>(s, base, side, second_of_home(side), own & 1);
        score_unit<Element>(s, base, side, second_of_home(1 - side), own & 1);
        wgmma_commit();
    }

    DEVICE void beside_scores(int) {}

    /* Masks scores that do not count and clears keys that must not reach P·V. All warps of the side call
     * it, between the last product with K and the first with V. */
    DEVICE void mask_and_clear(int first_key)
    {
        mask_scores(s, p.call, task(), first_key, row());
        const int end = clamp_int(task().end - first_key, 0, KEYS),
                  all_see = clamp_int(task().all_see - first_key, 0, end);
        barrier_sync(SIDE_BARRIER + side, WARPGROUP_THREADS); /* every warp's Q·Kᵀ has read the block */
        if (__any_sync(~0u, not_finite<Element>(base, side, all_see, end))) shared.poisoned = 1;
        clear_keys(base, side, end);
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
        const float slack = REFERENCE_SLACK / p.call.scale_log2;
        const bool moves =
            __any_sync(~0u, most[0] > state.reference[0] + slack || most[1] > state.reference[1] + slack) ||
            first;
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
        wait_for_turn(base, side, others); /* ends before P arrives; the wait observes every phase */
        wait_for_weights(base, side, others);
        follow_references();
        multiply_home<Element>(left, right, base, side, 1 - side, blocks > 1);
        wgmma_wait<0>();
        hold(left), hold(right);
        release_unit(base, 1 - side, first_of_home(side), lane());
        release_unit(base, 1 - side, second_of_home(side), lane());
        others++;
    }

    /* Adds the other side's sums: each side has summed its own blocks, and both hold the same references
     * by now. */
    DEVICE void join_sums(int my_row)
    {
        float *own_sums = shared.sum[items % 2][side], *other_sums = shared.sum[items % 2][1 - side];
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
        const uint32_t lines =
            SHARED_AT(base, tiles.p) + (uint32_t)(side * TILE_BYTES + first_row * LINE_BYTES);
        const bool stores_end = side == 0 && lane() % 4 == 0;
        const bool looks = !V::TOGETHER && __any_sync(~0u, looks_for_second_part(p.call, task().split));
        join_sums(my_row);
        part_end end[2];
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            end[i] = {state.reference[i] * p.call.scale_log2, state.sum[i]};
            factor[i] = state.sum[i] == 0.0f ? 0.0f : 1.0f / state.sum[i];
        }
        if constexpr (V::TOGETHER) {
#pragma unroll
            for (int i = 0; i < 2; i++) finish_row(p.call, task(), false, end[i], my_row + 8 * i, stores_end);
            store_halves(p.call, task(), left, right, factor, first_row, column);
            return;
        }
        if (looks) mbarrier_wait(SHARED_AT(base, second_full), 0);
        /* A poisoned split is written again later. */
        if (__all_sync(~0u, looks & (shared.second_part != 0) & !shared.poisoned)) {
            WithSecond both(shared, my_row, column + slot_position_of_lane(lane()), end, factor);
#pragma unroll
            for (int i = 0; i < 2; i++)
                both.factor[i] =
                    finish_row(p.call, task(), true, both.parts[i].whole, my_row + 8 * i, stores_end);
            store_out<Element>(p.call, task(), left, right, both, first_row, column, lines);
            if (threadIdx.x == WARPGROUP_THREADS) mark_joined(p.call);
            return;
        }
        const bool direct = __any_sync(~0u, task().split.slot == DIRECT);
#pragma unroll
        for (int i = 0; i < 2; i++)
            factor[i] *= finish_row(p.call, task(), direct, end[i], my_row + 8 * i, stores_end);
        if (direct) {
            Scaled scaled = {factor};
            store_out<Element>(p.call, task(), left, right, scaled, first_row, column, lines);
        } else {
            store_slot(p.call, task(), left, right, factor, first_row, column);
            if (__any_sync(~0u, (p.call.split.marks != NULL) & task().split.second_of_two & !shared.poisoned))
                mark_stored(p.call, (int)(fresh_thread() - WARPGROUP_THREADS) / 32);
        }
    }

    DEVICE void run_split(const Work &work)
    {
        const Span span = {work.blocks, work.task.split.begin, work.task.all_see};
        __syncwarp();
        if (lane() == 0) task() = work.task;
        __syncwarp();
        if (span.blocks == 0) {
            if (side == 0) store_empty(p.call, task(), ROWS);
            return;
        }
        state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
        if constexpr (V::ROPE) load_q_rope(q_rope, p.call, task(), task().first_row + row());
        this->run_blocks(span);
        multiply_last(span.blocks);
        end_split();
        items++;
    }

    DEVICE void run(const SplitList &list)
    {
        if constexpr (V::TOGETHER)
            run_and_join();
        else
            run_all(list);
    }

    DEVICE void run_all(const SplitList &list)
    {
        for (int i = list.first; i <= list.last; i += list.step) {
            const Place place(p);
            run_split(Work(p, list, i, place.kv_head, place.tile * ROWS, ROWS));
        }
        barrier_sync(SPLIT_BARRIER, 2 * WARPGROUP_THREADS);
        if (SELDOM(__any_sync(~0u, shared.poisoned))) redo_poisoned<Element>(p, list, Place(p));
    }

    DEVICE void run_and_join()
    {
        const Place place(p);
        /* The thread that will join the meeting begins it while the first keys are in flight. */
        if (fresh_thread() == WARPGROUP_THREADS)
            meeting_begin(meeting_of(p, place, shared.one.request), p.ticket);
        __syncwarp();
        run_split(Work(p, shared.one, place.kv_head, place.tile * ROWS, ROWS));
        const RowShare<true> share(p.call, shared.one, place.kv_head, place.tile * ROWS, ROWS);
        join_together<Element, MOST_PARTS_TOGETHER / SHARE_WARPS>(share, meeting_of(p, place, share.request),
                                                                  base, WARPGROUP_THREADS, SPLIT_BARRIER);
    }
};

/* ---- The kernel -------------------------------------------------------------------------------- */

template <typename V> DEVICE void prepare(const struct dense_decode_sm90_params &p, Shared &shared)
{
    tma_prefetch_map(&p.keys), tma_prefetch_map(&p.queries);
    if (V::ROPE) tma_prefetch_map(&p.rope);
    shared.barriers.init_blocks([](int, int) { return 1; }, 1);
    shared.poisoned = shared.second_part = 0;
    shared.keys_asked.init(1), shared.second_full.init(32);
    shared.barriers.init_queries();
    mbarrier_fence_init();
    fence_async_shared();
}

template <typename V> DEVICE void dense_decode(const struct dense_decode_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    const uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) prepare<V>(p, shared);
    if (!V::TOGETHER) __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    const Place place(p);
    SplitList list;
    if constexpr (V::TOGETHER) {
        if (threadIdx.x / 32 == 1) shared.one.parts = 0, __syncwarp(), share_out(p, place.worker, shared.one);
        __syncthreads();
        if (!__any_sync(~0u, shared.one.parts)) return;
        list.first = list.last = 0, list.step = 1;
    } else {
        list = split_list(p.call, (unsigned)place.worker);
    }
    if (SELDOM(threadIdx.x >= WARPGROUP_THREADS)) {
        take_registers<SIDE_REGISTERS>();
        Side<V>(p, shared).run(list);
    } else {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 0 && elect_one()) {
            shared.parities = produce_keys<V>(p, list, place, shared, base);
            mbarrier_arrive(SHARED_AT(base, keys_asked));
        }
        if (threadIdx.x / 32 == 1 && elect_one()) produce_queries<V>(p, list, place, shared, base);
        if constexpr (!V::TOGETHER)
            if (threadIdx.x / 32 == 2) produce_second_part<V>(p, list, place, shared, base);
    }
}

#define DENSE_DECODE_KERNEL(NAME, ELEMENT, D_QK, SHARED_KEYS, TOGETHER)                                      \
    DEFINE_KERNEL(NAME, dense_decode_sm90_params, (THREADS, 1),                                              \
                  dense_decode<Variant<ELEMENT, D_QK, SHARED_KEYS, TOGETHER>>(p))
