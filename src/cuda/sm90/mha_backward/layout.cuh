/* SPDX-License-Identifier: MIT
 *
 * Shared memory, barriers and roles of dense MHA backward on Hopper, per head size.
 *
 *   Q, dO     tiles of 64 columns; a row is a line of 128 bytes (swizzle_128)
 *   V, K      the same; but K at 192, and Q and K at 96, in tiles of 32 columns, lines of 64 bytes (swizzle_64),
 *             so that half of dQ's columns, or all, are whole tiles
 *   dS        a line per key, of 64 rows: transposed it is the A of dQ = dS K
 *
 *            registers of a consumer: dK  dV  S, then P  dP  P, dS packed  K   dQ             shared memory
 *   192/128                            96  64  32         0   16 + 16      -   48, after S    226 KiB
 *   128/128                            64  64  32         32  16           -   64, after S    226
 *    96/64                             48  32  32         32  16           16  48, before S   203
 *   64/64                              32  32  32         32  16           16  of its own     195
 */
#pragma once

#include "../../device/mbarrier.cuh"
#include "../../device/ring.cuh"
#include "../../device/shared.cuh"
#include "../../device/tma.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"

namespace mha_backward {

/* Stages of the ring of work tiles, between the producer and the consumers. */
enum { WORK_STAGES = 2 };

/* A work tile: a block of keys of a key head, with the tiles of rows that see it, of all its query heads or of one.
 * The producer writes it, the consumers read it; its first two parts are 16 bytes each. */
struct WorkKeys {
    int key;  /* the first: index in the request, or among all tokens where requests are ragged */
    int keys; /* keys that belong to the request */
    uint32_t request, head; /* request: 0 where requests are ragged; head: the key head */
};
struct WorkRows {
    int first_tile; /* first tile of rows that sees a key, numbered over all requests */
    int tiles;      /* tiles of a head; < 0: no more work tiles */
    int diagonal;   /* row i from first_tile on sees key t of the block if t + diagonal <= i */
    uint32_t phase; /* of the barriers of K and V (phase_of), and its group (pack_group) */
};
struct WorkTile {
    WorkKeys k;
    WorkRows q;
    int start; /* the tile at which the loop over a head's tiles starts (scheduler.cuh) */
    int order; /* in order: key blocks that add to dQ before this one. Causal: those behind it, or, if its rows descend,
                  less than 0: ~ of those before it. Full: those before its group */
    int head;  /* the first query head */
    int block; /* of all requests' keys, of one head */
};

/* Returns the phase of the barriers of K and V, of a work tile's word `phase`. */
template <typename Layout> DEVICE uint32_t phase_of(uint32_t word)
{
    return MHA_BACKWARD_SM90_HAS_GROUPS(Layout::D_QK) ? word & 1 : word;
}

/* Returns the keys of the work tile at the address `work`. */
DEVICE WorkKeys load_work_keys(uint32_t work)
{
    const uint4 words = load_shared_16(work + offsetof(WorkTile, k));
    return {(int)words.x, (int)words.y, words.z, words.w};
}

/* Which warpgroup computes dQ of a tile: both consumers, half the columns each; the consumers alternately; or
 * a warpgroup of its own. */
enum DqBy { DQ_BY_HALVES, DQ_BY_ALTERNATE_TILES, DQ_BY_OWN_WARPGROUP };

/* The swizzle of a tile's lines, as a matrix descriptor states it. */
enum Swizzle { SWIZZLE_128 = 1, SWIZZLE_64 = 2 };

/* Returns the position of a row's lse or delta in its tile. Within 16 rows, the four that a thread has of two groups
 * of eight are adjacent. */
DEVICE int stat_at(int row)
{
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

/* Addresses in shared memory, which begins at `smem`, of what every layout has. */
template <typename Layout> struct Addresses {
    uint32_t smem;

    DEVICE uint32_t barrier(int first, int i = 0) const
    {
        return smem + Layout::BARRIERS_AT + 8u * (uint32_t)(first + i);
    }
    DEVICE uint32_t k(int stage = 0) const { return smem + (uint32_t)stage * Layout::K_BYTES; }
    DEVICE uint32_t v(int stage = 0) const { return smem + Layout::V_AT + (uint32_t)stage * Layout::V_BYTES; }
    /* The stage of K and V of a work tile is that of the work tile, if there are as many. */
    static DEVICE int key_stage(int work_stage) { return Layout::KEY_STAGES == 1 ? 0 : work_stage; }
    DEVICE uint32_t q(int stage) const { return smem + Layout::Q_AT + (uint32_t)stage * Layout::Q_BYTES; }
    DEVICE uint32_t dout(int stage) const
    {
        return smem + Layout::DO_AT + (uint32_t)stage * Layout::DO_BYTES;
    }
    /* Which tile the dQ of a stage belongs to: its number over all heads, and its order (dq_order). */
    DEVICE uint32_t dq_tile(int stage) const { return smem + Layout::DQ_TILES_AT + (uint32_t)stage * 8; }
    DEVICE uint32_t stats(int stage) const
    {
        return smem + Layout::STATS_AT + (uint32_t)stage * Layout::STATS_BYTES;
    }
    DEVICE uint32_t work(int stage) const
    {
        return smem + Layout::WORK_AT + (uint32_t)(stage * (int)sizeof(WorkTile));
    }
};

template <int D_QK_, int D_V_> struct BackwardLayout : Addresses<BackwardLayout<D_QK_, D_V_>> {
    using Base = Addresses<BackwardLayout<D_QK_, D_V_>>;
    using Base::smem, Base::barrier;
    static constexpr int D_QK = D_QK_, D_V = D_V_;
    static constexpr int ROWS = MHA_BACKWARD_SM90_ROWS(D_QK_), KEYS = MHA_BACKWARD_SM90_KEYS(D_QK_);
    static constexpr int CTAS = 1, CTA_KEYS = KEYS;          /* that share a work tile; keys of each */
    static constexpr int CONSUMERS = MHA_BACKWARD_CONSUMERS; /* warpgroups that own keys */
    static constexpr int KEY_STEP = 64;                      /* keys from one consumer's to the next one's */
    static constexpr DqBy DQ_BY = D_QK == 192  ? DQ_BY_HALVES
                                  : D_QK == 64 ? DQ_BY_OWN_WARPGROUP
                                               : DQ_BY_ALTERNATE_TILES;
    static constexpr int DQ_PRODUCERS = DQ_BY == DQ_BY_HALVES ? CONSUMERS : 1; /* per tile */
    static constexpr int WARPGROUPS = CONSUMERS + (DQ_BY == DQ_BY_OWN_WARPGROUP ? 2 : 1),
                         THREADS = WARPGROUP_THREADS * WARPGROUPS;
    static constexpr int Q_STAGES = D_QK <= 96 ? 4 : 2,
                         DO_STAGES = D_QK == 192 ? 1 : Q_STAGES;    /* of Q; of dO */
    static constexpr int KEY_STAGES = D_QK == 64 ? WORK_STAGES : 1; /* of K and V */
    /* Where registers suffice, dP is issued together with S, so that the exponentials hide half of it, and dK
     * together with dV, with dS from registers. */
    static constexpr bool DP_EARLY = D_QK != 192, DK_EARLY = D_QK != 192;
    static constexpr int DELTA_EARLY = D_QK == 192 ? 1 : 4; /* · 16 rows whose delta is loaded beside dP */
    static constexpr bool KEEPS_P = D_QK != 192;            /* P in fp32 until dS is computed */
    static constexpr bool SENDS_P = false;                  /* to the other consumer */
    static constexpr bool S_EARLY = D_QK <= 96; /* S of the next tile runs beside dV and dK, or dQ */
    static constexpr int PRODUCER_REGISTERS = 24, DQ_REGISTERS = DQ_BY == DQ_BY_OWN_WARPGROUP ? 72 : 0,
                         CONSUMER_REGISTERS = DQ_BY == DQ_BY_OWN_WARPGROUP ? 208 : 240;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS + DQ_REGISTERS <=
                      WARPGROUPS * (65536 / THREADS / 8 * 8),
                  "warpgroups would wait for registers for ever");
    static_assert(THREADS == MHA_BACKWARD_SM90_THREADS(D_QK), "the host launches as many");
    static_assert(KEYS == 64 * CONSUMERS && ROWS == 64, "a consumer has 64 keys, dQ 64 rows");

    static constexpr int DQ_TILE = ROWS * D_QK, DQ_OF_PRODUCER = DQ_TILE / DQ_PRODUCERS, /* floats */
        DQ_COLUMNS = D_QK / DQ_PRODUCERS, DQ_VALUES = DQ_OF_PRODUCER / WARPGROUP_THREADS;

    static constexpr Swizzle Q_SWIZZLE = D_QK == 96 ? SWIZZLE_64 : SWIZZLE_128;
    static constexpr uint32_t Q_LINE = Q_SWIZZLE == SWIZZLE_64 ? 64 : 128;
    static constexpr int Q_COLUMNS = (int)Q_LINE / 2, Q_STEPS = Q_COLUMNS / 16; /* of a tile */
    static constexpr Swizzle K_SWIZZLE = D_QK == 192 ? SWIZZLE_64 : Q_SWIZZLE;
    static constexpr uint32_t K_LINE = K_SWIZZLE == SWIZZLE_64 ? 64 : 128;      /* bytes */
    static constexpr int K_COLUMNS = (int)K_LINE / 2, K_STEPS = K_COLUMNS / 16; /* of a tile */
    static constexpr int K_BOX_TILES = D_QK / K_COLUMNS;                        /* that a load brings */
    static constexpr uint32_t K_TILE = KEYS * K_LINE, V_TILE = KEYS * LINE_BYTES, Q_TILE = ROWS * Q_LINE,
                              DO_TILE = ROWS * LINE_BYTES, DS_TILE = KEYS * LINE_BYTES;
    static constexpr uint32_t K_BYTES = KEYS * D_QK * 2, V_BYTES = KEYS * D_V * 2, Q_BYTES = ROWS * D_QK * 2,
                              DO_BYTES = ROWS * D_V * 2, DS_BYTES = ROWS * KEYS * 2,
                              DQ_BYTES = DQ_OF_PRODUCER * 4, STATS_BYTES = 2 * ROWS * 4;
    static constexpr uint32_t V_AT = KEY_STAGES * K_BYTES, Q_AT = V_AT + KEY_STAGES * V_BYTES,
                              DO_AT = Q_AT + Q_STAGES * Q_BYTES, DS_AT = DO_AT + DO_STAGES * DO_BYTES,
                              DQ_AT = DS_AT + 2 * DS_BYTES, STATS_AT = DQ_AT + 2 * DQ_BYTES,
                              WORK_AT = STATS_AT + Q_STAGES * STATS_BYTES,
                              DQ_TILES_AT = WORK_AT + WORK_STAGES * sizeof(WorkTile),
                              BARRIERS_AT = DQ_TILES_AT + 2 * 8;
    enum {
        K_FULL,
        V_FULL = K_FULL + KEY_STAGES,
        KEYS_EMPTY = V_FULL + KEY_STAGES,
        RAW = KEYS_EMPTY + KEY_STAGES, /* data to be cleared before it counts as full */
        Q_FULL,
        Q_EMPTY = Q_FULL + Q_STAGES,
        DO_FULL = Q_EMPTY + Q_STAGES,
        DO_EMPTY = DO_FULL + DO_STAGES,
        DS_FULL = DO_EMPTY + DO_STAGES, /* two per consumer */
        DS_EMPTY = DS_FULL + 2 * CONSUMERS,
        DQ_FULL = DS_EMPTY + 2, /* two stages; one per producer where there are two */
        DQ_EMPTY = DQ_FULL + 2,
        WORK_FULL = DQ_EMPTY + 2,
        WORK_EMPTY = WORK_FULL + WORK_STAGES,
        BARRIERS = WORK_EMPTY + WORK_STAGES
    };
    static constexpr uint32_t BYTES = BARRIERS_AT + BARRIERS * 8;
    static_assert(BYTES <= 227 * 1024, "it fits");

    /* Returns the address as a matrix descriptor states it. */
    static DEVICE uint32_t in_descriptor(uint32_t at) { return at; }
    DEVICE uint32_t ds(int stage) const { return smem + DS_AT + (uint32_t)stage * DS_BYTES; }
    DEVICE uint32_t dq(int stage) const { return smem + DQ_AT + (uint32_t)stage * DQ_BYTES; }
    /* Stage and parity of the dQ of a producer's tile `n`. */
    static DEVICE int dq_stage(int producer, uint32_t n)
    {
        return DQ_PRODUCERS == 1 ? (int)(n % 2) : producer;
    }
    static DEVICE uint32_t dq_parity(uint32_t n) { return (DQ_PRODUCERS == 1 ? n / 2 : n) % 2; }

    /* Called by one thread. */
    DEVICE void init_barriers() const
    {
        for (int i = 0; i < KEY_STAGES; i++)
            mbarrier_init(barrier(K_FULL, i), 1), mbarrier_init(barrier(V_FULL, i), 1),
                mbarrier_init(barrier(KEYS_EMPTY, i), WARPGROUPS - 1);
        mbarrier_init(barrier(RAW), 1);
        for (int i = 0; i < Q_STAGES; i++) {
            mbarrier_init(barrier(Q_FULL, i), 1), mbarrier_init(barrier(Q_EMPTY, i), CONSUMERS);
        }
        for (int i = 0; i < DO_STAGES; i++)
            mbarrier_init(barrier(DO_FULL, i), 1), mbarrier_init(barrier(DO_EMPTY, i), CONSUMERS);
        for (int i = 0; i < 2; i++)
            mbarrier_init(barrier(DQ_FULL, i), 4), mbarrier_init(barrier(DQ_EMPTY, i), 1);
        for (int i = 0; i < 2; i++)
            mbarrier_init(barrier(DS_FULL, i), 4), mbarrier_init(barrier(DS_FULL + 2, i), 4),
                mbarrier_init(barrier(DS_EMPTY, i), DK_EARLY ? DQ_PRODUCERS : 2 * CONSUMERS); /* dQ, dK */
        for (int i = 0; i < WORK_STAGES; i++)
            mbarrier_init(barrier(WORK_FULL, i), 1),
                mbarrier_init(barrier(WORK_EMPTY, i), 4 * (WARPGROUPS - 1));
        mbarrier_fence_init();
    }
};

} // namespace mha_backward
