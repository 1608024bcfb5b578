/* SPDX-License-Identifier: MIT
 *
 * Sparse decode without tensor cores, for calls that the other kernels refuse; not fast. A warp takes a row
 * through its worker's splits (sparse_row.cuh).
 */
#include "../device/fragment.h"
#include "sparse_row.cuh"

template <bool BYTES, typename Element> struct Row {
    const struct sparse_decode_params &p;
    const int token, head;
    SparseRow<BYTES, Element> row;

    DEVICE Row(const struct sparse_decode_params &params, int number)
        : p(params), token(fast_divide(number, params.heads_divisor)), head(number - token * params.h_q),
          row(params.d_qk, params.scale_log2)
    {
    }

    DEVICE void store(const Split &split) const
    {
        const bool direct = split.part == DIRECT;
        const float lse = row.lse();
        const RowCoord coord = {token, head};
        const float factor = row.factor(direct ? result_sink_factor(p.output.rules, head, lse) : 1.0f);
        const int64_t part_row = split.part * ((int64_t)p.h_q * p.s_q) + (int64_t)token * p.h_q + head;
        const int64_t to = out_offset(p.output, split.request, coord);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) {
                const int column = column_of(g) + e;
                const float value = row.value(g, e, factor);
                if (direct)
                    p.output.out[to + column] = Element::from_float(value);
                else
                    p.split.part_out[part_row * D_V + part_position(column)] = value;
            }
        if (lane_of_warp()) return;
        if (direct)
            store_lse(p.output, split.request, coord, lse);
        else
            p.split.part_ends[part_row] = {row.most, row.total};
    }

    DEVICE void run(const Split &split)
    {
        const ListEnds ends = list_ends(p, split.request);
        row.begin(p.q + split.request * p.q_stride[0] + token * p.q_stride[1] + head * p.q_stride[2]);
        row.add_keys(split.begin, split.end, [&](int at) {
            return row_key(p.cache[at >= ends.extra_begin], list_entry(p, ends, split.request, token, at));
        });
        store(split);
    }
};

template <bool BYTES, typename Element> DEVICE void sparse_decode(const struct sparse_decode_params &p)
{
    const int worker = fast_divide((int)blockIdx.x, p.tiles_divisor);
    const int tile = (int)blockIdx.x - worker * p.tiles, row = tile * SPARSE_WARPS + (int)threadIdx.x / 32;
    if (row >= p.s_q * p.h_q) return; /* the whole warp */
    Row<BYTES, Element> mine(p, row);
    const SplitList list = split_list(p, worker);
    for (int i = list.first; i <= list.last; i += list.step) {
        int length;
        mine.run(list_split(p, list, i, &length));
    }
}

#define SPARSE_DECODE_KERNEL(NAME, BYTES, ELEMENT)                                                           \
    DEFINE_KERNEL(NAME, sparse_decode_params, (32 * SPARSE_WARPS), sparse_decode<BYTES, ELEMENT>(p))

SPARSE_DECODE_KERNEL(sparse_decode_bf16, false, Bf16)
SPARSE_DECODE_KERNEL(sparse_decode_fp16, false, Fp16)
SPARSE_DECODE_KERNEL(sparse_decode_bytes_bf16, true, Bf16)
SPARSE_DECODE_KERNEL(sparse_decode_bytes_fp16, true, Fp16)
