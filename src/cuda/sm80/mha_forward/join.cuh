/* SPDX-License-Identifier: MIT
 *
 * The join of portable dense MHA: adds the parts of rows whose keys were split. A warp takes a row
 * (device/row_join.cuh).
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/row_join.cuh"
#include "scheduler.cuh"

namespace mha_forward {

/* Rows of a request are numbered as those of its parts: by units of heads, then as in tiles. This is the unit of a
 * row. */
struct PartUnit {
    int request, token, head; /* of its first row */
};

DEVICE RowCoord coord_of_row(const mha_forward_sm80_params &p, const PartUnit &unit, int row)
{
    const int token_offset = token_of_row(p, row);
    return {unit.token + token_offset, unit.head + row - token_offset * p.heads_of_tile};
}

template <typename Element, int D_V>
DEVICE void join_row(const mha_forward_sm80_params &p, const MhaRequest &r)
{
    const int of_unit = r.tokens * p.heads_of_tile, unit = r.within / of_unit;
    RowJoin<Element, D_V, mha_forward_sm80_params>(p, r.part_row + r.within, r.tokens * p.call.h_q, r.splits)
        .finish(PartUnit{r.number, r.token, unit * p.heads_of_tile}, r.within - unit * of_unit,
                p.out_aligned);
}

/* Joins rows of requests that are not ragged, of which lengths in use may leave some without parts. */
template <typename Element, int D_V> DEVICE void join_rows_apart(const mha_forward_sm80_params &p)
{
    const mha_forward_params &call = p.call;
    const int of_request = call.s_q * call.h_q;
    for (int i = blockIdx.x * MHA_JOIN_WARPS + threadIdx.x / 32; i < call.b * of_request;
         i += gridDim.x * MHA_JOIN_WARPS) {
        const int request = i / of_request;
        const MhaRequest r = request_apart<Numbers::PART_ROWS>(p, request, i - request * of_request);
        if (r.splits > 1 && r.within < r.tokens * call.h_q) join_row<Element, D_V>(p, r);
    }
}

template <typename Element, int D_V> DEVICE void join(const mha_forward_sm80_params &p)
{
    wait_for_parts();
    if (!p.call.starts_q) return join_rows_apart<Element, D_V>(p);
    RaggedRequests<Numbers::PART_ROWS> requests(p);
    MhaRequest r;
    for (int i = blockIdx.x * MHA_JOIN_WARPS + threadIdx.x / 32; requests.find(i, r);
         i += gridDim.x * MHA_JOIN_WARPS)
        join_row<Element, D_V>(p, r);
}

} // namespace mha_forward

#define MHA_FORWARD_JOIN(NAME, ELEMENT, D_V)                                                                 \
    DEFINE_KERNEL(NAME, mha_forward_sm80_params, (32 * MHA_JOIN_WARPS, 4), mha_forward::join<ELEMENT, D_V>(p))
