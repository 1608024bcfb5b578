/* SPDX-License-Identifier: MIT
 *
 * The work of a CTA of Hopper's dense decodes: its tile of rows and its list of splits. Every role computes
 * it for itself.
 *
 * Few requests need no plan: the CTAs of a tile share the requests out among themselves, one split each,
 * and join their results (../../device/join_in_kernel.cuh). A request has as many splits of c blocks of
 * keys as it needs, where c is the smaller of two values that both leave no split without a CTA: the blocks
 * per worker if the longest request has an equal share of the workers, and the blocks of all requests per
 * worker if one worker is set aside for each request's incomplete split.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/join_in_kernel.cuh"
#include "../../device/task.cuh"

namespace latent {

/* The split of a CTA in kernels where each CTA has one split (share_out). */
struct OneSplit {
    int request, part, parts, begin, end, length;
    int64_t first_part; /* index of the request's first part among all */
};

/* Every role iterates over the same list by itself. The plan is read by plain loads from addresses that
 * all threads share: ptxas then knows that the loop bounds are uniform, and keeps the wgmma descriptors in
 * uniform registers. */
struct WorkTile {
    Task task;
    int blocks;

    DEVICE WorkTile(const struct dense_decode_sm90_params &p, const SplitList &list, int i, int kv_head,
                    int first_row, int rows)
    {
        int length;
        const Split split = list_split(p.call, list, i, &length);
        task = task_of(p.call, split, length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(split.end - split.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }

    DEVICE WorkTile(const struct dense_decode_sm90_params &p, const OneSplit &one, int kv_head, int first_row,
                    int rows)
    {
        Split split = {};
        split.request = one.request, split.begin = one.begin, split.end = one.end;
        split.part = one.first_part + one.part;
        task = task_of(p.call, split, one.length, kv_head, first_row, rows);
        blocks = (int)((unsigned)(split.end - split.begin + (int)PLAN_BLOCK - 1) / PLAN_BLOCK);
    }
};

/* The worker and the tile of rows of this CTA. */
struct CtaCoord {
    int worker, kv_head, tile;

    DEVICE explicit CtaCoord(const struct dense_decode_sm90_params &p)
    {
        const int block = fresh_block();
        worker = fast_divide(block, p.tiles_divisor);
        const int within = block - worker * p.call.h_kv * p.tiles_of_head;
        kv_head = fast_divide(within, p.tiles_of_head_divisor), tile = within - kv_head * p.tiles_of_head;
    }
};

/* ---- Few requests without a plan --------------------------------------------------------------- */

/* Returns n / d, rounded up. n and d are below 2^21, so that the added 1/2 exceeds the rounding error. */
DEVICE unsigned share_ceil(unsigned n, unsigned d)
{
    return (unsigned)(((float)(n + d - 1) + 0.5f) * reciprocal_approx((float)d));
}

/* Finds the split of worker `worker`; called by one warp. Leaves `one` unchanged if there is no split for
 * it. */
DEVICE void share_out(const struct dense_decode_sm90_params &p, int worker, OneSplit &one)
{
    const int lane = (int)(fresh_thread() % 32), b = p.call.b;
    const int length = lane < b ? request_length(p.call, lane) : 0;
    const unsigned blocks = (unsigned)(length + PLAN_BLOCK - 1) / PLAN_BLOCK;
    const unsigned most = __reduce_max_sync(~0u, blocks), all = __reduce_add_sync(~0u, blocks);
    const unsigned even = share_ceil(most, p.of_request), packed = share_ceil(all, p.workers - b),
                   least = (most + MOST_PARTS_JOINED_IN_KERNEL - 1) / MOST_PARTS_JOINED_IN_KERNEL;
    const unsigned c = max(max(min(even, packed), least), 1u);
    const int parts = lane < b ? max((int)share_ceil(blocks, c), 1) : 0;
    int end = parts; /* parts of the requests up to this lane's */
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, end, lanes);
        if (lane >= lanes) end += before;
    }
    const uint32_t mine = __ballot_sync(~0u, worker < end && worker >= end - parts);
    if (mine >> lane & 1) {
        const int part = worker - (end - parts), first = part * (int)c * (int)PLAN_BLOCK;
        one.request = lane, one.part = part, one.parts = parts, one.first_part = end - parts,
        one.length = length;
        one.begin = min(first, length), one.end = min(first + (int)c * (int)PLAN_BLOCK, length);
    }
}

/* What a CTA joins of a request: halves of some rows of a tile. PAIRS: parts are stored in the order of
 * store_half_tile; else their columns are in order. */
template <bool PAIRS_> struct JoinRange {
    const struct split_params &split;
    const struct output_params &output;
    const struct dense_decode_params &call;
    int request, kv_head, first_row;
    int parts, joiners, begin, end;
    int64_t first_part;

    DEVICE JoinRange(const struct dense_decode_params &p, const OneSplit &one, int head, int row, int rows)
        : split(p.split), output(p.output), call(p), request(one.request), kv_head(head), first_row(row),
          parts(one.parts), joiners(one.parts), first_part(one.first_part)
    {
        const int items = 2 * min(rows, p.rows - first_row);
        begin = join_range_up_to(one.part * items, parts),
        end = join_range_up_to((one.part + 1) * items, parts);
    }

    DEVICE int64_t part_row(int part, int row) const
    {
        return (first_part + part) * (call.h_q * call.s_q) + (int64_t)kv_head * call.rows + first_row + row;
    }

    DEVICE RowCoord coord(int row) const { return row_coord(call, first_row + row, kv_head); }

    static constexpr bool PAIRS = PAIRS_, LARGEST = false;
    static DEVICE int column(int half, int lane) { return half * (HALF_ROW_COLUMNS / 2) + 8 * lane; }
};

/* Returns the barrier of the CTAs with parts of a request. */
DEVICE uint64_t *cta_group_barrier(const struct dense_decode_sm90_params &p, const CtaCoord &cta, int request)
{
    return p.cta_group_barriers + ((int64_t)request * p.call.h_kv + cta.kv_head) * p.tiles_of_head + cta.tile;
}

} // namespace latent
