/* SPDX-License-Identifier: MIT
 *
 * Scheduler: which block of keys a CTA takes, and the order of its tiles of rows.
 *
 * Blocks are numbered by sets of key heads whose rows and sums of dQ fit L2; within a set by block, then by
 * head. In order, causal blocks with the fewest rows come first.
 */
#pragma once

#include "../../device/backward_requests.cuh"
#include "../../device/shared.cuh"
#include "gradient.cuh"

namespace mha_backward {

/* Returns the key block of number `i`. Called by a whole warp. */
template <typename Tiles> DEVICE KeyBlock find_key_block(const mha_backward_sm80_params &p, int i)
{
    const int blocks_of_set = p.key_blocks * p.heads_of_set, set = i / blocks_of_set,
              within = i - set * blocks_of_set,
              heads = min(p.heads_of_set, p.call.h_kv - set * p.heads_of_set);
    int number = within / heads;
    KeyBlock b;
    b.head = set * p.heads_of_set + within - number * heads;
    if (p.in_order && p.call.causal) number = p.key_blocks - 1 - number;
    const Request r = find_request<false, MHA_BACKWARD_ROWS, Tiles::KEYS>(p.call, number);
    b.request = p.call.starts_q ? 0 : r.index;
    b.token = r.token, b.tokens = r.tokens, b.row_tile = r.row_tile;
    b.number = number - r.key_block;
    b.key = r.key + b.number * Tiles::KEYS, b.keys = r.keys - b.number * Tiles::KEYS;
    b.shift = p.call.causal ? r.keys - r.tokens : r.keys;
    b.end_tile = (r.tokens + Tiles::ROWS - 1) / Tiles::ROWS;
    b.first_tile = min(max(0, b.number * Tiles::KEYS - b.shift) / Tiles::ROWS, b.end_tile);
    const int tiles = b.end_tile - b.first_tile;
    b.start_tile = b.first_tile + (p.in_order || !tiles ? 0 : b.number % tiles);
    return b;
}

/* Returns the number of this CTA's key block. In order, a number is taken only after all smaller ones are
 * being processed. */
DEVICE int take_number(const mha_backward_sm80_params &p, uint32_t shared)
{
    if (!p.in_order) return (int)blockIdx.x;
    if (threadIdx.x == 0) store_shared_4(shared, atomicAdd(p.taken, 1));
    __syncthreads();
    const int number = (int)load_shared_4(shared);
    __syncthreads();
    return number;
}

template <typename Element, typename Tiles>
DEVICE typename Backward<Element, Tiles>::TileCoord Backward<Element, Tiles>::first_coord() const
{
    return {head() * p.call.group, start_tile()};
}

/* Returns the next tile: from start_tile to the last, then from first_tile to the one before start_tile,
 * then on the next head. */
template <typename Element, typename Tiles>
DEVICE typename Backward<Element, Tiles>::TileCoord
Backward<Element, Tiles>::coord_after(const TileCoord &coord) const
{
    TileCoord next = {coord.head, coord.tile + 1};
    if (next.tile == end_tile()) next.tile = first_tile();
    if (next.tile == start_tile()) next.head++;
    return next;
}

template <typename Element, typename Tiles>
DEVICE int64_t Backward<Element, Tiles>::tile_index(const TileCoord &coord) const
{
    return ((int64_t)coord.head * p.row_tiles + row_tile()) * Tiles::OF_ROW_TILE + coord.tile;
}

} // namespace mha_backward
