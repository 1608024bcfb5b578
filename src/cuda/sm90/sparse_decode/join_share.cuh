/* SPDX-License-Identifier: MIT
 *
 * A share of the join in sparse decode (../../device/join_share.cuh): some heads of a tile.
 */
#pragma once

#include "../../device/join_share.cuh"
#include "common.cuh"

/* Stores the largest score of a head, in powers of two, to max_logits. For prefill, whose requests are
 * tokens. */
DEVICE void store_largest(const struct sparse_decode_params &p, int token, int head, float most)
{
    const struct sparse_prefill_fp8_params &call = (const struct sparse_prefill_fp8_params &)p;
    if (call.max_logits)
        call.max_logits[token * call.max_stride + head] = most * LN_2 * p.output.rules.lse_factor;
}

/* Items begin … end - 1 of the tile's heads. BY_SIXTEEN: a lane that stored 64 columns had 16 neighbouring
 * ones (store_half_tile), else eight and eight. */
template <bool BY_SIXTEEN, bool LARGEST_ = false> struct HeadShare {
    static constexpr bool LARGEST = LARGEST_;
    const struct sparse_decode_params &call;
    const struct split_params &split;
    const struct output_params &output;
    int request, token, first_head; /* of the tile */
    int parts, takers, begin, end;
    int heads, tokens; /* of a request */

    DEVICE HeadShare(const struct sparse_decode_params &p, const SplitList &list, int heads_of_tile)
        : call(p), split(p.split), output(p.output), heads(p.h_q), tokens(p.s_q)
    {
        const Place at(p);
        request = list.request, token = at.token, first_head = at.tile * heads_of_tile;
        parts = list.last + 1, takers = p.split.even_splits;
        const int items = 2 * min(heads_of_tile, p.h_q - first_head);
        begin = share_up_to(list.first * items, takers), end = share_up_to((list.first + 1) * items, takers);
    }

    DEVICE int64_t slot_row(int part, int row) const
    {
        return ((int64_t)request * split.even_splits + part) * (heads * tokens) + token * heads + first_head +
               row;
    }

    DEVICE RowPlace place(int row) const { return {token, first_head + row}; }

    DEVICE void store_largest(int row, float most) const
    {
        ::store_largest(call, request, first_head + row, most);
    }

    static constexpr bool PAIRS = false;
    static DEVICE int column(int half, int lane)
    {
        return half * (HALF_ROW_COLUMNS / 2) +
               (BY_SIXTEEN ? lane / 8 * HALF_ROW_TILE + lane % 4 * 16 + lane / 4 % 2 * 8 : 8 * lane);
    }
};

/* Returns the kernel's parameters, of which p is the call. */
DEVICE const struct sparse_decode_sm90_params &with_meetings(const struct sparse_decode_params &p)
{
    return (const struct sparse_decode_sm90_params &)p;
}

DEVICE uint64_t *meeting_of(const struct sparse_decode_params &p, const Place &place, int request)
{
    return with_meetings(p).meetings + (int64_t)request * p.tiles + place.token * p.tiles_of_token +
           place.tile;
}

/* Called by the thread that will join the meeting. */
DEVICE void begin_meeting(const struct sparse_decode_params &p, int request)
{
    meeting_begin(meeting_of(p, Place(p), request), with_meetings(p).ticket);
}
