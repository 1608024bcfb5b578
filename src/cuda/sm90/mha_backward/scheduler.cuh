/* SPDX-License-Identifier: MIT
 *
 * Scheduler: which work tile a CTA takes, and the order of its tiles of rows.
 *
 * A work tile has all query heads of its key head, or one: with a causal mask their sums of dQ and their rows would
 * not fit L2 together. Those of one key head add to the same dK and dV, one after the other (epilogue.cuh), so work
 * tiles are numbered first by the query head among those of its key head; then by request; within a request by sets of
 * key heads whose rows and sums of dQ fit L2; within a set the key blocks with the most rows come first, block by block
 * over its heads; in order without a causal mask group by group over its heads, the blocks of a group one after the other.
 * Per head the loop over the tiles of rows goes from tile `start` to the last and then from the first to the one before
 * `start`, so that CTAs that process the same head at the same time add to different tiles.
 *
 * In order with a causal mask the last key blocks, which have the fewest rows, come first: they reach a tile first, from
 * their own diagonals, and none waits. But then the longest work tiles are the last to begin, and other CTAs have none
 * meanwhile. So of a long request the last heads, as many as have blocks for all CTAs, are taken together, the first
 * blocks first; they go from the last tile of rows to their diagonals, each behind the blocks before it. They do not wait
 * either, because CTAs come to them one by one from the heads before. So at most half of the heads go that way, and
 * where query heads share a key head only the last of these.
 */
#pragma once

#include "layout.cuh"

#include "../../device/backward_requests.cuh"
#include "../../device/divide.cuh"

