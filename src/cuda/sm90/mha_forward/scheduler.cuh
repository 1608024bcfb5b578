/* SPDX-License-Identifier: MIT
 *
 * Tile scheduler. TileScheduler hands tile numbers to CTAs; RequestWindow finds the tile of a number.
 *
 * Tiles are numbered by request; within a request by sets of heads whose keys and values fit L2 together;
 * within a set the tiles with the most keys first. A warp looks at 32 requests at a time and only moves
 * forward, because a CTA takes tiles in increasing order. Where the keys of tiles are split (mha_splits.h), all
 * tiles of a request have split 0 first, then split 1, so that tiles of one key head read the same keys from L2.
 *
 *   numbers   | request 0                                      | request 1 …
 *             | heads 0 … 3                    | heads 4 … 7   |
 *             | last tokens h0 h1 h2 h3 | … first tokens h0 …  |
 */
#pragma once

#include "layout.cuh"

#include "../../device/divide.cuh"
#include "../../device/result.cuh"
#include "../../device/used.cuh"
#include "../../device/warp.cuh"
#include "../../mha_splits.h"

#include <limits.h>

namespace mha_forward {

/* Returns token and head of row `row` of the tile that begins at `token` and `head`. */
DEVICE RowCoord coord_of_row(const mha_forward_sm90_params &p, int token, int head, int row)
{
    const int token_offset = fast_divide(row, p.heads_divisor);
    return {token + token_offset, head + row - token_offset * p.heads_of_tile};
}

/* What RequestWindow numbers: tiles, where none are split; their splits; or only the tiles that are split, for the
 * join. */
enum class Numbers { TILES, SPLITS, SPLIT_TILES };

/* Finds tiles by number. A window in shared memory describes 32 requests; lane i of the warp writes request
 * first + i. SINGLE: the call has one request, whose splits the host chose. FEW_KEYS: of a block of the kernel for few
 * rows, for the join, which is the same for both kernels with splits. */
template <int ROWS, int KEYS, Numbers NUMBERS, bool SINGLE = false, int FEW_KEYS = KEYS>
struct RequestWindow {
    static constexpr bool HAS_SPLITS = NUMBERS != Numbers::TILES;
    enum {
        FIRST_TILES_AT = 32 * 16,
        SPLITS_AT = FIRST_TILES_AT + 32 * 4, /* what follows only with splits */
        PART_ROWS_AT = SPLITS_AT + 32 * 8,   /* rows of parts before the window's end */
        BYTES = HAS_SPLITS ? PART_ROWS_AT + 16 : SPLITS_AT
    };

    const mha_forward_sm90_params &p;
    uint32_t
        window; /* per request: first token, tokens in use, first key, keys in use; then the number of its first tile;
                   then the splits of its tiles and, if there are several, the first row of its parts */
    int first = 0, end = 0; /* the window's first request; the number of the first tile behind the window */

    DEVICE RequestWindow(const mha_forward_sm90_params &params, uint32_t address) : p(params), window(address)
    {
        if constexpr (SINGLE) {
            fill_single();
        } else {
            if constexpr (HAS_SPLITS) store_shared_4(window + PART_ROWS_AT, 0);
            fill();
        }
    }

    /* Fills the window of a single request, without sums over lanes: with cold code every instruction before the first
     * tile delays a short call. */
    DEVICE void fill_single()
    {
        const mha_forward_params &call = p.call;
        const uint32_t lane = fresh_thread() % 32;
        int q = 0, k = 0, tokens = call.s_q, keys = call.s_k;
        if (call.starts_q) { /* lanes 0 and 1 look at q's, 2 and 3 at k's */
            const int start = (lane & 2 ? call.starts_k : call.starts_q)[lane & 1],
                      within = min(max(start, 0), lane & 2 ? call.tokens_k : call.tokens_q);
            q = __shfl_sync(~0u, within, 0), k = __shfl_sync(~0u, within, 2);
            tokens = max(__shfl_sync(~0u, within, 1) - q, 0), keys = max(__shfl_sync(~0u, within, 3) - k, 0);
        }
        tokens = length_in_use(call.used_q, 0, tokens), keys = length_in_use(call.used_k, 0, keys);
        store_shared_16(window, make_uint4(q, tokens, k, keys));
        int splits = p.splits ? p.splits : splits_of_batch(blocks_of(keys));
        if ((int64_t)tokens * call.h_q * splits > min(p.part_rows, MHA_MOST_PART_ROWS_OF_REQUEST)) splits = 1;
        end = numbers_of(tiles_of_head(tokens) * p.units, splits);
        store_shared_8(window + SPLITS_AT, (uint32_t)splits, 0);
        __syncwarp();
    }

    /* Returns the splits of a tile of `blocks` key blocks by the batch. */
    DEVICE int splits_of_batch(int blocks) const
    {
        return max(min(mha_ceil_div(blocks, p.blocks_of_split), p.most_splits), 1);
    }

