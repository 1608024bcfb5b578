/* SPDX-License-Identifier: MIT
 *
 * Loads the queries of a tile of 16 heads to shared memory. Eight lanes take a line of 128 bytes, and the
 * CTA two tiles of 64 columns at a time; a thread converts what it copied.
 */
#pragma once

#include "layout.cuh"

template <typename F> struct SmallQueries {
    enum { TILES_AT_ONCE = SMALL_THREADS / 8 / SMALL_HEADS };
    enum { ROUNDS = (F::Q_TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE };

    static DEVICE int first_tile() { return (int)(fresh_thread() / (8 * SMALL_HEADS)); }

    /* Returns the thread's address in its first tile. */
    static DEVICE uint32_t place(uint32_t base)
    {
        return SHARED_AT(base, q) + (uint32_t)first_tile() * Q_TILE_BYTES +
               swizzle_128(fresh_thread() / 8 % SMALL_HEADS, fresh_thread() % 8);
    }

    /* Requests the queries, as bf16. */
    static DEVICE void ask(const struct sparse_decode_params &p, int request, uint32_t base)
    {
        const Place where(p);
        const int head = where.tile * SMALL_HEADS + (int)(fresh_thread() / 8 % SMALL_HEADS);
        const bool there = head < p.h_q;
        const uint16_t *from = p.q + request * p.q_stride[0] + where.token * p.q_stride[1] +
                               (there ? head : 0) * p.q_stride[2] + LINE_ELEMENTS * first_tile() +
                               CHUNK_ELEMENTS * (int)(fresh_thread() % 8);
        const uint32_t to = place(base);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (first_tile() + TILES_AT_ONCE * i < F::Q_TILES)
                cp_async_16(to + TILES_AT_ONCE * Q_TILE_BYTES * i, from + LINE_ELEMENTS * TILES_AT_ONCE * i,
                            there);
        cp_async_commit();
    }

    /* Converts what the thread requested to fp16; returns whether fp16 holds it. */
    static DEVICE bool convert(uint32_t base)
    {
        uint32_t at = place(base), most = 0;
        cp_async_wait<0>();
#pragma unroll 1
        for (int tile = first_tile(); tile < F::Q_TILES; tile += TILES_AT_ONCE) {
            const uint4 x = load_shared_16(at);
            most = larger_bf16x2(larger_bf16x2(most, x.x), x.y);
            most = larger_bf16x2(larger_bf16x2(most, x.z), x.w);
            store_shared_16(at, make_uint4(convert_bf16x2<Fp16>(x.x), convert_bf16x2<Fp16>(x.y),
                                           convert_bf16x2<Fp16>(x.z), convert_bf16x2<Fp16>(x.w)));
            at += TILES_AT_ONCE * Q_TILE_BYTES;
        }
        return !too_large_for_fp16(most);
    }
};
