/* SPDX-License-Identifier: MIT
 *
 * The row kernels before and after the products; a CTA of 256 threads takes a tile of rows of a head:
 *
 *   prepare   lse in base 2 (inf where a row sees no key or does not exist, so that P is 0),
 *             delta = Σ dO out, both as row_numbers says; clears the counters of dQ, and those of dK and dV; the
 *             tile's part of the gradient of the sink
 *   finish    dq = scale · sums, in the layout of dq; begins on SMs that have no more products to compute,
 *             with tiles to which all key blocks have added
 */
#pragma once

#include "dq.cuh"
#include "epilogue.cuh"
#include "pair_layout.cuh"

#include "../../device/backward_requests.cuh"
#include "../../device/backward_rows.cuh"

namespace mha_backward {

enum { ROW_KERNEL_THREADS = MHA_BACKWARD_ROW_THREADS };

DEVICE uint4 load_global_16(const void *from)
{
    return *(const uint4 *)from;
}

/* Returns the number of key blocks visible to the tile of rows that begins at row `first`. */
template <typename Layout>
DEVICE int blocks_of_tile(const mha_backward_params &call, const Request &r, int first)
{
    const int keys = call.causal ? min(first + Layout::ROWS + r.keys - r.tokens, r.keys) : r.keys;
    return (max(keys, 0) + Layout::KEYS - 1) / Layout::KEYS;
}

/* Waits until `blocks` key blocks have added to the tile; the products may still run. */
template <typename Layout> DEVICE void await_sums(const mha_backward_sm90_params &p, int64_t tile, int blocks)
{
    if (!blocks) {
        wait_for_kernels_before();
    } else if (threadIdx.x < Layout::DQ_PRODUCERS) {
        const uint32_t *added = p.added + tile * Layout::DQ_PRODUCERS + threadIdx.x;
        while (load_acquire(added) != (uint32_t)blocks) __nanosleep(200);
    }
    __syncthreads();
}

template <typename Element, typename Layout> DEVICE void prepare_rows(const mha_backward_sm90_params &p)
{
    constexpr int LANES = Layout::D_V / 8, ROWS_AT_ONCE = ROW_KERNEL_THREADS / LANES, ROWS = Layout::ROWS;
    const mha_backward_params &call = p.call;
    const int head = (int)blockIdx.x / max(p.row_tiles, 1), row_tile = (int)blockIdx.x - head * p.row_tiles,
              thread = (int)threadIdx.x;
    let_next_kernel_start();
    if (row_tile == 0 && head == 0 && thread == 0) *p.taken = 0;
    for (int64_t i = blockIdx.x * (int64_t)ROW_KERNEL_THREADS + thread; i < p.head_counters;
         i += gridDim.x * (int64_t)ROW_KERNEL_THREADS)
        p.heads_added[i] = 0;
    const Request r = find_request<true, ROWS, Layout::KEYS>(call, row_tile);
    const int first = (row_tile - r.row_tile) * ROWS;
    const int64_t tile = (int64_t)head * p.row_tiles + row_tile, request = call.starts_q ? 0 : r.index;
    if (first >= r.tokens) {
        if (call.of_dsink && thread == 0 && p.row_tiles) call.of_dsink[tile] = 0.0f;
        return;
    }
    if (thread < Layout::DQ_PRODUCERS) p.added[tile * Layout::DQ_PRODUCERS + thread] = 0;
    float *sums = p.dq_sums + tile * Layout::DQ_TILE, *stats = p.rows + tile * 2 * ROWS;
    if (!blocks_of_tile<Layout>(call, r, first)) /* else the first key block stores its sums */
#pragma unroll
        for (int i = thread * 4; i < Layout::DQ_TILE; i += ROW_KERNEL_THREADS * 4)
            *(float4 *)(sums + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const uint16_t *out = call.out.data + request * call.out.request + head * call.out.head,
                   *dout = call.dout.data + request * call.dout.request + head * call.dout.head;
    const int column = thread % LANES * 8, first_seeing = first_seeing_row(call, r);
    float dsink = 0.0f;
#pragma unroll
    for (int row = thread / LANES; row < ROWS; row += ROWS_AT_ONCE) {
        const bool exists = first + row >= first_seeing && first + row < r.tokens;
        const int64_t token = r.token + first + row;
        float delta = 0.0f;
        RowNumbers numbers = {INFINITY, 0.0f, 0.0f};
        if (exists) {
            const uint4 a = load_global_16(out + token * call.out.token + column),
                        b = load_global_16(dout + token * call.dout.token + column);
            delta = dot_of_eight<Element>(a, b);
            numbers = row_numbers(call, request, token, head);
        }
        for (int lanes = LANES / 2; lanes; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
        if (column == 0) {
            const int at = stat_at(row);
            const bool empty = numbers.lse == INFINITY;
            stats[at] = numbers.lse - P_SCALE_LOG2;
            stats[ROWS + at] = empty ? 0.0f : (delta - numbers.off_delta) * DS_SCALE<Element>;
            if (!empty) dsink += numbers.dsink * delta;
        }
    }
    if (!call.of_dsink) return;
    dsink = cta_sum<ROW_KERNEL_THREADS>(dsink);
    if (thread == 0) call.of_dsink[tile] = dsink;
}

template <typename Element, typename Layout> DEVICE void finish_rows(const mha_backward_sm90_params &p)
{
    constexpr int ROWS = Layout::ROWS, VALUES = Layout::DQ_TILE / ROW_KERNEL_THREADS;
    const mha_backward_params &call = p.call;
    /* Tiles in the order in which the products complete them: requests, then heads. */
    const int tiles = max((p.row_tiles + call.b - 1) / call.b, 1), number = (int)blockIdx.x,
              request_tiles = number / (tiles * call.h_q) * tiles, within = number - request_tiles * call.h_q,
              width = max(min(tiles, p.row_tiles - request_tiles), 1), head = within / width,
              row_tile = request_tiles + within - head * width;
    const int group = (int)threadIdx.x / WARPGROUP_THREADS, thread = (int)threadIdx.x % WARPGROUP_THREADS;
    const Request r = find_request<true, ROWS, Layout::KEYS>(call, row_tile);
    const int first = (row_tile - r.row_tile) * ROWS;
    if (blockIdx.x == gridDim.x - 1)
        wait_for_kernels_before(); /* so that dk and dv, too, are complete when this kernel ends */
    if (first >= r.tokens) return;
    const int64_t tile = (int64_t)head * p.row_tiles + row_tile, request = call.starts_q ? 0 : r.index;
    await_sums<Layout>(p, tile, blocks_of_tile<Layout>(call, r, first));
    const float *from = p.dq_sums + tile * Layout::DQ_TILE + group * (Layout::DQ_TILE / 2) + thread * 4;
    float dq[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) {
        const float4 four = __ldcs((const float4 *)(from + i * WARPGROUP_THREADS));
        dq[i] = four.x, dq[i + 1] = four.y, dq[i + 2] = four.z, dq[i + 3] = four.w;
    }
    store_rows<Element>(call.dq.data + request * call.dq.request + head * call.dq.head +
                            (int64_t)(r.token + first) * call.dq.token + group * (Layout::D_QK / 2),
                        call.dq.token, r.tokens - first, call.scale * DS_UNSCALE<Element>, dq,
                        [](float(&)[16], int) {});
}

} // namespace mha_backward

#define MHA_BACKWARD_ROW_KERNELS(PREPARE, FINISH, ELEMENT, D_QK, D_V)                                        \
    DEFINE_KERNEL(PREPARE, mha_backward_sm90_params, (mha_backward::ROW_KERNEL_THREADS, 6),                  \
                  mha_backward::prepare_rows<ELEMENT, mha_backward::BackwardLayout<D_QK, D_V>>(p))           \
    DEFINE_KERNEL(FINISH, mha_backward_sm90_params, (mha_backward::ROW_KERNEL_THREADS, 4),                   \
                  mha_backward::finish_rows<ELEMENT, mha_backward::BackwardLayout<D_QK, D_V>>(p))
