/* SPDX-License-Identifier: MIT
 *
 * The producer: codes come to registers, 16 of a row a lane, become bf16(e4m3 × scale) and are stored to where both products read
 * them. What is bf16 already is copied by cp.async.
 */
#pragma once

#include "layout.cuh"

/* What an entry reads that names no key. */
__device__ __align__(16) static const uint8_t NO_KEY[656] = {};

/* A warp has 16 keys of a block: 4 (16 i + 4 warp + r, r < 4) in each of four rounds i. Lane 4 i + r looks the key up, lanes
 * 8 r … 8 r + 7 load it. */
template <typename F> struct Producer {
    enum { ROUNDS = 4, ROWS_APART = KEYS / ROUNDS, LANES_OF_ROW = 8, CODES = 16 /* a lane */ };

    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t base;
    const int lane;
    const uint32_t there_at; /* where the warp tells which entries name keys */
    const uint32_t place; /* of the lane's first chunk in a unit, in the order in which both are stored */
    Item item;            /* whose entries are asked for next, from `block` on; without blocks: none are left */
    int block, seen;      /* seen: of the block of threads' tiles */
    int index;            /* of the key that the lane looks up, in the block that is next */
    const uint8_t *token[ROUNDS]; /* of the block whose codes are asked for: its first code of the lane */
    uint4 raw[ROUNDS];            /* of the unit that is next */
    uint32_t scale[ROUNDS], next_scale[ROUNDS]; /* of a row, one a lane */
    uint32_t keys;                /* of the block whose codes are asked for: which entries name one */

    __device__ __forceinline__ Producer(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), lane(kept((int)threadIdx.x % 32)),
          there_at(kept(SHARED_AT(base, there) + 2 * (threadIdx.x / 32))),
          place((uint32_t)(tile() * TILE_BYTES) +
                swizzle_128((uint32_t)row(), 2 * ((uint32_t)chunk() % 4) + (uint32_t)tile())),
          item{0, 0, 0, 0}, block(0), seen((int)blockIdx.x)
    {
    }

    /* In a register, not read anew each time. */
    template <typename Word> static __device__ __forceinline__ Word kept(Word word)
    {
        asm volatile("" : "+r"(word));
        return word;
    }

    static __device__ __forceinline__ int row() { return (int)threadIdx.x / LANES_OF_ROW; } /* of the first round */
    __device__ __forceinline__ int chunk() const { return lane % LANES_OF_ROW; } /* of 16 codes */
    __device__ __forceinline__ int tile() const { return lane / 4 % 2; }                    /* of the unit */

    /* ---- Ahead ------------------------------------------------------------------------------------ */

    /* Of the next block, in a later tile if this one has no more. */
    __device__ __forceinline__ void ask_indices()
    {
        block++;
        if (__any_sync(~0u, block >= item.blocks)) {
            item = {0, 0, 0, 0}, block = 0;
            while (item.blocks == 0 && seen < p.items) item = Item(p, seen), seen += (int)gridDim.x;
        }
        const int own = lane, at = block * KEYS + 16 * (own / 4) + 4 * ((int)threadIdx.x / 32) + own % 4;
        const bool is = own < 16 && at < item.length;
        index = is ? __ldg(p.call.kv.indices + item.token * p.call.kv.indices_stride[0] + at) : -1;
    }

    /* Where the block's keys are; their scales are asked for. */
    __device__ __forceinline__ void take_indices()
    {
        const bool is = names_key(p.call.kv, index);
        KeyPlace at = place_of_key<F::FORMAT>(p.call.kv, is ? index : 0);
        if (!is) at.token = at.scales = NO_KEY;
        keys = __ballot_sync(~0u, is);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int from = 4 * i + lane / LANES_OF_ROW;
            token[i] = (const uint8_t *)__shfl_sync(~0u, (uint64_t)at.token, from);
            if constexpr (F::ROPE_IS_V) {
                const uint8_t *scales = (const uint8_t *)__shfl_sync(~0u, (uint64_t)at.scales, from);
                next_scale[i] = __ldg(scales + chunk());
            } else {
                next_scale[i] = __ldg((const uint32_t *)(token[i] + D_V) + chunk() % 4);
            }
            token[i] += CODES * chunk();
            asm volatile("" : "+l"(token[i])); /* one address for all loads of a row */
        }
    }

    __device__ __forceinline__ bool has_codes(int unit) const
    {
        return !F::ROPE_IS_V || unit < UNITS - 1 || tile() == 0;
    }

    __device__ __forceinline__ void load_codes(int unit, int i)
    {
        if (has_codes(unit)) raw[i] = __ldg((const uint4 *)(token[i] + 2 * LINE_ELEMENTS * unit));
    }

    /* ---- A unit ----------------------------------------------------------------------------------- */

    __device__ __forceinline__ float scale_of(int unit, int i) const
    {
        const int from = lane / LANES_OF_ROW * LANES_OF_ROW + (F::ROPE_IS_V ? 2 * unit + tile() : unit);
        const uint32_t bits = __shfl_sync(~0u, scale[i], from);
        return F::ROPE_IS_V ? num_from_ue8m0((uint8_t)bits) : __uint_as_float(bits);
    }

    /* Lanes of the second tile, whose lines are in the same banks, begin with the other chunk. */
    __device__ __forceinline__ void store_values(uint32_t to, const uint4 &codes, float scale) const
    {
        const bool swap = tile();
        const uint32_t in[4] = {swap ? codes.z : codes.x, swap ? codes.w : codes.y, swap ? codes.x : codes.z,
                                swap ? codes.y : codes.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 out;
            convert_codes(in[2 * h], scale, out.x, out.y);
            convert_codes(in[2 * h + 1], scale, out.z, out.w);
            store_shared_16(to ^ (uint32_t)(h * CHUNK_BYTES), out);
        }
    }

    /* Of bf16 values, 64 columns. */
    __device__ __forceinline__ void copy_rope(uint32_t to, uint32_t barrier)
    {
        to += swizzle_128((uint32_t)row(), (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            cp_async_16(to + (uint32_t)(i * ROWS_APART * LINE_BYTES), token[i] + F::ROPE_OFFSET, true);
        cp_async_arrive(barrier);
    }

    /* ---- A block, all blocks ---------------------------------------------------------------------- */

    __device__ __forceinline__ void load_block(uint32_t count)
    {
        const uint32_t buffer = count % BUFFERS, phase = count / BUFFERS & 1;
        const uint32_t units = half_at(base, buffer, 0);
        if constexpr (!F::ROPE_IS_V) {
            mbarrier_wait(SHARED_AT(base, rope_empty), (count & 1) ^ 1);
            copy_rope(SHARED_AT(base, rope), SHARED_AT(base, rope_full));
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) scale[i] = next_scale[i];
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            const uint32_t full = barrier_at(SHARED_AT(base, keys_full) + buffer * (UNITS * sizeof(Barrier)), unit);
            const uint32_t to = units + (uint32_t)unit * UNIT_BYTES + place;
            if (unit % HALF_UNITS == 0)
                mbarrier_wait(barrier_at(SHARED_AT(base, keys_empty) + buffer * (HALVES * sizeof(Barrier)), unit / HALF_UNITS),
                              phase ^ 1);
            if (F::ROPE_IS_V && unit == UNITS - 1) copy_rope(units + (V_TILES - 1) * TILE_BYTES, full);
            if (unit == UNITS - 1) {
                if (lane == 0) store_shared_2(there_at + buffer * (uint32_t)sizeof shared.there[0], (uint16_t)keys);
                take_indices(), ask_indices();
            }
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                const uint4 codes = raw[i];
                const float by = scale_of(unit, i);
                load_codes((unit + 1) % UNITS, i);
                if (has_codes(unit)) store_values(to + (uint32_t)(i * ROWS_APART * LINE_BYTES), codes, by);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(full);
        }
    }

    __device__ __forceinline__ void run()
    {
        ask_indices();
        bool more = item.blocks > 0;
        take_indices(), ask_indices();
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) load_codes(0, i);
        for (uint32_t count = 0; more; count++) {
            more = item.blocks > 0; /* those of the next block */
            load_block(count);
        }
        cp_async_wait<0>();
    }
};
