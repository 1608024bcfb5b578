/* SPDX-License-Identifier: MIT
 *
 * An experiment (NOTES.md, "FP8 pages"), in place of the library's Producer: the producer over pages of bytes: rows come to registers, 16 codes a lane, become bf16(e4m3 × scale) as everywhere, and are
 * stored to where the products read them. What is bf16 already is gathered as from bf16 keys.
 */
#pragma once

#include "../../src/cuda/sm90/sparse_prefill/layout.cuh"

#include "../../src/cuda/sm90/sides/products.cuh"

/* Four codes to bf16, by fp32: for any scale. */
__device__ __forceinline__ void convert_codes(uint32_t codes, float scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
    low = Bf16::pack(Fp16::to_float((uint16_t)a) * scale, Fp16::to_float((uint16_t)(a >> 16)) * scale);
    high = Bf16::pack(Fp16::to_float((uint16_t)b) * scale, Fp16::to_float((uint16_t)(b >> 16)) * scale);
}

template <typename V> struct CodesProducer {
    enum { ROWS_APART = WARPGROUP_THREADS / 8, ROWS_OF_THREAD = KEYS / ROWS_APART };
    static constexpr enum kv_format FORMAT = V::FORMAT;
    static constexpr bool ROPE_IS_V = FORMAT == KV_FP8_584; /* the last tile of V is bf16 */

    const struct sparse_prefill_sm90_params &p;
    Shared &shared;
    const uint32_t base;
    int index[ROWS_OF_THREAD];            /* of the block that is next */
    const uint8_t *token[ROWS_OF_THREAD]; /* of the block in hand, and which are there, a bit each */
    int scales[ROPE_IS_V ? ROWS_OF_THREAD : 1]; /* of FP8_584: from the chunk on, in bytes */
    uint32_t there;
    uint4 raw[ROWS_OF_THREAD]; /* of the unit that is next */
    uint32_t raw_scale[ROWS_OF_THREAD];
    uint32_t first[2]; /* of the thread's two chunks in a unit of shared memory, in the order of store_values */
    uint32_t parity[2], tiles;

    __device__ __forceinline__ CodesProducer(const struct sparse_prefill_sm90_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), parity{0, 0}, tiles(0)
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            first[h] = (uint32_t)(tile() * TILE_BYTES) +
                       swizzle_128((uint32_t)row(), 2 * ((uint32_t)chunk() % 4) + (uint32_t)(h ^ tile()));
    }

    static __device__ __forceinline__ int row() { return (int)fresh_thread() / 8; }
    static __device__ __forceinline__ int chunk() { return (int)fresh_thread() % 8; } /* of 16 codes */
    static __device__ __forceinline__ int tile() { return chunk() / 4; }           /* of the unit */

    __device__ __forceinline__ void load_indices(const Item &item, int block)
    {
        const int32_t *entries = p.call.kv.indices + item.token * p.call.kv.indices_stride[0];
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const int at = block * KEYS + row() + i * ROWS_APART;
            index[i] = at < item.length ? __ldg(entries + at) : -1;
        }
    }

    __device__ __forceinline__ void take_indices()
    {
        there = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const bool is = names_key(p.call.kv, index[i]);
            const KeyPlace place = place_of_key<FORMAT>(p.call.kv, is ? index[i] : 0);
            token[i] = place.token + 16 * chunk();
            if constexpr (ROPE_IS_V) scales[i] = (int)(place.scales - token[i]);
            there |= (uint32_t)is << i;
        }
    }

    /* Of a row; codes and scales of 0 where it is not there. */
    __device__ __forceinline__ void load_codes(int unit, int i)
    {
        raw[i] = make_uint4(0, 0, 0, 0), raw_scale[i] = 0;
        if (!(there >> i & 1) || !has_codes(unit)) return;
        raw[i] = __ldg((const uint4 *)(token[i] + 2 * LINE_ELEMENTS * unit));
        if constexpr (ROPE_IS_V)
            raw_scale[i] = __ldg(token[i] + scales[i] + 2 * unit + tile());
        else
            raw_scale[i] = __ldg((const uint32_t *)(token[i] + D_V - 16 * chunk()) + unit);
    }

    static __device__ __forceinline__ bool has_codes(int unit)
    {
        return !ROPE_IS_V || unit < UNITS - 1 || tile() == 0;
    }

    static __device__ __forceinline__ float scale_of(uint32_t bits)
    {
        return ROPE_IS_V ? num_from_ue8m0((uint8_t)bits) : __uint_as_float(bits);
    }

    /* 16 values of a row: two chunks of 8. Lanes of the second tile, whose lines are in the same banks, begin with the other. */
    __device__ __forceinline__ void store_values(uint32_t to, int i, const uint4 &codes, float scale) const
    {
        const bool swap = tile();
        const uint32_t in[4] = {swap ? codes.z : codes.x, swap ? codes.w : codes.y, swap ? codes.x : codes.z,
                                swap ? codes.y : codes.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 out;
            convert_codes(in[2 * h], scale, out.x, out.y);
            convert_codes(in[2 * h + 1], scale, out.z, out.w);
            store_shared_16(to + first[h] + (uint32_t)(i * ROWS_APART * LINE_BYTES), out);
        }
    }

    /* Of bf16 values, 64 columns. */
    __device__ __forceinline__ void copy_rope(uint32_t to)
    {
        const struct kv_layout layout = kv_layout_of(FORMAT, 0);
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++)
            cp_async_16(to + swizzle_128((uint32_t)row(), (uint32_t)chunk()) + (uint32_t)(i * ROWS_APART * LINE_BYTES),
                        token[i] + layout.rope_offset, there >> i & 1);
    }

    template <int SIDE> __device__ __forceinline__ void tell_keys(uint32_t named)
    {
        uint32_t keys = 0;
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const uint32_t lanes = __ballot_sync(~0u, named >> i & 1) & 0x01010101u;
            keys |= (lanes * 0x01020408u >> 24) << 4 * i;
        }
        if (threadIdx.x % 32 == 0) shared.there[SIDE][threadIdx.x / 32] = (uint16_t)keys;
    }

    /* `more`: there is a next block of this tile, whose indices are in `index`. */
    template <int SIDE> __device__ __forceinline__ void load_block(const Item &item, int block)
    {
        const uint32_t named = there;
        if constexpr (V::ROPE) {
            mbarrier_wait(barrier_at(SHARED_AT(base, rope_empty), SIDE), parity[SIDE] ^ 1);
            copy_rope(SHARED_AT(base, rope) + SIDE * TILE_BYTES);
            cp_async_arrive(barrier_at(SHARED_AT(base, rope_full), SIDE));
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = unit_in_turn(SIDE, i), barrier = SIDE * UNITS + unit;
            const uint32_t to = unit_at(base, SIDE, unit);
            mbarrier_wait(barrier_at(SHARED_AT(base, keys_empty), barrier), parity[SIDE] ^ 1);
            if (ROPE_IS_V && unit == UNITS - 1) {
                copy_rope(to + TILE_BYTES);
                cp_async_arrive(barrier_at(SHARED_AT(base, keys_full), barrier));
            }
            const int next = i + 1 < UNITS ? unit_in_turn(SIDE, i + 1) : unit_in_turn(1 - SIDE, 0);
            if (i + 1 == UNITS) take_indices(), load_indices(item, block + 2);
#pragma unroll
            for (int r = 0; r < ROWS_OF_THREAD; r++) {
                const uint4 codes = raw[r];
                const float scale = scale_of(raw_scale[r]);
                load_codes(next, r);
                if (has_codes(unit)) store_values(to, r, codes, scale);
            }
            if (i == UNITS - 1) tell_keys<SIDE>(named);
            fence_async_shared();
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, keys_full), barrier));
        }
        parity[SIDE] ^= 1;
    }

    __device__ __forceinline__ void load_queries(const Item &item)
    {
        const uint32_t full = SHARED_AT(base, q_full);
        mbarrier_wait(SHARED_AT(base, q_empty), ~tiles & 1);
        if (elect_one()) {
            mbarrier_arrive_expect(full, UNITS * UNIT_BYTES);
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++)
                tma_load_once(SHARED_AT(base, q) + (uint32_t)unit * UNIT_BYTES, &p.queries, full,
                              {0, item.tile * ROWS, 2 * unit, item.token, 0});
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run()
    {
        for (int i = (int)blockIdx.x; i < p.items; i += (int)gridDim.x) {
            const Item item(p, i);
            if (item.blocks == 0) continue;
            load_indices(item, 0), take_indices();
            load_indices(item, 1);
#pragma unroll
            for (int r = 0; r < ROWS_OF_THREAD; r++) load_codes(unit_in_turn(0, 0), r);
            if (threadIdx.x < 32) load_queries(item);
            tiles++;
            for (int block = 0; block < item.blocks; block += 2) {
                load_block<0>(item, block);
                if (block + 1 < item.blocks) load_block<1>(item, block + 1);
            }
        }
        cp_async_wait<0>();
    }
};
