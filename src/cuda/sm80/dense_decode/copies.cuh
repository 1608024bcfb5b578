/* SPDX-License-Identifier: MIT
 *
 * Q and blocks of keys on their way from memory to shared memory, by cp.async: eight threads a row, KEYS_AT_ONCE rows at a
 * time.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/divide.cuh"
#include "../../device/fragment.h"
#include "../../device/pieces.cuh"
#include "../latent/shape.h"
#include "tasks.cuh"

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

template <int ROWS, int KEYS, int THREADS> struct Copier {
    static constexpr int KEYS_AT_ONCE = THREADS / 8, PASSES = KEYS / KEYS_AT_ONCE;
    static constexpr int Q_PASSES = (ROWS + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE;
    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static_assert(KEYS % KEYS_AT_ONCE == 0, "");

    const struct dense_decode_params &p;
    const Task &task; /* in shared memory */

    /* A row's share of this thread: a chunk of 16 bytes of every group of 64 columns. Where `valid` is false nothing is
     * read, and zeros are written. */
    DEVICE void copy_row(uint32_t to, uint32_t group_bytes, const uint16_t *from, bool valid) const
    {
        if (!p.vectors_aligned) {
            copy_row_unaligned(to, group_bytes, from, valid ? p.d_qk : 0, p.d_qk);
            return;
        }
        if (!valid) from = p.q;
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; g++)
            if (g < MAX_GROUPS - 1 || p.d_qk == MAX_GROUPS * LINE_ELEMENTS)
                cp_async_16(to + (uint32_t)g * group_bytes, from + g * LINE_ELEMENTS, valid);
    }

    /* Rows past the end of the key head are zeros. */
    DEVICE void copy_q(uint32_t q_at) const
    {
        for (int pass = 0; pass < Q_PASSES; pass++) {
            const int row = (int)threadIdx.x / 8 + pass * KEYS_AT_ONCE, chunk = (int)threadIdx.x % 8;
            if (row >= ROWS) break;
            const bool valid = task.first_row + row < p.rows;
            const RowPlace place = row_place(p, valid ? task.first_row + row : 0, task.kv_head);
            const uint16_t *from = p.q + task.piece.request * p.q_stride[0] + place.token * p.q_stride[1] +
                                   place.head * p.q_stride[2] + chunk * CHUNK_ELEMENTS;
            copy_row(q_at + swizzle_128((uint32_t)row, (uint32_t)chunk), Q_GROUP, from, valid);
        }
    }

    /* Where this thread's keys of a block are. Fetched a block ahead: a copy that waits for the table waits twice. */
    struct KeyPlaces {
        int page[PASSES], slot[PASSES];
    };

    /* Without branches, so that it can be scheduled among the products. end > 0; keys past it count as the last one. */
    DEVICE KeyPlaces find_keys(unsigned first_key, int end) const
    {
        KeyPlaces places;
        const int32_t *table = p.block_table + task.piece.request * p.block_table_stride;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int key = (int)min(first_key + threadIdx.x / 8 + pass * KEYS_AT_ONCE, (unsigned)end - 1);
            const int index = fast_divide(key, p.page_divisor);
            const int32_t entry = __ldg(p.block_table ? table + index : p.seqlens);
            places.page[pass] = p.block_table ? entry : task.piece.request;
            places.slot[pass] = p.block_table ? key - index * p.page_size : key;
        }
        return places;
    }

    /* A block of keys on its way into a stage: what is left to be issued. Slots past the end of the piece are not read: what
     * they hold must not reach a product, so zeros stand there. */
    struct Copies {
        const uint16_t *from[PASSES];
        uint32_t to;
        bool valid[PASSES];
        bool some;
    };

    DEVICE Copies prepare_copies(uint32_t stage_at, unsigned first_key, int end,
                                 const KeyPlaces &places) const
    {
        const unsigned row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        const uint16_t *keys = p.kv + task.kv_head * p.kv_stride[2] + chunk * CHUNK_ELEMENTS;
        Copies copies;
        copies.to = stage_at + swizzle_128(row, chunk);
        copies.some = first_key < (unsigned)end && p.vectors_aligned;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            copies.valid[pass] = first_key + row + pass * KEYS_AT_ONCE < (unsigned)end;
            copies.from[pass] =
                keys + places.page[pass] * p.kv_stride[0] + places.slot[pass] * p.kv_stride[1];
        }
        return copies;
    }

    /* The copies begin … end - 1 of MAX_GROUPS × PASSES; d_qk 512 has not the last PASSES. */
    DEVICE void issue_copies(const Copies &copies, int begin, int end) const
    {
#pragma unroll
        for (int i = begin; i < end; i++) {
            const int group = i / PASSES, pass = i % PASSES;
            if (copies.some && (group < MAX_GROUPS - 1 || p.d_qk == MAX_GROUPS * LINE_ELEMENTS))
                cp_async_16(copies.to + (uint32_t)group * KEY_GROUP +
                                (uint32_t)(pass * KEYS_AT_ONCE * LINE_BYTES),
                            copies.from[pass] + group * LINE_ELEMENTS, copies.valid[pass]);
        }
    }

    /* The whole block where it cannot be read 16 bytes at a time. */
    DEVICE void copy_keys_unaligned(uint32_t stage_at, unsigned first_key, int end,
                                    const KeyPlaces &places) const
    {
        const Copies copies = prepare_copies(stage_at, first_key, end, places);
        if (p.vectors_aligned || first_key >= (unsigned)end) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            copy_row_unaligned(copies.to + (uint32_t)(pass * KEYS_AT_ONCE * LINE_BYTES), KEY_GROUP,
                               copies.from[pass], copies.valid[pass] ? p.d_qk : 0, p.d_qk);
    }

    DEVICE void copy_keys(uint32_t stage_at, unsigned first_key, int end, const KeyPlaces &places) const
    {
        copy_keys_unaligned(stage_at, first_key, end, places);
        issue_copies(prepare_copies(stage_at, first_key, end, places), 0, MAX_GROUPS * PASSES);
    }

    /* Waits until the oldest block of the ring has arrived: stages - 1 are under way. */
    DEVICE void wait_for_block() const
    {
        switch (p.stages) {
        case 2: cp_async_wait<0>(); break;
        case 3: cp_async_wait<1>(); break;
        case 4: cp_async_wait<2>(); break;
        case 5: cp_async_wait<3>(); break;
        default: cp_async_wait<4>(); break;
        }
    }
};
