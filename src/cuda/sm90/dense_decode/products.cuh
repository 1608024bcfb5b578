/* SPDX-License-Identifier: MIT
 *
 * The matrix products of one side. SIDE's home is its half of the columns of V, units 2·SIDE and 2·SIDE + 1: it multiplies
 * these of every block. All addresses but the base are constants.
 */
#pragma once

#include "../../device/result.cuh"
#include "layout.cuh"

template <int SIDE> struct Home {
    static constexpr int FIRST = 2 * SIDE, SECOND = 2 * SIDE + 1;
};

/* A fragments of Q's rope columns, from memory to registers; rows past the end are zero. `row`: of the key head. */
__device__ __forceinline__ void load_q_rope(uint32_t (&q)[4][4], const struct dense_decode_params &p,
                                            const Task &task, int row)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const RowPlace place = row_place(p, row + 8 * i, task.kv_head);
        const uint16_t *from = p.q + task.piece.request * p.q_stride[0] + place.token * p.q_stride[1] +
                               place.head * p.q_stride[2] + D_V + 2 * (fresh_thread() % 4);
        const bool some = row + 8 * i < p.rows;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k][i] = some ? *(const uint32_t *)(from + 16 * k) : 0;
            q[k][i + 2] = some ? *(const uint32_t *)(from + 16 * k + 8) : 0;
        }
    }
}

/* S = Q·Kᵀ over the rope columns. */
template <typename Element, int SIDE>
__device__ __forceinline__ void score_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t base,
                                           uint32_t parity)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, rope_full), SIDE), parity);
    hold(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_64<Element>(s, q[k], wgmma_lines(SHARED_AT(base, rope) + SIDE * TILE_BYTES, k), k > 0);
}

/* S (+)= Q·Kᵀ over one unit, as soon as it has arrived. */
template <typename Element, int SIDE, int UNIT, bool ADD = true>
__device__ __forceinline__ void score_unit(float (&s)[32], uint32_t base, uint32_t parity)
{
    mbarrier_wait(barrier_at(SHARED_AT(base, keys_full), SIDE * UNITS + UNIT), parity);
    if (!ADD) hold(s);
    wgmma_fence(); /* the wait is a branch: without this ptxas adds one of its own */
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t tile = (uint32_t)(k / 4) * TILE_BYTES;
        wgmma_64<Element>(s, wgmma_lines(SHARED_AT(base, q) + UNIT * UNIT_BYTES + tile, k % 4),
                          wgmma_lines(unit_at(base, SIDE, UNIT) + tile, k % 4), ADD || k > 0);
    }
}

/* O (+)= P·V over one unit of a block of side OWNER: P in shared memory … */
template <typename Element, int OWNER>
__device__ __forceinline__ void multiply_unit(float (&o)[64], uint32_t base, int unit, int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, wgmma_lines(SHARED_AT(base, p) + OWNER * TILE_BYTES, k),
                                   wgmma_columns(unit_at(base, OWNER, unit), k), k > 0 || add);
    wgmma_commit();
}

/* … or in registers. */
template <typename Element, int OWNER>
__device__ __forceinline__ void multiply_unit(float (&o)[64], const uint32_t (&p)[4][4], uint32_t base,
                                              int unit, int add)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_128_columns<Element>(o, p[k], wgmma_columns(unit_at(base, OWNER, unit), k), k > 0 || add);
    wgmma_commit();
}

/* Gives a unit back to the producer; by every warp of SIDE, when its last product has been waited for. */
template <int OWNER> __device__ __forceinline__ void release_unit(uint32_t base, int unit, int lane)
{
    if (lane == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, keys_empty), OWNER * UNITS + unit));
}
