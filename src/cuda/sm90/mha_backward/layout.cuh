/* SPDX-License-Identifier: MIT
 *
 * Shared memory, barriers and roles of dense MHA backward on Hopper, per head size.
 *
 *   Q, dO     tiles of 64 columns; a row is a line of 128 bytes (swizzle_128)
 *   V, K      the same; but K at 192 in tiles of 32 columns, lines of 64 bytes (swizzle_64), so that half of
 *             dQ's columns are whole tiles
 *   dS        a line per key, of 64 rows: transposed it is the A of dQ = dS K
 *
 *            registers of a consumer: dK  dV  S, then P  dP  P, dS packed  K   dQ           shared memory
 *   192/128                            96  64  32         0   16 + 16      -   48, after S  226 KiB
 *   128/128                            64  64  32         32  16           -   64, after S  226
 *   64/64                              32  32  32         32  16           16  apart        163
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

/* Slots of the ring of items, between the producer and the consumers. */
enum { ITEM_SLOTS = 2 };

/* A work item: a block of keys of a key head. The producer writes it, the consumers read it. */
struct Item {
    int key;           /* the first: index in the request, or among all tokens where requests are ragged */
    int keys;          /* keys that belong to the request */
    int request, head; /* request: 0 where requests are ragged; head: the key head */
    int first_tile;    /* first tile of rows that sees a key, numbered over all requests */
    int tiles;         /* tiles of a head; < 0: no more items */
    int diagonal;      /* row i from first_tile on sees key t of the block if t + diagonal <= i */
    uint32_t phase;    /* of the barriers of K and V */
    int start;         /* the tile at which the walk over a head's tiles starts */
    int order;         /* in order: key blocks that add to dQ before this one; causal: those behind it */
    int gap[2];
};

/* Which warpgroup computes dQ of a tile. */
enum QueriesBy { DQ_BY_HALVES, DQ_IN_TURNS, DQ_APART };

/* The swizzle of a tile's lines, as a matrix descriptor states it. */
enum Swizzle { SWIZZLE_128 = 1, SWIZZLE_64 = 2 };

