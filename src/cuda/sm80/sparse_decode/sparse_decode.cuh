/* SPDX-License-Identifier: MIT
 *
 * Sparse decode and sparse prefill for latent/mainloop.cuh: the rows of a tile are heads of one token, since
 * every token has lists of its own; entries that name no key are masked for all rows. In a prefill each token
 * is a request of one token.
 */
#pragma once

#include "../latent/mainloop.cuh"
#include "producer.cuh"
#include "scheduler.cuh"

namespace sparse_decode {

template <typename Element> struct ListCall {
    static constexpr bool CAUSAL = false, WANTS_MAXIMA = true;
    using Task = ListTask;
    using Cursor = TaskCursor;

    const struct sparse_sm80_params &params;
    const Task &task; /* in shared memory */

    /* ---- The call, and the split ---- */

    DEVICE int d_qk() const { return params.call.d_qk; }
    DEVICE int stages() const { return params.stages; }
    DEVICE bool aligned() const { return params.vectors_aligned; }
    DEVICE float scale_log2() const { return params.call.scale_log2; }
    DEVICE const struct output_params &output() const { return params.call.output; }
    DEVICE int begin() const { return task.split.begin; }
    DEVICE int end() const { return task.split.end; }

    /* ---- Rows of the tile ---- */

    DEVICE bool has_row(int row) const { return task.first_head + row < params.call.h_q; }

    DEVICE RowCoord coord(int row) const { return {task.token, task.first_head + row}; }

    DEVICE const uint16_t *q_row(int row) const
    {
        const struct sparse_decode_params &p = params.call;
        return p.q + task.split.request * p.q_stride[0] + task.token * p.q_stride[1] +
               (task.first_head + row) * p.q_stride[2];
    }

    DEVICE bool direct() const { return task.split.part == DIRECT; }
    DEVICE int64_t out_at(int row) const { return out_offset(output(), task.split.request, coord(row)); }

    DEVICE int64_t part_row(int row) const
    {
        const struct sparse_decode_params &p = params.call;
        return task.split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)task.token * p.h_q + task.first_head +
               row;
    }

    DEVICE float *part_at(int row) const { return params.call.split.part_out + part_row(row) * D_V; }

    /* Stores the row's lse, or its part_end if the split is a part; returns the factor by which the sink
     * scales the row. */
    DEVICE float finish_row(int row, const part_end &end) const
    {
        if (!direct()) {
            params.call.split.part_ends[part_row(row)] = end;
            return 1.0f;
        }
        const float lse = score_lse(end.max, end.sum);
        store_lse(output(), task.split.request, coord(row), lse);
        return result_sink_factor(output().rules, task.first_head + row, lse);
    }

    /* Stores the largest score; `most` is in natural units, not base 2. */
    DEVICE void store_maximum(int row, float most) const
    {
        if (params.max_logits)
            params.max_logits[task.split.request * params.max_stride + task.first_head + row] =
                most * output().rules.lse_factor;
    }
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct SparseDecode {
    using Sizes = latent::Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = ListCall<Element>;
    using Kernel = latent::Attend<Sizes, Call, latent::RingKeys<Sizes, Call, ListSource<Sizes, Call>>>;
};

} // namespace sparse_decode

#define SPARSE_DECODE_KERNEL(NAME, ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                               \
    DEFINE_KERNEL(                                                                                           \
        NAME##_##ROWS##x##KEYS, sparse_sm80_params, (32 * (WARPS)),                                          \
        latent::kernel<                                                                                      \
            typename sparse_decode::SparseDecode<ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS>::Kernel>(p))