    /* Returns how many numbers a request's `tiles` have. */
    static DEVICE int numbers_of(int tiles, int splits)
    {
        if constexpr (NUMBERS == Numbers::SPLIT_TILES) return splits > 1 ? tiles : 0;
        return tiles * splits;
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
            const int at = min(request + 1, call.b), start_q = call.starts_q[at], start_k = call.starts_k[at];
            int last_q, last_k; /* where the last request before the window ends */
            if (first) {
                const uint4 last = load_shared_16(window + 31 * 16);
                last_q = min(max(call.starts_q[first], (int)last.x), call.tokens_q);
                last_k = min(max(call.starts_k[first], (int)last.z), call.tokens_k);
            } else {
                last_q = min(max(call.starts_q[0], 0), call.tokens_q);
                last_k = min(max(call.starts_k[0], 0), call.tokens_k);
            }
            const int end_q = min(max(warp_inclusive_max(start_q), last_q), call.tokens_q),
                      end_k = min(max(warp_inclusive_max(start_k), last_k), call.tokens_k);
            q = __shfl_up_sync(~0u, end_q, 1), k = __shfl_up_sync(~0u, end_k, 1);
            if (lane == 0) q = last_q, k = last_k;
            tokens = end_q - q, keys = end_k - k;
        }
        tokens = length_in_use(call.used_q, min(request, call.b - 1), tokens);
        keys = length_in_use(call.used_k, min(request, call.b - 1), keys);
        if (request >= call.b) tokens = 0;
        const int rows = tiles_of_head(tokens) * p.units;
        int splits = 1;
        if constexpr (HAS_SPLITS) {
            __syncwarp();
            store_shared_16(window + (uint32_t)lane * 16, make_uint4(q, tokens, k, keys));
            const int blocks = blocks_of(keys);
            splits = p.splits            ? p.splits
                     : p.blocks_of_split ? splits_of_batch(blocks)
                                         : mha_splits(mha_tiles_alone(tokens, ROWS, call.h_kv, call.group),
                                                      blocks, p.sms, p.most_splits, false);
            if ((int64_t)tokens * call.h_q * splits > MHA_MOST_PART_ROWS_OF_REQUEST) splits = 1;
            const int part_rows = splits > 1 ? tokens * call.h_q * splits : 0,
                      up_to = (int)load_shared_4(window + PART_ROWS_AT) + warp_inclusive_sum(part_rows);
            if (up_to > p.part_rows) splits = 1;
            __syncwarp();
            store_shared_8(window + SPLITS_AT + (uint32_t)lane * 8, (uint32_t)splits,
                           (uint32_t)(up_to - part_rows));
            if (lane == 31) store_shared_4(window + PART_ROWS_AT, (uint32_t)min(up_to, p.part_rows));
        }
        const int tiles = numbers_of(rows, splits), up_to = warp_inclusive_sum(tiles);
        __syncwarp();
        if constexpr (!HAS_SPLITS)
            store_shared_16(window + (uint32_t)lane * 16, make_uint4(q, tokens, k, keys));
        store_shared_4(window + FIRST_TILES_AT + (uint32_t)lane * 4, end + up_to - tiles);
        end += __shfl_sync(~0u, up_to, 31);
        __syncwarp();
    }

    /* Returns the blocks of a request's keys. The join is one for both kernels with splits. */
    DEVICE int blocks_of(int keys) const
    {
        return FEW_KEYS != KEYS && p.few_rows ? (keys + FEW_KEYS - 1) / FEW_KEYS : (keys + KEYS - 1) / KEYS;
    }

    /* Returns the tiles of a request's tokens, of one head or set of heads. */
    DEVICE int tiles_of_head(int tokens) const
    {
        return fast_divide(tokens + p.tile_tokens - 1, p.tokens_divisor);
    }

    /* Returns whether no CTA has a second tile; false also if there are more requests than a window has. */
    DEVICE bool all_have_one_tile() const { return p.call.b <= 32 && end <= (int)gridDim.x; }

    /* Returns a / b; of a single request by few instructions, if a is not too large. */
    static DEVICE int divide(int a, int b)
    {
        return SINGLE && a <= MHA_LARGEST_DIVIDED ? mha_div(a, b) : a / b;
    }

    /* Returns a split's share of the key blocks of a tile. The first splits have at most one block more than the
     * others. */
    static DEVICE TileKeys keys_of_split(const TileKeys &kv, int split, int splits)
    {
        const int least = divide(kv.blocks, splits), larger = kv.blocks - least * splits,
                  begin = split * least + min(split, larger), end = begin + least + (split < larger),
                  passed = begin * KEYS;
        return {min(kv.keys, end * KEYS) - passed, kv.visible - passed, end - begin, kv.first_key + passed};
    }

    /* A tile's number in the order of tokens, and its set of heads. */
    struct Tile {
        int order, unit;
    };

