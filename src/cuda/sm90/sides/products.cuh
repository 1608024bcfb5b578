/* SPDX-License-Identifier: MIT
 *
 * The matrix products of one side. All addresses but the base are constants. After a kernel's layout.cuh.
 */
#pragma once

__device__ __forceinline__ uint32_t unit_at(uint32_t base, int side, int unit)
{
    return SHARED_AT(base, keys) + (uint32_t)(side * UNITS + unit) * UNIT_BYTES;
}

/* Of a row of Q, the thread's first or second (i), what the A fragments of its rope columns have; zeros where there is none. `from`: its
 * first rope column. */
__device__ __forceinline__ void load_rope_row(uint32_t (&q)[4][4], const uint16_t *from, bool some, int i)
{
    from += 2 * (fresh_thread() % 4);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        q[k][i] = some ? *(const uint32_t *)(from + 16 * k) : 0;
        q[k][i + 2] = some ? *(const uint32_t *)(from + 16 * k + 8) : 0;
    }
}

/* S = Q·Kᵀ over the rope columns, which of Q are in registers. */
template <typename Element, int SIDE>
__device__ __forceinline__ void multiply_rope(float (&s)[32], const uint32_t (&q)[4][4], uint32_t base)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_64<Element>(s, q[k], wgmma_lines(SHARED_AT(base, rope) + SIDE * TILE_BYTES, k), k > 0);
}

/* S (+)= Q·Kᵀ over one unit. */
template <typename Element, int SIDE, int UNIT, bool ADD>
__device__ __forceinline__ void multiply_keys(float (&s)[32], uint32_t base)
{
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
