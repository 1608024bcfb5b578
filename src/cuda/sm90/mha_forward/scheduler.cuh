/* SPDX-License-Identifier: MIT
 *
 * Tile scheduler. TileScheduler hands tile numbers to CTAs; RequestWindow finds the tile of a number.
 *
 * Tiles are numbered by request; within a request by sets of heads whose keys and values fit L2 together;
 * within a set the tiles with the most keys first. A warp looks at 32 requests at a time and only moves
 * forward, because a CTA takes tiles in increasing order.
 *
 *   numbers   | request 0                                      | request 1 …
 *             | heads 0 … 3                    | heads 4 … 7   |
 *             | last tokens h0 h1 h2 h3 | … first tokens h0 …  |
 */
#pragma once

#include "layout.cuh"

#include "../../device/divide.cuh"
#include "../../device/result.cuh"
#include "../../device/warp.cuh"

#include <limits.h>

namespace mha_forward {

/* Returns token and head of row `row` of the tile that begins at `token` and `head`. */
DEVICE RowCoord coord_of_row(const mha_forward_sm90_params &p, int token, int head, int row)
{
    const int token_offset = fast_divide(row, p.heads_divisor);
    return {token + token_offset, head + row - token_offset * p.heads_of_tile};
}

/* Finds tiles by number. A window in shared memory describes 32 requests; lane i of the warp writes request
 * first + i. */
struct RequestWindow {
    enum { FIRST_TILES_AT = 32 * 16, BYTES = FIRST_TILES_AT + 32 * 4 };

    const mha_forward_sm90_params &p;
    uint32_t
        window; /* per request: first token, tokens, first key, keys; then the number of its first tile */
    int first = 0, end = 0; /* the window's first request; the number of the first tile behind the window */

    DEVICE RequestWindow(const mha_forward_sm90_params &params, uint32_t address) : p(params), window(address)
    {
        const mha_forward_params &call = p.call;
        if (call.starts_q && threadIdx.x % 32 == 31)
            store_shared_16(window + 31 * 16, make_uint4(min(max(call.starts_q[0], 0), call.tokens_q), 0,
                                                         min(max(call.starts_k[0], 0), call.tokens_k), 0));
        fill();
    }

    /* Fills the window. A start is clamped to at least the starts before it and at most the number of
     * tokens. */
    DEVICE void fill()
    {
        const mha_forward_params &call = p.call;
        const int lane = (int)threadIdx.x % 32, request = first + lane;
        int q = 0, k = 0, tokens = call.s_q, keys = call.s_k;
        __syncwarp();
        if (call.starts_q) {
            const uint4 last = load_shared_16(window + 31 * 16); /* last request before the window */
            const int last_q = (int)(last.x + last.y), last_k = (int)(last.z + last.w);
            const int at = min(request + 1, call.b);
            const int end_q = min(max(warp_inclusive_max(call.starts_q[at]), last_q), call.tokens_q);
            const int end_k = min(max(warp_inclusive_max(call.starts_k[at]), last_k), call.tokens_k);
            q = __shfl_up_sync(~0u, end_q, 1), k = __shfl_up_sync(~0u, end_k, 1);
            if (lane == 0) q = last_q, k = last_k;
            tokens = end_q - q, keys = end_k - k;
        }
        if (request >= call.b) tokens = 0;
        const int tiles = (tokens + p.tile_tokens - 1) / p.tile_tokens * p.units,
                  up_to = warp_inclusive_sum(tiles);
        __syncwarp();
        store_shared_16(window + (uint32_t)lane * 16, make_uint4(q, tokens, k, keys));
        store_shared_4(window + FIRST_TILES_AT + (uint32_t)lane * 4, end + up_to - tiles);
        end += __shfl_sync(~0u, up_to, 31);
        __syncwarp();
    }

