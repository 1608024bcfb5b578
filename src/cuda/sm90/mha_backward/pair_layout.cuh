/* SPDX-License-Identifier: MIT
 *
 * Shared memory, barriers and roles at 256/256, where two CTAs share a work tile.
 *
 *   K, V, Q, dO   tiles of 64 columns; a row is a line of 128 bytes (swizzle_128)
 *   other K       the other CTA's keys, the half of the columns of dQ that this CTA computes
 *   P             for dS, four words of a thread, thread after thread, and so on: sixteen pairs of fp16, or, where dV has
 *                 fp16, 32 of fp32
 *   dS            a line per key, of 64 rows; other dS: of the other CTA's keys
 *
 *   registers     of the first consumer: dV 128, S 32, P 16, dQ 32; of the second: dK 128, dP 32, P 16, dS 16, dQ 32
 */
#pragma once

#include "layout.cuh"

namespace mha_backward {

template <> struct BackwardLayout<256, 256> : Addresses<BackwardLayout<256, 256>> {
    static constexpr int D_QK = 256, D_V = 256;
    static constexpr int ROWS = MHA_BACKWARD_SM90_ROWS(256),
                         KEYS = MHA_BACKWARD_SM90_KEYS(256); /* of a pair */
    static constexpr int CTAS = 2, CTA_KEYS = KEYS / CTAS;
    static constexpr int CONSUMERS = MHA_BACKWARD_CONSUMERS, KEY_STEP = 0;
    static constexpr DqBy DQ_BY = DQ_BY_HALVES;
    static constexpr int DQ_PRODUCERS = MHA_BACKWARD_SM90_DQ_PARTS(256); /* per tile */
    static constexpr int WARPGROUPS = CONSUMERS + 1, THREADS = WARPGROUP_THREADS * WARPGROUPS;
    static constexpr int Q_STAGES = 2, DO_STAGES = 1, KEY_STAGES = 1;
    static constexpr int DELTA_EARLY = 4;
    static constexpr bool KEEPS_P = false, SENDS_P = true; /* to the consumer that computes dS */
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                      WARPGROUPS * (65536 / THREADS / 8 * 8),
                  "warpgroups would wait for registers for ever");
    static_assert(THREADS == MHA_BACKWARD_SM90_THREADS(256), "the host launches as many");
    static_assert(CTA_KEYS == 64 && ROWS == 64 && DQ_PRODUCERS == CTAS * CONSUMERS, "products have 64 rows");

    static constexpr int DQ_TILE = ROWS * D_QK, DQ_OF_PRODUCER = DQ_TILE / DQ_PRODUCERS; /* floats */
    static constexpr int DQ_VALUES = DQ_OF_PRODUCER / WARPGROUP_THREADS;
    /* A part of dQ is stored in two pieces, since there is room for the first alone. */
    static constexpr int FIRST_VALUES = DQ_VALUES / 2;

