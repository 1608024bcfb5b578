/* SPDX-License-Identifier: MIT
 *
 * Shared memory, stages, barriers and registers of dense MHA forward on Hopper, per head size. Q, K and V are
 * stored in tiles of 64 columns; a row of a tile is a line of 128 bytes, swizzled (swizzle_128).
 *
 *            rows   keys    stages    stages   registers per
 *            /tile  /block  of K, V   of Q     consumer thread
 *   256/256  128     80     2         1        O 128 + S 40 + P 20, of 232     226 KiB
 *   192/128  128    128     2         1        O 64 + S 64 + P 32, of 224      224
 *   128/128  128    128     2         2        the same                        208
 *    96/64   192    128     3         1        O 32 + S 64 + P 32, of 160      217
 *   64/64    192    128     4         2        the same                        201
 *
 * Of few rows, of which two CTAs share an SM; a consumer has 216 registers:
 *
 *   192/128   64     64     2         1        O 64 + S 32 + P 16              105 KiB a CTA
 *   128/128   64     80     2         1        O 64 + S 40 + P 20              98
 *    96/64    64     80     3         1        O 32 + S 40 + P 20              107
 *   64/64     64    128     3         1        O 32 + S 64 + P 32              105
 *
 * Tiles of 96 columns are two of 64 that overlap: columns 0 … 63 and 32 … 95.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/ring.cuh"
#include "../../device/shared.cuh"
#include "../../device/tma.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"

namespace mha_forward {

/* Stages of the ring of tiles. The consumers know of the tile whose results they write, the current one and
 * the next one. */
enum { TILE_STAGES = 4 };

/* A tile of query rows and the keys that it attends to, or a split of them. TileProducer writes it; the other
 * producers and the consumers read its members, 16 bytes each. */
struct TileRows {
    int token;        /* the first: index in the request, or among all tokens where requests are ragged */
    int rows;         /* rows that belong to the request and are in use */
    uint32_t request; /* 0 where requests are ragged; unsigned, because a signed one costs instructions */
    int head;
};
struct TileKeys {
    int keys;      /* of the request, in use */
    int visible;   /* keys visible to the tile's first token; may be below 0 */
    int blocks;    /* key blocks visible to some row; < 0: no more tiles */
    int first_key; /* the request's first key among all keys */
};
struct TilePart {
    int row;           /* of all parts, where the split's first row is; < 0: the tile is not split */
    int step;          /* from a split's rows to those of the next one */
    int splits, split; /* of the tile: their number, and which this is */
};
struct WorkTile {
    TileRows q;
    TileKeys kv;
    TilePart part;
};

/* Return a member of the tile at the address `tile`. */
DEVICE TileRows load_tile_rows(uint32_t tile)
{
    const uint4 words = load_shared_16(tile + offsetof(WorkTile, q));
    return {(int)words.x, (int)words.y, words.z, (int)words.w};
}

DEVICE TileKeys load_tile_keys(uint32_t tile)
{
    const uint4 words = load_shared_16(tile + offsetof(WorkTile, kv));
    return {(int)words.x, (int)words.y, (int)words.z, (int)words.w};
}

DEVICE TilePart load_tile_part(uint32_t tile)
{
    const uint4 words = load_shared_16(tile + offsetof(WorkTile, part));
    return {(int)words.x, (int)words.y, (int)words.z, (int)words.w};
}

/* What a kernel takes: whole tiles; also tiles whose keys are split; or those, of few rows. */
enum class Tiles { WHOLE, SPLIT, FEW_ROWS };

