/* SPDX-License-Identifier: MIT
 *
 * Keys that are values of the queries' type, on their way from memory to a ring of blocks in shared memory: by cp.async, eight
 * threads a key, KEYS_AT_ONCE keys at a time. A source says where keys are: a block table (dense_decode/dense_decode.cuh) or a list of
 * slots (sparse_decode/sparse_decode.cuh).
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/fragment.h"
#include "tile.cuh"

/* Copies a thread's chunks of a row of `columns`, zeros past the first `valid_columns`, from any even address through
 * registers. */
DEVICE void copy_row_unaligned(uint32_t to, uint32_t group_bytes, const uint16_t *from, int valid_columns,
                               int columns)
{
#pragma unroll 1
    for (int i = 0; i < columns / LINE_ELEMENTS * CHUNK_ELEMENTS; i++) {
        const int column = i / CHUNK_ELEMENTS * LINE_ELEMENTS + i % CHUNK_ELEMENTS;
        store_shared_2(to + (uint32_t)(i / CHUNK_ELEMENTS) * group_bytes + (uint32_t)(i % CHUNK_ELEMENTS) * 2,
                       column < valid_columns ? from[column] : (uint16_t)0);
    }
}

/* Waits until the oldest block of a ring has arrived: stages - 1 are under way. */
DEVICE void wait_for_oldest(int stages)
{
    switch (stages) {
    case 2: cp_async_wait<0>(); break;
    case 3: cp_async_wait<1>(); break;
    case 4: cp_async_wait<2>(); break;
    case 5: cp_async_wait<3>(); break;
    default: cp_async_wait<4>(); break;
    }
}

/* Keys as attend.cuh wants them. `beside_scores` issues copies in batches between the steps of the scores, or all at once where
 * little else is to be done. */
template <typename Tile, typename Call, typename Source> struct RingKeys {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool CONVERTS_BESIDE_VALUES = false;
    static constexpr bool LISTED = Source::LISTED, ENOUGH_REGISTERS = true;
    static constexpr uint32_t KEY_GROUP = Tile::KEY_GROUP, STAGE_BYTES = Tile::STAGE_BYTES,
                              BYTES_BEHIND_RING = 0;
    static constexpr int LEAST_STAGES = LATENT_LEAST_STAGES;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    static constexpr int COPY_BATCHES = Tile::ROWS == 16 || Tile::KEYS * Tile::ROWS == 4096 ? 1 : 3,
                         COPY_STEPS = 4;
#else
    static constexpr int COPY_BATCHES = Tile::ROWS == 16 ? 1 : 3, COPY_STEPS = 4;
#endif
    static constexpr int COPY_BATCH = MAX_GROUPS * PASSES / COPY_BATCHES;
    using Places = typename Source::Places;
    using Flags = typename Source::Flags;

    const Call call;
    Source source;
    uint32_t ring_at;
    Flags flags;
    Places
        places; /* of the block that is copied next; fetched a block ahead: a copy that waits for the table waits twice */

    /* A block of keys on its way into a stage: what is left to be issued. What is no key is not read: what its memory holds must
     * not reach a product, so zeros stand there. */
    struct Copies {
        const uint16_t *from[PASSES];
        uint32_t to;
        bool valid[PASSES];
        bool some;
    };
    Copies copies;

    DEVICE RingKeys(const Call &of_call, uint32_t ring)
        : call(of_call), source{of_call},
          ring_at(ring), flags{ring + (uint32_t)of_call.stages() * STAGE_BYTES}
    {
    }

    DEVICE Copies prepare_copies(int stage, unsigned first_key) const
    {
        const unsigned row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        Copies prepared;
        prepared.to = ring_at + (uint32_t)stage * STAGE_BYTES + swizzle_128(row, chunk);
        prepared.some = first_key < (unsigned)call.end() && call.aligned();
        source.place(prepared.from, prepared.valid, first_key, (int)chunk * CHUNK_ELEMENTS, places);
        return prepared;
    }

    /* The copies begin … end - 1 of MAX_GROUPS × PASSES; d_qk 512 has not the last PASSES. */
    DEVICE void issue_copies(int begin, int end) const
    {
#pragma unroll
        for (int i = begin; i < end; i++) {
            const int group = i / PASSES, pass = i % PASSES;
            if (copies.some && (group < MAX_GROUPS - 1 || call.d_qk() == MAX_GROUPS * LINE_ELEMENTS))
                cp_async_16(copies.to + (uint32_t)group * KEY_GROUP +
                                (uint32_t)(pass * KEYS_AT_ONCE * LINE_BYTES),
                            copies.from[pass] + group * LINE_ELEMENTS, copies.valid[pass]);
        }
    }

    /* The whole block where it cannot be read 16 bytes at a time. */
    DEVICE void copy_unaligned(int stage, unsigned first_key) const
    {
        const Copies all = prepare_copies(stage, first_key);
        if (call.aligned() || first_key >= (unsigned)call.end()) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            copy_row_unaligned(all.to + (uint32_t)(pass * KEYS_AT_ONCE * LINE_BYTES), KEY_GROUP,
                               all.from[pass], all.valid[pass] ? call.d_qk() : 0, call.d_qk());
    }

    /* ---- As attend.cuh calls it ---- */

    DEVICE int stages() const
    {
        return call.stages();
    }

    DEVICE int blocks_ahead() const
    {
        return call.stages() - 1;
    }

    /* The first blocks of a piece. What is past the end is no copy at all. Keys are unsigned: a block that is ahead may pass 2^31. */
    DEVICE void begin(unsigned first_key, bool some)
    {
        if (some) places = source.find(first_key);
        for (int i = 0; i < blocks_ahead(); i++) {
            const unsigned key = first_key + (unsigned)(i * KEYS);
            if (some) {
                copy_unaligned(i, key);
                copies = prepare_copies(i, key);
                issue_copies(0, MAX_GROUPS * PASSES);
                if constexpr (LISTED)
                    for (int pass = 0; pass < PASSES; pass++) flags.set(i, pass, copies.valid[pass]);
            }
            cp_async_commit(); /* groups are counted: an empty one too */
            if (some) places = source.find(first_key + (unsigned)(i + 1) * KEYS);
        }
    }

    DEVICE void wait_for_block() const
    {
        wait_for_oldest(call.stages());
    }

    DEVICE void before_scores(int, int free_stage, unsigned, unsigned ahead)
    {
        copy_unaligned(free_stage, ahead);
    }

    DEVICE void beside_scores(int step, int free_stage, unsigned ahead)
    {
        if (step == 0) {
            copies = prepare_copies(free_stage, ahead);
            if constexpr (LISTED)
                for (int pass = 0; pass < PASSES; pass++) flags.set(free_stage, pass, copies.valid[pass]);
        }
        if (step % COPY_STEPS == 0 && step / COPY_STEPS < COPY_BATCHES)
            issue_copies(step / COPY_STEPS * COPY_BATCH, (step / COPY_STEPS + 1) * COPY_BATCH);
        if (step == COPY_STEPS * COPY_BATCHES - 1) places = source.find(ahead + KEYS);
    }

    DEVICE void before_values(int) const {}

    DEVICE void beside_values(int, int) const {}
};
