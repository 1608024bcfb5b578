/* SPDX-License-Identifier: MIT
 *
 * Tile scheduler: a CTA has one tile. Tiles are numbered by request; within a request by sets of key heads
 * whose keys and values fit L2 together; within a set the tiles with the most keys first, so that short tiles
 * fill the tail.
 *
 *   numbers   | request 0                                      | request 1 …
 *             | heads 0 … 3                    | heads 4 … 7   |
 *             | last tokens h0 h1 h2 h3 | … first tokens h0 …  |
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/result.cuh"
#include "../../device/used.cuh"
#include "../../device/warp.cuh"
#include "../../params.h"

namespace mha_forward {

/* A tile of query rows. Token and key numbers are positions in the tensors, in which ragged requests are
 * concatenated; `request` is then 0. */
struct WorkTile {
    int request, token, head; /* of the first row */
    int rows;                 /* valid rows */
    int keys;                 /* of the request */
    int visible;              /* keys visible to the first token; 0 or less: none */
    const uint16_t *k, *v;    /* of the request's first key */
};

/* A request, by its lengths in use, and the number of a tile within it. */
struct MhaRequest {
    int number, token, tokens, key, keys;
    int within;
};

DEVICE int mha_tiles_of_unit(const mha_forward_sm80_params &p, int tokens)
{
    return fast_divide(tokens + p.tile_tokens - 1, p.tokens_divisor);
}

DEVICE int mha_tiles_of(const mha_forward_sm80_params &p, int tokens)
{
    return mha_tiles_of_unit(p, tokens) * p.units;
}

/* Finds the request of tile `number` where requests are ragged; returns false if there is no such tile. A
 * warp looks at 32 requests at a time. A start is clamped to at least the starts before it and at most the
 * number of tokens. */
DEVICE bool find_ragged(const mha_forward_sm80_params &p, int number, MhaRequest &r)
{
    const mha_forward_params &call = p.call;
    const int lane = (int)threadIdx.x % 32;
    int last_q = min(max(call.starts_q[0], 0), call.tokens_q),
        last_k = min(max(call.starts_k[0], 0), call.tokens_k);
    for (int first = 0; first < call.b; first += 32) {
        const int at = min(first + lane + 1, call.b);
        const int end_q = min(max(warp_inclusive_max(call.starts_q[at]), last_q), call.tokens_q);
        const int end_k = min(max(warp_inclusive_max(call.starts_k[at]), last_k), call.tokens_k);
        const int before_q = __shfl_up_sync(~0u, end_q, 1), before_k = __shfl_up_sync(~0u, end_k, 1);
        const int q = lane ? before_q : last_q, k = lane ? before_k : last_k;
        const int request = min(first + lane, call.b - 1),
                  tokens = length_in_use(call.used_q, request, end_q - q),
                  keys = length_in_use(call.used_k, request, end_k - k);
        const int tiles = mha_tiles_of(p, tokens), up_to = warp_inclusive_sum(tiles);
        const unsigned behind = __ballot_sync(~0u, number < up_to);
        if (behind) {
            const int from = __ffs((int)behind) - 1;
            r.number = 0;
            r.token = __shfl_sync(~0u, q, from), r.tokens = __shfl_sync(~0u, tokens, from);
            r.key = __shfl_sync(~0u, k, from), r.keys = __shfl_sync(~0u, keys, from);
            r.within = number - __shfl_sync(~0u, up_to - tiles, from);
            return true;
        }
        number -= __shfl_sync(~0u, up_to, 31);
        last_q = __shfl_sync(~0u, end_q, 31), last_k = __shfl_sync(~0u, end_k, 31);
    }
    return false;
}

/* A unit is the heads of a tile; `order` is the tile's rank among those of the unit. */
struct UnitOfSet {
    int unit, order;
};

DEVICE UnitOfSet find_unit(const mha_forward_sm80_params &p, const MhaRequest &r, int of_unit)
{
    const int h_kv = p.call.h_kv;
    if ((int64_t)r.keys * h_kv <= p.cached_keys) { /* there is one set: its divisor is precomputed */
        const int order = fast_divide(r.within, p.units_divisor);
        return {r.within - order * p.units, order};
    }
    /* As few sets as L2 allows; the first of them have at most one head more than the others. */
    const int of_head = of_unit * p.units_of_key_head, fit = max(p.cached_keys / max(r.keys, 1), 1);
    const int sets = (h_kv + fit - 1) / fit, heads = h_kv / sets, larger = h_kv - heads * sets;
    const bool is_larger = r.within < larger * (heads + 1) * of_head;
    const int of_set = is_larger ? heads + 1 : heads, passed = is_larger ? 0 : larger * (heads + 1);
    const int first_head = passed + (r.within - passed * of_head) / (of_set * of_head) * of_set;
    const int in_set = r.within - first_head * of_head, units = of_set * p.units_of_key_head,
              order = in_set / units;
    return {first_head * p.units_of_key_head + in_set - order * units, order};
}

/* Finds tile `number`; returns false if there is none. Called by a whole warp. */
DEVICE bool find_tile(const mha_forward_sm80_params &p, int number, WorkTile &t)
{
    const mha_forward_params &call = p.call;
    MhaRequest r;
    if (!call.starts_q) {
        const int of_request = mha_tiles_of(p, call.s_q), request = number / of_request;
        r = {request,
             0,
             length_in_use(call.used_q, request, call.s_q),
             0,
             length_in_use(call.used_k, request, call.s_k),
             number - request * of_request};
        if (call.used_q && r.within >= mha_tiles_of(p, r.tokens)) return false;
    } else if (!find_ragged(p, number, r)) {
        return false;
    }
    const int of_unit = mha_tiles_of_unit(p, r.tokens);
    const UnitOfSet u = find_unit(p, r, of_unit);
    const int first_token = (call.causal ? of_unit - 1 - u.order : u.order) * p.tile_tokens;
    t.request = r.number, t.token = r.token + first_token;
    t.head = u.unit * p.heads_of_tile;
    t.rows = min(r.tokens - first_token, p.tile_tokens) * p.heads_of_tile;
    t.keys = r.keys, t.visible = r.keys - r.tokens + first_token + 1;
    const int64_t key_head = fast_divide(t.head, p.group_divisor);
    t.k = call.k + r.number * call.k_stride[0] + r.key * call.k_stride[1] + key_head * call.k_stride[2];
    t.v = call.v + r.number * call.v_stride[0] + r.key * call.v_stride[1] + key_head * call.v_stride[2];
    return true;
}

/* Returns the token of row `row`, relative to the tile. */
DEVICE int token_of_row(const mha_forward_sm80_params &p, int row)
{
    return fast_divide(row, p.heads_divisor);
}

/* Returns token and head of row `row` of a tile. */
DEVICE RowCoord coord_of_row(const mha_forward_sm80_params &p, const WorkTile &t, int row)
{
    const int token_offset = token_of_row(p, row);
    return {t.token + token_offset, t.head + row - token_offset * p.heads_of_tile};
}

/* Returns how many keys are visible to a row, from the request's first on; 0 or less: none. */
DEVICE int visible_keys(const mha_forward_sm80_params &p, const WorkTile &t, int row)
{
    return p.call.causal ? min(t.keys, t.visible + token_of_row(p, row)) : t.keys;
}

} // namespace mha_forward
