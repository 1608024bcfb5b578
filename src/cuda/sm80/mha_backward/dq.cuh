/* SPDX-License-Identifier: MIT
 *
 * dQ: a key block's dQ of a tile, and its addition to the sums in global memory.
 */
#pragma once

#include "scheduler.cuh"

namespace mha_backward {

/* Adds a warp's 16 × 8 sums to those in memory. */
DEVICE void add_sums(float *to, int lane, const float (&x)[4])
{
    if constexpr (ADDS_FOUR) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane),
                     "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
#endif
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 32 * e + lane), "f"(x[e])
                         : "memory");
    }
}

DEVICE uint32_t load_acquire(const uint32_t *from)
{
    uint32_t word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

DEVICE void store_release(uint32_t *to, uint32_t word)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

/* Returns the number of key blocks that add to the tile before this one. */
template <typename Element, typename Tiles>
DEVICE int Backward<Element, Tiles>::order_of(const TileCoord &coord) const
{
    if (!p.call.causal) return number();
    const int keys_of_request = number() * Tiles::KEYS + keys(),
              visible = min((coord.tile + 1) * Tiles::ROWS + shift(), keys_of_request);
    return (visible + Tiles::KEYS - 1) / Tiles::KEYS - 1 - number();
}

/* Computes this key block's dQ of the tile and adds it to the sums. */
template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::add_dq(const TileCoord &coord) const
{
    const Lane l;
    QuerySums dq;
    this->queries(dq);
    constexpr int TILES_OF_ROW = Tiles::D_QK / 8, TILES_OF_LINE = LINE_ELEMENTS / 8,
                  COUNTERS = MHA_BACKWARD_COUNTERS(Tiles::D_QK) / Tiles::OF_ROW_TILE; /* of a tile */
    const int64_t index = tile_index(coord);
    float *to = p.dq_sums + index * (Tiles::ROWS * Tiles::D_QK) +
                (l.row_group * Products::DQ_ROW_TILES * TILES_OF_ROW + l.key_group * 2 * Products::DQ_PAIRS) *
                    SUMS_OF_TILE;
    const uint32_t order = p.in_order ? (uint32_t)order_of(coord) : 0;
    if (p.in_order) {
        if (fresh_thread() == 0)
            while (load_acquire(p.added + index * COUNTERS) != order) __nanosleep(100);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < Products::DQ_ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < Products::DQ_TILES; i++) {
            const int line = i / (2 * Products::DQ_PAIRS);
            const bool half_line = line == Tiles::D_QK / LINE_ELEMENTS;
            add_sums((half_line ? to - l.key_group * Products::DQ_PAIRS * SUMS_OF_TILE : to) +
                         (m * TILES_OF_ROW + line * TILES_OF_LINE + i % (2 * Products::DQ_PAIRS)) *
                             SUMS_OF_TILE,
                     l.lane, dq[m][i]);
        }
    if (p.in_order) { /* after the barrier one release covers what all threads have added */
        __syncthreads();
        if (fresh_thread() == 0) store_release(p.added + index * COUNTERS, order + 1);
    }
}

} // namespace mha_backward
