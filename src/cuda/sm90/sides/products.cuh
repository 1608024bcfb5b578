/* SPDX-License-Identifier: MIT
 *
 * The matrix products of one side. All addresses are constants apart from the base. Include after a kernel's
 * layout.cuh.
 */
#pragma once

DEVICE uint32_t unit_at(uint32_t base, int side, int unit)
{
    return SHARED_AT(base, tiles.keys) + (uint32_t)(side * UNITS + unit) * UNIT_BYTES;
}

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
DEVICE void multiply_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t base, int side)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_64<Element>(s, q[k], wgmma_lines(SHARED_AT(base, tiles.rope) + (uint32_t)side * TILE_BYTES, k),
                          k > 0);
}

/* S (+)= Q·Kᵀ over one unit. */
template <typename Element>
DEVICE void multiply_keys(float (&s)[32], uint32_t base, int side, int unit, bool add)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t tile = (uint32_t)(k / 4) * TILE_BYTES;
        wgmma_64<Element>(s,
                          wgmma_lines(SHARED_AT(base, tiles.q) + (uint32_t)unit * UNIT_BYTES + tile, k % 4),
                          wgmma_lines(unit_at(base, side, unit) + tile, k % 4), add || k > 0);
    }
}

/* O (+)= P·V over one unit of a block of side `owner`; P is in shared memory. */
template <typename Element>
DEVICE void multiply_unit(float (&o)[64], uint32_t base, int owner, int unit, int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, wgmma_lines(SHARED_AT(base, tiles.p) + (uint32_t)owner * TILE_BYTES, k),
                                   wgmma_columns(unit_at(base, owner, unit), k), k > 0 || add);
    wgmma_commit();
}

/* The same; P is in registers. */
template <typename Element>
DEVICE void multiply_unit(float (&o)[64], const uint32_t (&p)[4][4], uint32_t base, int owner, int unit,
                          int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, p[k], wgmma_columns(unit_at(base, owner, unit), k), k > 0 || add);
    wgmma_commit();
}

/* O (+)= P·V over the home units of `side`, for a block of side `owner`. `p`: the weights if they are in
 * registers. */
template <typename Element, typename... P>
DEVICE void multiply_home(float (&left)[64], float (&right)[64], uint32_t base, int side, int owner, int add,
                          const P &...p)
{
    hold(left), hold(right);
    wgmma_fence();
    multiply_unit<Element>(left, p..., base, owner, first_of_home(side), add);
    multiply_unit<Element>(right, p..., base, owner, second_of_home(side), add);
}

/* Waits until the other side has issued Q·Kᵀ of the previous block: the tensor cores then run that one
 * first, and its softmax, which this side waits for, begins early. `others`: number of the other side's
 * blocks so far. */
DEVICE void wait_for_turn(uint32_t base, int side, uint32_t others)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, barriers.scored), 1 - side), others & 1);
}

/* Waits for P of the other side's block; the other side's reference may have moved with it. */
DEVICE void wait_for_weights(uint32_t base, int side, uint32_t others)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, barriers.p_full), 1 - side), others & 1);
}

/* Returns a unit to the producer. Every warp whose home it is calls this after waiting for its last
 * product with the unit. */
DEVICE void release_unit(uint32_t base, int owner, int unit, int lane)
{
    if (lane == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, barriers.keys_empty), owner * UNITS + unit));
}