    static constexpr Swizzle Q_SWIZZLE = SWIZZLE_128, K_SWIZZLE = Q_SWIZZLE;
    static constexpr uint32_t Q_LINE = LINE_BYTES, K_LINE = Q_LINE;
    static constexpr int Q_COLUMNS = 64, Q_STEPS = Q_COLUMNS / 16, K_COLUMNS = Q_COLUMNS,
                         K_STEPS = Q_STEPS;                     /* of a tile */
    static constexpr int K_BOX_TILES = D_QK / K_COLUMNS / CTAS; /* that a load brings */
    static constexpr uint32_t K_TILE = CTA_KEYS * K_LINE, V_TILE = K_TILE, Q_TILE = ROWS * Q_LINE,
                              DO_TILE = Q_TILE, DS_TILE = CTA_KEYS * LINE_BYTES;
    static constexpr uint32_t K_BYTES = CTA_KEYS * D_QK * 2, OTHER_K_BYTES = K_BYTES / CTAS,
                              V_BYTES = CTA_KEYS * D_V * 2, Q_BYTES = ROWS * D_QK * 2,
                              DO_BYTES = ROWS * D_V * 2, P_BYTES = ROWS * CTA_KEYS * 4, DS_BYTES = DS_TILE,
                              DQ_BYTES = FIRST_VALUES * WARPGROUP_THREADS * 4, STATS_BYTES = 2 * ROWS * 4;
    static constexpr uint32_t OTHER_K_AT = K_BYTES, V_AT = OTHER_K_AT + OTHER_K_BYTES, Q_AT = V_AT + V_BYTES,
                              DO_AT = Q_AT + Q_STAGES * Q_BYTES, P_AT = DO_AT + DO_STAGES * DO_BYTES,
                              DS_AT = P_AT + P_BYTES, OTHER_DS_AT = DS_AT + DS_BYTES,
                              DQ_AT = OTHER_DS_AT + DS_BYTES, STATS_AT = DQ_AT + CONSUMERS * DQ_BYTES,
                              WORK_AT = STATS_AT + Q_STAGES * STATS_BYTES,
                              DQ_TILES_AT = WORK_AT + WORK_STAGES * sizeof(WorkTile),
                              NEXT_AT = DQ_TILES_AT + CONSUMERS * 8, BARRIERS_AT = NEXT_AT + 8;
    enum {
        K_FULL,
        OTHER_K_FULL,
        V_FULL,
        KEYS_EMPTY,
        RAW, /* data to be cleared before it counts as full */
        Q_FULL,
        Q_EMPTY = Q_FULL + Q_STAGES,
        DO_FULL = Q_EMPTY + Q_STAGES,
        DO_EMPTY = DO_FULL + DO_STAGES,
        P_FULL = DO_EMPTY + DO_STAGES,
        P_EMPTY,
        DS_FULL,
        DS_EMPTY,       /* both consumers have read dS */
        OTHER_DS_FULL,  /* the other CTA has written its dS here */
        OTHER_DS_EMPTY, /* both consumers of the other CTA have read this CTA's dS */
        DQ_FULL,        /* one per consumer */
        DQ_EMPTY = DQ_FULL + CONSUMERS,
        NEXT_FULL = DQ_EMPTY + CONSUMERS, /* in CTA 1: the number of its next work tile */
        NEXT_EMPTY,                       /* in CTA 0 */
        WORK_FULL,
        WORK_EMPTY = WORK_FULL + WORK_STAGES,
        BARRIERS = WORK_EMPTY + WORK_STAGES
    };
    static constexpr uint32_t BYTES = BARRIERS_AT + BARRIERS * 8;
    static_assert(BYTES <= 227 * 1024, "it fits");

    /* Returns the address as a matrix descriptor states it: without the CTA's number in the cluster. */
    static DEVICE uint32_t in_descriptor(uint32_t at) { return at & 0x3ffff; }
    DEVICE uint32_t other_k() const { return smem + OTHER_K_AT; }
    DEVICE uint32_t p() const { return smem + P_AT; }
    DEVICE uint32_t ds() const { return smem + DS_AT; }
    DEVICE uint32_t other_ds() const { return smem + OTHER_DS_AT; }
    DEVICE uint32_t dq(int consumer) const { return smem + DQ_AT + (uint32_t)consumer * DQ_BYTES; }
    DEVICE uint32_t next() const { return smem + NEXT_AT; }

    /* Called by one thread. */
    DEVICE void init_barriers() const
    {
        mbarrier_init(barrier(K_FULL), 1), mbarrier_init(barrier(OTHER_K_FULL), 1),
            mbarrier_init(barrier(V_FULL), 1);
        mbarrier_init(barrier(KEYS_EMPTY), CONSUMERS), mbarrier_init(barrier(RAW), 1);
        for (int i = 0; i < Q_STAGES; i++)
            mbarrier_init(barrier(Q_FULL, i), 1), mbarrier_init(barrier(Q_EMPTY, i), CONSUMERS);
        for (int i = 0; i < DO_STAGES; i++)
            mbarrier_init(barrier(DO_FULL, i), 1), mbarrier_init(barrier(DO_EMPTY, i), CONSUMERS);
        mbarrier_init(barrier(P_FULL), 4), mbarrier_init(barrier(P_EMPTY), 4);
        mbarrier_init(barrier(DS_FULL), 4), mbarrier_init(barrier(DS_EMPTY), CONSUMERS);
        mbarrier_init(barrier(OTHER_DS_FULL), 1), mbarrier_init(barrier(OTHER_DS_EMPTY), CONSUMERS);
        for (int i = 0; i < CONSUMERS; i++)
            mbarrier_init(barrier(DQ_FULL, i), 4), mbarrier_init(barrier(DQ_EMPTY, i), 1);
        mbarrier_init(barrier(NEXT_FULL), 1), mbarrier_init(barrier(NEXT_EMPTY), 1);
        for (int i = 0; i < WORK_STAGES; i++)
            mbarrier_init(barrier(WORK_FULL, i), 1), mbarrier_init(barrier(WORK_EMPTY, i), 4 * CONSUMERS);
        mbarrier_fence_init();
    }
};

} // namespace mha_backward
