/* SPDX-License-Identifier: MIT
 *
 * Shared memory and barriers of sparse decode over 16-bit caches. Keys are gathered in the swizzle that wgmma
 * reads.
 */
#pragma once

#include "../layout.cuh"

namespace sparse_decode::plain {

enum { KV_STAGES = 2 };

/* D_QK: 576 or 512; Element: of queries, caches and results. */
template <int D_QK_, typename Element_> struct Rows {
    using Element = Element_;
    static constexpr bool HAS_ROPE = D_QK_ > D_V; /* columns of K alone: a tile behind V's */
    static constexpr int TILES = D_QK_ / LINE_ELEMENTS, ROPE_TILE = V_TILES;
    static constexpr enum kv_format FORMAT = Element::IS_BF16 ? KV_BF16 : KV_FP16;
    static_assert(TILES == V_TILES + HAS_ROPE, "");

    /* Tiles of a block that arrive together: one of either half of V's columns, since each half is
     * gathered by the warpgroup that uses it; then the rope columns. */
    static constexpr int GROUPS = HALF_TILES + HAS_ROPE;

    struct Shared {
        /* All threads write `block`: a branch there keeps ptxas from keeping matrix descriptors in uniform
         * registers. */
        static constexpr bool ALL_PUBLISH = true;
        unsigned char keys[KV_STAGES][TILES][TILE_BYTES];
        unsigned char q[TILES][TILE_BYTES];
        unsigned char p[1][TILE_BYTES];
        uint64_t address[KV_STAGES][KEYS]; /* of a block's tokens: addresses, and NO_KEY */
        float factor[1][HEADS];            /* rescales O if the references of this block moved */
        float sum[4][HEADS];               /* [warp of the scores], of the split */
        float below[HEADS];                /* minus the references */
        uint32_t block[1];                 /* BLOCK_… */
        SplitList list;
        struct {
            int64_t part;
            int request;
        } split[8]; /* [warp] of the sums: kept here until the end of the split */
        uint64_t full[1], empty, sum_full, sum_empty, q_full, arrived[KV_STAGES][GROUPS];
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");
    static_assert(sizeof(Shared::keys[0]) % 1024 == 0 && offsetof(Shared, q) % 1024 == 0 &&
                      offsetof(Shared, p) % 1024 == 0,
                  "where the swizzle begins");
};

/* Bit of a token's address (a multiple of 16): the entry names no key, and nothing is read. */
static constexpr uint64_t NO_KEY = 1;

/* Barrier 1 (SCORES_BARRIER) is that of the scores' warps. */
enum { START_BARRIER = 2, SIDE_BARRIER = 3 /* and 4: of the warps of a half of O */ };

} // namespace sparse_decode::plain
