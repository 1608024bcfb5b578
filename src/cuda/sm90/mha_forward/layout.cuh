/* SPDX-License-Identifier: MIT
 *
 * Shared memory, barriers and roles of dense MHA forward on Hopper, per head size. Q, K and V are stored in
 * tiles of 64 columns; a row of a tile is a line of 128 bytes, swizzled (swizzle_128).
 *
 *            rows   keys    stages    stages   registers per
 *            /tile  /block  of K, V   of Q     consumer thread
 *   192/128  128    128     2         1        O 64 + S 64 + P 32, of 224      224 KiB
 *   128/128  128    128     2         2        the same                        208
 *   64/64    192    128     4         2        O 32 + S 64 + P 32, of 160      201
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/quad.cuh"
#include "../../device/result.cuh"
#include "../../device/ring.cuh"
#include "../../device/shared.cuh"
#include "../../device/tma.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"

namespace mha_forward {

/* Slots of the ring of tiles. The consumers know of the tile whose results they write, the current one and
 * the next one. */
enum { TILE_SLOTS = 4 };

/* A tile of query rows. TileProducer writes it; the other producers and the consumers read it. */
struct Tile {
    int token; /* the first: index in the request, or among all tokens where requests are ragged */
    int rows;  /* rows that belong to the request */
    int request, head;
    int keys;      /* of the request */
    int seen;      /* keys visible to the tile's first token; may be below 0 */
    int blocks;    /* key blocks visible to some row; < 0: no more tiles */
    int first_key; /* the request's first key among all keys */
};

template <int D_QK_, int D_V_> struct MhaLayout {
    static constexpr int D_QK = D_QK_, D_V = D_V_;
    static constexpr int KEYS = MHA_SM90_KEYS(D_QK_);
    static constexpr int CONSUMERS = MHA_SM90_ROWS(D_QK_) / 64, ROWS = 64 * CONSUMERS,
                         THREADS = WARPGROUP_THREADS * (CONSUMERS + 1);
    static constexpr int STAGES = D_QK == 64 ? 4 : 2, Q_PLACES = D_QK == 192 ? 1 : 2;
    /* Weights of a block that a thread computes while the previous block's O += P V still runs; limited by
     * registers. */
    static constexpr int EARLY = D_QK == 64 ? 20 : 16;
    /* Test the barriers of the next stages between the exponentials: at small head sizes a block is short
     * compared with such a wait. */
    static constexpr bool ASKS_EARLY = D_QK == 64;
    static constexpr bool TAKES_TURNS = D_QK != 128; /* at 128 turns cost more than they gain */
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 56,
                         CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 224;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                      (CONSUMERS + 1) * (65536 / THREADS / 8 * 8),
                  "warpgroups would wait for registers for ever");

    static constexpr int QK_TILES = D_QK / 64, V_TILES = D_V / 64;
    static constexpr uint32_t Q_TILE = ROWS * LINE_BYTES, KEY_TILE = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = QK_TILES * Q_TILE, K_BYTES = QK_TILES * KEY_TILE,
                              V_BYTES = V_TILES * KEY_TILE;
    static constexpr uint32_t K_AT = Q_PLACES * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES,
                              BARRIERS_AT = V_AT + STAGES * V_BYTES;
    enum {
        Q_FULL,
        Q_EMPTY = Q_FULL + Q_PLACES,
        TILE_FULL = Q_EMPTY + Q_PLACES,
        TILE_EMPTY = TILE_FULL + TILE_SLOTS,
        K_FULL = TILE_EMPTY + TILE_SLOTS,
        K_EMPTY = K_FULL + STAGES,
        V_FULL = K_EMPTY + STAGES,
        V_EMPTY = V_FULL + STAGES,
        NEXT_WANTED = V_EMPTY + STAGES,
        BARRIERS
    };
    static constexpr uint32_t TILES_AT = (BARRIERS_AT + BARRIERS * 8 + 127) / 128 * 128;
    static constexpr uint32_t WINDOW_AT = TILES_AT + TILE_SLOTS * sizeof(Tile),
                              WINDOW_BYTES = 32 * 20; /* of Requests */
    static constexpr uint32_t RESULTS_AT = WINDOW_AT + WINDOW_BYTES,
                              RESULT_ROWS = D_QK == 64 ? 16 : 8, /* rows a warp writes at a time */
        RESULTS_OF_WARP = RESULT_ROWS * D_V * 2;
    static constexpr uint32_t BYTES = RESULTS_AT + 4 * CONSUMERS * RESULTS_OF_WARP;
    static_assert(BYTES <= 227 * 1024, "it fits");

    uint32_t base;

    DEVICE uint32_t barrier(int first, int i) const
    {
        return base + BARRIERS_AT + 8u * (uint32_t)(first + i);
    }
    DEVICE uint32_t q(int place) const { return base + (uint32_t)place * Q_BYTES; }
    DEVICE uint32_t k(int stage) const { return base + K_AT + (uint32_t)stage * K_BYTES; }
    DEVICE uint32_t v(int stage) const { return base + V_AT + (uint32_t)stage * V_BYTES; }
    DEVICE uint32_t tile(int slot) const { return base + TILES_AT + (uint32_t)(slot * (int)sizeof(Tile)); }
    DEVICE uint32_t results(int warp) const { return base + RESULTS_AT + (uint32_t)warp * RESULTS_OF_WARP; }

    /* Called by one thread. */
    DEVICE void init_barriers() const
    {
        for (int i = 0; i < Q_PLACES; i++)
            mbarrier_init(barrier(Q_FULL, i), 1), mbarrier_init(barrier(Q_EMPTY, i), CONSUMERS);
        for (int i = 0; i < TILE_SLOTS; i++)
            mbarrier_init(barrier(TILE_FULL, i), 1), mbarrier_init(barrier(TILE_EMPTY, i), 4 * CONSUMERS + 2);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(barrier(K_FULL, i), 1), mbarrier_init(barrier(K_EMPTY, i), CONSUMERS);
            mbarrier_init(barrier(V_FULL, i), 1), mbarrier_init(barrier(V_EMPTY, i), CONSUMERS);
        }
        mbarrier_init(barrier(NEXT_WANTED, 0), 1);
        mbarrier_fence_init();
    }
};

} // namespace mha_forward
