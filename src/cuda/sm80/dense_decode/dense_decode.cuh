/* SPDX-License-Identifier: MIT
 *
 * Dense decode for latent/attend.cuh: rows are those of a key head, over tokens; keys come from a block
 * table, in the element type of the queries; masks are causal.
 */
#pragma once

#include "../../device/by_rows.cuh"
#include "../../device/divide.cuh"
#include "../../device/task.cuh"
#include "../latent/attend.cuh"

/* The rows of a tile. `Key` reads single keys (by_rows.cuh). */
template <typename Element, typename Key> struct DenseCall {
    static constexpr bool CAUSAL = true, WANTS_MAXIMA = false;
    using Task = ::Task;

    const struct dense_decode_params &p;
    const Task &task; /* in shared memory */

    /* ---- Tasks ---- */

    /* A CTA's progress through its tasks: items (a worker and a tile of rows) in turn, and an item's
     * splits. */
    struct Turn {
        int64_t item;
        SplitList list;
        int next; /* index in the list */
    };

    static DEVICE void begin_turn(const struct dense_decode_params &, Turn &turn)
    {
        turn.item = (int64_t)blockIdx.x - gridDim.x, turn.next = 0, turn.list.last = -1;
    }

    /* Returns the next task in `task`, with tiles of `rows` rows; false after the last. Called by one
     * thread. */
    static DEVICE bool next_task(const struct dense_decode_params &p, int rows, Turn &turn, Task &task)
    {
        const int tiles_of_head = (p.rows + rows - 1) / rows, tiles = p.h_kv * tiles_of_head;
        const int64_t workers =
            p.split.partitions ? p.split.num_partitions : (int64_t)p.b * p.split.split_lanes;
        while (turn.next > turn.list.last) {
            turn.item += gridDim.x;
            if (turn.item >= workers * tiles) return false;
            turn.list = split_list(p, (unsigned)(turn.item / tiles));
            turn.next = turn.list.first;
        }
        const int tile = (int)(turn.item % tiles);
        int length;
        const Split split = list_split(p, turn.list, turn.next, &length);
        task = task_of(p, split, length, tile / tiles_of_head, tile % tiles_of_head * rows, rows);
        turn.next += turn.list.step;
        return true;
    }

    /* ---- The call, and the split ---- */

    DEVICE int d_qk() const { return p.d_qk; }
    DEVICE int stages() const { return p.stages; }
    DEVICE bool aligned() const { return p.vectors_aligned; }
    DEVICE float scale_log2() const { return p.scale_log2 * Key::scale_of_cache(p); }
    DEVICE const struct output_params &output() const { return p.output; }
    DEVICE int begin() const { return task.split.begin; }
    DEVICE int end() const { return task.end; }

    /* ---- Which keys rows do not see ---- */

    DEVICE bool causal() const { return p.causal; }
    DEVICE int all_see() const { return task.all_see; }
    DEVICE bool hides(int first_key, int keys) const { return task.all_see - first_key < keys; }
    DEVICE int visible_end(int row) const { return min(task.end, ::visible_end(p, task, row)); }

    DEVICE void attend_by_rows(int rows, int warp, int warps) const
    {
        ::attend_by_rows<Element, Key>(p, task, rows, warp, warps);
    }

    /* ---- Rows of the tile ---- */

    DEVICE bool has_row(int row) const { return task.first_row + row < p.rows; }

    DEVICE RowPlace place(int row) const { return row_place(p, task.first_row + row, task.kv_head); }

    DEVICE const uint16_t *q_row(int row) const
    {
        const RowPlace at = row_place(p, has_row(row) ? task.first_row + row : 0, task.kv_head);
        return p.q + task.split.request * p.q_stride[0] + at.token * p.q_stride[1] + at.head * p.q_stride[2];
    }

    DEVICE bool direct() const { return task.split.slot == DIRECT; }
    DEVICE int64_t out_at(int row) const { return out_offset(p.output, task.split.request, place(row)); }

    DEVICE float *slot_at(int row) const
    {
        return p.split.slot_out + slot_row(p, task, task.first_row + row) * D_V;
    }

    /* Stores the row's lse, or its part_end if it goes to a slot; returns the factor by which the scale of the
     * cache and the sink scale the row. */
    DEVICE float finish_row(int row, const part_end &end) const
    {
        if (!direct()) {
            p.split.slot_end[slot_row(p, task, task.first_row + row)] = end;
            return Key::scale_of_cache(p);
        }
        const RowPlace at = place(row);
        const float lse = score_lse(end.max, end.sum);
        store_lse(p.output, task.split.request, at, lse);
        return Key::scale_of_cache(p) * result_sink_factor(p.output.rules, at.head, lse);
    }
};

/* Replaces the NamedKeys of a list: a table names every key. */
struct NoFlags {
    uint32_t at;
};

/* Keys from a block table. */
template <typename Tile, typename Call> struct TableSource {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE;
    static constexpr bool LISTED = false;
    using Flags = NoFlags;

    const Call call;

    struct Places {
        int page[PASSES], slot[PASSES];
    };

    /* Returns the places of this thread's keys. It has no branches, so that it can be scheduled among the
     * products. Requires end > 0; keys past the end count as the last one. */
    DEVICE Places find(unsigned first_key) const
    {
        const struct dense_decode_params &p = call.p;
        Places places;
        const int32_t *table = p.block_table + call.task.split.request * p.block_table_stride;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int key =
                (int)min(first_key + threadIdx.x / 8 + pass * KEYS_AT_ONCE, (unsigned)call.task.end - 1);
            const int index = fast_divide(key, p.page_divisor);
            const int32_t entry = __ldg(p.block_table ? table + index : p.seqlens);
            places.page[pass] = p.block_table ? entry : call.task.split.request;
            places.slot[pass] = p.block_table ? key - index * p.page_size : key;
        }
        return places;
    }

    /* Returns the addresses of this thread's keys of a block, from `column` on; keys past the end are not
     * valid. */
    DEVICE void place(const uint16_t *(&from)[PASSES], bool (&valid)[PASSES], unsigned first_key, int column,
                      const Places &places) const
    {
        const struct dense_decode_params &p = call.p;
        const uint16_t *keys = p.kv + call.task.kv_head * p.kv_stride[2] + column;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            valid[pass] = first_key + threadIdx.x / 8 + pass * KEYS_AT_ONCE < (unsigned)call.task.end;
            from[pass] = keys + places.page[pass] * p.kv_stride[0] + places.slot[pass] * p.kv_stride[1];
        }
    }
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct DenseDecode {
    using Sizes = Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = DenseCall<Element, PlainKey<Element>>;
    using Kernel = Attend<Sizes, Call, RingKeys<Sizes, Call, TableSource<Sizes, Call>>>;
};

#define DENSE_DECODE_KERNEL(NAME, KIND, ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                          \
    DEFINE_KERNEL(NAME##_##ROWS##x##KEYS, dense_decode_params, (32 * (WARPS)),                               \
                  attend<typename KIND<ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS>::Kernel>(p))