    /* Writes the WorkTile of number `i` to the address `tile` and returns its number of key blocks, or -1 if
     * there is no such tile. `i` must not decrease between calls. */
    DEVICE int find(int i, int keys_of_block, uint32_t tile)
    {
        for (; end <= i; fill()) {
            first += 32;
            if (first < p.call.b) continue;
            store_shared_4(tile + offsetof(WorkTile, kv.blocks), ~0u);
            return -1;
        }
        const int first_tile = (int)load_shared_4(window + FIRST_TILES_AT + fresh_thread() % 32 * 4);
        const int at = __popc(__ballot_sync(~0u, first_tile <= i)) - 1,
                  within = i - __shfl_sync(~0u, first_tile, at);
        const uint4 request = load_shared_16(window + (uint32_t)at * 16);
        const int tokens = (int)request.y, keys = (int)request.w;
        /* Heads whose keys and values fit L2 are processed together, in as few sets as that allows. The first
         * sets have at most one head more than the others: a small set keeps few CTAs busy with long
         * tiles. */
        const int of_request = (tokens + p.tile_tokens - 1) / p.tile_tokens,
                  of_head = of_request * p.units_of_key_head;
        const int fit = max(p.cached_keys / max(keys, 1), 1), sets = (p.call.h_kv + fit - 1) / fit;
        const int heads = p.call.h_kv / sets, larger = p.call.h_kv - heads * sets;
        const bool is_larger = within < larger * (heads + 1) * of_head;
        const int of_set = is_larger ? heads + 1 : heads, passed = is_larger ? 0 : larger * (heads + 1);
        const int set = (within - passed * of_head) / (of_set * of_head), first_head = passed + set * of_set;
        const int in_set = within - first_head * of_head, units = of_set * p.units_of_key_head,
                  order = in_set / units;
        const int head = (first_head * p.units_of_key_head + in_set - order * units) * p.heads_of_tile;
        const int first_token = (p.call.causal ? of_request - 1 - order : order) * p.tile_tokens;
        const int rows = min(tokens - first_token, p.tile_tokens) * p.heads_of_tile;
        store_shared_16(tile + offsetof(WorkTile, q), make_uint4((int)request.x + first_token, rows,
                                                                 p.call.starts_q ? 0 : first + at, head));
        const int visible = p.call.causal ? keys - tokens + first_token + 1 : keys;
        const int most = p.call.causal ? min(keys, visible + p.tile_tokens - 1) : keys;
        const int blocks = (max(most, 0) + keys_of_block - 1) / keys_of_block;
        store_shared_16(tile + offsetof(WorkTile, kv), make_uint4(keys, visible, blocks, request.z));
        return blocks;
    }
};

/* Dynamic tile scheduler. A CTA first takes the tile of its own index, then, tile by tile, the next free one.
 * The counters lie in a workspace with arbitrary contents: the first CTA clears them and publishes that with a
 * ticket that is unique to the launch. The last CTA removes the ticket, so that a graph can be launched
 * again. */
struct TileScheduler {
    const mha_forward_sm90_params &p;

    /* Clears the counters (first CTA only). Called by one thread of each CTA. */
    DEVICE void begin() const
    {
        if (!p.tile_counters || blockIdx.x) return;
        p.tile_counters->taken = p.tile_counters->ended = 0;
        __threadfence();
        *(volatile uint64_t *)&p.tile_counters->ticket = p.ticket;
    }

    /* Waits until the counters are cleared. `i`: the CTA's current tile; after its first one they are. */
    DEVICE void wait(int i) const
    {
        if (i >= (int)gridDim.x) return;
        while (*(const volatile uint64_t *)&p.tile_counters->ticket != p.ticket) {
        }
        __threadfence();
    }

    /* Returns the number of the tile after tile `i`. Called by one thread. */
    DEVICE int next(int i) const
    {
        if (!p.tile_counters) return INT_MAX;
        wait(i);
        return (int)(gridDim.x + atomicAdd(&p.tile_counters->taken, 1u));
    }

    /* Removes the ticket (last CTA only). Called by one thread of each CTA, when there is no tile `i`. A CTA
     * without any tile (ragged requests may have fewer than the grid) waits here: if it were counted before the
     * counters are cleared, a ticket would be removed for which others still wait. */
    DEVICE void end(int i) const
    {
        if (!p.tile_counters) return;
        wait(i);
        __threadfence();
        if (atomicAdd(&p.tile_counters->ended, 1u) == gridDim.x - 1)
            *(volatile uint64_t *)&p.tile_counters->ticket = 0;
    }
};

} // namespace mha_forward