template <int D_QK_, int D_V_> struct BackwardLayout {
    static constexpr int D_QK = D_QK_, D_V = D_V_;
    static constexpr int ROWS = MHA_BACKWARD_SM90_ROWS(D_QK_), KEYS = MHA_BACKWARD_SM90_KEYS(D_QK_);
    static constexpr int CONSUMERS = MHA_BACKWARD_CONSUMERS; /* warpgroups that own keys */
    static constexpr QueriesBy DQ_BY = D_QK == 192 ? DQ_BY_HALVES : D_QK == 128 ? DQ_IN_TURNS : DQ_APART;
    static constexpr int MAKERS = DQ_BY == DQ_BY_HALVES ? CONSUMERS : 1; /* per tile */
    static constexpr int WARPGROUPS = CONSUMERS + (DQ_BY == DQ_APART ? 2 : 1),
                         THREADS = WARPGROUP_THREADS * WARPGROUPS;
    static constexpr int STAGES = DQ_BY == DQ_APART ? 4 : 2,
                         DO_STAGES = D_QK == 192 ? 1 : STAGES; /* of Q; of dO */
    /* Where registers suffice, dP is issued together with S, so that the exponentials hide half of it, and dK
     * together with dV, with dS from registers. */
    static constexpr bool DP_EARLY = D_QK != 192, DK_EARLY = D_QK != 192;
    static constexpr int DELTA_EARLY = D_QK == 192 ? 1 : 4; /* · 16 rows whose delta is loaded beside dP */
    static constexpr bool KEEPS_P = D_QK != 192;            /* P in fp32 until dS is computed; else in fp16 */
    static constexpr int PRODUCER_REGISTERS = 24, MAKER_REGISTERS = DQ_BY == DQ_APART ? 72 : 0,
                         CONSUMER_REGISTERS = DQ_BY == DQ_APART ? 208 : 240;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS + MAKER_REGISTERS <=
                      WARPGROUPS * (65536 / THREADS / 8 * 8),
                  "warpgroups would wait for registers for ever");
    static_assert(THREADS == MHA_BACKWARD_SM90_THREADS(D_QK), "the host launches as many");
    static_assert(KEYS == 64 * CONSUMERS && ROWS == 64, "a consumer has 64 keys, dQ 64 rows");

    static constexpr int DQ_TILE = ROWS * D_QK, DQ_OF_MAKER = DQ_TILE / MAKERS, /* floats */
        DQ_COLUMNS = D_QK / MAKERS, DQ_VALUES = DQ_OF_MAKER / WARPGROUP_THREADS;

    static constexpr Swizzle K_SWIZZLE = D_QK == 192 ? SWIZZLE_64 : SWIZZLE_128;
    static constexpr uint32_t K_LINE = K_SWIZZLE == SWIZZLE_64 ? 64 : 128;      /* bytes */
    static constexpr int K_COLUMNS = (int)K_LINE / 2, K_STEPS = K_COLUMNS / 16; /* of a tile */
    static constexpr uint32_t K_TILE = KEYS * K_LINE, V_TILE = KEYS * LINE_BYTES,
                              ROW_TILE = ROWS * LINE_BYTES, DS_TILE = KEYS * LINE_BYTES;
    static constexpr uint32_t K_BYTES = KEYS * D_QK * 2, V_BYTES = KEYS * D_V * 2, Q_BYTES = ROWS * D_QK * 2,
                              DO_BYTES = ROWS * D_V * 2, DS_BYTES = ROWS * KEYS * 2,
                              DQ_BYTES = DQ_OF_MAKER * 4, NUMBERS_BYTES = 2 * ROWS * 4;
    static constexpr uint32_t V_AT = K_BYTES, Q_AT = V_AT + V_BYTES, DO_AT = Q_AT + STAGES * Q_BYTES,
                              DS_AT = DO_AT + DO_STAGES * DO_BYTES, DQ_AT = DS_AT + 2 * DS_BYTES,
                              NUMBERS_AT = DQ_AT + 2 * DQ_BYTES,
                              ITEMS_AT = NUMBERS_AT + STAGES * NUMBERS_BYTES,
                              WHERE_AT = ITEMS_AT + ITEM_SLOTS * sizeof(Item), BARRIERS_AT = WHERE_AT + 2 * 8;
    enum {
        K_FULL,
        V_FULL,
        KEYS_EMPTY,
        RAW, /* data to be cleared before it counts as full */
        Q_FULL,
        Q_EMPTY = Q_FULL + STAGES,
        DO_FULL = Q_EMPTY + STAGES,
        DO_EMPTY = DO_FULL + DO_STAGES,
        DS_FULL = DO_EMPTY + DO_STAGES, /* two per consumer */
        DS_EMPTY = DS_FULL + 2 * CONSUMERS,
        DQ_FULL = DS_EMPTY + 2, /* two buffers; one per maker where there are two */
        DQ_EMPTY = DQ_FULL + 2,
        ITEM_FULL = DQ_EMPTY + 2,
        ITEM_EMPTY = ITEM_FULL + ITEM_SLOTS,
        BARRIERS = ITEM_EMPTY + ITEM_SLOTS
    };
    static constexpr uint32_t BYTES = BARRIERS_AT + BARRIERS * 8;
    static_assert(BYTES <= 227 * 1024, "it fits");

    /* Returns the position of a row's lse or delta. Within 16 rows, the four that a thread has of two groups
     * of eight are adjacent. */
    static DEVICE int number_at(int row)
    {
        return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
    }

    uint32_t base;

    DEVICE uint32_t barrier(int first, int i = 0) const
    {
        return base + BARRIERS_AT + 8u * (uint32_t)(first + i);
    }
    DEVICE uint32_t k() const { return base; }
    DEVICE uint32_t v() const { return base + V_AT; }
    DEVICE uint32_t q(int stage) const { return base + Q_AT + (uint32_t)stage * Q_BYTES; }
    DEVICE uint32_t dout(int stage) const { return base + DO_AT + (uint32_t)stage * DO_BYTES; }
    DEVICE uint32_t ds(int place) const { return base + DS_AT + (uint32_t)place * DS_BYTES; }
    DEVICE uint32_t dq(int place) const { return base + DQ_AT + (uint32_t)place * DQ_BYTES; }
    DEVICE uint32_t where(int place) const { return base + WHERE_AT + (uint32_t)place * 8; }
    /* Buffer and parity of the dQ of a maker's tile `n`. */
    static DEVICE int dq_place(int maker, uint32_t n) { return MAKERS == 1 ? (int)(n % 2) : maker; }
    static DEVICE uint32_t dq_parity(uint32_t n) { return (MAKERS == 1 ? n / 2 : n) % 2; }
    DEVICE uint32_t numbers(int stage) const { return base + NUMBERS_AT + (uint32_t)stage * NUMBERS_BYTES; }
    DEVICE uint32_t item(int slot) const { return base + ITEMS_AT + (uint32_t)(slot * (int)sizeof(Item)); }

    /* Called by one thread. */
    DEVICE void init_barriers() const
    {
        mbarrier_init(barrier(K_FULL), 1), mbarrier_init(barrier(V_FULL), 1);
        mbarrier_init(barrier(KEYS_EMPTY), WARPGROUPS - 1), mbarrier_init(barrier(RAW), 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(barrier(Q_FULL, i), 1), mbarrier_init(barrier(Q_EMPTY, i), CONSUMERS);
        }
        for (int i = 0; i < DO_STAGES; i++)
            mbarrier_init(barrier(DO_FULL, i), 1), mbarrier_init(barrier(DO_EMPTY, i), CONSUMERS);
        for (int i = 0; i < 2; i++)
            mbarrier_init(barrier(DQ_FULL, i), 4), mbarrier_init(barrier(DQ_EMPTY, i), 1);
        for (int i = 0; i < 2; i++)
            mbarrier_init(barrier(DS_FULL, i), 4), mbarrier_init(barrier(DS_FULL + 2, i), 4),
                mbarrier_init(barrier(DS_EMPTY, i), DK_EARLY ? MAKERS : 2 * CONSUMERS); /* dQ, dK */
        for (int i = 0; i < ITEM_SLOTS; i++)
            mbarrier_init(barrier(ITEM_FULL, i), 1),
                mbarrier_init(barrier(ITEM_EMPTY, i), 4 * (WARPGROUPS - 1));
        mbarrier_fence_init();
    }
};

} // namespace mha_backward
