/* SPDX-License-Identifier: MIT
 *
 * The join of a tile's parts by the blocks of threads that made them: each stores its part, they meet, and each joins a share of the
 * rows. No second kernel begins, whose code and parameters would come from far; what the blocks of threads read was just
 * written, and lies in L2.
 *
 * Eight warps take items: half of the columns of a row, 8 a lane. All parts of a warp's items are under way together, by cp.async to
 * where keys and queries were. (With one part there are two turns.) Loops are not unrolled where it saves little: it is code that
 * is walked through once.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/element.cuh"
#include "../../device/half_rows.cuh"
#include "../../device/meeting.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "common.cuh"

enum {
    SHARE_WARPS = 8,
    SHARE_COPIES = 32 /* of a warp: parts times items, as many at most as there are lanes */
};
enum { SHARE_VALUES = 32 * 16, SHARE_BYTES = SHARE_COPIES * (SHARE_VALUES + 32 * 4) /* of a warp */ };
static_assert(SHARE_COPIES >= (int)MOST_PARTS_TOGETHER, "one item takes as many copies as there are parts");

/* The share of this block of threads: rows begin … end - 1 of the tile's heads. */
struct Share {
    int request, token, first_head; /* of the tile */
    int parts, begin, end;

    DEVICE Share(const struct sparse_decode_params &p, const PieceList &list, int heads_of_tile)
    {
        const Place place(p);
        request = list.request, token = place.token, first_head = place.tile * heads_of_tile;
        parts = list.last + 1;
        const int heads = min(heads_of_tile, p.h_q - first_head);
        begin = up_to(list.first * heads), end = up_to((list.first + 1) * heads);
    }

    /* n / parts; the numbers are small, so that a half is more than what rounding takes. */
    DEVICE int up_to(int n) const { return (int)(((float)n + 0.5f) * reciprocal_approx((float)parts)); }

    DEVICE int64_t slot_row(const struct sparse_decode_params &p, int part, int row) const
    {
        return ((int64_t)request * p.split.chunks + part) * (p.h_q * p.s_q) + token * p.h_q + first_head +
               row;
    }
};

enum { SHARE_TOGETHER = 4 /* parts that are added in a row, without a branch */ };

/* Lanes of an item's parts, as a shift: a power of two, SHARE_TOGETHER at least. */
DEVICE int share_shift(int parts)
{
    return max(2, 32 - __clz(parts - 1));
}

