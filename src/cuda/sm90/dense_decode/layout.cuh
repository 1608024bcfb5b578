/* SPDX-License-Identifier: MIT
 *
 * Definitions shared by the roles of Hopper's dense decode: variants, shared memory, barriers, and the
 * iteration over splits.
 */
#pragma once

#include "../../device/tma.cuh"
#include "../latent/layout.cuh"
#include "../latent/scheduler.cuh"

namespace dense_decode {

using namespace latent;

static_assert(ROWS == (int)ROWS_OF_READY_TILE, "");

/* Named barrier of both sides at the end of a split. */
enum { SPLIT_BARRIER = 3 };

/* JOIN_IN_KERNEL: a CTA has one split (share_out in ../latent/scheduler.cuh). SHARED_KEYS: several tiles of
 * rows read the same keys, all but the first of them from L2. The tiles then prefetch keys to L2 one after
 * the other, and the early Q·Kᵀ is the longer one. A single tile is memory-bound and loses by both. */
template <typename Element_, int D_QK_, bool SHARED_KEYS_, bool JOIN_IN_KERNEL_> struct Variant {
    using Params = struct dense_decode_sm90_params;
    using Element = Element_;
    static constexpr bool ROPE = D_QK_ > D_V, SHARED_KEYS = SHARED_KEYS_, JOIN_IN_KERNEL = JOIN_IN_KERNEL_;
    static constexpr int EARLY_UNITS =
        SHARED_KEYS ? 3 : 2; /* units of Q·Kᵀ computed before P·V of the previous block */
    static constexpr bool RELEASES_BEFORE_SOFTMAX = true, LAST_IN_END = false; /* of Seesaw */
    static constexpr int BLOCKS_AHEAD = 2; /* distance of the L2 prefetch of keys */
    static_assert(D_QK_ == D_V || D_QK_ == D_V + LINE_ELEMENTS, "");
};

/* ---- Shared memory ----------------------------------------------------------------------------- */

struct Shared {
    SideTiles tiles;
    float sum[2][2][ROWS];   /* [split % 2][side] */
    uint32_t poisoned;       /* some split is poisoned (mainloop.cuh) */
    uint32_t rescaled[2][4]; /* [side][warp]: this block moved the reference */
    Task task[8];            /* [warp of both sides]: kept here until the end of the split */
    SideBarriers barriers;
    Barrier keys_asked; /* all keys have been requested */
    Barrier second_full;
    uint32_t second_part; /* whether the last split's second part is in the keys' stages */
    uint32_t parities;    /* the producer's, after the last block */
    part_end second_end[ROWS];
    OneSplit one;
};
static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");

/* Returns the work of split i of the list, or of the only split. */
template <typename V>
DEVICE WorkTile work_tile_of(const struct dense_decode_sm90_params &p, const SplitList &list,
                             const Shared &shared, int i, const CtaCoord &cta)
{
    if constexpr (V::JOIN_IN_KERNEL)
        return WorkTile(p, shared.one, cta.kv_head, cta.tile * ROWS, ROWS);
    else
        return WorkTile(p, list, i, cta.kv_head, cta.tile * ROWS, ROWS);
}

} // namespace dense_decode
