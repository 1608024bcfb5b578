/* SPDX-License-Identifier: MIT
 *
 * The seesaw of two sides (docs/kernels/dense-decode.md draws it): who multiplies which block when, and at
 * which barriers the sides wait and arrive. A kernel derives its side from Seesaw and defines the hooks, the
 * steps in which kernels differ:
 *
 *      keys      score_early, see_late, score_late: wait until units of the block have arrived, and compute
 *                Q·Kᵀ over them; beside_scores: what is done meanwhile
 *      mask      mask: sets the scores of keys that do not count to -inf
 *      softmax   update_references, move_to, make_weights: when references move, and to what; P
 *
 * The kernel itself calls run_blocks, multiplies the last block and ends the split. multiply_last is not
 * shared: sparse prefill runs one copy of it for both sides, and stores results from the last block's units.
 * A kernel's Variant V says whether a side releases what its scores have read before the softmax
 * (RELEASES_BEFORE_SOFTMAX), and whether the owner of the last block leaves P·V of it to multiply_last
 * (LAST_IN_END).
 *
 * Shared is the kernel's shared memory (layout.cuh), RowState the softmax state of a thread's two rows.
 */
#pragma once

#include "layout.cuh"
#include "softmax.cuh"

namespace latent {

/* ---- Products ---------------------------------------------------------------------------------- */

/* Loads the A fragments of the rope columns of the thread's first or second row of Q (i); zeros if the row
 * does not exist (`some`). `from`: the row's first rope column. */
DEVICE void load_rope_row(uint32_t (&q)[4][4], const uint16_t *from, bool some, int i)
{
    from += 2 * (fresh_thread() % 4);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        q[k][i] = some ? *(const uint32_t *)(from + 16 * k) : 0;
        q[k][i + 2] = some ? *(const uint32_t *)(from + 16 * k + 8) : 0;
    }
}

/* S = Q·Kᵀ over the rope columns; Q's are in registers. */
template <typename Element>
DEVICE void multiply_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t smem, int side)
{
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_64<Element>(s, q[k], wgmma_lines(rope_at(smem, side), k), k > 0);
}

/* S (+)= Q·Kᵀ over one unit. */
template <typename Element>
DEVICE void multiply_keys(float (&s)[32], uint32_t smem, int side, int unit, bool add)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t tile = (uint32_t)(k / 4) * TILE_BYTES;
        wgmma_64<Element>(s, wgmma_lines(q_unit_at(smem, unit) + tile, k % 4),
                          wgmma_lines(unit_at(smem, side, unit) + tile, k % 4), add || k > 0);
    }
}

/* O (+)= P·V over one unit of a block of side `owner`; P is in shared memory. */
template <typename Element>
DEVICE void multiply_unit(float (&o)[64], uint32_t smem, int owner, int unit, int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, wgmma_lines(weights_at(smem, owner), k),
                                   wgmma_columns(unit_at(smem, owner, unit), k), k > 0 || add);
    wgmma_commit();
}

/* The same; P is in registers. */
template <typename Element>
DEVICE void multiply_unit(float (&o)[64], const uint32_t (&p)[4][4], uint32_t smem, int owner, int unit,
                          int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, p[k], wgmma_columns(unit_at(smem, owner, unit), k), k > 0 || add);
    wgmma_commit();
}

/* O (+)= P·V over the home units of `side`, for a block of side `owner`. `p`: the weights if they are in
 * registers. */
template <typename Element, typename... P>
DEVICE void multiply_home(float (&left)[64], float (&right)[64], uint32_t smem, int side, int owner, int add,
                          const P &...p)
{
    hold(left), hold(right);
    wgmma_fence();
    multiply_unit<Element>(left, p..., smem, owner, first_of_home(side), add);
    multiply_unit<Element>(right, p..., smem, owner, second_of_home(side), add);
}

/* ---- The schedule ------------------------------------------------------------------------------ */

/* One side and its state from block to block. Both sides run the same code: a copy for each side, with
 * constant addresses, was no faster and up to a third longer, and a short call executes all of it once. A
 * work tile is what lies between two results: a tile of rows and a split or a list of keys. */