namespace mha_backward {

/* A request of so many key blocks is long: in a shorter one the last heads would wait for each other. */
enum { LONG_REQUEST = 32 };

/* Takes the next number of a work tile; the result is valid in the elected lane. */
DEVICE int next_number(const mha_backward_sm90_params &p)
{
    return elect_one() ? (int)atomicAdd(p.taken, 1u) : 0;
}

DEVICE uint32_t load_acquire(const uint32_t *from)
{
    uint32_t word;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

/* The keys of a work tile. */
struct KeyBlock {
    Request request;
    int head, key_head; /* the first query head; the key head */
    int block;          /* of the request's keys; >= blocks: the number has no keys */
    int blocks;         /* of the request */
    int member;         /* which one of its group it is */
    int group_end;      /* the number behind those of its group */
    bool rows_descend;  /* its loop goes from the last tile of rows to the first that sees it */
};

template <typename Layout> DEVICE int blocks_of_group(const mha_backward_sm90_params &p)
{
    return MHA_BACKWARD_SM90_HAS_GROUPS(Layout::D_QK) ? p.blocks_of_group : 1;
}

/* Returns the keys of work tile number `i`. */
template <typename Layout> DEVICE KeyBlock find_key_block(const mha_backward_sm90_params &p, int i)
{
    const int of_group = blocks_of_group<Layout>(p), given = i, part = fast_divide(i, p.blocks_divisor);
    i -= part * p.key_blocks * p.call.h_kv;
    const Request r =
        find_request<false, Layout::ROWS, Layout::KEYS>(p.call, fast_divide(i, p.key_heads_divisor));
    const int blocks = (r.keys + Layout::KEYS - 1) / Layout::KEYS;
    int last = 0; /* heads that are taken together, the first blocks first */
    if (p.in_order && p.call.causal && blocks >= LONG_REQUEST && part == p.call.group - 1)
        last = max(p.in_order / blocks, 1);
    if (2 * last > p.call.h_kv) last = 0;
    const int before_last = p.call.h_kv - last, within = i - r.key_block * p.call.h_kv;
    const bool is_last = within >= before_last * r.room;
    const int set = within / (r.room * p.heads_of_set),
              first_of_set = is_last ? before_last : set * p.heads_of_set,
              heads = is_last ? last : min(before_last - first_of_set, p.heads_of_set),
              in_set = within - first_of_set * r.room, groups_before = in_set / (heads * of_group),
              first_of_group = groups_before * of_group, in_groups = in_set - first_of_group * heads,
              members = of_group == 1 ? 1 : min(of_group, r.room - first_of_group),
              head_in_set = in_groups / members, member = in_groups - head_in_set * members,
              head = first_of_set + head_in_set;
    const int number = first_of_group + member,
              block = p.in_order && p.call.causal && !is_last ? r.room - 1 - number : number;
    return {r,
            head * p.call.group + part * p.work_heads,
            head,
            block,
            blocks,
            member,
            given - member + members,
            is_last};
}

/* Bits 1 to 8: which one of its group; 9 to 16: how many the group has; from 17 on: shift. Bit 0 is the phase of the
 * barriers of K and V.
 *
 * In order and without causal mask, the key blocks of a group begin at different tiles of rows, so that none waits for
 * another: each `1 << shift` tiles behind the one before it, and behind the last tile it goes on with the first one. So
 * those that began before a tile, or at it, reach it first, the last of them before the others. A group's blocks are
 * processed at the same time: a CTA takes no further number before all of its group are taken. */
DEVICE uint32_t pack_group(int member, int members, int shift)
{
    return (uint32_t)(member << 1 | members << 9 | shift << 17);
}

/* Returns how many key blocks of the group add to tile `tile` of the rows before this one. */
DEVICE int order_in_group(uint32_t packed, int tile)
{
    const int member = (int)(packed >> 1 & 255), members = (int)(packed >> 9 & 255),
              begun = min((tile >> (packed >> 17)) + 1, members);
    return begun - 1 - member + (member < begun ? 0 : members);
}

/* Returns a word of shared memory, uniform over the warp. */
DEVICE int load_uniform(uint32_t from)
{
    return (int)__shfl_sync(~0u, load_shared_4(from), 0);
}

/* The loop over the tiles of rows of a work tile. */
template <typename Layout> struct RowTiles {
    int left;     /* tiles left in the work tile, including this one */
    int index;    /* the tile's number over all heads */
    int in_run;   /* contiguous tiles left, including this one */
    int diagonal; /* row i of the tile sees key t of the work tile if t + diagonal <= i */
    int step;     /* 1 or -1: to the next tile's number */

    DEVICE void begin(const mha_backward_sm90_params &p, uint32_t work)
    {
        left = load_uniform(work + offsetof(WorkTile, q.tiles)) * p.work_heads;
        step = load_uniform(work + offsetof(WorkTile, order)) < 0 ? -1 : 1;
        if (left) begin_run(p, work);
    }

    DEVICE void begin_run(const mha_backward_sm90_params &p, uint32_t work)
    {
        const int first = load_uniform(work + offsetof(WorkTile, q.first_tile)),
                  tiles = load_uniform(work + offsetof(WorkTile, q.tiles)),
                  start = load_uniform(work + offsetof(WorkTile, start)),
                  head = load_uniform(work + offsetof(WorkTile, head));
        const int done = tiles * p.work_heads - left, h = done / tiles, i = done - h * tiles;
        const bool wraps = i >= tiles - start;
        const int nth = i + start - (wraps ? tiles : 0), tile = step < 0 ? tiles - 1 - nth : nth;
        index = (head + h) * p.row_tiles + first + tile;
        in_run = wraps ? tiles - i : tiles - start - i;
        diagonal = load_uniform(work + offsetof(WorkTile, q.diagonal)) - tile * Layout::ROWS;
    }

    /* Goes to the next tile; returns false if there is none. */
    DEVICE bool advance(const mha_backward_sm90_params &p, uint32_t work)
    {
        if (!--left) return false;
        index += step, diagonal -= step * Layout::ROWS;
        if (!--in_run) begin_run(p, work);
        return true;
    }
};

} // namespace mha_backward
