/* SPDX-License-Identifier: MIT
 *
 * Producer: finds the keys of a block table. latent/producer.cuh copies those of the queries' type,
 * byte_producer.cuh those of a cache of bytes.
 */
#pragma once

#include "../../device/divide.cuh"
#include "../../device/kernel.cuh"
#include "../../params.h"

namespace dense_decode {

/* Replaces the NamedKeys of a list: a table names every key. */
struct NoFlags {
    uint32_t at;
};

/* Keys from a block table. */
template <typename Tile, typename Call> struct TableSource {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE;
    static constexpr bool LISTED = false;
    using Flags = NoFlags;

    const Call call;

    struct KeyCoords {
        int page[PASSES], slot[PASSES];
    };

    /* Returns the coordinates of this thread's keys. It has no branches, so that it can be scheduled among
     * the products. Requires end > 0; keys past the end count as the last one. */
    DEVICE KeyCoords find(unsigned first_key) const
    {
        const struct dense_decode_params &p = call.p;
        KeyCoords coords;
        const int32_t *table = p.block_table + call.task.split.request * p.block_table_stride;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int key =
                (int)min(first_key + threadIdx.x / 8 + pass * KEYS_AT_ONCE, (unsigned)call.task.end - 1);
            const int index = fast_divide(key, p.page_divisor);
            const int32_t entry = __ldg(p.block_table ? table + index : p.seqlens);
            coords.page[pass] = p.block_table ? entry : call.task.split.request;
            coords.slot[pass] = p.block_table ? key - index * p.page_size : key;
        }
        return coords;
    }

    /* Returns the addresses of this thread's keys of a block, from `column` on; keys past the end are not
     * valid. */
    DEVICE void find_addresses(const uint16_t *(&from)[PASSES], bool (&valid)[PASSES], unsigned first_key,
                               int column, const KeyCoords &coords) const
    {
        const struct dense_decode_params &p = call.p;
        const uint16_t *keys = p.kv + call.task.kv_head * p.kv_stride[2] + column;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            valid[pass] = first_key + threadIdx.x / 8 + pass * KEYS_AT_ONCE < (unsigned)call.task.end;
            from[pass] = keys + coords.page[pass] * p.kv_stride[0] + coords.slot[pass] * p.kv_stride[1];
        }
    }
};

} // namespace dense_decode
