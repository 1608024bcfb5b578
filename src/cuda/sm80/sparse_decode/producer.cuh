/* SPDX-License-Identifier: MIT
 *
 * Producer: finds the keys of a token's lists, and flags those that an index names. latent/producer.cuh
 * copies keys of the queries' type, byte_producer.cuh those of a cache of bytes.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/gather.cuh"
#include "../../device/kernel.cuh"

namespace sparse_decode {

/* Flags of the named keys of the ring, a byte each. Other keys are zeros in the ring, and their scores become
 * -inf. */
template <typename Tile> struct NamedKeys {
    uint32_t at; /* [stages][KEYS] */

    DEVICE void set_key(int stage, uint32_t key, bool named) const
    {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at + (uint32_t)(stage * Tile::KEYS) + key),
                     "r"((uint32_t)named)
                     : "memory");
    }

    /* Called by the eight threads of a key. */
    DEVICE void set(int stage, int pass, bool named) const
    {
        if (threadIdx.x % 8 == 0)
            set_key(stage, threadIdx.x / 8 + (uint32_t)(pass * Tile::KEYS_AT_ONCE), named);
    }

    /* Returns the flags of two adjacent keys, a byte each; `key` is even. */
    DEVICE uint32_t pair(int stage, int key) const
    {
        uint16_t both;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(both)
                     : "r"(at + (uint32_t)(stage * Tile::KEYS + key))
                     : "memory");
        return both;
    }
};

/* Keys from the lists of a token. A block of keys belongs to one cache, because the extra list begins at a
 * multiple of PLAN_BLOCK. */
template <typename Tile, typename Call> struct ListSource {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE;
    static constexpr bool LISTED = true;
    using Flags = NamedKeys<Tile>;

    const Call call;

    struct KeyCoords {
        int index[PASSES]; /* -1: no entry */
    };

    DEVICE bool is_extra(unsigned first_key) const
    {
        return first_key >= (unsigned)call.task.ends.extra_begin;
    }

    /* Returns the key of a block that this thread copies in a pass. */
    static DEVICE unsigned key_of(int pass) { return threadIdx.x / 8 + (unsigned)(pass * KEYS_AT_ONCE); }

    /* Whether a key of a block has an entry, and the entry's address. */
    DEVICE bool has_entry(unsigned first_key, unsigned key) const
    {
        const ListEnds &ends = call.task.ends;
        const int end = min(call.task.split.end, is_extra(first_key) ? ends.extra_end : ends.count);
        return first_key + key < (unsigned)end;
    }

    DEVICE const int32_t *entry(unsigned first_key, unsigned key) const
    {
        const bool extra = is_extra(first_key);
        const unsigned from = extra ? (unsigned)call.task.ends.extra_begin : 0;
        return call.task.entries[extra] + (first_key + key - from);
    }

    DEVICE KeyCoords find(unsigned first_key) const
    {
        KeyCoords coords;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            coords.index[pass] =
                has_entry(first_key, key_of(pass)) ? __ldg(entry(first_key, key_of(pass))) : -1;
        return coords;
    }

    /* Returns the addresses of this thread's keys of a block, from `column` on; an index that names no key is
     * not valid. */
    DEVICE void find_addresses(const uint16_t *(&from)[PASSES], bool (&valid)[PASSES], unsigned first_key,
                               int column, const KeyCoords &coords) const
    {
        const struct sparse_cache_params &cache = call.params.call.cache[is_extra(first_key)];
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int index = coords.index[pass], page = fast_divide(index, cache.page_divisor);
            valid[pass] = names_key(cache, index);
            const uint8_t *token =
                cache.data + page * cache.page_bytes + (index - page * cache.page_size) * cache.slot_bytes;
            from[pass] = (valid[pass] ? (const uint16_t *)token : call.params.call.q) + column;
        }
    }
};

} // namespace sparse_decode
