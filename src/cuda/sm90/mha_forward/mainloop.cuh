/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on Hopper (docs/kernels/mha.md).
 *
 *   CTA                        persistent, one per SM; takes tiles of query rows (scheduler.cuh)
 *     warpgroup 0, 3 warps     producers (producer.cuh)
 *     the others               consumers, 64 rows of the tile each:
 *
 *       wgmma    | S = Q Kᵀ of block n - 1 | O += P V of block n |                    | S of n - 2 …
 *       warps    |        (wait)           |   (wait)            | P of n - 1 from S  |
 *
 * While one consumer computes weights, the products of another one run. P stays in registers: the accumulator
 * fragments of S have the layout of A. The pipeline continues across tiles: the results of a tile are written
 * while the first scores of the next one are in flight.
 *
 * Limits for 128 rows by 128 keys, in clocks of an SM: products 2560 at 192/128, 2048 at 128/128, 1024 at
 * 64/64; ex2 1024; then power.
 *
 * Rounding: P has 16 bits and is relative to the row's base (softmax.cuh); sums are fp32 and follow the order
 * of the blocks, the last block first.
 */
#pragma once

#include "epilogue.cuh"
#include "producer.cuh"

namespace mha_forward {

/* Named barriers: one for all consumers, then one per consumer for its turn. */
enum { ALL_CONSUMERS = 1, FIRST_TURN };

template <typename Element, typename Layout> struct Consumer {
    static constexpr int D_V = Layout::D_V, KEYS = Layout::KEYS, QK_STEPS = Layout::D_QK / 16,
                         KEY_STEPS = KEYS / 16;

    const mha_forward_sm90_params &p;
    const Layout l;
    const int group; /* consumer index: it has rows 64 · group … of a tile */
    const int later; /* token of its last row minus the tile's first token */

    int n;          /* the block whose scores or values come next */
    int keys, seen; /* Tile::keys and Tile::seen of the current tile */
    bool is_mine;   /* this consumer has rows in the tile */
    Ring<TILE_SLOTS> slot;
    Ring<Layout::Q_PLACES> place;
    Ring<Layout::STAGES> stage, values; /* of the next scores; of the next values */

    DEVICE bool speaks() const { return threadIdx.x % WARPGROUP_THREADS == 0; }

    /* Consumers issue wgmma in turns, so that their exponentials do not coincide: two consumers that compute
     * them at the same time each take twice as long. */
    DEVICE void await_turn() const
    {
        if constexpr (Layout::TAKES_TURNS) barrier_sync(FIRST_TURN + group, 2 * WARPGROUP_THREADS);
    }

    DEVICE void pass_turn() const
    {
        if constexpr (Layout::TAKES_TURNS)
            barrier_arrive(FIRST_TURN + (group + 1) % Layout::CONSUMERS, 2 * WARPGROUP_THREADS);
    }

    DEVICE void arrive(int barriers, int at, bool is = true) const
    {
        mbarrier_arrive_if(speaks() && is, l.barrier(barriers, at));
    }

    /* ---- Products -------------------------------------------------------------------------------- */

    DEVICE void issue_scores(float (&s)[KEYS / 2]) const
    {
        const uint32_t q = l.q(place.index) + (uint32_t)group * TILE_BYTES, k = l.k(stage.index);
#pragma unroll
        for (int i = 0; i < QK_STEPS; i++)
            wgmma_lines_of<Element>(s, wgmma_lines(q + i / 4 * Layout::Q_TILE, i % 4),
                                    wgmma_lines(k + i / 4 * Layout::KEY_TILE, i % 4), i != 0);
        wgmma_commit();
    }

    DEVICE void issue_values(float (&o)[D_V / 2], const uint32_t (&w)[KEY_STEPS][4]) const
    {
        const uint32_t v = l.v(values.index);
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) {
            const uint64_t b = wgmma_descriptor(v, Layout::KEY_TILE, (uint32_t)i * 16 * LINE_BYTES);
            if constexpr (D_V == 128)
                wgmma_128_columns<Element>(o, w[i], b, 1);
            else
                wgmma_64_columns<Element>(o, w[i], b, 1);
        }
        wgmma_commit();
    }

