/* SPDX-License-Identifier: MIT
 *
 * Scores, computed as the keys arrive.
 */
#pragma once

#include "../../device/result.cuh"
#include "layout.cuh"

#include "../sides/products.cuh"

/* Loads the A fragments of Q's rope columns from memory; rows past the end are zero. `row`: of the key
 * head. */
DEVICE void load_q_rope(uint32_t (&q)[4][4], const struct dense_decode_params &p, const Task &task, int row)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const RowPlace place = row_place(p, row + 8 * i, task.kv_head);
        const uint16_t *from = p.q + task.split.request * p.q_stride[0] + place.token * p.q_stride[1] +
                               place.head * p.q_stride[2] + D_V;
        load_rope_row(q, from, row + 8 * i < p.rows, i);
    }
}

/* S = Q·Kᵀ over the rope columns. */
template <typename Element>
DEVICE void score_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t base, int side, uint32_t parity)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, barriers.rope_full), side), parity);
    hold(s);
    wgmma_fence();
    multiply_rope<Element>(s, q, base, side);
}

/* S (+)= Q·Kᵀ over one unit; waits until the unit has arrived. */
template <typename Element>
DEVICE void score_unit(float (&s)[32], uint32_t base, int side, int unit, uint32_t parity, bool add = true)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, barriers.keys_full), side * UNITS + unit), parity);
    if (!add) hold(s);
    wgmma_fence(); /* the wait is a branch: without this fence ptxas adds one of its own */
    multiply_keys<Element>(s, base, side, unit, add);
}
