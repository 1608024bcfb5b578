/* SPDX-License-Identifier: MIT
 *
 * Producer: all threads copy K and V, and tiles of Q and dO, from global to shared memory by cp.async.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/shared.cuh"
#include "../../device/warpgroup.cuh"
#include "scheduler.cuh"

namespace mha_backward {

/* Copies ROWS rows of COLUMNS columns. The first `rows` rows exist; the others become zeros, and chunks past the
 * last column. */
template <int ROWS, int COLUMNS, int THREADS>
DEVICE void copy_rows(uint32_t to, const uint16_t *from, int64_t stride, int rows)
{
    constexpr int CHUNKS = LINE_BYTES / CHUNK_BYTES, AT_A_TIME = THREADS / CHUNKS;
    static_assert(ROWS % AT_A_TIME == 0 && AT_A_TIME % 8 == 0, "each thread copies the same chunk of rows");
    const int thread = (int)fresh_thread(), chunk = thread % CHUNKS, row = thread / CHUNKS;
    const uint32_t at = to + swizzle_128((uint32_t)row, (uint32_t)chunk);
    from += row * stride + chunk * CHUNK_ELEMENTS;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_A_TIME, from += AT_A_TIME * stride)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += LINE_ELEMENTS)
            cp_async_16(at + (uint32_t)(c / LINE_ELEMENTS * ROWS + i) * LINE_BYTES, from + c,
                        row + i < rows && c + chunk * CHUNK_ELEMENTS < COLUMNS);
}

template <typename Element, typename Tiles>
DEVICE const uint16_t *Backward<Element, Tiles>::rows_of(const mha_vectors &of, const TileCoord &coord) const
{
    return of.data + request() * of.request + (token() + coord.tile * Tiles::ROWS) * of.token +
           coord.head * of.head;
}

template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::copy_q(const TileCoord &coord) const
{
    copy_rows<Tiles::ROWS, Tiles::D_QK, Tiles::THREADS>(this->q(), rows_of(p.call.q, coord), p.call.q.token,
                                                        tokens() - coord.tile * Tiles::ROWS);
}

template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::copy_dout(const TileCoord &coord) const
{
    copy_rows<Tiles::ROWS, Tiles::D_V, Tiles::THREADS>(
        this->dout(), rows_of(p.call.dout, coord), p.call.dout.token, tokens() - coord.tile * Tiles::ROWS);
}

/* Returns where the four values of lse or delta are that the thread copies. Delta of all rows of a row tile
 * follows their lse. */
template <typename Element, typename Tiles>
DEVICE const float *Backward<Element, Tiles>::stats_of(const TileCoord &coord, int thread) const
{
    constexpr int OF_ROW_TILE = Tiles::OF_ROW_TILE, THREADS = Tiles::ROWS / 4;
    if (OF_ROW_TILE == 1) return p.rows + tile_index(coord) * (MHA_BACKWARD_STATS * Tiles::ROWS) + 4 * thread;
    const int64_t index = tile_index(coord);
    return p.rows + index / OF_ROW_TILE * (MHA_BACKWARD_STATS * MHA_BACKWARD_ROWS) +
           thread / THREADS * MHA_BACKWARD_ROWS + index % OF_ROW_TILE * Tiles::ROWS + thread % THREADS * 4;
}

template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::copy_stats(const TileCoord &coord) const
{
    const int thread = (int)fresh_thread();
    if (thread < (int)Tiles::STATS_BYTES / 16)
        cp_async_16(this->stats() + 16 * (uint32_t)thread, stats_of(coord, thread), true);
}

template <typename Element, typename Tiles>
DEVICE void Backward<Element, Tiles>::copy_rows_at(const TileCoord &coord) const
{
    copy_q(coord), copy_dout(coord), copy_stats(coord);
}

template <typename Element, typename Tiles>
DEVICE uint16_t *Backward<Element, Tiles>::keys_of(const mha_vectors &of) const
{
    return of.data + request() * of.request + key() * of.token + head() * of.head;
}

template <typename Element, typename Tiles> DEVICE void Backward<Element, Tiles>::copy_keys() const
{
    copy_rows<Tiles::KEYS, Tiles::D_QK, Tiles::THREADS>(smem, keys_of(p.call.k), p.call.k.token, keys());
    copy_rows<Tiles::KEYS, Tiles::D_V, Tiles::THREADS>(smem + Tiles::V_AT, keys_of(p.call.v), p.call.v.token,
                                                       keys());
}

/* Returns whether some row of the copied tile sees no key. Each thread tests the lse values that it has
 * copied itself. */
template <typename Element, typename Tiles> DEVICE bool Backward<Element, Tiles>::copied_empty_row() const
{
    const int thread = (int)fresh_thread();
    if (thread >= Tiles::ROWS / 4) return false;
    const uint4 lse = load_shared_16(this->stats() + 16 * (uint32_t)thread);
    const float most = fmaxf(fmaxf(__uint_as_float(lse.x), __uint_as_float(lse.y)),
                             fmaxf(__uint_as_float(lse.z), __uint_as_float(lse.w)));
    return most == INFINITY;
}

/* Clears Q and dO of rows that see no key: 0 × NaN would be NaN. */
template <typename Element, typename Tiles>
__device__ __noinline__ void Backward<Element, Tiles>::clear_empty_rows(uint32_t stats, uint32_t q,
                                                                        uint32_t dout)
{
    constexpr int LINES = (Tiles::QK_LINES + Tiles::V_LINES) * Tiles::ROWS, CHUNKS = LINE_BYTES / CHUNK_BYTES;
    for (int i = (int)threadIdx.x; i < LINES * CHUNKS; i += Tiles::THREADS) {
        const int line = i / CHUNKS, row = line % Tiles::ROWS, of_q = Tiles::QK_LINES * Tiles::ROWS;
        if (__uint_as_float(load_shared_4(stats + (uint32_t)stat_at(row) * 4)) != INFINITY) continue;
        store_zero_16(
            (line < of_q ? q + (uint32_t)line * LINE_BYTES : dout + (uint32_t)(line - of_q) * LINE_BYTES) +
            (uint32_t)(i % CHUNKS) * CHUNK_BYTES);
    }
    __syncthreads();
}

} // namespace mha_backward