    /* Finds tile `within` of a request, of whose tokens a head has `of_request` tiles. Heads whose keys and values
     * fit L2 are processed together, in as few sets as that allows. The first sets have at most one head more than the
     * others: a small set keeps few CTAs busy with long tiles. */
    DEVICE Tile tile_of_sets(int within, int of_request, int keys) const
    {
        const int of_head = of_request * p.units_of_key_head;
        const int fit = max(p.cached_keys / max(keys, 1), 1), sets = (p.call.h_kv + fit - 1) / fit;
        const int heads = p.call.h_kv / sets, larger = p.call.h_kv - heads * sets;
        const bool is_larger = within < larger * (heads + 1) * of_head;
        const int of_set = is_larger ? heads + 1 : heads, passed = is_larger ? 0 : larger * (heads + 1);
        const int set = (within - passed * of_head) / (of_set * of_head), first_head = passed + set * of_set;
        const int in_set = within - first_head * of_head, units = of_set * p.units_of_key_head,
                  order = in_set / units;
        return {order, first_head * p.units_of_key_head + in_set - order * units};
    }

    /* The same where splits of all tiles run at the same time: those that read the same keys are neighbours. A request
     * that is split has few tiles, so mha_div is exact. */
    DEVICE Tile tile_of_key_head(int within, int of_request) const
    {
        const int of_head = of_request * p.units_of_key_head, key_head = mha_div(within, of_head),
                  in_head = within - key_head * of_head, order = mha_div(in_head, p.units_of_key_head);
        return {order, (key_head - order) * p.units_of_key_head + in_head};
    }

    /* The same for all heads together. */
    DEVICE Tile tile_of_all_heads(int within) const
    {
        const int order = fast_divide(within, p.units_divisor);
        return {order, within - order * p.units};
    }

    /* Writes the WorkTile of number `i` to the address `tile` and returns its number of key blocks, or -1 if
     * there is no such tile. `i` must not decrease between calls. */
    DEVICE int find(int i, uint32_t tile)
    {
        for (; end <= i; fill()) {
            first += 32;
            if (!SINGLE && first < p.call.b) continue;
            store_shared_4(tile + offsetof(WorkTile, kv.blocks), ~0u);
            return -1;
        }
        int at = 0, within = i;
        if constexpr (!SINGLE) {
            const int first_tile = (int)load_shared_4(window + FIRST_TILES_AT + fresh_thread() % 32 * 4);
            at = __popc(__ballot_sync(~0u, first_tile <= i)) - 1;
            within -= __shfl_sync(~0u, first_tile, at);
        }
        const uint4 request = load_shared_16(window + (uint32_t)at * 16);
        const int tokens = (int)request.y, keys = (int)request.w;
        const int of_request = tiles_of_head(tokens);
        int split = 0, splits = 1,
            part_row = -1; /* of all of the request's parts: the first row of the split */
        if constexpr (HAS_SPLITS) {
            const uint2 words = load_shared_8(window + SPLITS_AT + (uint32_t)at * 8);
            splits = (int)words.x;
            if (splits > 1) {
                const int tiles = of_request * p.units;
                split = divide(within, tiles), within -= split * tiles;
                part_row = (int)words.y + split * tokens * p.call.h_q;
            }
        }
        const Tile of = splits > 1                     ? tile_of_key_head(within, of_request)
                        : keys <= p.cached_keys_of_all ? tile_of_all_heads(within)
                                                       : tile_of_sets(within, of_request, keys);
        const int order = of.order, head = of.unit * p.heads_of_tile;
        const int first_token = (p.call.causal ? of_request - 1 - order : order) * p.tile_tokens;
        const int rows = min(tokens - first_token, p.tile_tokens) * p.heads_of_tile;
        store_shared_16(tile + offsetof(WorkTile, q), make_uint4((int)request.x + first_token, rows,
                                                                 p.call.starts_q ? 0 : first + at, head));
        const int visible = p.call.causal ? keys - tokens + first_token + 1 : keys;
        const int most = p.call.causal ? min(keys, visible + p.tile_tokens - 1) : keys;
        const int blocks = (max(most, 0) + KEYS - 1) / KEYS;
        TileKeys kv = {keys, visible, blocks, (int)request.z};
        if constexpr (HAS_SPLITS) {
            if (splits > 1) {
                kv = keys_of_split(kv, split, splits);
                part_row += head * tokens + first_token * p.heads_of_tile;
            }
            store_shared_16(tile + offsetof(WorkTile, part),
                            make_uint4((uint32_t)part_row, (uint32_t)(tokens * p.call.h_q), (uint32_t)splits,
                                       (uint32_t)split));
        }
        store_shared_16(tile + offsetof(WorkTile, kv),
                        make_uint4(kv.keys, kv.visible, kv.blocks, kv.first_key));
        return kv.blocks;
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