template <typename Hooks, typename V, typename Shared, typename RowState> struct Seesaw : SideThread {
    using Element = typename V::Element;
    using Params = typename V::Params;
    static_assert(offsetof(Shared, tiles) == 0, "its address is that of shared memory");

    const Params &p;
    Shared &shared;
    const uint32_t smem;
    const int side;
    float s[32], left[64], right[64]; /* S of a block; O of the two home units */
    uint32_t weights[4][4], q_rope[4][4];
    RowState state;
    uint32_t own = 0, others = 0, tiles_done = 0; /* blocks of this and of the other side, and work tiles, so
                                                     far: they give the parities of barriers */

    DEVICE Seesaw(const Params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), side(uniform_side())
    {
#pragma unroll
        for (int i = 0; i < 64; i++) left[i] = right[i] = 0.0f;
    }

    DEVICE Hooks &hooks()
    {
        return static_cast<Hooks &>(*this);
    }

    /* ---- References and weights ------------------------------------------------------------------ */

    /* Publishes the references that this side has moved to. */
    DEVICE void publish_references(const float (&to)[2])
    {
        shared.tiles.reference[side][row()] = to[0], shared.tiles.reference[side][row() + 8] = to[1];
    }

    /* Moves to the references of the other side's last block. */
    DEVICE void follow_references()
    {
        if (!__any_sync(~0u, shared.rescaled[1 - side][warp()])) return;
        const float to[2] = {shared.tiles.reference[1 - side][row()],
                             shared.tiles.reference[1 - side][row() + 8]};
        hooks().move_to(to, false);
    }

    DEVICE void softmax(bool first)
    {
        const bool moves = hooks().update_references(first);
        if (lane() == 0) shared.rescaled[side][warp()] = moves;
        /* P of the block before last is no longer read: the other side waited for that product before it
         * computed the P that this side waited for. */
        hooks().make_weights(weights_line(weights_at(smem, side), warp(), lane()));
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.p_full), side));
    }

    /* ---- Barriers -------------------------------------------------------------------------------- */

    /* Waits until the other side has issued Q·Kᵀ of the previous block: the tensor cores then run that one
     * first, and its softmax, which this side waits for, begins early. */
    DEVICE void order_wait()
    {
        mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.scored), 1 - side), others & 1);
    }

    /* Waits for P of the other side's block; the other side's reference may have moved with it. */
    DEVICE void wait_for_weights()
    {
        mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.p_full), 1 - side), others & 1);
    }

    /* Returns a unit to the producer. Every warp whose home it is calls this after waiting for its last
     * product with the unit. */
    DEVICE void release_unit(int owner, int unit)
    {
        if (lane() == 0)
            mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.keys_empty), owner * UNITS + unit));
    }

    /* Releases the rope columns of a scored block k and, if it is the side's last, the queries. LAST: it is
     * known to be the last. */
    template <bool LAST = false> DEVICE void release_scored(int k, int blocks)
    {
        if (lane()) return;
        if (V::ROPE) mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.rope_empty), side));
        if (LAST || k + 2 >= blocks) mbarrier_arrive(SHARED_AT(smem, barriers.q_empty));
    }

    /* ---- Products -------------------------------------------------------------------------------- */

    /* P·V of the other side's block before block k, as soon as its P is there; waits for the first unit.
     * Returns what see_late found. */
    DEVICE uint32_t multiply_others(int k)
    {
        wait_for_weights();
        wgmma_wait<0>();
        const uint32_t arrived = hooks().see_late();
        hold(s);
        follow_references();
        multiply_home<Element>(left, right, smem, side, 1 - side, k > 1);
        wgmma_wait<1>();
        release_unit(1 - side, first_of_home(side));
        return arrived;
    }

    /* P·V of this side's block k. */
    DEVICE void multiply_own(int k, int blocks)
    {
        multiply_home<Element>(left, right, smem, side, side, k > 0, weights);
        if (!V::RELEASES_BEFORE_SOFTMAX) release_scored(k, blocks);
        wgmma_wait<1>();
        release_unit(side, first_of_home(side));
        wgmma_wait<0>();
        hold(left), hold(right);
        release_unit(side, second_of_home(side));
    }

    /* ---- A block, a work tile ---------------------------------------------------------------------- */

    /* Runs block k of the work tile, which this side owns. */
    template <typename Tile> DEVICE void run_block(int k, int first_key, const Tile &tile)
    {
        const bool follows = side == 1 || k > 0;
        uint32_t arrived = 0;
        hooks().score_early(follows);
        if (follows) arrived = multiply_others(k);
        hooks().score_late(arrived);
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.scored), side));
        hooks().beside_scores(k);
        wgmma_wait<1>();
        if (follows) {
            release_unit(1 - side, second_of_home(side));
            others++;
        }
        wgmma_wait<0>();
        hold(s), hold(left), hold(right);
        if (V::RELEASES_BEFORE_SOFTMAX) release_scored(k, tile.blocks);
        hooks().mask(first_key, tile);
        softmax(k == 0);
        own++;
        if constexpr (V::LAST_IN_END)
            if (k + 1 >= tile.blocks) return release_scored<true>(k, tile.blocks);
        multiply_own(k, tile.blocks);
    }

    /* Runs this side's blocks of a work tile that has keys. */
    template <typename Tile> DEVICE void run_blocks(const Tile &tile)
    {
        mbarrier_wait(SHARED_AT(smem, barriers.q_full), tiles_done & 1);
        if (side == 1 && tile.blocks == 1 && lane() == 0) mbarrier_arrive(SHARED_AT(smem, barriers.q_empty));
        int first_key = tile.first_key() + side * KEYS;
        for (int k = side; k < tile.blocks; k += 2, first_key += 2 * KEYS) run_block(k, first_key, tile);
    }
};

} // namespace latent
