/* SPDX-License-Identifier: MIT
 *
 * Few requests without a plan: the blocks of threads of a tile share the requests out by themselves, a piece each, and join
 * what they made (../../device/join_share.cuh). A request has as many pieces of c blocks of keys as it takes, where c is the
 * lesser of two that leave no piece over: what the longest request needs of an equal share of the workers, and what all need of
 * those that are left when every request has one that is not full.
 */
#pragma once

#include "../../device/join_share.cuh"
#include "results.cuh"

enum { MOST_REQUESTS = 32 /* a lane each */ };

/* By one warp: the piece of worker `worker`; false where none is left for it. */
DEVICE bool share_out(const struct dense_decode_sm90_params &p, int worker, Shared::OnePiece &one)
{
    const int lane = (int)(fresh_thread() % 32), b = p.call.b;
    const int length = lane < b ? request_length(p.call, lane) : 0;
    const int blocks = (int)((unsigned)(length + KEYS - 1) / KEYS);
    int most = blocks, all = blocks;
#pragma unroll 1
    for (int lanes = 16; lanes; lanes /= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, lanes));
        all += __shfl_xor_sync(~0u, all, lanes);
    }
    const int even = (most + p.of_request - 1) / p.of_request,
              packed = (all + p.workers - b - 1) / (p.workers - b),
              least = (most + MOST_PARTS_TOGETHER - 1) / MOST_PARTS_TOGETHER;
    const int c = max(max(min(even, packed), least), 1);
    const int parts = lane < b ? max((blocks + c - 1) / c, 1) : 0;
    int end = parts; /* of the parts of the requests so far */
#pragma unroll 1
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, end, lanes);
        if (lane >= lanes) end += before;
    }
    const uint32_t mine = __ballot_sync(~0u, worker < end && worker >= end - parts);
    if (mine >> lane & 1) {
        const int part = worker - (end - parts), first = part * c * KEYS;
        one.request = lane, one.part = part, one.parts = parts, one.slot = end - parts, one.length = length;
        one.begin = min(first, length), one.end = min(first + c * KEYS, length);
    }
    return mine != 0;
}

/* Some rows of a tile. */
struct RowShare {
    const struct split_params &split;
    const struct output_params &output;
    const struct dense_decode_params &call;
    int request, kv_head, first_row;
    int parts, begin, end;
    int64_t slot;

    DEVICE RowShare(const struct dense_decode_params &p, const Shared::OnePiece &one, int head, int row)
        : split(p.split), output(p.output), call(p), request(one.request), kv_head(head), first_row(row),
          parts(one.parts), slot(one.slot)
    {
        const int rows = min((int)ROWS, p.rows - first_row);
        begin = share_up_to(one.part * rows, parts), end = share_up_to((one.part + 1) * rows, parts);
    }

    DEVICE int64_t slot_row(int part, int row) const
    {
        return (slot + part) * (call.h_q * call.s_q) + (int64_t)kv_head * call.rows + first_row + row;
    }

    DEVICE RowPlace place(int row) const { return row_place(call, first_row + row, kv_head); }
};

/* ---- A part's rows in halves ------------------------------------------------------------------- */

/* What becomes of an element of O on its way to a slot: it is finished, and scaled by its row's power of two. */
struct Halved {
    float factor[2];

    template <int FIRST> DEVICE float4 values(const float (&o)[64], int e, int i, int) const
    {
        return scaled_values(o, e, factor[i]);
    }
};

/* 64 columns of the warp's 16 rows, from element FIRST of o on, and their powers of two. `scales`: where the lane's of either row go. */
template <int FIRST>
DEVICE void store_half_group(uint16_t *to, const int64_t (&offset)[4], const bool (&stores)[4],
                             const float (&o)[64], const float (&factor)[2], float *const (&scales)[2],
                             int group, uint32_t lines)
{
    Halved halved;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++)
            most = fmaxf(most, fmaxf(fabsf(o[FIRST + 4 * k + 2 * i]), fabsf(o[FIRST + 4 * k + 2 * i + 1])));
        const HalfScale scale(quad_max(most) * factor[i]);
        halved.factor[i] = factor[i] * scale.up;
        if (scales[i]) scales[i][group] = scale.down;
    }
    store_group<Fp16, FIRST>(to, offset, stores, o, halved, 0, lines);
}

/* The warp's rows and columns to the piece's slot; `column`: the side's first. */
DEVICE void store_halves(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                         const float (&right)[64], const float (&factor)[2], int tile_row, int column,
                         uint32_t lines)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
    int64_t offset[4];
    bool stores[4];
    float *scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        const bool own = row < p.rows && lane % 4 == 0;
        scales[i] = own ? half_row_scales(p.split, slot_row(p, task, row)) + column / HALF_ROW_TILE : NULL;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = first + lane / 8 + 4 * i;
        offset[i] = slot_row(p, task, row) * (2 * HALF_ROW_COLUMNS);
        stores[i] = row < p.rows;
    }
    uint16_t *to = (uint16_t *)p.split.slot_out + column;
    /* One text for both: it is code that is walked through once. */
#pragma unroll 1
    for (int group = 0; group < 4; group += 2, to += 2 * HALF_ROW_TILE) {
        float o[64];
#pragma unroll
        for (int e = 0; e < 64; e++) o[e] = group ? right[e] : left[e];
        store_half_group<0>(to, offset, stores, o, factor, scales, group, lines);
        store_half_group<32>(to + HALF_ROW_TILE, offset, stores, o, factor, scales, group + 1, lines);
    }
}

/* ---- Meetings ------------------------------------------------------------------------------------ */

DEVICE uint64_t *meeting_of(const struct dense_decode_sm90_params &p, const Place &place, int request)
{
    return p.meetings + ((int64_t)request * p.call.h_kv + place.kv_head) * p.tiles_of_head + place.tile;
}
