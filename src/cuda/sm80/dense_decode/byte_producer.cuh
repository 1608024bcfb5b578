/* SPDX-License-Identifier: MIT
 *
 * Key blocks from a cache of bytes: cp.async copies raw tokens, followed by their scales, to shared memory
 * while the previous block is multiplied; then all threads convert them to bf16 in the ring's only stage.
 */
#pragma once

#include "../../device/byte_key.cuh"
#include "../../device/shared.cuh"
#include "dense_decode.cuh"

namespace dense_decode {

template <typename Tile, typename Call> struct RawKeys {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool CONVERTS_BESIDE_VALUES = false;
    static constexpr bool LISTED = false, LOADS_FAR_AHEAD = false;
    static constexpr int LEAST_STAGES = 1;
    static constexpr uint32_t KEY_GROUP = Tile::KEY_GROUP, STAGE_BYTES = Tile::STAGE_BYTES,
                              BYTES_BEHIND_RING = KEYS * RAW_LINE_BYTES;
    /* Ampere does not convert codes in hardware, and lacks the registers for the conversion beside 64 rows.
     * Ampere and Ada lack those for the coordinates of keys beside the products of fewer rows. */
    static constexpr bool ENOUGH_REGISTERS = Tile::ROWS <= LATENT_MOST_ROWS_OF_BYTES(latent::CODE),
                          FINDS_LATE = latent::CODE < 90;
    using KeyCoords = typename TableSource<Tile, Call>::KeyCoords;
    static_assert(PASSES <= 2, "copy_keys names both coordinates of a thread's keys");

    const Call call;
    const struct dense_decode_params &p;
    TableSource<Tile, Call> source;
    uint32_t ring_at, raw_at; /* raw: KEYS lines of RAW_LINE_BYTES */
    KeyCoords coords;

    DEVICE RawKeys(const Call &of_call, uint32_t ring)
        : call(of_call), p(of_call.p), source{of_call}, ring_at(ring),
          raw_at(ring + (uint32_t)of_call.stages() * STAGE_BYTES)
    {
    }

    /* Copies byte by byte, from a cache that cannot be read 16 bytes at a time. */
    static DEVICE void copy_bytes(uint32_t to, const uint8_t *from, int bytes)
    {
#pragma unroll 1
        for (int i = (int)threadIdx.x % 8; i < bytes; i += 8)
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + (uint32_t)i), "r"((uint32_t)__ldg(from + i))
                         : "memory");
    }

    /* Copies a block of raw tokens; keys past the end of the split are not read. */
    DEVICE void copy_keys(unsigned first_key) const
    {
        const unsigned row = threadIdx.x / 8;
        const ByteLayout layout(p);
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            if (first_key + row + pass * KEYS_AT_ONCE >= (unsigned)call.end()) return;
            const ByteKey key(p, pass == 0 ? coords.page[0] : coords.page[PASSES - 1],
                              pass == 0 ? coords.slot[0] : coords.slot[PASSES - 1]);
            const uint32_t to = raw_at + (row + (uint32_t)(pass * KEYS_AT_ONCE)) * RAW_LINE_BYTES;
            if (!p.vectors_aligned) {
                copy_bytes(to, key.token, layout.token_bytes);
                copy_bytes(to + (uint32_t)layout.token_bytes, key.scales, layout.scale_bytes);
                continue;
            }
#pragma unroll 1
            for (int at = (int)threadIdx.x % 8 * CHUNK_BYTES; at < layout.token_bytes; at += 8 * CHUNK_BYTES)
                cp_async_16(to + (uint32_t)at, key.token + at, true);
            if (threadIdx.x % 8 == 0 && layout.scale_bytes)
                cp_async_8(to + (uint32_t)layout.token_bytes, key.scales, true);
        }
    }

    /* Converts a block to bf16. `keys` of its keys have been copied; the others become 0. */
    DEVICE void convert(uint32_t stage_at, int keys) const
    {
        const ByteLayout layout(p);
        const uint32_t chunk = threadIdx.x % 8;
#pragma unroll 1
        for (int row = (int)threadIdx.x / 8; row < KEYS; row += KEYS_AT_ONCE) {
            const uint32_t from = raw_at + (uint32_t)row * RAW_LINE_BYTES,
                           to = stage_at + swizzle_128((uint32_t)row, chunk);
#pragma unroll 3
            for (int g = 0; g < MAX_GROUPS; g++) {
                const int column = g * LINE_ELEMENTS + (int)chunk * CHUNK_ELEMENTS;
                uint4 values = make_uint4(0, 0, 0, 0);
                if (row < keys && g * LINE_ELEMENTS < layout.nope) {
                    const uint2 codes = load_shared_8(from + (uint32_t)column);
                    values = bf16_of_codes(codes, layout.scale(from, column));
                } else if (row < keys && g * LINE_ELEMENTS < p.d_qk) {
                    values =
                        load_shared_16(from + (uint32_t)(layout.rope_offset + 2 * (column - layout.nope)));
                }
                if (g * LINE_ELEMENTS < p.d_qk) store_shared_16(to + (uint32_t)g * KEY_GROUP, values);
            }
        }
    }

    /* ---- Interface to latent/mainloop.cuh: one block ahead, copied during the products ---- */

    DEVICE int stages() const
    {
        return call.stages();
    }

    DEVICE int blocks_ahead() const
    {
        return 1;
    }

    DEVICE void begin(unsigned first_key, bool some)
    {
        if (some) {
            coords = source.find(first_key);
            copy_keys(first_key);
        }
        cp_async_commit();
        if (some) coords = source.find(first_key + KEYS);
    }

    DEVICE void wait_for_block() const
    {
        cp_async_wait<0>();
    }

    DEVICE void before_scores(int, int, unsigned first_key, unsigned ahead)
    {
        convert(ring_at, min(call.end() - (int)first_key, KEYS));
        __syncthreads(); /* the block is converted, and its raw tokens have been read */
        if (FINDS_LATE) coords = source.find(ahead);
        if (ahead < (unsigned)call.end()) copy_keys(ahead);
        if (!FINDS_LATE) coords = source.find(ahead + KEYS);
    }

    DEVICE void beside_scores(int, int, unsigned) const {}

    DEVICE void before_values(int) const {}

    DEVICE void beside_values(int, int) const {}
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct DenseDecodeOfBytes {
    using Sizes = latent::Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = DenseCall<Element, ByteKey>;
    using Kernel = latent::Attend<Sizes, Call, RawKeys<Sizes, Call>>;
};

} // namespace dense_decode
