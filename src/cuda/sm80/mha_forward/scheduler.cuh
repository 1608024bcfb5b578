/* SPDX-License-Identifier: MIT
 *
 * Tile scheduler: a CTA has one tile. Tiles are numbered by request; within a request by sets of key heads
 * whose keys and values fit L2 together; within a set the tiles with the most keys first, so that short tiles
 * fill the tail. Where the keys of tiles are split (mha_splits.h), a CTA has one split: all tiles of a request have
 * split 0 first, then split 1, and tiles that read the same keys are neighbours.
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
#include "../../mha_splits.h"
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

/* What is numbered: tiles, where none are split; their splits; or only the rows that have parts, for the join. */
enum class Numbers { TILES, SPLITS, PART_ROWS };

/* A request, by its lengths in use, and a number within it. */
struct MhaRequest {
    int number, token, tokens, key, keys;
    int within;
    int splits;   /* of its tiles; unused without splits, like what follows */
    int part_row; /* where there are several, the first row of its parts */
};

DEVICE int mha_tiles_of_unit(const mha_forward_sm80_params &p, int tokens)
{
    return fast_divide(tokens + p.tile_tokens - 1, p.tokens_divisor);
}

DEVICE int mha_tiles_of(const mha_forward_sm80_params &p, int tokens)
{
    return mha_tiles_of_unit(p, tokens) * p.units;
}

/* Returns the splits of a ragged request's tiles, as Hopper's scheduler does. */
DEVICE int splits_of_request(const mha_forward_sm80_params &p, int tokens, int keys)
{
    const mha_forward_params &call = p.call;
    const int whole = fast_divide(keys, p.block_divisor), blocks = whole + (keys > whole * p.block_keys);
    const int splits = p.splits ? p.splits
                       : p.blocks_of_split
                           ? max(min(mha_ceil_div(blocks, p.blocks_of_split), p.most_splits), 1)
                           : mha_splits(mha_tiles_alone(tokens, p.rows_alone, call.h_kv, call.group), blocks,
                                        p.slots, p.most_splits, false);
    return (int64_t)tokens * call.h_q * splits > MHA_MOST_PART_ROWS_OF_REQUEST ? 1 : splits;
}

/* Finds ragged requests by number, which must not decrease. A warp looks at 32 requests at a time. A start is
 * clamped to at least the starts before it and at most the number of tokens. */
template <Numbers NUMBERS> struct RaggedRequests {
    const mha_forward_sm80_params &p;
    int first = 0, last_q, last_k;  /* the next requests; where those before them end */
    int numbers = 0, part_rows = 0; /* of those before */

    DEVICE RaggedRequests(const mha_forward_sm80_params &params) : p(params)
    {
        last_q = min(max(p.call.starts_q[0], 0), p.call.tokens_q);
        last_k = min(max(p.call.starts_k[0], 0), p.call.tokens_k);
    }

    /* Finds the request of `number`; returns false if there is no such number. */
    DEVICE bool find(int number, MhaRequest &r)
    {
        const mha_forward_params &call = p.call;
        const int lane = (int)threadIdx.x % 32;
        number -= numbers;
        for (; first < call.b; first += 32) {
            const int at = min(first + lane + 1, call.b);
            const int end_q = min(max(warp_inclusive_max(call.starts_q[at]), last_q), call.tokens_q);
            const int end_k = min(max(warp_inclusive_max(call.starts_k[at]), last_k), call.tokens_k);
            const int before_q = __shfl_up_sync(~0u, end_q, 1), before_k = __shfl_up_sync(~0u, end_k, 1);
            const int q = lane ? before_q : last_q, k = lane ? before_k : last_k;
            const int request = min(first + lane, call.b - 1),
                      tokens = length_in_use(call.used_q, request, end_q - q),
                      keys = length_in_use(call.used_k, request, end_k - k);
            int count = mha_tiles_of(p, tokens), splits = 1, rows_up_to = part_rows, rows = 0;
            if constexpr (NUMBERS != Numbers::TILES) {
                splits = splits_of_request(p, tokens, keys);
                rows = splits > 1 ? tokens * call.h_q * splits : 0;
                rows_up_to += warp_inclusive_sum(rows);
                if (rows_up_to > p.part_rows) splits = 1;
                count = NUMBERS == Numbers::SPLITS ? count * splits : splits > 1 ? rows / splits : 0;
            }
            const int up_to = warp_inclusive_sum(count);
            const unsigned behind = __ballot_sync(~0u, number < up_to);
            if (behind) {
                const int from = __ffs((int)behind) - 1;
                r.number = 0;
                r.token = __shfl_sync(~0u, q, from), r.tokens = __shfl_sync(~0u, tokens, from);
                r.key = __shfl_sync(~0u, k, from), r.keys = __shfl_sync(~0u, keys, from);
                r.within = number - __shfl_sync(~0u, up_to - count, from);
                if constexpr (NUMBERS != Numbers::TILES) {
                    r.splits = __shfl_sync(~0u, splits, from);
                    r.part_row = __shfl_sync(~0u, rows_up_to - rows, from);
                }
                return true;
            }
            const int all = __shfl_sync(~0u, up_to, 31);
            number -= all, numbers += all;
            last_q = __shfl_sync(~0u, end_q, 31), last_k = __shfl_sync(~0u, end_k, 31);
            if constexpr (NUMBERS != Numbers::TILES)
                part_rows = min(__shfl_sync(~0u, rows_up_to, 31), p.part_rows);
        }
        return false;
    }
};