/* By one warp of SHARE_WARPS: its items from `first` on, as many as its lanes have room for the parts of; `memory`: its SHARE_BYTES. */
template <typename Element>
DEVICE void join_items(const struct sparse_decode_params &p, const Share &share, uint32_t memory, int first,
                       int items)
{
    const int lane = (int)(fresh_thread() % 32), parts = share.parts, shift = share_shift(parts);

    /* A lane has the lse of a part of an item. */
    const int own_item = first + SHARE_WARPS * (lane >> shift), own_part = lane & ((1 << shift) - 1);
    const int own_row = share.begin + own_item / 2;
    const bool some = own_item < items && own_part < parts;
    const float mine = some ? __ldcg(p.split.slot_lse + share.slot_row(p, own_part, own_row)) : -INFINITY;

    uint32_t to = memory + (uint32_t)lane * 16,
             scale_to = memory + SHARE_COPIES * SHARE_VALUES + (uint32_t)lane * 4;
    const int64_t step = (int64_t)(p.h_q * p.s_q) * HALF_ROW_COLUMNS; /* floats from a part to the next */
#pragma unroll 1
    for (int item = first; item < items; item += SHARE_WARPS) {
        const float *row = p.split.slot_out + share.slot_row(p, 0, share.begin + item / 2) * HALF_ROW_COLUMNS;
        const int half = item % 2;
        const float *values = row + half * (HALF_ROW_COLUMNS / 4) + 4 * lane,
                    *scale = row + HALF_ROW_COLUMNS / 2 + half * 4 + lane / 8;
#pragma unroll 2
        for (int part = 0; part < parts; part++) {
            cp_async_16(to, values, true), cp_async_4(scale_to, scale);
            values += step, scale += step, to += SHARE_VALUES, scale_to += 32 * 4;
        }
    }
    cp_async_commit();

    /* The weights. A part that saw no key (lse -inf) does not count: -1. */
    float most = mine;
#pragma unroll 1
    for (int lanes = 1 << shift >> 1; lanes; lanes /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    if (most == -INFINITY) most = 0.0f;
    float sum = part_exp(mine - most);
#pragma unroll 1
    for (int lanes = 1 << shift >> 1; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const float lse = part_lse(most, sum);
    float weight = isinf(mine) ? -1.0f : part_exp(mine - lse);
    if (some) {
        const int head = share.first_head + own_row;
        if (weight >= 0.0f) weight *= result_sink_factor(p.output.rules, head, lse);
        if (own_part == 0 && own_item % 2 == 0) store_lse(p.output, share.request, {share.token, head}, lse);
    }

    cp_async_wait<0>();
    to = memory + (uint32_t)lane * 16, scale_to = memory + SHARE_COPIES * SHARE_VALUES + (uint32_t)lane * 4;
#pragma unroll 1
    for (int item = first, of_item = 0; item < items; item += SHARE_WARPS, of_item += 1 << shift) {
        float o[8] = {};
#pragma unroll 1
        for (int part = 0; part < parts; part += SHARE_TOGETHER)
#pragma unroll
            for (int k = 0; k < SHARE_TOGETHER; k++) { /* past the last weights are -1 */
                const float of_part = __shfl_sync(~0u, weight, of_item + part + k);
                const uint4 x = load_shared_16(to + (uint32_t)((part + k) * SHARE_VALUES));
                const float by =
                    of_part * __uint_as_float(load_shared_4(scale_to + (uint32_t)((part + k) * 128)));
                const uint32_t words[] = {x.x, x.y, x.z, x.w};
                if (of_part < 0.0f) continue;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    o[i] = fmaf(by, Fp16::to_float((uint16_t)(words[i / 2] >> 16 * (i % 2))), o[i]);
            }
        to += (uint32_t)parts * SHARE_VALUES, scale_to += (uint32_t)parts * 128;
        const RowPlace place = {share.token, share.first_head + share.begin + item / 2};
        const int column = item % 2 * (HALF_ROW_COLUMNS / 2) + 8 * lane;
        *(uint4 *)(p.output.out + out_offset(p.output, share.request, place) + column) =
            make_uint4(Element::pack(o[0], o[1]), Element::pack(o[2], o[3]), Element::pack(o[4], o[5]),
                       Element::pack(o[6], o[7]));
    }
}

/* What the kernel is told beside the call. */
DEVICE const struct sparse_decode_sm90_params &with_meetings(const struct sparse_decode_params &p)
{
    return (const struct sparse_decode_sm90_params &)p;
}

DEVICE uint64_t *meeting_of(const struct sparse_decode_params &p, const Place &place, int request)
{
    return with_meetings(p).meetings + (int64_t)request * p.tiles + place.token * p.tiles_of_token +
           place.tile;
}

/* By one thread, as soon as the workspace is the call's. */
DEVICE void begin_meeting(const struct sparse_decode_params &p)
{
    const Place place(p);
    meeting_begin(meeting_of(p, place, fast_divide(place.worker, p.chunks_divisor)), with_meetings(p).ticket);
}

/* By the SHARE_WARPS warps, from thread `first_thread` on, that have stored the part; barrier `id` is theirs. */
template <typename Element>
DEVICE void join_together(const struct sparse_decode_params &p, const PieceList &list, int heads_of_tile,
                          uint32_t memory, unsigned first_thread, int id)
{
    const Share share(p, list, heads_of_tile);
    barrier_sync(id, 32 * SHARE_WARPS);
    if (fresh_thread() == first_thread) meet(meeting_of(p, Place(p), share.request), (uint32_t)share.parts);
    barrier_sync(id, 32 * SHARE_WARPS);
    const int warp = (int)(fresh_thread() - first_thread) / 32, items = 2 * (share.end - share.begin);
    const int of_turn = SHARE_WARPS << (5 - share_shift(share.parts));
#pragma unroll 1
    for (int first = warp; first < items; first += of_turn)
        join_items<Element>(p, share, memory + (uint32_t)warp * SHARE_BYTES, first,
                            min(items, first + of_turn));
}
