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

/* n / d, rounded up; n and d are below 2^21, so that a half is more than what rounding takes. */
DEVICE unsigned share_ceil(unsigned n, unsigned d)
{
    return (unsigned)(((float)(n + d - 1) + 0.5f) * reciprocal_approx((float)d));
}

/* Finds the piece of worker `worker`, by one warp; where none is left for it `one` stays as it was. */
DEVICE void share_out(const struct dense_decode_sm90_params &p, int worker, Shared::OnePiece &one)
{
    const int lane = (int)(fresh_thread() % 32), b = p.call.b;
    const int length = lane < b ? request_length(p.call, lane) : 0;
    const unsigned blocks = (unsigned)(length + KEYS - 1) / KEYS;
    const unsigned most = __reduce_max_sync(~0u, blocks), all = __reduce_add_sync(~0u, blocks);
    const unsigned even = share_ceil(most, p.of_request), packed = share_ceil(all, p.workers - b),
                   least = (most + MOST_PARTS_TOGETHER - 1) / MOST_PARTS_TOGETHER;
    const unsigned c = max(max(min(even, packed), least), 1u);
    const int parts = lane < b ? max((int)share_ceil(blocks, c), 1) : 0;
    int end = parts; /* of the parts of the requests so far */
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, end, lanes);
        if (lane >= lanes) end += before;
    }
    const uint32_t mine = __ballot_sync(~0u, worker < end && worker >= end - parts);
    if (mine >> lane & 1) {
        const int part = worker - (end - parts), first = part * (int)c * KEYS;
        one.request = lane, one.part = part, one.parts = parts, one.slot = end - parts, one.length = length;
        one.begin = min(first, length), one.end = min(first + (int)c * KEYS, length);
    }
}

/* Halves of some rows of a tile. */
struct RowShare {
    const struct split_params &split;
    const struct output_params &output;
    const struct dense_decode_params &call;
    int request, kv_head, first_row;
    int parts, takers, begin, end;
    int64_t slot;

    DEVICE RowShare(const struct dense_decode_params &p, const Shared::OnePiece &one, int head, int row)
        : split(p.split), output(p.output), call(p), request(one.request), kv_head(head), first_row(row),
          parts(one.parts), takers(one.parts), slot(one.slot)
    {
        const int items = 2 * min((int)ROWS, p.rows - first_row);
        begin = share_up_to(one.part * items, parts), end = share_up_to((one.part + 1) * items, parts);
    }

    DEVICE int64_t slot_row(int part, int row) const
    {
        return (slot + part) * (call.h_q * call.s_q) + (int64_t)kv_head * call.rows + first_row + row;
    }

    DEVICE RowPlace place(int row) const { return row_place(call, first_row + row, kv_head); }

    static constexpr bool PAIRS = true /* as store_halves has them */, LARGEST = false;
    static DEVICE int column(int half, int lane) { return half * (HALF_ROW_COLUMNS / 2) + 8 * lane; }
};

/* ---- A part's rows in halves ------------------------------------------------------------------- */

/* Stores half of the side's columns of the first or the second of the thread's two rows to a slot, and returns two powers of two. Chunk h
 * of 64 columns has the pairs that the lane has of every eight columns from 32 h on. */
DEVICE float2 store_halves(uint16_t *to, const float (&o)[64], bool second, float factor, bool stores)
{
    float down[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float x[16];
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 32 * c + 4 * (e / 2) + e % 2;
            x[e] = second ? o[at + 2] : o[at];
        }
        down[c] = store_half_tile(to + HALF_ROW_TILE * c, x, factor, stores);
    }
    return make_float2(down[0], down[1]);
}

/* Stores the warp's rows and columns to the piece's slot; `column`: the side's first. */
DEVICE void store_halves(const struct dense_decode_params &p, const Task &task, const float (&left)[64],
                         const float (&right)[64], const float (&factor)[2], int tile_row, int column)
{
    const int lane = (int)(fresh_thread() % 32), first = task.first_row + tile_row;
    /* One text for both: it is code that is walked through once. */
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int row = first + lane / 4 + 8 * i;
        const bool stores = row < p.rows;
        const float by = i ? factor[1] : factor[0];
        const int64_t at = slot_row(p, task, row);
        uint16_t *const to = half_row(p.split, at) + column + 8 * (lane % 4);
        const float2 low = store_halves(to, left, i == 1, by, stores),
                     high = store_halves(to + 2 * HALF_ROW_TILE, right, i == 1, by, stores);
        if (stores && lane % 4 == 0)
            *(float4 *)(half_row_scales(p.split, at) + column / HALF_ROW_TILE) =
                make_float4(low.x, low.y, high.x, high.y);
    }
}

/* ---- Meetings ------------------------------------------------------------------------------------ */

DEVICE uint64_t *meeting_of(const struct dense_decode_sm90_params &p, const Place &place, int request)
{
    return p.meetings + ((int64_t)request * p.call.h_kv + place.kv_head) * p.tiles_of_head + place.tile;
}
