/* SPDX-License-Identifier: MIT
 *
 * Which tiles there are, and in what order: request by request; of a request the heads whose keys and values fit L2 together, and of
 * those the tiles with the most keys first. A warp looks at 32 requests at a time, and only goes on: a block of threads takes tiles of
 * growing numbers.
 *
 *   numbers   | request 0                                      | request 1 …
 *             | heads 0 … 3                    | heads 4 … 7   |
 *             | last tokens h0 h1 h2 h3 | … first tokens h0 …  |
 */
#pragma once

#include "layout.cuh"

#include "../../device/warp.cuh"

/* Row `row` of a tile whose first token and head these are. */
DEVICE RowPlace place_of(const mha_forward_sm90_params &p, int token, int head, int row)
{
    const int later = fast_divide(row, p.heads_divisor);
    return {token + later, head + row - later * p.heads_of_tile};
}

/* By a warp; a lane has request first + lane. */
struct Requests {
    const mha_forward_sm90_params &p;
    int first = 0, tiles_before = 0; /* of the window */
    int last_q, last_k;              /* where the requests in front of the window end */
    int q, tokens, k, keys;          /* where the lane's request begins, and how long it is */
    int before, tiles;               /* in front of the lane's, and with it; of the window */

    DEVICE explicit Requests(const mha_forward_sm90_params &params) : p(params)
    {
        const mha_forward_params &call = p.call;
        last_q = call.starts_q ? min(max(call.starts_q[0], 0), call.tokens_q) : 0;
        last_k = call.starts_k ? min(max(call.starts_k[0], 0), call.tokens_k) : 0;
        look();
    }

    /* A start is no smaller than those in front of it, and not beyond the last token. */
    DEVICE void look()
    {
        const mha_forward_params &call = p.call;
        const int lane = (int)threadIdx.x % 32, request = first + lane;
        q = k = 0, tokens = call.s_q, keys = call.s_k;
        if (call.starts_q) {
            const int at = min(request + 1, call.b);
            const int end_q = min(max(warp_inclusive_max(call.starts_q[at]), last_q), call.tokens_q);
            const int end_k = min(max(warp_inclusive_max(call.starts_k[at]), last_k), call.tokens_k);
            q = __shfl_up_sync(~0u, end_q, 1), k = __shfl_up_sync(~0u, end_k, 1);
            if (lane == 0) q = last_q, k = last_k;
            tokens = end_q - q, keys = end_k - k;
            last_q = __shfl_sync(~0u, end_q, 31), last_k = __shfl_sync(~0u, end_k, 31);
        }
        if (request >= call.b) tokens = 0;
        const int own = (tokens + p.tile_tokens - 1) / p.tile_tokens * p.units;
        tiles = warp_inclusive_sum(own), before = tiles - own;
    }

    /* Tile number `i`, no smaller than the one before; false: there is none. */
    DEVICE bool find(int i, int keys_of_block, Tile &t)
    {
        for (int all; (all = __shfl_sync(~0u, tiles, 31)) <= i - tiles_before; look()) {
            tiles_before += all, first += 32;
            if (first >= p.call.b) return false;
        }
        const int lane = 31 - __clz((int)__ballot_sync(~0u, before <= i - tiles_before));
        const int within = i - tiles_before - __shfl_sync(~0u, before, lane);
        const int its_tokens = __shfl_sync(~0u, tokens, lane);
        t.keys = __shfl_sync(~0u, keys, lane), t.first_key = __shfl_sync(~0u, k, lane);
        t.token = __shfl_sync(~0u, q, lane), t.request = p.call.starts_q ? 0 : first + lane;
        /* `together` units are taken at once; a unit is the heads of a tile. There are no more sets than heads that fit ask for, and
         * they have one size but for the last: a small last one keeps few blocks of threads busy with long tiles. */
        const int of_request = (its_tokens + p.tile_tokens - 1) / p.tile_tokens;
        const int fit = max(p.cached_keys / max(t.keys, 1), 1), sets = (p.call.h_kv + fit - 1) / fit;
        const int together = (p.call.h_kv + sets - 1) / sets * p.units_of_key_head;
        const int set = within / (of_request * together), in_set = within - set * of_request * together;
        const int units = min(together, p.units - set * together), order = in_set / units;
        const int first_token = (p.call.causal ? of_request - 1 - order : order) * p.tile_tokens;
        t.head = (set * together + in_set - order * units) * p.heads_of_tile;
        t.token += first_token;
        t.rows = min(its_tokens - first_token, p.tile_tokens) * p.heads_of_tile;
        t.seen = p.call.causal ? t.keys - its_tokens + first_token + 1 : t.keys;
        const int most = p.call.causal ? min(t.keys, t.seen + p.tile_tokens - 1) : t.keys;
        t.blocks = (max(most, 0) + keys_of_block - 1) / keys_of_block;
        return true;
    }
};

/* Who takes which tile: a block of threads first the one of its own number, then, tile by tile, the next that nobody has taken. The counter
 * is in a workspace that holds anything: the first block clears it, and says so by a ticket that no other launch has; the last one takes
 * the ticket away, so that a graph can be launched again. */
struct Turns {
    const mha_forward_sm90_params &p;
    bool open = false;

    /* The first block clears the counter. By one thread of each block. */
    DEVICE void begin() const
    {
        if (!p.turns || blockIdx.x) return;
        p.turns->taken = p.turns->ended = 0;
        __threadfence();
        *(volatile uint64_t *)&p.turns->ticket = p.ticket;
    }

    /* Takes the next tile, and answers its number. By one thread. */
    DEVICE int next()
    {
        if (!p.turns) return INT_MAX;
        if (!open) {
            while (*(const volatile uint64_t *)&p.turns->ticket != p.ticket) {
            }
            __threadfence();
            open = true;
        }
        return (int)(gridDim.x + atomicAdd(&p.turns->taken, 1u));
    }

    /* The last block takes the ticket away. By one thread of each block. */
    DEVICE void end() const
    {
        if (!p.turns) return;
        __threadfence();
        if (atomicAdd(&p.turns->ended, 1u) == gridDim.x - 1) *(volatile uint64_t *)&p.turns->ticket = 0;
    }
};
