/* SPDX-License-Identifier: MIT
 *
 * The join of a tile's parts by the blocks of threads that made them: each stores its part, they meet, and each joins a share of the
 * rows. No second kernel begins, whose code and parameters would come from far; what the blocks of threads read was just
 * written, and lies in L2.
 *
 * Eight warps take items: half of the columns of a row, 8 a lane. All parts of a warp's items are under way together, by cp.async to
 * where keys and queries were. (With one part there are two turns.) Of more parts than a warp has lanes, four warps take a
 * quarter each. Loops are not unrolled where it saves little: it is code that is walked through once.
 *
 * A kernel says what a share is: struct Share with split, output, request, parts, begin and end (rows), slot_row(part, row) and
 * place(row).
 */
#pragma once

#include "async_copy.cuh"
#include "element.cuh"
#include "half_rows.cuh"
#include "meeting.cuh"
#include "result.cuh"
#include "shared.cuh"
#include "warpgroup.cuh"

enum {
    SHARE_WARPS = 8,
    SHARE_COPIES = 32, /* of a warp: parts times items, as many at most as there are lanes */
    SHARE_QUARTERS = 4 /* of more parts than that */
};
enum {
    SHARE_VALUES = 32 * 16,
    SHARE_COPY_BYTES = SHARE_VALUES + 32 * 4,
    SHARE_BYTES = SHARE_COPIES * SHARE_COPY_BYTES
};
static_assert(SHARE_COPIES * SHARE_QUARTERS >= (int)MOST_PARTS_TOGETHER, "");

enum { SHARE_TOGETHER = 4 /* parts that are added in a row, without a branch */ };

/* Lanes of an item's parts, as a shift: a power of two, SHARE_TOGETHER at least. */
DEVICE int share_shift(int parts)
{
    return max(2, 32 - __clz(parts - 1));
}

/* n / parts; the numbers are small, so that a half is more than what rounding takes. */
DEVICE int share_up_to(int n, int parts)
{
    return (int)(((float)n + 0.5f) * reciprocal_approx((float)parts));
}

/* Where a warp's copies go, of a lane. */
struct ShareCopies {
    uint32_t values, scales;

    DEVICE ShareCopies(uint32_t memory, int copies, int lane)
        : values(memory + (uint32_t)lane * 16),
          scales(memory + (uint32_t)copies * SHARE_VALUES + (uint32_t)lane * 4)
    {
    }
};

/* Asks for parts first, first + apart, … of half of a row. */
template <typename Share>
DEVICE void ask_for_parts(const Share &share, int row, int half, int first, int apart, ShareCopies &to,
                          int lane)
{
    const float *from = share.split.slot_out + share.slot_row(first, row) * HALF_ROW_COLUMNS;
    const int64_t step = (share.slot_row(first + apart, row) - share.slot_row(first, row)) * HALF_ROW_COLUMNS;
    const float *values = from + half * (HALF_ROW_COLUMNS / 4) + 4 * lane,
                *scale = from + HALF_ROW_COLUMNS / 2 + half * 4 + lane / 8;
#pragma unroll 2
    for (int part = first; part < share.parts; part += apart) {
        cp_async_16(to.values, values, true), cp_async_4(to.scales, scale);
        values += step, scale += step, to.values += SHARE_VALUES, to.scales += 32 * 4;
    }
}

/* Adds `count` copies, weighed by what lanes from `lanes` on hold; past the last that is -1. */
DEVICE void add_parts(float (&o)[8], const ShareCopies &from, int count, float weight, int lanes)
{
#pragma unroll 1
    for (int part = 0; part < count; part += SHARE_TOGETHER)
#pragma unroll
        for (int k = 0; k < SHARE_TOGETHER; k++) {
            const float of_part = __shfl_sync(~0u, weight, lanes + part + k);
            const uint4 x = load_shared_16(from.values + (uint32_t)((part + k) * SHARE_VALUES));
            const float by =
                of_part * __uint_as_float(load_shared_4(from.scales + (uint32_t)((part + k) * 128)));
            const uint32_t words[] = {x.x, x.y, x.z, x.w};
            if (of_part < 0.0f) continue;
#pragma unroll
            for (int i = 0; i < 8; i++)
                o[i] = fmaf(by, Fp16::to_float((uint16_t)(words[i / 2] >> 16 * (i % 2))), o[i]);
        }
}

template <typename Element, typename Share>
DEVICE void store_half(const Share &share, int row, int half, const float (&o)[8], int lane)
{
    const int column = half * (HALF_ROW_COLUMNS / 2) + 8 * lane;
    *(uint4 *)(share.output.out + out_offset(share.output, share.request, share.place(row)) + column) =
        make_uint4(Element::pack(o[0], o[1]), Element::pack(o[2], o[3]), Element::pack(o[4], o[5]),
                   Element::pack(o[6], o[7]));
}

/* The weight of a part; one that saw no key (lse -inf) does not count: -1. */
template <typename Share> DEVICE float share_weight(const Share &share, int row, float mine, float lse)
{
    if (isinf(mine)) return -1.0f;
    return part_exp(mine - lse) * result_sink_factor(share.output.rules, share.place(row).head, lse);
}

/* The sums of quarters, which warps w, w + 2, w + 4, w + 6 have, to the first of them; by all SHARE_WARPS, each of which has an item. They
 * pass where the copies were, 32 bytes a lane. */
