/* SPDX-License-Identifier: MIT
 *
 * Producer: all threads copy blocks of keys and values, and the queries, by cp.async.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace mha_forward {

template <typename Layout> DEVICE uint32_t MhaForward<Layout>::chunk_of_thread()
{
    return swizzle_128(threadIdx.x / 8, threadIdx.x % 8);
}

/* Returns whether a row of D columns has this thread's chunk of a line. */
template <typename Layout> template <int D> DEVICE bool MhaForward<Layout>::has_chunk(int line)
{
    return line * LINE_ELEMENTS + (int)threadIdx.x % 8 * CHUNK_ELEMENTS < D;
}

/* Copies the block from first_key on, of D columns. Rows past the request's last key become 0, because 0
 * × NaN is NaN; chunks past the last column too. */
template <typename Layout>
template <int D>
DEVICE void MhaForward<Layout>::copy_block(uint32_t to, const uint16_t *from, int64_t stride,
                                           unsigned first_key) const
{
    int row = (int)threadIdx.x / 8;
    const int left = (int)((unsigned)tile.keys - first_key);
    to += chunk_of_thread();
    if constexpr (LINES_OF_PASS > 1) {
        const int line = row / KEYS_OF_PASS;
        row %= KEYS_OF_PASS;
        to += (uint32_t)line * (KEY_GROUP - KEYS_OF_PASS * LINE_BYTES), from += line * LINE_ELEMENTS;
    }
    from += (int64_t)(first_key + row) * stride + threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
    for (int first = 0; first < KEYS; first += KEYS_OF_PASS) {
#pragma unroll
        for (int g = 0; g < MHA_SM80_LINES(D); g += LINES_OF_PASS)
            cp_async_16(to + (uint32_t)(g * KEY_GROUP + first * LINE_BYTES), from + g * LINE_ELEMENTS,
                        row + first < left && has_chunk<D>(g));
        from += KEYS_OF_PASS * stride;
    }
}

template <typename Layout> DEVICE void MhaForward<Layout>::load_block(unsigned first_key, int stage) const
{
    copy_block<D_QK>(k_at + (uint32_t)stage * K_BYTES, tile.k, p.call.k_stride[1], first_key);
    copy_block<D_V>(v_at + (uint32_t)stage * V_BYTES, tile.v, p.call.v_stride[1], first_key);
    cp_async_commit();
}

template <typename Layout> DEVICE void MhaForward<Layout>::load_queries() const
{
    const mha_forward_params &call = p.call;
    const uint32_t to = q_at + chunk_of_thread();
#pragma unroll 1
    for (int first = 0; first < ROWS; first += ROWS_OF_PASS) {
        const int row = (int)threadIdx.x / 8 + first;
        const RowCoord coord = coord_of_row(p, tile, row);
        const uint16_t *from = call.q + tile.request * call.q_stride[0] + coord.token * call.q_stride[1] +
                               coord.head * call.q_stride[2] + threadIdx.x % 8 * CHUNK_ELEMENTS;
#pragma unroll
        for (int g = 0; g < QK_LINES; g++)
            cp_async_16(to + (uint32_t)(g * Q_GROUP + first * LINE_BYTES), from + g * LINE_ELEMENTS,
                        row < tile.rows && has_chunk<D_QK>(g));
    }
}

} // namespace mha_forward
