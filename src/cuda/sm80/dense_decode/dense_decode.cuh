/* SPDX-License-Identifier: MIT
 *
 * Dense decode for latent/mainloop.cuh: rows are those of a key head, over tokens; keys come from a block
 * table, in the element type of the queries; masks are causal.
 */
#pragma once

#include "../../device/by_rows.cuh"
#include "../../device/task.cuh"
#include "../latent/mainloop.cuh"
#include "producer.cuh"
#include "scheduler.cuh"

namespace dense_decode {

/* The rows of a tile. `Key` reads single keys (by_rows.cuh). */
template <typename Element, typename Key> struct DenseCall {
    static constexpr bool CAUSAL = true, WANTS_MAXIMA = false;
    using Task = ::Task;
    using Cursor = TaskCursor;

    const struct dense_decode_params &p;
    const Task &task; /* in shared memory */

    /* ---- The call, and the split ---- */

    DEVICE int d_qk() const { return p.d_qk; }
    DEVICE int stages() const { return p.stages; }
    DEVICE bool aligned() const { return p.vectors_aligned; }
    DEVICE float scale_log2() const { return p.scale_log2 * Key::scale_of_cache(p); }
    DEVICE const struct output_params &output() const { return p.output; }
    DEVICE int begin() const { return task.split.begin; }
    DEVICE int end() const { return task.end; }

    /* ---- Which keys are visible to rows ---- */

    DEVICE bool causal() const { return p.causal; }
    DEVICE int visible_to_all() const { return task.all_see; }
    DEVICE bool masks(int first_key, int keys) const { return task.all_see - first_key < keys; }
    DEVICE int visible_end(int row) const { return min(task.end, ::visible_end(p, task, row)); }

    DEVICE void attend_by_rows(int rows, int warp, int warps) const
    {
        ::attend_by_rows<Element, Key>(p, task, rows, warp, warps);
    }

    /* ---- Rows of the tile ---- */

    DEVICE bool has_row(int row) const { return task.first_row + row < p.rows; }

    DEVICE RowCoord coord(int row) const { return row_coord(p, task.first_row + row, task.kv_head); }

    DEVICE const uint16_t *q_row(int row) const
    {
        const RowCoord at = row_coord(p, has_row(row) ? task.first_row + row : 0, task.kv_head);
        return p.q + task.split.request * p.q_stride[0] + at.token * p.q_stride[1] + at.head * p.q_stride[2];
    }

    DEVICE bool direct() const { return task.split.part == DIRECT; }
    DEVICE int64_t out_at(int row) const { return out_offset(p.output, task.split.request, coord(row)); }

    DEVICE float *part_at(int row) const
    {
        return p.split.part_out + part_row(p, task, task.first_row + row) * D_V;
    }

    /* Stores the row's lse, or its part_end if the split is a part; returns the factor by which the scale of
     * the cache and the sink scale the row. */
    DEVICE float finish_row(int row, const part_end &end) const
    {
        if (!direct()) {
            p.split.part_ends[part_row(p, task, task.first_row + row)] = end;
            return Key::scale_of_cache(p);
        }
        const RowCoord at = coord(row);
        const float lse = score_lse(end.max, end.sum);
        store_lse(p.output, task.split.request, at, lse);
        return Key::scale_of_cache(p) * result_sink_factor(p.output.rules, at.head, lse);
    }
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct DenseDecode {
    using Sizes = latent::Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = DenseCall<Element, PlainKey<Element>>;
    using Kernel = latent::Attend<Sizes, Call, latent::RingKeys<Sizes, Call, TableSource<Sizes, Call>>>;
};

} // namespace dense_decode

#define DENSE_DECODE_KERNEL(NAME, KIND, ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                          \
    DEFINE_KERNEL(                                                                                           \
        NAME##_##ROWS##x##KEYS, dense_decode_params, (32 * (WARPS)),                                         \
        latent::kernel<typename dense_decode::KIND<ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS>::Kernel>(p))
