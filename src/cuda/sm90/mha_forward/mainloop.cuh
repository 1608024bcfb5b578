/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on Hopper (docs/kernels/mha.md): the kernel, and the mainloop of its consumers.
 *
 *   CTA                        persistent, one per SM, two of few rows; the first tile is its own, the next it draws
 *     warpgroup 0              producers: warp 0 draws tiles from a counter in global memory, when few blocks
 *                              are left to load (scheduler.cuh), warp 1 loads Q and K, warp 2 V, by TMA
 *                              (producer.cuh)
 *     the others               2 consumers, 3 at 96/64 and 64/64, 1 of few rows (layout.cuh), 64 rows of the tile each:
 *
 *       wgmma    | S = Q Kᵀ of block n - 1 |     O += P V of block n      |                  | S of n - 2 …
 *       warps    |        (wait)           | P of n - 1 from S, its start | the rest of P    |
 *
 * Blocks are taken from the last keys to the first: block n - 1 follows block n. P stays in registers: the
 * accumulator fragments of S have the layout of A. The first EARLY_WEIGHTS of a thread's P of block n - 1 are
 * computed while O += P V of block n runs; the others overwrite P of block n, which the products still read
 * until then. While one consumer computes its softmax, the products of another one run (order_wait,
 * order_arrive; not in the plain kernel of 128/128, nor of few rows, where there is one consumer).
 *
 * The pipeline continues across tiles: the epilogue of a tile runs while the first scores of the next one are
 * in flight; it stages O in shared memory and stores whole lines, 16 bytes a
 * thread (at 256/256, and of few rows, without shared memory). No maximum is computed
 * unless a block outgrows a row (softmax.cuh); if its largest weight does too, the reference moves, and O is
 * rescaled before the block's P V is added. Blocks that no row of a consumer sees are skipped (skip_masked); in
 * others each row is masked.
 *
 * Limits for 128 rows by 128 keys, in clocks of an SM: products 2560 at 192/128, 2048 at 128/128, 1024 at
 * 64/64; ex2 1024; then power.
 *
 * Rounding: P has 16 bits and is relative to the row's reference (softmax.cuh); sums are fp32 and follow the
 * order of the blocks.
 */
#pragma once

#include "epilogue.cuh"
#include "producer.cuh"

namespace mha_forward {

/* Named barriers: one for all consumers, then one per consumer for its place in the order of wgmma. */
enum { ALL_CONSUMERS = 1, FIRST_ORDER };

template <typename Element, typename Layout> struct Consumer {
    static constexpr int D_V = Layout::D_V, KEYS = Layout::KEYS, QK_STEPS = Layout::D_QK / 16,
                         KEY_STEPS = KEYS / 16;

    const mha_forward_sm90_params &p;
    const Layout l;
    const int group;       /* consumer index: it has rows 64 · group … of a tile */
    const int last_offset; /* token of its last row minus the tile's first token */

    int n;             /* the block whose scores come next, or are in s */
    int keys, visible; /* of the current tile: its keys, and those that its first token sees */
    bool has_rows;     /* this consumer has rows in the tile */
    Ring<TILE_STAGES> tile_stage;
    Ring<Layout::Q_STAGES> q_stage;
    Ring<Layout::KV_STAGES> k_stage, v_stage; /* of the next scores; of the next values */

    DEVICE bool is_leader() const { return threadIdx.x % WARPGROUP_THREADS == 0; }

    /* Consumers issue wgmma one after the other, in a fixed order, so that their exponentials do not
     * coincide: two consumers that compute them at the same time each take twice as long, and the tensor cores
     * are idle meanwhile. order_wait waits for the consumer before, order_arrive lets the next one go on. */
    DEVICE void order_wait() const
    {
        if constexpr (Layout::IS_ORDERED) barrier_sync(FIRST_ORDER + group, 2 * WARPGROUP_THREADS);
    }

    DEVICE void order_arrive() const
    {
        if constexpr (Layout::IS_ORDERED)
            barrier_arrive(FIRST_ORDER + (group + 1) % Layout::CONSUMERS, 2 * WARPGROUP_THREADS);
    }

    /* Waits until the next stage of a ring is full. `full`: the ring's first full barrier. */
    template <int N> DEVICE void consumer_wait(int full, const Ring<N> &ring) const
    {
        mbarrier_wait(l.barrier(full, ring.index), ring.parity);
    }

    /* Returns whether the next stage is full. Called by a whole warp. */
    template <int N> DEVICE bool consumer_test(int full, const Ring<N> &ring) const
    {
        return __all_sync(~0u, mbarrier_test(l.barrier(full, ring.index), ring.parity));
    }

    /* Releases a stage to its producer: the leader arrives for the whole warpgroup. `empty`: the ring's first
     * empty barrier. */
    DEVICE void consumer_release(int empty, int stage, bool releases = true) const
    {
        mbarrier_arrive_if(is_leader() && releases, l.barrier(empty, stage));
    }

    /* ---- Products -------------------------------------------------------------------------------- */

    DEVICE void issue_scores(float (&s)[KEYS / 2]) const
    {
        const uint32_t q = l.q(q_stage.index) + (uint32_t)group * TILE_BYTES, k = l.k(k_stage.index);
#pragma unroll
        for (int i = 0; i < QK_STEPS; i++) {
            const int tile = i / 4, step = i % 4 + (tile == Layout::QK_TILES - 1 ? Layout::OVERLAP / 16 : 0);
            wgmma_lines_of<Element>(s, wgmma_lines(q + tile * Layout::Q_TILE, step),
                                    wgmma_lines(k + tile * Layout::KEY_TILE, step), i != 0);
        }
        wgmma_commit();
    }

    DEVICE void issue_values(float (&o)[D_V / 2], const uint32_t (&w)[KEY_STEPS][4]) const
    {
        const uint32_t v = l.v(v_stage.index);
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) {
            const uint64_t b = wgmma_descriptor(v, Layout::KEY_TILE, (uint32_t)i * 16 * LINE_BYTES);
            if constexpr (D_V == 256)
                wgmma_256_columns<Element>(o, w[i], b, 1);
            else if constexpr (D_V == 128)
                wgmma_128_columns<Element>(o, w[i], b, 1);
            else
                wgmma_64_columns<Element>(o, w[i], b, 1);
        }
        wgmma_commit();
    }

