/* SPDX-License-Identifier: MIT
 *
 * Shared memory, barriers, the order of the tiles, and partial results, common to the roles of sparse prefill
 * on Hopper over bf16 keys.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/divide.cuh"
#include "../../device/element.cuh"
#include "../../device/gather.cuh"
#include "../../device/result.cuh"
#include "../../device/tma.cuh"
#include "../../params.h"
#include "../latent/layout.cuh"

namespace sparse_prefill {

using namespace latent;

/* SPLITS_: some items are splits of tiles. */
template <int D_QK_, bool SPLITS_> struct Variant {
    using Params = struct sparse_prefill_sm90_params;
    using Element = Bf16;
    static constexpr bool SPLITS = SPLITS_;
    static constexpr bool ROPE = D_QK_ > D_V;
    /* Seesaw reads both. The other side waits for the softmax, so nothing is released before it. */
    static constexpr bool RELEASES_BEFORE_SOFTMAX = false, LAST_IN_END = true;
    static_assert(D_QK_ == D_V || D_QK_ == D_V + LINE_ELEMENTS, "");
};

/* ---- Shared memory ----------------------------------------------------------------------------- */

struct Shared {
    SideTiles tiles;
    float2 end[2][2][ROWS];  /* [tile % 2][side]: sum; largest score minus the reference */
    uint32_t rescaled[2][4]; /* [side][warp]: this block moved the reference */
    uint16_t there[2][4];    /* [side][warp of the producer]: entries that name keys; bit 4 i + r is key
                                16 i + 4 warp + r */
    SideBarriers barriers;
};
static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");
static_assert(offsetof(Shared, there) % 8 == 0, "read as one");

/* Named barriers, four from here on. At the end of a tile each side arrives on its own barrier, of the tile's
 * parity, when its sums are in shared memory. Two per tile instead of a common one, because the sides reach
 * them by different instructions; per parity, because one side may arrive for the next tile before the other
 * has waited. */
enum { SUMS_BARRIER = 3 };

DEVICE constexpr int last_unit(int side)
{
    return unit_in_order(side, UNITS - 1);
}

/* ---- The way through the tiles ------------------------------------------------------------------ */

/* The token, and the tile of its heads, that have tile number `index`. */
struct TileOfToken {
    int token, tile;

    DEVICE TileOfToken(const struct sparse_prefill_params &p, int index)
        : token(fast_divide(index, p.tiles_divisor)), tile(index - token * p.tiles)
    {
    }
};

/* Returns whether each CTA has at most one item. Then a side requests its queries at once, while the producer
 * waits for indices. In longer calls, queries that arrive before the first keys cost 1 %
 * (bench/results/h200/sparse_prefill_text.jsonl). */
DEVICE bool is_short(const struct sparse_prefill_sm90_params &p)
{
    return p.items <= (int)gridDim.x;
}

/* An item: a tile of heads of a token, or a split of it, that is, some of its key blocks. A CTA takes every
 * gridDim.x-th item; each role iterates over them on its own. */
enum { WHOLE = -1 };
template <typename V> struct ItemOf {
    int token, tile, length;
    int first, blocks; /* first key block; number of key blocks */
    int slot;          /* slot of a split; WHOLE for a tile */

    DEVICE ItemOf() : token(0), tile(0), length(0), first(0), blocks(0), slot(WHOLE) {}

    DEVICE int first_key() const { return first * KEYS; } /* in the list */

    DEVICE ItemOf(const struct sparse_prefill_sm90_params &p, int item) : first(0), slot(WHOLE)
    {
        int index = item, split = 0;
        if (V::SPLITS && item >= p.splits.whole) {
            slot = item - p.splits.whole;
            const int split_tile = fast_divide(slot, p.splits.divisor);
            index = p.splits.whole + split_tile, split = slot - split_tile * p.splits.of_tile;
        }
        const TileOfToken of(p.call, index);
        token = of.token, tile = of.tile;
        length = topk_count(p.call.topk, p.call.topk_length, token);
        blocks = (int)((unsigned)(length + KEYS - 1) / KEYS);
        if (!V::SPLITS || slot == WHOLE) return;
        const int most = fast_divide(blocks + p.splits.of_tile - 1, p.splits.divisor);
        first = min(split * most, blocks), blocks = min(most, blocks - first);
    }
};

/* ---- Partial results ---------------------------------------------------------------------------- */

enum { GROUPS = D_V / LINE_ELEMENTS /* of 64 columns */ };

/* Partial results of a split of a tile, in global memory until join_splits.cuh joins them. Rows are fp16
 * times a power of two per 64 columns (HalfScale of device/half_rows.cuh). The maximum of an end is the row's
 * largest score. */
struct Slot {
    unsigned char units[UNITS][UNIT_BYTES]; /* as in shared memory */
    float down[ROWS][GROUPS];               /* HalfScale::down */
    part_end end[ROWS];
};
static_assert(sizeof(Slot) == PREFILL_SLOT_BYTES, "");

} // namespace sparse_prefill
