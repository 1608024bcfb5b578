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
template <typename Item>
DEVICE void ask_for_queries(const struct sparse_prefill_sm90_params &p, uint32_t smem, const Item &item)
{
    const uint32_t full = SHARED_AT(smem, barriers.q_full);
    if (elect_one()) {
        mbarrier_arrive_expect(full, UNITS * UNIT_BYTES);
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++)
            tma_load_once(SHARED_AT(smem, tiles.q) + (uint32_t)unit * UNIT_BYTES, &p.queries, full,
                          {0, item.tile * ROWS, 2 * unit, item.token, 0});
    }
    __syncwarp();
}

template <typename V> struct Producer {
    using Item = ItemOf<V>;
    enum { ROWS_APART = WARPGROUP_THREADS / 8, ROWS_OF_THREAD = KEYS / ROWS_APART };

    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t smem;
    uint32_t first;            /* offset of the thread's chunks in a tile of shared memory */
    int index[ROWS_OF_THREAD]; /* indices of the next block */
    uint32_t parity[2];        /* parity of each side's next block */
    uint32_t tiles;
    int seen;  /* next item of this CTA to look at */
    Item next; /* next item, known once this one's last block is issued; no blocks: none is left */

    DEVICE Producer(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)),
          first(swizzle_128((uint32_t)row(), (uint32_t)chunk())), parity{0, 0}, tiles(0),
          seen((int)blockIdx.x)
    {
    }

    /* Advances to the next item that has keys and loads the indices of its first block. */
    DEVICE void look_ahead()
    {
        next = Item();
        while (next.blocks == 0 && seen < p.items) next = Item(p, seen), seen += (int)gridDim.x;
        load_indices(next, 0);
    }

    /* The thread's first row of a block, and its chunk of each row. */
    static DEVICE int row() { return (int)threadIdx.x / 8; }
    static DEVICE int chunk() { return (int)threadIdx.x % 8; }

    /* Loads entries of the token's list; -1 past its end. */
    DEVICE void load_indices(const Item &item, int block)
    {
        const int32_t *entries = p.call.kv.indices + item.token * p.call.kv.indices_stride[0];
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const int at = (item.first + block) * KEYS + row() + i * ROWS_APART;
            index[i] = at < item.length ? __ldg(entries + at) : -1;
        }
    }

    /* Copies 64 columns; rows not in `there` become zeros. */
    DEVICE void load_tile(uint32_t to, const uint8_t *const (&token)[ROWS_OF_THREAD], uint32_t there,
                          int tile)
    {
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++)
            cp_async_16(to + first + (uint32_t)(i * ROWS_APART * LINE_BYTES), token[i] + tile * LINE_BYTES,
                        there >> i & 1);
    }

    /* Publishes which of the warp's entries name keys, together with the block's last unit. */
    template <int SIDE> DEVICE void tell_keys(uint32_t there)
    {
        uint32_t keys = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const uint32_t lanes = __ballot_sync(~0u, there >> i & 1) & 0x01010101u; /* a row's first lane */
            keys |= (lanes * 0x01020408u >> 24) << 4 * i;                            /* packed */
        }
        if (threadIdx.x % 32) return;
        shared.there[SIDE][threadIdx.x / 32] = (uint16_t)keys;
        mbarrier_arrive(barrier_at(SHARED_AT(smem, barriers.keys_full), SIDE * UNITS + last_unit(SIDE)));
    }

    template <int SIDE> DEVICE void load_block(const Item &item, int block)
    {
        const uint8_t *token[ROWS_OF_THREAD];
        uint32_t there = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const bool is = names_key(p.call.kv, index[i]);
            token[i] = place_of_key<KV_BF16>(p.call.kv, is ? index[i] : 0).token + chunk() * (int)CHUNK_BYTES;
            /* Keeps one address for all copies of a row. If it were recomputed in the same registers for each
             * copy, it would have to wait until the previous copy has read it. */
            asm volatile("" : "+l"(token[i]));
            there |= (uint32_t)is << i;
        }
        if (block + 1 < item.blocks)
            load_indices(item, block + 1);
        else
            look_ahead();
        if constexpr (V::ROPE) {
            mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.rope_empty), SIDE), parity[SIDE] ^ 1);
            load_tile(SHARED_AT(smem, tiles.rope) + SIDE * TILE_BYTES, token, there, D_V / LINE_ELEMENTS);
            cp_async_arrive(barrier_at(SHARED_AT(smem, barriers.rope_full), SIDE));
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = unit_in_order(SIDE, i), barrier = SIDE * UNITS + unit;
            mbarrier_wait(barrier_at(SHARED_AT(smem, barriers.keys_empty), barrier), parity[SIDE] ^ 1);
            load_tile(unit_at(smem, SIDE, unit), token, there, 2 * unit);
            load_tile(unit_at(smem, SIDE, unit) + TILE_BYTES, token, there, 2 * unit + 1);
            if (i == UNITS - 1) tell_keys<SIDE>(there); /* the side has read the previous block's flags */
            cp_async_arrive(barrier_at(SHARED_AT(smem, barriers.keys_full), barrier));
        }
        parity[SIDE] ^= 1;
    }

    /* Queries are released later than keys. */
    DEVICE void load_queries(const Item &item)
    {
        mbarrier_wait(SHARED_AT(smem, barriers.q_empty), ~tiles & 1);
        ask_for_queries(p, smem, item);
    }

    DEVICE void run()
    {
        look_ahead();
        while (next.blocks) {
            const Item item = next;
            for (int block = 0; block < item.blocks; block += 2) {
                load_block<0>(item, block);
                if (block == 0 && threadIdx.x < 32 && !is_short(p)) load_queries(item);
                if (block + 1 < item.blocks) load_block<1>(item, block + 1);
            }
            tiles++;
        }
        cp_async_wait<0>();
    }
};

} // namespace sparse_prefill