template <int D_QK_, int D_V_, Tiles TILES> struct MhaLayout {
    static constexpr int D_QK = D_QK_, D_V = D_V_;
    static constexpr bool SPLITS = TILES != Tiles::WHOLE, FEW_ROWS = TILES == Tiles::FEW_ROWS;
    static constexpr int KEYS = FEW_ROWS ? MHA_SM90_FEW_KEYS(D_QK_) : MHA_SM90_KEYS(D_QK_),
                         ROWS = FEW_ROWS ? MHA_SM90_FEW_ROWS : MHA_SM90_ROWS(D_QK_),
                         CTAS_PER_SM = FEW_ROWS ? MHA_SM90_FEW_CTAS : 1;
    static constexpr int CONSUMERS = ROWS / 64, THREADS = WARPGROUP_THREADS * (CONSUMERS + 1);
    static constexpr int KV_STAGES = D_QK == 64   ? 4 - FEW_ROWS
                                     : D_QK == 96 ? 3
                                                  : 2,
                         Q_STAGES = !FEW_ROWS && (D_QK == 64 || D_QK == 128) ? 2 : 1;
    /* Weights of a block that a thread computes while the previous block's O += P V still runs; limited by
     * registers. */
    static constexpr int EARLY_WEIGHTS = D_V == 64 ? 20 : D_V == 256 ? 12 : 16;
    /* Test the barriers of the next stages between the exponentials: at small head sizes a block is short
     * compared with such a wait. */
    static constexpr bool TESTS_EARLY = D_V == 64;
    /* A single request is looked at by a shorter path. Not at 128/128, where the order of products of long calls loses 1 % by
     * the other code beside them. */
    static constexpr bool SINGLE_APART = SPLITS && (FEW_ROWS || D_QK != 128);
    static constexpr bool STAGES_OUT = D_V != 256 && !FEW_ROWS; /* out is written through shared memory */
    /* Consumers issue wgmma in order, and rows may have a sink. Either costs the kernel without splits at 128/128 some 3 %,
     * even if a branch skips it; calls that want one of them take the kernel with splits (choice.c). */
    static constexpr bool HAS_SINKS = D_QK != 128 || SPLITS, IS_ORDERED = HAS_SINKS && !FEW_ROWS;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3           ? 32
                                              : D_V == 256 || FEW_ROWS ? 40
                                                                       : 56,
                         CONSUMER_REGISTERS = FEW_ROWS         ? 216
                                              : CONSUMERS == 3 ? 160
                                              : D_V == 256     ? 232
                                                               : 224;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                      (CONSUMERS + 1) * (65536 / CTAS_PER_SM / THREADS / 8 * 8),
                  "warpgroups would wait for registers for ever");

    static constexpr int QK_TILES = (D_QK + 63) / 64, V_TILES = D_V / 64;
    static constexpr int OVERLAP =
        QK_TILES * 64 - D_QK; /* columns of the last tile that the one before has */
    static constexpr uint32_t Q_TILE = ROWS * LINE_BYTES, KEY_TILE = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = QK_TILES * Q_TILE, K_BYTES = QK_TILES * KEY_TILE,
                              V_BYTES = V_TILES * KEY_TILE;
    static constexpr uint32_t K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + KV_STAGES * K_BYTES,
                              BARRIERS_AT = V_AT + KV_STAGES * V_BYTES;
    enum {
        Q_FULL,
        Q_EMPTY = Q_FULL + Q_STAGES,
        TILE_FULL = Q_EMPTY + Q_STAGES,
        TILE_EMPTY = TILE_FULL + TILE_STAGES,
        K_FULL = TILE_EMPTY + TILE_STAGES,
        K_EMPTY = K_FULL + KV_STAGES,
        V_FULL = K_EMPTY + KV_STAGES,
        V_EMPTY = V_FULL + KV_STAGES,
        NEXT_WANTED = V_EMPTY + KV_STAGES,
        Q_RAW, /* Q with padding, which is cleared before Q counts as full; with SPLITS */
        BARRIERS = Q_RAW + SPLITS
    };
    static constexpr uint32_t TILES_AT = (BARRIERS_AT + BARRIERS * 8 + 127) / 128 * 128;
    static constexpr uint32_t BYTES_OF_TILE = SPLITS ? sizeof(WorkTile) : offsetof(WorkTile, part);
    static constexpr uint32_t WINDOW_AT = TILES_AT + TILE_STAGES * BYTES_OF_TILE,
                              WINDOW_BYTES = SPLITS ? 32 * 28 + 16 : 32 * 20; /* of RequestWindow */
    static constexpr uint32_t OUT_AT = WINDOW_AT + WINDOW_BYTES,
                              OUT_ROWS = D_V == 64 ? 16 : 8, /* rows a warp writes at a time */
        OUT_BYTES_OF_WARP = STAGES_OUT ? OUT_ROWS * D_V * 2 : 0;
    static constexpr uint32_t BYTES = OUT_AT + 4 * CONSUMERS * OUT_BYTES_OF_WARP;
    static_assert(BYTES <= (FEW_ROWS ? MHA_SM90_FEW_BYTES : 227 * 1024), "it fits");

    uint32_t smem; /* the address at which shared memory begins */

    DEVICE uint32_t barrier(int first, int i) const
    {
        return smem + BARRIERS_AT + 8u * (uint32_t)(first + i);
    }
    DEVICE uint32_t q(int stage) const { return smem + (uint32_t)stage * Q_BYTES; }
    DEVICE uint32_t k(int stage) const { return smem + K_AT + (uint32_t)stage * K_BYTES; }
    DEVICE uint32_t v(int stage) const { return smem + V_AT + (uint32_t)stage * V_BYTES; }
    DEVICE uint32_t tile(int stage) const { return smem + TILES_AT + (uint32_t)(stage * (int)BYTES_OF_TILE); }
    DEVICE uint32_t out(int warp) const { return smem + OUT_AT + (uint32_t)warp * OUT_BYTES_OF_WARP; }

    /* Called by one thread. */
    DEVICE void init_barriers() const
    {
        for (int i = 0; i < Q_STAGES; i++)
            mbarrier_init(barrier(Q_FULL, i), 1), mbarrier_init(barrier(Q_EMPTY, i), CONSUMERS);
        for (int i = 0; i < TILE_STAGES; i++)
            mbarrier_init(barrier(TILE_FULL, i), 1), mbarrier_init(barrier(TILE_EMPTY, i), 4 * CONSUMERS + 2);
        for (int i = 0; i < KV_STAGES; i++) {
            mbarrier_init(barrier(K_FULL, i), 1), mbarrier_init(barrier(K_EMPTY, i), CONSUMERS);
            mbarrier_init(barrier(V_FULL, i), 1), mbarrier_init(barrier(V_EMPTY, i), CONSUMERS);
        }
        mbarrier_init(barrier(NEXT_WANTED, 0), 1);
        if constexpr (SPLITS) mbarrier_init(barrier(Q_RAW, 0), 1);
        mbarrier_fence_init();
    }
};

} // namespace mha_forward