    /* Clears V rows past the request's last key in block n: their weight is 0, but the memory may hold NaN.
     * Called by all consumers. */
    DEVICE void clear_tail(const Ring<Layout::STAGES> &at) const
    {
        const int first = keys - n * KEYS, rest = KEYS - first;
        if (rest <= 0) return;
        mbarrier_wait(l.barrier(Layout::V_FULL, at.index), at.parity);
#pragma unroll 1
        for (int i = (int)fresh_thread() - WARPGROUP_THREADS; i < rest * Layout::V_TILES * 8;
             i += Layout::CONSUMERS * WARPGROUP_THREADS) {
            const int line = i / 8 % rest, tile = i / 8 / rest;
            store_zero_16(l.v(at.index) + tile * Layout::KEY_TILE +
                          (uint32_t)((first + line) * LINE_BYTES + i % 8 * 16));
        }
        fence_async_shared();
        barrier_sync(ALL_CONSUMERS, Layout::CONSUMERS * WARPGROUP_THREADS);
    }

    /* ---- Weights --------------------------------------------------------------------------------- */

    /* Sets masked scores to -inf. A row that sees its first keys in this block takes its largest score as
     * base. */
    DEVICE void prepare(float (&s)[KEYS / 2], Rows &r, bool &lacks) const
    {
        if (min(keys, seen) < (n + 1) * KEYS) {
            int bound[2];
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const int in_tile =
                    64 * group + (int)fresh_thread() / 32 % 4 * 16 + (int)fresh_thread() % 32 / 4 + 8 * row;
                const int later = p.call.causal ? fast_divide(in_tile, p.heads_divisor) : 0;
                bound[row] = min(keys, seen + later) - n * KEYS;
            }
            mask(s, bound);
        }
        if (lacks) {
            const bool is[2] = {r.base[0] == -INFINITY, r.base[1] == -INFINITY};
            float rescale[2]; /* unused: nothing is summed yet */
            raise(s, p.call.scale_log2, is, r, rescale);
            lacks = __any_sync(~0u, r.base[0] == -INFINITY || r.base[1] == -INFINITY);
        }
    }

    /* Recomputes the weights of a block where the bases of the rows in `is` have to be raised or exponents
     * are extreme. */
    DEVICE void weigh_with_care(float (&s)[KEYS / 2], const bool (&is)[2], Rows &r, float (&rescale)[2],
                                uint32_t (&w)[KEY_STEPS][4])
    {
        float less[2], sum[2] = {0.0f, 0.0f};
        raise(s, p.call.scale_log2, is, r, rescale);
#pragma unroll
        for (int row = 0; row < 2; row++) less[row] = exponent_of(r, row, p.call.scale_log2);
        if (__any_sync(~0u, is_extreme(less[0]) || is_extreme(less[1]))) {
            const float none[2] = {0.0f, 0.0f};
            exponents_with_care(s, p.call.scale_log2, less);
            weigh<Element, 0>(s, 1.0f, none, w, sum);
        } else {
            weigh<Element, 0>(s, p.call.scale_log2, less, w, sum);
        }
        r.sum[0] += sum[0], r.sum[1] += sum[1];
    }

    /* ---- Tiles ----------------------------------------------------------------------------------- */

    /* Reads the tile in the current slot; returns false if there are no more tiles. */
    DEVICE bool begin_tile()
    {
        mbarrier_wait(l.barrier(Layout::TILE_FULL, slot.index), slot.parity);
        const uint32_t rows = load_shared_4(l.tile(slot.index) + 4);
        const uint4 t = load_shared_16(l.tile(slot.index) + 16); /* keys, seen, blocks */
        keys = (int)__shfl_sync(~0u, t.x, 0), seen = (int)__shfl_sync(~0u, t.y, 0),
        n = (int)__shfl_sync(~0u, t.z, 0) - 1;
        is_mine = 64 * group < (int)__shfl_sync(~0u, rows, 0);
        return n >= 0;
    }

    /* Skips block n, of which no row of this consumer sees a key. */
    DEVICE void skip_block()
    {
        await_turn();
        pass_turn();
        mbarrier_wait(l.barrier(Layout::K_FULL, stage.index), stage.parity);
        arrive(Layout::K_EMPTY, stage.index);
        clear_tail(stage);
        mbarrier_wait(l.barrier(Layout::V_FULL, stage.index), stage.parity);
        arrive(Layout::V_EMPTY, stage.index);
        stage.advance();
        n--;
    }

    /* Skips the blocks that only rows of later consumers see, and returns their number. It is below STAGES,
     * because one stage holds values that have not been added yet. */
    DEVICE int skip_unseen()
    {
        static_assert(Layout::ROWS - 64 <= (Layout::STAGES - 1) * KEYS,
                      "else the producer would wait for ever");
        const int blocks = n;
        while (n > 0 && n * KEYS >= seen + later) skip_block();
        return blocks - n;
    }

    DEVICE void skip_tile()
    {
        mbarrier_wait(l.barrier(Layout::Q_FULL, place.index), place.parity);
        arrive(Layout::Q_EMPTY, place.index);
        while (n >= 0) skip_block();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, slot.index));
        place.advance(), slot.advance();
    }

    /* Returns whether the next stage of the ring is full. Called by a whole warp. */
    template <int N> DEVICE bool is_full(int barriers, const Ring<N> &ring) const
    {
        return __all_sync(~0u, mbarrier_test(l.barrier(barriers, ring.index), ring.parity));
    }

    /* Computes the weights of a tile's first block and clears O, where no values of an earlier tile remain to
     * be added. */
    DEVICE void weigh_first(float (&s)[KEYS / 2], Rows &r, bool &lacks, uint32_t (&w)[KEY_STEPS][4],
                            float (&o)[D_V / 2])
    {
        const bool both[2] = {true, true};
        float rescale[2]; /* unused: nothing is summed yet */
        skip_unseen();
        values = stage;
        mbarrier_wait(l.barrier(Layout::Q_FULL, place.index), place.parity);
        mbarrier_wait(l.barrier(Layout::K_FULL, stage.index), stage.parity);
        await_turn();
        wgmma_fence();
        issue_scores(s);
        pass_turn();
        wgmma_wait<0>();
        hold(s);
        arrive(Layout::K_EMPTY, stage.index), arrive(Layout::Q_EMPTY, place.index, n == 0);
        stage.advance();
        prepare(s, r, lacks);
        weigh_with_care(s, both, r, rescale, w);
        clear_tail(values);
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) o[i] = 0.0f;
    }

    /* Computes the weights of block n while the values in stage `used` are still being added; on return they
     * have been added. `begins`: those values belong to the previous tile. */
    DEVICE void weigh_next(float (&s)[KEYS / 2], Rows &r, int used, bool begins, uint32_t (&w)[KEY_STEPS][4],
                           float (&o)[D_V / 2], bool &k_full, bool &v_full)
    {
        float less[2], sum[2] = {0.0f, 0.0f}, early[Layout::EARLY];
#pragma unroll
        for (int row = 0; row < 2; row++) less[row] = exponent_of(r, row, p.call.scale_log2);
        exponentials<0, Layout::EARLY>(s, p.call.scale_log2, less, early, sum);
        hold(early), hold(sum);
        /* ptxas moves nothing across these, so the exponentials are computed before the wait for the
         * values. */
        if constexpr (Layout::ASKS_EARLY)
            k_full = is_full(Layout::K_FULL, stage), v_full = is_full(Layout::V_FULL, values);
        else
            mbarrier_wait(l.barrier(Layout::TILE_FULL, slot.index), slot.parity); /* already complete */
        wgmma_wait<0>();
        arrive(Layout::V_EMPTY, used);
#pragma unroll
        for (int i = 0; i < Layout::EARLY; i += 2)
            w[i / 8][i / 2 % 4] = Element::pack(early[i], early[i + 1]);
        weigh<Element, Layout::EARLY>(s, p.call.scale_log2, less, w, sum);
        bool far[2];
#pragma unroll
        for (int row = 0; row < 2; row++) far[row] = !(sum[row] <= MOST_WEIGHT) || is_extreme(less[row]);
        hold(o);
        if (!__any_sync(~0u, far[0] || far[1])) {
            r.sum[0] += sum[0], r.sum[1] += sum[1];
            hold(r.sum); /* else ptxas moves the additions behind the next products */
        } else {
            float rescale[2];
            far[0] = any_of_quad(far[0]), far[1] = any_of_quad(far[1]);
            weigh_with_care(s, far, r, rescale, w);
            if (!begins)
#pragma unroll
                for (int i = 0; i < D_V / 2; i++) o[i] *= rescale[i >> 1 & 1];
        }
    }

    /* Processes tiles with rows of this consumer, up to the first one without; that tile is current on
     * return. Returns false if there are no more tiles. */
    DEVICE bool take_tiles()
    {
        float s[KEYS / 2], o[D_V / 2], factor[2];
        uint32_t w[KEY_STEPS][4];
        Rows r = fresh_rows();
        bool lacks = true; /* some row has seen no key yet */
        weigh_first(s, r, lacks, w, o);
        int ended_slot, done_slot = 0, skipped = 0;
        bool pending = false; /* o belongs to the ended tile in done_slot and awaits its factors */
        bool k_full = false, v_full = false; /* the next stages are full; false: not known */
        for (;;) {                           /* w: weights of block n, whose values are not added yet */
            const bool begins = n == 0;      /* the next block belongs to another tile */
            ended_slot = slot.index;
            if (begins) {
                place.advance(), slot.advance();
                if (!begin_tile() || !is_mine) break;
                skipped = skip_unseen();
                if (skipped) k_full = false;
                mbarrier_wait(l.barrier(Layout::Q_FULL, place.index), place.parity);
            } else {
                n--;
            }
            if (!k_full) mbarrier_wait(l.barrier(Layout::K_FULL, stage.index), stage.parity);
            await_turn();
            wgmma_fence();
            issue_scores(s);
            if (pending) {
                pass_turn();
                write_rows<Element>(p, l, done_slot, factor, o);
            }
            if (begins) {
                end_rows(p, l, ended_slot, r, factor);
                done_slot = ended_slot, r = fresh_rows(), lacks = true;
            }
            if (!v_full) mbarrier_wait(l.barrier(Layout::V_FULL, values.index), values.parity);
            hold(o);
            wgmma_fence();
            issue_values(o, w);
            if (!pending) pass_turn();
            wgmma_wait<1>();
            hold(s);
            arrive(Layout::K_EMPTY, stage.index), arrive(Layout::Q_EMPTY, place.index, n == 0);
            stage.advance();
            const int used = values.index;
            values.advance();
#pragma unroll 1
            for (; skipped; skipped--) values.advance();
            if (lacks || min(keys, seen) < (n + 1) * KEYS) prepare(s, r, lacks);
            weigh_next(s, r, used, begins, w, o, k_full, v_full);
            clear_tail(values);
            pending = begins;
        }
        if (pending) write_rows<Element>(p, l, done_slot, factor, o); /* the last tile has a single block */
        mbarrier_wait(l.barrier(Layout::V_FULL, values.index), values.parity);
        wgmma_fence();
        hold(o);
        issue_values(o, w);
        wgmma_wait<0>();
        hold(o);
        arrive(Layout::V_EMPTY, values.index);
        end_rows(p, l, ended_slot, r, factor);
        write_rows<Element>(p, l, ended_slot, factor, o);
        return n >= 0;
    }

    DEVICE void run()
    {
        if (group == Layout::CONSUMERS - 1) pass_turn();
        for (bool more = begin_tile(); more;) {
            if (is_mine) {
                more = take_tiles();
            } else {
                skip_tile();
                more = begin_tile();
            }
        }
        if (group == 0) await_turn(); /* consume the last arrival, so that no barrier is left incomplete */
    }
};

template <typename Element, typename Layout> DEVICE void kernel(const mha_forward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* alignment of the tiles */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    if (threadIdx.x == 0) l.init_barriers();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        switch (threadIdx.x / 32) {
        case 0: TileProducer<Layout>{p, l}.run(); break;
        case 1: KeyProducer<Layout>{p, l}.run(); break;
        case 2: ValueProducer<Layout>{p, l}.run(); break;
        }
    } else {
        take_registers<Layout::CONSUMER_REGISTERS>();
        const int group = warpgroup - 1;
        Consumer<Element, Layout>{p, l, group, fast_divide(64 * group + 63, p.heads_divisor)}.run();
    }
}

} // namespace mha_forward

#define MHA_FORWARD_KERNEL(NAME, ELEMENT, D_QK, D_V)                                                         \
    DEFINE_KERNEL(NAME, mha_forward_sm90_params, (mha_forward::MhaLayout<D_QK, D_V>::THREADS, 1),            \
                  mha_forward::kernel<ELEMENT, mha_forward::MhaLayout<D_QK, D_V>>(p))