DEVICE void add_quarters(float (&o)[8], uint32_t memory, int warp, int lane, int id)
{
    const uint32_t own = memory + (uint32_t)(warp * SHARE_BYTES + 32 * lane);
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; i++) bits[i] = __float_as_uint(o[i]);
    __syncwarp(); /* all lanes have read their copies */
    store_shared_16(own, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    store_shared_16(own + 16, make_uint4(bits[4], bits[5], bits[6], bits[7]));
    barrier_sync(id, 32 * SHARE_WARPS);
    if (warp < 2)
#pragma unroll 1
        for (uint32_t at = own + 2 * SHARE_BYTES; at < own + SHARE_WARPS * SHARE_BYTES;
             at += 2 * SHARE_BYTES) {
            const uint4 x = load_shared_16(at), y = load_shared_16(at + 16);
            const uint32_t other[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 8; i++) o[i] += __uint_as_float(other[i]);
        }
    barrier_sync(id, 32 * SHARE_WARPS);
}

/* By one warp of SHARE_WARPS: its items from `first` on, as many as its lanes have room for the parts of. An item is half of a row, of
 * QUARTERS a quarter of its parts: part q, q + 4, … `memory`: of all warps, with room for so many copies each; `id`: their barrier. */
template <typename Element, bool MANY, typename Share>
DEVICE void join_items(const Share &share, uint32_t memory, int copies, int warp, int first, int items,
                       int quarters, int id)
{
    const int lane = (int)(fresh_thread() % 32), parts = share.parts;
    const int shift = share_shift((parts + quarters - 1) / quarters);
    const uint32_t own = memory + (uint32_t)(warp * copies * SHARE_COPY_BYTES);

    /* A lane has the lse of a part of an item, of quarters those of four neighbours, of which one is the item's. */
    const int own_item = first + SHARE_WARPS * (lane >> shift), own_part = lane & ((1 << shift) - 1);
    const int own_row = share.begin + own_item / 2 / quarters, own_quarter = own_item / 2 % quarters;
    float lse[MANY ? SHARE_QUARTERS : 1], mine = -INFINITY, most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (MANY ? SHARE_QUARTERS : 1); i++) {
        const int part = own_part * quarters + i;
        const bool some = (own_item < items) & (part < parts) & (i < quarters);
        lse[i] = some ? __ldcg(share.split.slot_lse + share.slot_row(part, own_row)) : -INFINITY;
    }

    ShareCopies to(own, copies, lane);
#pragma unroll 1
    for (int item = first; item < items; item += SHARE_WARPS)
        ask_for_parts(share, share.begin + item / 2 / quarters, item % 2, item / 2 % quarters, quarters, to,
                      lane);
    cp_async_commit();

#pragma unroll
    for (int i = 0; i < (MANY ? SHARE_QUARTERS : 1); i++) {
        most = fmaxf(most, lse[i]);
        if (i == own_quarter) mine = lse[i];
    }
#pragma unroll 1
    for (int lanes = 1 << shift >> 1; lanes; lanes /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    if (most == -INFINITY) most = 0.0f;
#pragma unroll
    for (int i = 0; i < (MANY ? SHARE_QUARTERS : 1); i++) sum += part_exp(lse[i] - most);
#pragma unroll 1
    for (int lanes = 1 << shift >> 1; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const float whole = part_lse(most, sum);
    float weight = -1.0f;
    if (own_item < items) {
        weight = share_weight(share, own_row, mine, whole);
        if (own_part == 0 && own_item % 2 == 0 && own_quarter == 0)
            store_lse(share.output, share.request, share.place(own_row), whole);
    }

    cp_async_wait<0>();
    ShareCopies from(own, copies, lane);
#pragma unroll 1
    for (int item = first, lanes = 0; item < items; item += SHARE_WARPS, lanes += 1 << shift) {
        const int quarter = item / 2 % quarters, count = (parts - quarter + quarters - 1) / quarters;
        float o[8] = {};
        add_parts(o, from, count, weight, lanes);
        from.values += (uint32_t)count * SHARE_VALUES, from.scales += (uint32_t)count * 128;
        if (MANY && __any_sync(~0u, quarters > 1)) add_quarters(o, memory, warp, lane, id);
        if (quarter == 0) store_half<Element>(share, share.begin + item / 2 / quarters, item % 2, o, lane);
    }
}

/* By the SHARE_WARPS warps, from thread `first_thread` on, that have stored the part; barrier `id` is theirs. MANY: there may be more
 * parts than SHARE_COPIES. FEW_ROWS: a tile has 16 rows at most; then `memory` is 64 copies, else SHARE_WARPS · SHARE_BYTES. */
template <typename Element, bool MANY, bool FEW_ROWS, typename Share>
DEVICE void join_together(const Share &share, uint64_t *meeting, uint32_t memory, unsigned first_thread,
                          int id)
{
    static_assert(!MANY || !FEW_ROWS, "quarters take all of the memory");
    barrier_sync(id, 32 * SHARE_WARPS);
    if (fresh_thread() == first_thread) meet(meeting, (uint32_t)share.parts);
    barrier_sync(id, 32 * SHARE_WARPS);
    const int warp = (int)(fresh_thread() - first_thread) / 32;
    const int quarters = MANY && share.parts > SHARE_COPIES ? (int)SHARE_QUARTERS : 1;
    const int items = 2 * quarters * (share.end - share.begin);
    const int of_turn = SHARE_WARPS << (5 - share_shift((share.parts + quarters - 1) / quarters));
    /* The first warps have items; together they have no more copies than 2 (16 + parts). */
    const int copies = FEW_ROWS ? (items + SHARE_WARPS - 1) / SHARE_WARPS * share.parts : (int)SHARE_COPIES;
#pragma unroll 1
    for (int first = warp; first < items; first += of_turn)
        join_items<Element, MANY>(share, memory, copies, warp, first, min(items, first + of_turn), quarters,
                                  id);
}
