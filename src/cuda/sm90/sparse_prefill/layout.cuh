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

/* SPLITS_: some work tiles are splits of tiles. */
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
    uint16_t valid[2][4];    /* [side][warp of the producer]: entries that name keys; bit 4 i + r is key
                                16 i + 4 warp + r */
    SideBarriers barriers;
};
static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");
static_assert(offsetof(Shared, valid) % 8 == 0, "read as one");

/* Named barriers, four from here on. At the end of a tile each side arrives on its own barrier, of the tile's
 * parity, when its sums are in shared memory. Two per tile instead of a common one, because the sides reach
 * them by different instructions; per parity, because one side may arrive for the next tile before the other
 * has waited. */
enum { SUMS_BARRIER = 3 };

DEVICE constexpr int last_unit(int side)
{
    return unit_in_order(side, UNITS - 1);
}

/* ---- The order of the tiles --------------------------------------------------------------------- */

/* Coordinates of tile number `index`: its token, and the tile of the token's heads. */
struct TileCoord {
    int token, head_tile;

    DEVICE TileCoord(const struct sparse_prefill_params &p, int index)
        : token(fast_divide(index, p.tiles_divisor)), head_tile(index - token * p.tiles)
    {
    }
};

/* Returns whether each CTA has at most one work tile. Then a side requests its queries at once, while the
 * producer waits for indices. In longer calls, queries that arrive before the first keys cost 1 %
 * (bench/results/h200/sparse_prefill_text.jsonl). */
DEVICE bool is_short(const struct sparse_prefill_sm90_params &p)
{
    return p.items <= (int)gridDim.x;
}

/* A work tile: a tile of heads of a token, or a split of it, that is, some of its key blocks. A CTA takes
 * every gridDim.x-th; each role iterates over them on its own. */
enum { WHOLE = -1 };
template <typename V> struct WorkTile {
    int token, head_tile, length;
    int first_block, blocks; /* number of the first key block; how many */
    int part;                /* index of a split's part; WHOLE for a tile */

    DEVICE WorkTile() : token(0), head_tile(0), length(0), first_block(0), blocks(0), part(WHOLE) {}

    DEVICE int first_key() const { return first_block * KEYS; } /* in the list */

    DEVICE WorkTile(const struct sparse_prefill_sm90_params &p, int number) : first_block(0), part(WHOLE)
    {
        int index = number, split = 0;
        if (V::SPLITS && number >= p.splits.whole) {
            part = number - p.splits.whole;
            const int split_tile = fast_divide(part, p.splits.divisor);
            index = p.splits.whole + split_tile, split = part - split_tile * p.splits.of_tile;
        }
        const TileCoord coord(p.call, index);
        token = coord.token, head_tile = coord.head_tile;
        length = topk_count(p.call.topk, p.call.topk_length, token);
        blocks = (int)((unsigned)(length + KEYS - 1) / KEYS);
        if (!V::SPLITS || part == WHOLE) return;
        const int most = fast_divide(blocks + p.splits.of_tile - 1, p.splits.divisor);
        first_block = min(split * most, blocks), blocks = min(most, blocks - first_block);
    }
};

/* ---- Partial results ---------------------------------------------------------------------------- */

enum { GROUPS = D_V / LINE_ELEMENTS /* of 64 columns */ };

/* The part of a split of a tile, in global memory until join_splits.cuh joins them. Rows are fp16 times a
 * power of two per 64 columns (HalfScale of device/half_rows.cuh). The maximum of an end is the row's largest
 * score. */
struct Part {
    unsigned char units[UNITS][UNIT_BYTES]; /* as in shared memory */
    float scale[ROWS][GROUPS];              /* HalfScale::down */
    part_end end[ROWS];
};
static_assert(sizeof(Part) == PREFILL_PART_BYTES, "");

} // namespace sparse_prefill