    /* Clears V rows past the request's last key in block n: their weight is 0, but the memory may hold NaN.
     * Called by all consumers, also by those that skip the block. */
    DEVICE void clear_tail(const Ring<Layout::KV_STAGES> &stage) const
    {
        const int first = keys - n * KEYS, rest = KEYS - first;
        if (rest <= 0) return;
        consumer_wait(Layout::V_FULL, stage);
#pragma unroll 1
        for (int i = (int)fresh_thread() - WARPGROUP_THREADS; i < rest * Layout::V_TILES * 8;
             i += Layout::CONSUMERS * WARPGROUP_THREADS) {
            const int line = i / 8 % rest, tile = i / 8 / rest;
            store_zero_16(l.v(stage.index) + tile * Layout::KEY_TILE +
                          (uint32_t)((first + line) * LINE_BYTES + i % 8 * 16));
        }
        fence_async_shared();
        barrier_sync(ALL_CONSUMERS, Layout::CONSUMERS * WARPGROUP_THREADS);
    }

    /* ---- Softmax --------------------------------------------------------------------------------- */

    /* Sets masked scores of block n to -inf. A row that sees its first keys in this block takes its largest
     * score as reference. */
    DEVICE void mask_and_set_reference(float (&s)[KEYS / 2], RowState &r) const
    {
        if (min(keys, visible) < (n + 1) * KEYS) {
            int bound[2];
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const int in_tile =
                    64 * group + (int)fresh_thread() / 32 % 4 * 16 + (int)fresh_thread() % 32 / 4 + 8 * row;
                const int token_offset = p.call.causal ? fast_divide(in_tile, p.heads_divisor) : 0;
                bound[row] = min(keys, visible + token_offset) - n * KEYS;
            }
            mask_scores(s, bound);
        }
        if (r.has_unseen) {
            float highest[2];
            row_maxima(s, highest);
#pragma unroll
            for (int row = 0; row < 2; row++)
                if (r.reference[row] == -INFINITY) r.reference[row] = highest[row];
            r.has_unseen = __any_sync(~0u, r.reference[0] == -INFINITY || r.reference[1] == -INFINITY);
        }
    }

    /* Computes the weights of a block and adds them to the sums. */
    DEVICE void weigh_with_care(float (&s)[KEYS / 2], RowState &r, uint32_t (&w)[KEY_STEPS][4]) const
    {
        float reference[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int row = 0; row < 2; row++) reference[row] = scaled_reference(r, row, p.call.scale_log2);
        if (__any_sync(~0u, is_extreme(reference[0]) || is_extreme(reference[1]))) {
            const float none[2] = {0.0f, 0.0f};
            exponents_with_care(s, p.call.scale_log2, reference);
            packed_exponentials<Element, 0>(s, 1.0f, none, w, sum);
        } else {
            packed_exponentials<Element, 0>(s, p.call.scale_log2, reference, w, sum);
        }
        r.sum[0] += sum[0], r.sum[1] += sum[1];
    }

    /* Adds the sums of a block where it outgrows rows of the warp. `outgrows`: by this thread's weights. The reference of
     * such a row moves if the block's largest weight is more than all before together. The weights are then computed
     * again, as they are if exponents are extreme, and O is rescaled unless `is_new_tile`: no row has earlier keys. */
    DEVICE void add_outgrown(float (&s)[KEYS / 2], const float (&sum)[2], bool (&outgrows)[2],
                             bool is_new_tile, RowState &r, uint32_t (&w)[KEY_STEPS][4],
                             float (&o)[D_V / 2]) const
    {
        float highest[2] = {0.0f, 0.0f};
        bool moves[2] = {false, false}, again = false;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            outgrows[row] = any_of_quad(outgrows[row]);
            again |= is_extreme(scaled_reference(r, row, p.call.scale_log2));
        }
        if (!is_new_tile) {
            row_maxima(s, highest);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const float largest = exp2_approx((highest[row] - r.reference[row]) * p.call.scale_log2),
                            before = fminf(quad_sum(r.sum[row]), MOST_LAGGING_WEIGHT);
                moves[row] = outgrows[row] && highest[row] > r.reference[row] && largest > before;
                again |= moves[row];
            }
        }
        if (__any_sync(~0u, again)) {
            float rescale[2];
            move_reference(highest, p.call.scale_log2, moves, r, rescale);
            weigh_with_care(s, r, w);
            if (!is_new_tile)
#pragma unroll
                for (int i = 0; i < D_V / 2; i++) o[i] *= rescale[i >> 1 & 1];
        } else {
            r.sum[0] += sum[0], r.sum[1] += sum[1];
        }
        note_others(outgrows, r);
    }

    /* Notes what the other threads have summed of the rows for which `outgrown` is true. */
    DEVICE void note_others(const bool (&outgrown)[2], RowState &r) const
    {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float whole = quad_sum(r.sum[row]);
            if (outgrown[row]) r.others[row] = whole - r.sum[row];
        }
    }

    /* ---- Tiles ----------------------------------------------------------------------------------- */

    /* Reads the tile of the current stage; returns false if there are no more tiles. The shuffles tell ptxas
     * that the values are uniform in a warp. */
    DEVICE bool begin_tile()
    {
        consumer_wait(Layout::TILE_FULL, tile_stage);
        const uint32_t rows = load_shared_4(l.tile(tile_stage.index) + offsetof(WorkTile, q.rows));
        const TileKeys t = load_tile_keys(l.tile(tile_stage.index));
        keys = __shfl_sync(~0u, t.keys, 0), visible = __shfl_sync(~0u, t.visible, 0),
        n = __shfl_sync(~0u, t.blocks, 0) - 1;
        has_rows = 64 * group < (int)__shfl_sync(~0u, rows, 0);
        return n >= 0;
    }

    /* Skips block n, in which all keys are masked for the rows of this consumer: takes its place in the order,
     * and only releases its stages. */
    DEVICE void skip_block()
    {
        order_wait();
        order_arrive();
        consumer_wait(Layout::K_FULL, k_stage);
        consumer_release(Layout::K_EMPTY, k_stage.index);
        clear_tail(k_stage);
        consumer_wait(Layout::V_FULL, k_stage);
        consumer_release(Layout::V_EMPTY, k_stage.index);
        k_stage.advance();
        n--;
    }

    /* Skips the blocks that are visible only to rows of later consumers, and returns whether there were any.
     * They must be fewer than KV_STAGES: one stage holds values of the previous tile, which are added later,
     * and the producer waits for it. */
    DEVICE bool skip_masked()
    {
        static_assert(Layout::ROWS - 64 <= (Layout::KV_STAGES - 1) * KEYS,
                      "else the producer would wait for ever");
        const int last = n;
        while (n > 0 && n * KEYS >= visible + last_offset) skip_block();
        return n < last;
    }

    /* Goes on to block n - 1 or, after block 0, to the next tile's highest block that this consumer sees. Returns
     * false if there is no next tile or it has no rows of this consumer. `k_full` becomes false if blocks were
     * skipped: it was about the first of them. */
    DEVICE bool next_block(bool &k_full)
    {
        if (n > 0) {
            n--;
            return true;
        }
        q_stage.advance(), tile_stage.advance();
        if (!begin_tile() || !has_rows) return false;
        if (skip_masked()) k_full = false;
        consumer_wait(Layout::Q_FULL, q_stage);
        return true;
    }

    DEVICE void skip_tile()
    {
        consumer_wait(Layout::Q_FULL, q_stage);
        consumer_release(Layout::Q_EMPTY, q_stage.index);
        while (n >= 0) skip_block();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(l.barrier(Layout::TILE_EMPTY, tile_stage.index));
        q_stage.advance(), tile_stage.advance();
    }

    /* Prologue of the mainloop: computes the weights of a tile's first block and clears O, for a tile that
     * does not follow another one in the pipeline. */
    DEVICE void prologue(float (&s)[KEYS / 2], RowState &r, uint32_t (&w)[KEY_STEPS][4], float (&o)[D_V / 2])
    {
        const bool both[2] = {true, true};
        skip_masked();
        v_stage = k_stage;
        consumer_wait(Layout::Q_FULL, q_stage);
        consumer_wait(Layout::K_FULL, k_stage);
        order_wait();
        wgmma_fence();
        issue_scores(s);
        order_arrive();
        wgmma_wait<0>();
        hold(s);
        consumer_release(Layout::K_EMPTY, k_stage.index);
        consumer_release(Layout::Q_EMPTY, q_stage.index, n == 0);
        k_stage.advance();
        mask_and_set_reference(s, r);
        weigh_with_care(s, r, w);
        note_others(both, r);
        clear_tail(v_stage);
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) o[i] = 0.0f;
    }

    /* Computes the weights of block n while the values in `used_stage` are still being added; on return they
     * have been added. `is_new_tile`: those values belong to the previous tile, and O is not rescaled. */
    DEVICE void softmax_block(float (&s)[KEYS / 2], RowState &r, int used_stage, bool is_new_tile,
                              uint32_t (&w)[KEY_STEPS][4], float (&o)[D_V / 2], bool &k_full, bool &v_full)
    {
        float reference[2], sum[2] = {0.0f, 0.0f}, early[Layout::EARLY_WEIGHTS];
#pragma unroll
        for (int row = 0; row < 2; row++) reference[row] = scaled_reference(r, row, p.call.scale_log2);
        exponentials<0, Layout::EARLY_WEIGHTS>(s, p.call.scale_log2, reference, early, sum);
        hold(early), hold(sum);
        /* ptxas moves nothing across these, so the exponentials are computed before the wait for the
         * values. At 64/64 the next stages are tested meanwhile. */
        if constexpr (Layout::TESTS_EARLY)
            k_full = consumer_test(Layout::K_FULL, k_stage), v_full = consumer_test(Layout::V_FULL, v_stage);
        else
            /* Synchronises nothing, for it completed long ago: it only holds the compiler. */
            consumer_wait(Layout::TILE_FULL, tile_stage);
        wgmma_wait<0>();
        consumer_release(Layout::V_EMPTY, used_stage);
#pragma unroll
        for (int i = 0; i < Layout::EARLY_WEIGHTS; i += 2)
            w[i / 8][i / 2 % 4] = Element::pack(early[i], early[i + 1]);
        packed_exponentials<Element, Layout::EARLY_WEIGHTS>(s, p.call.scale_log2, reference, w, sum);
        bool outgrows[2];
#pragma unroll
        for (int row = 0; row < 2; row++)
            outgrows[row] = !(sum[row] <= fminf(MOST_GROWTH * (r.others[row] + r.sum[row]), MOST_WEIGHT)) ||
                            is_extreme(reference[row]);
        hold(o);
        if (__any_sync(~0u, outgrows[0] || outgrows[1])) {
            add_outgrown(s, sum, outgrows, is_new_tile, r, w, o);
        } else {
            r.sum[0] += sum[0], r.sum[1] += sum[1];
            hold(r.sum); /* else ptxas moves the additions behind the next products */
        }
    }

    /* Processes tiles with rows of this consumer, up to the first one without; that tile is current on
     * return. Returns false if there are no more tiles.
     *
     * An iteration issues S of a block, then O += P V of the block of the iteration before, and begins P of S
     * while the latter runs. After a tile's block 0 the next block is of the next tile, so the epilogue is spread
     * over two iterations: finish_rows in the one that adds the tile's last values, store_rows in the next one
     * (`is_pending`), each while S of that iteration is computed. */
    DEVICE bool mainloop()
    {
        float s[KEYS / 2], o[D_V / 2], factor[2];
        uint32_t w[KEY_STEPS][4];
        RowState r = initial_row_state();
        prologue(s, r, w, o);
        int finished_stage, pending_stage = 0;
        bool is_pending = false; /* o belongs to the finished tile in pending_stage and awaits its factors */
        bool k_full = false, v_full = false; /* the next stages are full; false: not known */
        for (;;) {
            /* w: weights of block n, whose values are not added yet. */
            const bool is_new_tile = n == 0; /* the next block belongs to another tile */
            finished_stage = tile_stage.index;
            if (!next_block(k_full)) break;
            if (!k_full) consumer_wait(Layout::K_FULL, k_stage);
            order_wait();
            wgmma_fence();
            issue_scores(s);
            if (is_pending) { /* writing takes long: the next consumer goes first */
                order_arrive();
                store_rows<Element>(p, l, pending_stage, factor, o); /* releases the stage, clears o */
            }
            if (is_new_tile) { /* the finished tile's sums are complete; its O lacks the last block */
                finish_rows(p, l, finished_stage, r, factor);
                pending_stage = finished_stage, r = initial_row_state();
            }
            if (!v_full) consumer_wait(Layout::V_FULL, v_stage);
            hold(o);
            wgmma_fence();
            issue_values(o, w);
            if (!is_pending) order_arrive();
            wgmma_wait<1>(); /* S is complete; O += P V runs on */
            hold(s);
            consumer_release(Layout::K_EMPTY, k_stage.index);
            consumer_release(Layout::Q_EMPTY, q_stage.index, n == 0);
            const int used_stage = v_stage.index;
            v_stage = k_stage; /* K and V of a block have the same stage */
            k_stage.advance();
            if (r.has_unseen || min(keys, visible) < (n + 1) * KEYS) mask_and_set_reference(s, r);
            softmax_block(s, r, used_stage, is_new_tile, w, o, k_full, v_full);
            clear_tail(v_stage);
            is_pending = is_new_tile;
        }
        if (is_pending) /* the last tile has a single block */
            store_rows<Element>(p, l, pending_stage, factor, o);
        consumer_wait(Layout::V_FULL, v_stage);
        wgmma_fence();
        hold(o);
        issue_values(o, w);
        wgmma_wait<0>();
        hold(o);
        consumer_release(Layout::V_EMPTY, v_stage.index);
        finish_rows(p, l, finished_stage, r, factor);
        store_rows<Element>(p, l, finished_stage, factor, o);
        return n >= 0;
    }

    DEVICE void run()
    {
        if (group == Layout::CONSUMERS - 1) order_arrive(); /* the first consumer may begin */
        for (bool more = begin_tile(); more;) {
            if (has_rows) {
                more = mainloop();
            } else {
                skip_tile();
                more = begin_tile();
            }
        }
        if (group == 0) order_wait(); /* consume the last arrival, so that no barrier is left incomplete */
    }
};