/* Returns a request of those that are not ragged. Its parts have the room that all of its tokens would fill. */
template <Numbers NUMBERS>
DEVICE MhaRequest request_apart(const mha_forward_sm80_params &p, int request, int within)
{
    const mha_forward_params &call = p.call;
    MhaRequest r = {request,
                    0,
                    length_in_use(call.used_q, request, call.s_q),
                    0,
                    length_in_use(call.used_k, request, call.s_k),
                    within};
    if constexpr (NUMBERS != Numbers::TILES) {
        r.splits = splits_of_request(p, r.tokens, r.keys);
        r.part_row = request * call.s_q * call.h_q * p.most_splits;
    }
    return r;
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

/* The same where splits of all tiles run at the same time: those that read the same keys are neighbours. */
DEVICE UnitOfSet find_unit_of_key_head(const mha_forward_sm80_params &p, int within, int of_unit)
{
    const int of_head = of_unit * p.units_of_key_head, key_head = within / of_head,
              in_head = within - key_head * of_head, order = in_head / p.units_of_key_head;
    return {(key_head - order) * p.units_of_key_head + in_head, order};
}

/* Narrows a tile to its share of the key blocks that its rows see. The first splits have at most one block more than
 * the others. */
DEVICE void take_split(const mha_forward_sm80_params &p, int split, int splits, WorkTile &t)
{
    const int seen = max(visible_keys(p, t, t.rows - 1), 0), whole = fast_divide(seen, p.block_divisor),
              blocks = whole + (seen > whole * p.block_keys);
    const int least = blocks / splits, larger = blocks - least * splits,
              begin = split * least + min(split, larger), end = begin + least + (split < larger);
    const int64_t passed = (int64_t)begin * p.block_keys, to = (int64_t)end * p.block_keys;
    t.keys = (int)(min((int64_t)t.keys, to) - passed), t.visible = (int)(t.visible - passed);
    t.k += passed * p.call.k_stride[1], t.v += passed * p.call.v_stride[1];
}

/* Finds tile `number`, or split `number`, of whose part `part_row` is the first row; < 0: the tile is not split.
 * Returns false if there is none. Called by a whole warp. */
template <Numbers NUMBERS>
DEVICE bool find_tile(const mha_forward_sm80_params &p, int number, WorkTile &t, int &part_row)
{
    constexpr bool SPLITS = NUMBERS == Numbers::SPLITS;
    const mha_forward_params &call = p.call;
    MhaRequest r;
    if (!call.starts_q) {
        const int of_request = mha_tiles_of(p, call.s_q) * (SPLITS ? p.most_splits : 1),
                  request = number / of_request;
        r = request_apart<NUMBERS>(p, request, number - request * of_request);
        /* Lengths in use leave numbers unused. */
        if ((SPLITS || call.used_q) && r.within >= mha_tiles_of(p, r.tokens) * (SPLITS ? r.splits : 1))
            return false;
    } else if (!RaggedRequests<NUMBERS>(p).find(number, r)) {
        return false;
    }
    const int of_unit = mha_tiles_of_unit(p, r.tokens);
    int split = 0;
    if constexpr (SPLITS) {
        const int tiles = of_unit * p.units;
        split = r.within / tiles, r.within -= split * tiles;
    }
    const bool is_split = SPLITS && r.splits > 1;
    const UnitOfSet u = is_split ? find_unit_of_key_head(p, r.within, of_unit) : find_unit(p, r, of_unit);
    const int first_token = (call.causal ? of_unit - 1 - u.order : u.order) * p.tile_tokens;
    t.request = r.number, t.token = r.token + first_token;
    t.head = u.unit * p.heads_of_tile;
    t.rows = min(r.tokens - first_token, p.tile_tokens) * p.heads_of_tile;
    t.keys = r.keys, t.visible = r.keys - r.tokens + first_token + 1;
    const int64_t key_head = fast_divide(t.head, p.group_divisor);
    t.k = call.k + r.number * call.k_stride[0] + r.key * call.k_stride[1] + key_head * call.k_stride[2];
    t.v = call.v + r.number * call.v_stride[0] + r.key * call.v_stride[1] + key_head * call.v_stride[2];
    part_row = -1;
    if (is_split) {
        take_split(p, split, r.splits, t);
        part_row =
            r.part_row + split * r.tokens * call.h_q + t.head * r.tokens + first_token * p.heads_of_tile;
    }
    return true;
}

} // namespace mha_forward
