/* SPDX-License-Identifier: MIT
 *
 * The row kernels before and after the products; a CTA of 256 threads takes a tile of rows of a head:
 *
 *   prepare   lse in base 2 (inf where a row sees no key or does not exist, so that P is 0),
 *             delta = Σ dO out, both as row_numbers says; clears the sums of dQ; the tile's part of the gradient
 *             of the sink
 *   finish    dq = scale · sums
 */
#pragma once

#include "../../device/backward_requests.cuh"
#include "../../device/backward_rows.cuh"
#include "../../device/result.cuh"
#include "layout.cuh"

namespace mha_backward {

enum { ROW_KERNEL_THREADS = MHA_BACKWARD_ROW_THREADS };

/* The tile of rows of a head that this CTA takes. */
struct RowTile {
    Request request;
    int head, first; /* first row of the tile within the request */
    int64_t index;

    DEVICE explicit RowTile(const mha_backward_sm80_params &p)
    {
        head = (int)blockIdx.x / max(p.row_tiles, 1);
        const int tile = (int)blockIdx.x - head * p.row_tiles;
        /* Key blocks are not numbered here: any block size will do. */
        request = find_request<true, MHA_BACKWARD_ROWS, MHA_BACKWARD_ROWS>(p.call, tile);
        first = (tile - request.row_tile) * MHA_BACKWARD_ROWS;
        index = (int64_t)head * p.row_tiles + tile;
    }
    DEVICE int rows() const { return request.tokens - first; }
    DEVICE uint16_t *rows_of(const mha_backward_params &call, const mha_vectors &of) const
    {
        return of.data + (call.starts_q ? 0 : request.index) * of.request +
               (int64_t)(request.token + first) * of.token + head * of.head;
    }
};

template <typename Element, int D_QK, int D_V> DEVICE void prepare_rows(const mha_backward_sm80_params &p)
{
    constexpr int LANES = D_V / 8, AT_A_TIME = ROW_KERNEL_THREADS / LANES, ROWS = MHA_BACKWARD_ROWS,
                  SUMS = ROWS * D_QK, COUNTERS = MHA_BACKWARD_COUNTERS(D_QK);
    const mha_backward_params &call = p.call;
    const int thread = (int)threadIdx.x;
    if (blockIdx.x == 0 && thread == 0) *p.taken = 0;
    const RowTile tile(p);
    if (tile.rows() <= 0) {
        if (call.of_dsink && thread == 0 && p.row_tiles) call.of_dsink[tile.index] = 0.0f;
        return;
    }
    if (thread == 0)
        for (int i = 0; i < COUNTERS; i++) p.added[tile.index * COUNTERS + i] = 0;
    float *sums = p.dq_sums + tile.index * SUMS, *stats = p.rows + tile.index * (MHA_BACKWARD_STATS * ROWS);
#pragma unroll
    for (int i = thread * 4; i < SUMS; i += ROW_KERNEL_THREADS * 4)
        *(float4 *)(sums + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const uint16_t *out = tile.rows_of(call, call.out), *dout = tile.rows_of(call, call.dout);
    const int column = thread % LANES * 8, first_seeing = first_seeing_row(call, tile.request);
    float dsink = 0.0f;
#pragma unroll
    for (int row = thread / LANES; row < ROWS; row += AT_A_TIME) {
        float delta = 0.0f;
        RowNumbers numbers = {INFINITY, 0.0f, 0.0f};
        if (row + tile.first >= first_seeing && row < tile.rows()) {
            const uint4 a = *(const uint4 *)(out + row * call.out.token + column),
                        b = *(const uint4 *)(dout + row * call.dout.token + column);
            delta = dot_of_eight<Element>(a, b);
            numbers = row_numbers(call, call.starts_q ? 0 : tile.request.index,
                                  (int64_t)tile.request.token + tile.first + row, tile.head);
        }
        for (int lanes = LANES / 2; lanes; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
        if (column == 0) {
            const bool empty = numbers.lse == INFINITY;
            stats[stat_at(row)] = numbers.lse - P_SCALE_LOG2;
            stats[ROWS + stat_at(row)] = empty ? 0.0f : (delta - numbers.off_delta) * DS_SCALE<Element>;
            if (!empty) dsink += numbers.dsink * delta;
        }
    }
    if (!call.of_dsink) return;
    dsink = cta_sum<ROW_KERNEL_THREADS>(dsink);
    if (thread == 0) call.of_dsink[tile.index] = dsink;
}

template <typename Element, int D_QK> DEVICE void finish_rows(const mha_backward_sm80_params &p)
{
    /* A thread has eight columns of two rows that are 8 apart: the values that a quad of lanes held. */
    constexpr int EIGHTS = D_QK / 8, UNITS = MHA_BACKWARD_ROWS / 2 * EIGHTS;
    const RowTile tile(p);
    if (tile.rows() <= 0) return;
    const float *sums = p.dq_sums + tile.index * (MHA_BACKWARD_ROWS * D_QK),
                factor = p.call.scale * DS_UNSCALE<Element>;
    uint16_t *dq = tile.rows_of(p.call, p.call.dq);
#pragma unroll
    for (int unit = (int)threadIdx.x; unit < UNITS; unit += ROW_KERNEL_THREADS) {
        const int eight = unit % EIGHTS, pair = unit / EIGHTS, row = pair / 8 * 16 + pair % 8;
        const float *from = sums + (pair / 8 * EIGHTS + eight) * SUMS_OF_TILE;
        float x[4][4]; /* in either order, four at a time */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 four = __ldcs(
                (const float4 *)(ADDS_FOUR ? from + (pair % 8 * 4 + i) * 4 : from + i * 32 + pair % 8 * 4));
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = ADDS_FOUR ? x[i][2 * half] : x[2 * half][i],
                            high = ADDS_FOUR ? x[i][2 * half + 1] : x[2 * half + 1][i];
                words[i] = Element::pack(low * factor, high * factor);
            }
            store_global_16(dq + (row + 8 * half) * p.call.dq.token + eight * 8,
                            make_uint4(words[0], words[1], words[2], words[3]), row + 8 * half < tile.rows());
        }
    }
}

} // namespace mha_backward

#define MHA_BACKWARD_ROW_KERNELS(PREFIX, ELEMENT, d_qk, d_v)                                                 \
    DEFINE_KERNEL(PREFIX##prepare_##d_qk, mha_backward_sm80_params, (mha_backward::ROW_KERNEL_THREADS, 5),   \
                  mha_backward::prepare_rows<ELEMENT, d_qk, d_v>(p))                                         \
    DEFINE_KERNEL(PREFIX##finish_##d_qk, mha_backward_sm80_params, (mha_backward::ROW_KERNEL_THREADS, 4),    \
                  mha_backward::finish_rows<ELEMENT, d_qk>(p))
