/* SPDX-License-Identifier: MIT
 *
 * Copies keys of the queries' element type from global memory to a ring of key blocks in shared memory, by
 * cp.async, eight threads per key, KEYS_AT_ONCE keys at a time. A Source provides the addresses: a block
 * table (dense_decode/producer.cuh) or a list (sparse_decode/producer.cuh).
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "layout.cuh"

namespace latent {

/* Copies a thread's chunks of a row of `columns`, from any even address through registers; columns past the
 * first `valid_columns` become zeros. */
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

/* Waits until the oldest block of a ring has arrived; stages - 1 blocks are in flight. */
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

/* Implements the Keys of mainloop.cuh. `beside_scores` issues copies in batches between the steps of the
 * scores, or all at once where there is little else to do. */
template <typename Tile, typename Call, typename Source> struct RingKeys {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool CONVERTS_BESIDE_VALUES = false;
    static constexpr bool LISTED = Source::LISTED, ENOUGH_REGISTERS = true;
    static constexpr bool LOADS_FAR_AHEAD = LISTED; /* beside block tables registers do not suffice */
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
    using KeyCoords = typename Source::KeyCoords;
    using Flags = typename Source::Flags;

    const Call call;
    Source source;
    uint32_t ring_at;
    Flags flags;
    KeyCoords coords; /* of the next block, fetched early: else a copy also waits for the table */

    /* A block of keys that is being copied to a stage: the copies left to issue. Entries that name no key are
     * not read and become zeros, because their memory must not reach a product. */
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
        source.find_addresses(prepared.from, prepared.valid, first_key, (int)chunk * CHUNK_ELEMENTS, coords);
        return prepared;
    }

    /* Issues copies begin … end - 1 of MAX_GROUPS × PASSES; d_qk 512 lacks the last PASSES. */
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

    /* Copies the whole block where it cannot be read 16 bytes at a time. */
    DEVICE void copy_unaligned(int stage, unsigned first_key) const
    {
        const Copies all = prepare_copies(stage, first_key);
        if (call.aligned() || first_key >= (unsigned)call.end()) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            copy_row_unaligned(all.to + (uint32_t)(pass * KEYS_AT_ONCE * LINE_BYTES), KEY_GROUP,
                               all.from[pass], all.valid[pass] ? call.d_qk() : 0, call.d_qk());
    }

    /* ---- Interface to mainloop.cuh ---- */

    DEVICE int stages() const
    {
        return call.stages();
    }

    DEVICE int blocks_ahead() const
    {
        return call.stages() - 1;
    }

    /* Issues the copies of the first blocks of a split; past the end nothing is copied. Keys are unsigned,
     * because a block ahead may pass 2^31. */
    DEVICE void begin(unsigned first_key, bool some)
    {
        if (some) coords = source.find(first_key);
        for (int i = 0; i < blocks_ahead(); i++) {
            const unsigned key = first_key + (unsigned)(i * KEYS);
            if (some) {
                copy_unaligned(i, key);
                copies = prepare_copies(i, key);
                issue_copies(0, MAX_GROUPS * PASSES);
                if constexpr (LISTED)
                    for (int pass = 0; pass < PASSES; pass++) flags.set(i, pass, copies.valid[pass]);
            }
            cp_async_commit(); /* empty groups count, too */
            if (some) coords = source.find(first_key + (unsigned)(i + 1) * KEYS);
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
        if (step == COPY_STEPS * COPY_BATCHES - 1) coords = source.find(ahead + KEYS);
    }

    DEVICE void before_values(int) const {}

    DEVICE void beside_values(int, int) const {}
};

} // namespace latent
