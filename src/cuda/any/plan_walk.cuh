/* SPDX-License-Identifier: MIT
 *
 * The sequential chain of partitions, by one warp, for any number of requests: in tiles of PLAN_THREADS
 * requests, whose starts all threads have summed into shared memory.
 */
#pragma once

#include "plan_common.cuh"

/* The partition that is being filled; the same in all lanes of the first warp. */
struct Walk {
    int32_t partition;
    int32_t request, block, split; /* where it begins */
    int64_t room_end;              /* Y, on the line */
    int32_t last_blocks;           /* of the last request before the current tile */
};

struct Tile {
    int64_t origin;           /* the beginning of the tile on the line */
    int64_t start[TILE + 1];  /* of its requests, relative to origin */
    int32_t boundaries[TILE]; /* between splits, of its requests */
    int64_t sums[2][WARPS];
    int32_t boundary_sums[WARPS];
};

/* The beginnings of partitions, one per lane (partition % 32), until their rows are written together. */
struct Begun {
    int32_t request, block, split;
};

/* Writes the rows of partitions first … walk.partition - 1, which ended in this tile. A partition ends where
 * the next one begins: within a request that it splits, or after the previous request. */
DEVICE void write_rows(const struct plan_params &p, int32_t first, int64_t first_request, Tile &tile,
                       const Walk &walk, const Begun &begun)
{
    const int lane = (int)threadIdx.x % 32;
    const int32_t partition = walk.partition - 1 - (walk.partition - 1 - lane) % 32; /* the lane's last one */
    int32_t next_request = __shfl_sync(~0u, begun.request, (lane + 1) % 32);
    int32_t next_block = __shfl_sync(~0u, begun.block, (lane + 1) % 32);
    if (partition == walk.partition - 1) next_request = walk.request, next_block = walk.block;
    if (partition < first || partition >= walk.partition) return;
    const bool cut = next_block > 0;
    const int local = (int)(next_request - first_request);
    const int32_t before =
        local ? (int32_t)(tile.start[local] - tile.start[local - 1]) - PLAN_OVERHEAD : walk.last_blocks;
    p.partitions[partition] = plan_row(begun.request, begun.block, begun.split,
                                       cut ? next_request : next_request - 1, cut ? next_block : before, cut);
    if (cut) atomicAdd(&tile.boundaries[local], 1);
}

/* Fills partitions as long as they end within the tile. Called by the first warp: its lanes hold the starts
 * of 32 neighbouring requests (the window) and search them for Y. Int is int32_t if the numbers of the tile
 * fit. */
template <typename Int>
DEVICE void walk_tile(const struct plan_params &p, int64_t payload, int64_t first_request, Tile &tile,
                      Walk &walk, Begun &begun)
{
    const int lane = (int)threadIdx.x % 32;
    const Int coarse = (Int)tile.start[32 * lane + 32]; /* the end of each 32 requests */
    const Int end = (Int)tile.start[TILE];
    Int room_end = (Int)(walk.room_end - tile.origin);
    int32_t first_unwritten = walk.partition;
    int window = 0;
    Int start = (Int)tile.start[lane], window_end = (Int)tile.start[32];
    while (room_end < end && walk.partition < p.num_partitions) {
        if (room_end >= window_end) {
            window = 32 * __popc(__ballot_sync(~0u, coarse <= room_end));
            start = (Int)tile.start[window + lane];
            window_end = (Int)tile.start[window + 32];
        }
        const int within = __popc(__ballot_sync(~0u, start <= room_end)) - 1;
        const Int its_start = __shfl_sync(~0u, start, within);
        const Int next = max(room_end - PLAN_OVERHEAD, its_start);
        if (lane == walk.partition % 32)
            begun.request = walk.request, begun.block = walk.block, begun.split = walk.split;
        const int32_t request = (int32_t)first_request + window + within;
        walk.block = (int32_t)(next - its_start);
        walk.split = !walk.block ? 0 : request == walk.request ? walk.split + 1 : 1;
        walk.request = request;
        walk.partition++;
        room_end = next + (Int)payload;
        if (walk.partition - first_unwritten == 32) { /* one per lane */
            write_rows(p, first_unwritten, first_request, tile, walk, begun);
            first_unwritten = walk.partition;
        }
    }
    write_rows(p, first_unwritten, first_request, tile, walk, begun);
    walk.room_end = tile.origin + room_end;
}

/* Makes the whole plan. */
DEVICE void plan_by_walk(const struct plan_params &p, Tile &tile)
{
    const int thread = (int)threadIdx.x;
    int64_t cost = 0, total;
    for (int64_t r = thread; r < p.b; r += PLAN_THREADS) cost += cost_of(p, r);
    block_inclusive_sum(cost, tile.sums[1], &total);
    const int64_t payload = (total + p.planned - 1) / p.planned + PLAN_OVERHEAD;
    Walk walk = {};
    Begun begun = {};
    walk.room_end = payload;
    int32_t boundaries_before = 0;
    if (thread == 0) write_header(p, payload), tile.origin = 0;
    for (int64_t first = 0; first < p.b; first += TILE) {
        int64_t tile_cost;
        int32_t tile_boundaries;
        tile.start[thread + 1] = block_inclusive_sum(cost_of(p, first + thread), tile.sums[0], &tile_cost);
        if (thread == 0) tile.start[0] = 0;
        tile.boundaries[thread] = 0;
        __syncthreads();
        if (thread < 32) {
            if (tile_cost < (1 << 29) && payload < (1 << 29))
                walk_tile<int32_t>(p, payload, first, tile, walk, begun);
            else
                walk_tile<int64_t>(p, payload, first, tile, walk, begun);
        }
        __syncthreads();
        const int32_t boundaries =
            block_inclusive_sum(tile.boundaries[thread], tile.boundary_sums, &tile_boundaries);
        if (first + thread < p.b)
            p.num_splits[first + thread + 1] = (int32_t)(first + thread + 1) + boundaries_before + boundaries;
        boundaries_before += tile_boundaries;
        const int64_t last = min(p.b - first, (int64_t)TILE) - 1;
        walk.last_blocks = (int32_t)(tile.start[last + 1] - tile.start[last]) - PLAN_OVERHEAD;
        __syncthreads();
        if (thread == 0) tile.origin += tile_cost;
    }

    /* The current partition takes the rest; those after it are idle. */
    if (thread >= 32) return;
    for (int32_t i = walk.partition + thread; i < p.num_partitions; i += 32) {
        const bool last = i == walk.partition;
        p.partitions[i] = plan_row(last ? walk.request : (int32_t)p.b, last ? walk.block : 0,
                                   last ? walk.split : 0, (int32_t)p.b - 1, walk.last_blocks, false);
    }
}
