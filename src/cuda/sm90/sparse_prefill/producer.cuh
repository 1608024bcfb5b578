/* SPDX-License-Identifier: MIT
 *
 * The producer: four warps gather keys, eight lanes per row, into the stages that the products read; one
 * thread issues the TMA loads of queries. The pipeline never drains: while the sides finish a tile, the keys
 * of the next one arrive.
 */
#pragma once

#include "layout.cuh"

namespace sparse_prefill {

/* Issues the TMA load of a tile's queries; heads past the end are zeros. Called by a whole warp. */
template <typename Tile>
DEVICE void issue_queries(const struct sparse_prefill_sm90_params &p, uint32_t smem, const Tile &tile)
{
    const uint32_t full = SHARED_AT(smem, barriers.q_full);
    if (elect_one()) {
        mbarrier_arrive_expect(full, UNITS * UNIT_BYTES);
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++)
            tma_load_once(SHARED_AT(smem, tiles.q) + (uint32_t)unit * UNIT_BYTES, &p.queries, full,
                          {0, tile.head_tile * ROWS, 2 * unit, tile.token, 0});
    }
    __syncwarp();
}

template <typename V> struct Producer {
    using Tile = WorkTile<V>;
    enum { ROW_STRIDE = WARPGROUP_THREADS / 8, ROWS_OF_THREAD = KEYS / ROW_STRIDE };

    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t smem;
    uint32_t chunk_offset;     /* offset of the thread's chunks in a tile of shared memory */
    int index[ROWS_OF_THREAD]; /* indices of the next block */
    uint32_t parity[2];        /* parity of each side's next block */
    uint32_t tiles_done;
    int number; /* of the next work tile of this CTA to look at */
    Tile next;  /* the next work tile, known once this one's last block is issued; no blocks: none is left */

    DEVICE Producer(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)),
          chunk_offset(swizzle_128((uint32_t)row(), (uint32_t)chunk())), parity{0, 0}, tiles_done(0),
          number((int)blockIdx.x)
    {
    }

    /* Advances to the next work tile that has keys and loads the indices of its first block. */
    DEVICE void look_ahead()
    {
        next = Tile();
        while (next.blocks == 0 && number < p.items) next = Tile(p, number), number += (int)gridDim.x;
        load_indices(next, 0);
    }

    /* The thread's first row of a block, and its chunk of each row. */
    static DEVICE int row() { return (int)threadIdx.x / 8; }
    static DEVICE int chunk() { return (int)threadIdx.x % 8; }

    /* Loads entries of the token's list; -1 past its end. */
    DEVICE void load_indices(const Tile &tile, int block)
    {
        const int32_t *entries = p.call.kv.indices + tile.token * p.call.kv.indices_stride[0];
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const int at = (tile.first_block + block) * KEYS + row() + i * ROW_STRIDE;
            index[i] = at < tile.length ? __ldg(entries + at) : -1;
        }
    }

    /* Copies 64 columns; rows not in `valid` become zeros. */
    DEVICE void load_tile(uint32_t to, const uint8_t *const (&token)[ROWS_OF_THREAD], uint32_t valid,
                          int column_tile)
    {
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++)
            cp_async_16(to + chunk_offset + (uint32_t)(i * ROW_STRIDE * LINE_BYTES),
                        token[i] + column_tile * LINE_BYTES, valid >> i & 1);
    }

    /* Publishes which of the warp's entries name keys, together with the block's last unit. */
    template <int SIDE> DEVICE void publish_valid(uint32_t valid)
    {
        uint32_t keys = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const uint32_t lanes = __ballot_sync(~0u, valid >> i & 1) & 0x01010101u; /* a row's first lane */
            keys |= (lanes * 0x01020408u >> 24) << 4 * i;                            /* packed */
        }
        if (threadIdx.x % 32) return;
        shared.valid[SIDE][threadIdx.x / 32] = (uint16_t)keys;
        mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.keys_full), SIDE * UNITS + last_unit(SIDE)));
    }

    template <int SIDE> DEVICE void load_block(const Tile &tile, int block)
    {
        const uint8_t *token[ROWS_OF_THREAD];
        uint32_t valid = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const bool is_valid = names_key(p.call.kv, index[i]);
            token[i] = address_of_key<KV_BF16>(p.call.kv, is_valid ? index[i] : 0).token +
                       chunk() * (int)CHUNK_BYTES;
            /* Keeps one address for all copies of a row. If it were recomputed in the same registers for each
             * copy, it would have to wait until the previous copy has read it. */
            asm volatile("" : "+l"(token[i]));
            valid |= (uint32_t)is_valid << i;
        }
        if (block + 1 < tile.blocks)
            load_indices(tile, block + 1);
        else
            look_ahead();
        if constexpr (V::ROPE) {
            mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.rope_empty), SIDE), parity[SIDE] ^ 1);
            load_tile(SHARED_AT(smem, tiles.rope) + SIDE * TILE_BYTES, token, valid, D_V / LINE_ELEMENTS);
            cp_async_arrive(barrier_at(SHARED_AT(smem, barriers.rope_full), SIDE));
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = unit_in_order(SIDE, i), barrier = SIDE * UNITS + unit;
            mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.keys_empty), barrier), parity[SIDE] ^ 1);
            load_tile(unit_at(smem, SIDE, unit), token, valid, 2 * unit);
            load_tile(unit_at(smem, SIDE, unit) + TILE_BYTES, token, valid, 2 * unit + 1);
            if (i == UNITS - 1) publish_valid<SIDE>(valid); /* the side has read the previous block's flags */
            cp_async_arrive(barrier_at(SHARED_AT(smem, barriers.keys_full), barrier));
        }
        parity[SIDE] ^= 1;
    }

    /* Queries are released later than keys. */
    DEVICE void load_queries(const Tile &tile)
    {
        mbarrier_wait(SHARED_AT(smem, barriers.q_empty), ~tiles_done & 1);
        issue_queries(p, smem, tile);
    }

    DEVICE void run()
    {
        look_ahead();
        while (next.blocks) {
            const Tile tile = next;
            for (int block = 0; block < tile.blocks; block += 2) {
                load_block<0>(tile, block);
                if (block == 0 && threadIdx.x < 32 && !is_short(p)) load_queries(tile);
                if (block + 1 < tile.blocks) load_block<1>(tile, block + 1);
            }
            tiles_done++;
        }
        cp_async_wait<0>();
    }
};

} // namespace sparse_prefill