template <typename Element, typename Layout> DEVICE void kernel(const mha_forward_sm90_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[]; /* alignment of the tiles */
    const Layout l = {(uint32_t)__cvta_generic_to_shared(memory)};
    const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP_THREADS, 0);
    if (warpgroup == 0) {
        give_registers<Layout::PRODUCER_REGISTERS>();
        switch (threadIdx.x / 32) {
        case 0: TileProducer<Layout>{p, l}.run(); break;
        case 1: QueryKeyProducer<Layout>{p, l}.run(); break;
        case 2: ValueProducer<Layout>{p, l}.run(); break;
        case 3: /* initializes the barriers, while warp 0 looks at the requests */
            if (elect_one()) l.init_barriers();
            __syncwarp();
            __syncthreads();
            break;
        }
    } else {
        take_registers<Layout::CONSUMER_REGISTERS>();
        __syncthreads();
        const int group = warpgroup - 1;
        Consumer<Element, Layout>{p, l, group, fast_divide(64 * group + 63, p.heads_divisor)}.run();
    }
}

} // namespace mha_forward

/* TILES: of enum class Tiles. */
#define MHA_FORWARD_KERNEL(NAME, ELEMENT, D_QK, D_V, TILES)                                                  \
    using NAME##_layout = mha_forward::MhaLayout<D_QK, D_V, mha_forward::Tiles::TILES>;                      \
    DEFINE_KERNEL(NAME, mha_forward_sm90_params, (NAME##_layout::THREADS, NAME##_layout::CTAS_PER_SM),       \
                  mha_forward::kernel<ELEMENT, NAME##_layout>(p))
