/* SPDX-License-Identifier: MIT
 *
 * Processes a task without tensor cores: a warp takes a row through exactly the keys that it sees. The
 * tensor-core products cannot do this: with causal masking, a key that holds an infinity or a NaN must not
 * reach the rows that do not see it, and 0 × NaN is NaN. Rare and slow.
 */
#pragma once

#include "divide.cuh"
#include "element.cuh"
#include "fragment.h"
#include "latent.cuh"
#include "result.cuh"
#include "task.cuh"
#include "warpgroup.cuh"

/* The location of key `key` of a task's request. */
struct KeySlot {
    int64_t page, slot;

    DEVICE KeySlot(const struct dense_decode_params &p, const Task &task, int key)
    {
        const int index = fast_divide(key, p.page_divisor);
        page = p.block_table ? p.block_table[task.split.request * p.block_table_stride + index]
                             : task.split.request;
        slot = p.block_table ? key - index * p.page_size : key;
    }
};

DEVICE const uint16_t *key_of(const struct dense_decode_params &p, const Task &task, int key)
{
    const KeySlot at(p, task, key);
    return p.kv + at.page * p.kv_stride[0] + at.slot * p.kv_stride[1] + task.kv_head * p.kv_stride[2];
}

/* A key whose values have the queries' type; ByteKey is the one for caches of bytes. */
template <typename Element> struct PlainKey {
    const uint16_t *values;

    DEVICE PlainKey(const struct dense_decode_params &p, const Task &task, int key)
        : values(key_of(p, task, key))
    {
    }
    DEVICE float value(const struct dense_decode_params &, int column) const
    {
        return Element::to_float(values[column]);
    }
    static DEVICE float scale_of_cache(const struct dense_decode_params &) { return 1.0f; }
};

/* Called by warp `warp` of `warps`. */
template <typename Element, typename Key = PlainKey<Element>>
__device__ void attend_by_rows(const struct dense_decode_params &p, const Task &task, int rows, int warp,
                               int warps)
{
    constexpr int LANE_COLUMNS = D_V / 32;
    const int lane = (int)threadIdx.x % 32;
    for (int row = task.first_row + warp; row < min(task.first_row + rows, p.rows); row += warps) {
        const RowCoord coord = row_coord(p, row, task.kv_head);
        const uint16_t *q = p.q + task.split.request * p.q_stride[0] + coord.token * p.q_stride[1] +
                            coord.head * p.q_stride[2];
        float most = -INFINITY, sum = 0.0f, o[LANE_COLUMNS] = {};
        for (int key = task.split.begin;
             key < min(task.split.end, visible_end(p, task, row - task.first_row)); key++) {
            const Key k(p, task, key);
            float s = 0.0f;
            for (int d = lane; d < p.d_qk; d += 32) s += Element::to_float(q[d]) * k.value(p, d);
            for (int lanes = 16; lanes; lanes /= 2) s += __shfl_xor_sync(~0u, s, lanes);
            s *= p.scale_log2;
            if (most == -INFINITY && s == -INFINITY) continue; /* the difference would be NaN */
            const float factor = s > most ? exp2f(most - s) : 1.0f;
            most = fmaxf(most, s);
            const float weight = exp2f(s - most);
            sum = sum * factor + weight;
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) o[i] = o[i] * factor + weight * k.value(p, lane + 32 * i);
        }
        const bool empty = most == -INFINITY && sum == 0.0f;
        const float lse = empty ? -INFINITY : (most + log2f(sum)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / sum;
        const int column = (int)(fresh_thread() % 32); /* the lane's first column */
        if (task.split.part == DIRECT) {
            factor *= result_sink_factor(p.output.rules, coord.head, lse);
            uint16_t *to = p.output.out + out_offset(p.output, task.split.request, coord) + column;
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) to[32 * i] = Element::from_float(o[i] * factor);
            if (lane == 0) store_lse(p.output, task.split.request, coord, lse);
        } else {
            float *to = p.split.part_out + part_row(p, task, row) * D_V + part_position(column);
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) to[32 * i] = o[i] * factor;
            if (lane == 0) p.split.part_ends[part_row(p, task, row)] = {most, sum};
        }
    }
}
