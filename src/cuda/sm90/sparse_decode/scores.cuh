/* SPDX-License-Identifier: MIT
 *
 * The scores' warpgroup: raw keys to bf16, in registers; from there at once S^T = K Qᵀ, and V to shared memory; softmax.
 */
#pragma once

#include "keys.cuh"
#include "queries.cuh"
#include "softmax.cuh"

template <typename F> struct Scores {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t base;
    Keys<F> keys;
    Scales<F> scales[2];
    uint4 raw[3][2], rope[2][2];
    bool valid[2];
    uint32_t noticed[2]; /* NaN codes of the thread's keys */
    float s[32];
    Softmax softmax;
    uint32_t half, half_parity; /* of V: the next one to fill */

    __device__ __forceinline__ Scores(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), keys(params, memory),
          softmax(params, memory), half(0), half_parity(0)
    {
    }

    static __device__ __forceinline__ int lane() { return (int)fresh_thread() % 32; }
    static __device__ __forceinline__ int warp() { return (int)fresh_thread() / 32; }

    /* Chunk c of this block, from shared memory. */
    __device__ __forceinline__ void take_chunk(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (c < F::CODE_CHUNKS) raw[c % 3][i] = load_shared_16(keys.raw_at(c, i));
        if (F::ROPE_IS_V && c == F::CODE_CHUNKS) take_rope();
    }

    __device__ __forceinline__ void take_rope()
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) rope[i][h] = load_shared_16(keys.rope_at(i, h));
    }

    __device__ __forceinline__ void rope_fragments(uint32_t (&f)[4][4]) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 &x = rope[i][h];
                f[2 * h][i] = x.x, f[2 * h][i + 2] = x.y, f[2 * h + 1][i] = x.z, f[2 * h + 1][i + 2] = x.w;
            }
    }

    __device__ __forceinline__ void code_fragments(int c, bool plain, uint32_t (&f)[4][4])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 x = raw[c % 3][i];
            notice_nan(noticed[i], x.x), notice_nan(noticed[i], x.y);
            notice_nan(noticed[i], x.z), notice_nan(noticed[i], x.w);
        }
        if (plain) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t by = scales[i].shifted(c);
                const uint4 x = raw[c % 3][i];
                convert_plain(x.x, by, f[0][i], f[0][i + 2]), convert_plain(x.y, by, f[1][i], f[1][i + 2]);
                convert_plain(x.z, by, f[2][i], f[2][i + 2]), convert_plain(x.w, by, f[3][i], f[3][i + 2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float by = scales[i].value(c);
                const uint4 x = raw[c % 3][i];
                convert_any(x.x, by, f[0][i], f[0][i + 2]), convert_any(x.y, by, f[1][i], f[1][i + 2]);
                convert_any(x.z, by, f[2][i], f[2][i + 2]), convert_any(x.w, by, f[3][i], f[3][i + 2]);
            }
        }
    }

    __device__ __forceinline__ void multiply_chunk(const uint32_t (&f)[4][4], int tile, bool first)
    {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_64<Bf16>(s, f[k], wgmma_lines(SHARED_AT(base, q) + (uint32_t)tile * TILE_BYTES, k),
                           !first || k > 0);
        wgmma_commit();
    }

    /* S^T of a block, V stored; and the next block's raw keys asked for. */
    __device__ __forceinline__ void score_block()
    {
        cp_async_wait<6>(); /* scales, chunks 0 and 1; from here on always the oldest but six */
        __syncwarp();
        take_chunk(0), take_chunk(1);
        bool plain = true;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            valid[i] = keys.there[i], noticed[i] = 0;
            scales[i].load(keys.scales_at(i));
            plain &= !valid[i] || scales[i].plain();
        }
        plain = __all_sync(~0u, plain); /* also: every lane has its scales */
        uint32_t frag[2][4][4];
        hold(s);
        if constexpr (!F::ROPE_IS_V) {
            take_rope();
            rope_fragments(frag[1]);
            multiply_chunk(frag[1], F::CODE_CHUNKS, true);
        }
        keys.take_indices(), keys.load_indices();
        __syncwarp();
        keys.ask_first();
        /* Of matrix l / 8 of a step: keys 0 to 7 or 8 to 15 of the warp's, the first or last eight of the step's columns. */
        const uint32_t line = 16 * (uint32_t)warp() + (uint32_t)ldmatrix_tile_row(lane());
        const uint32_t v = SHARED_AT(base, v) + swizzle_128(line, (uint32_t)ldmatrix_tile_chunk(lane()));
        uint32_t to
            [4]; /* where a step's matrices go: registers of their own, so that no store waits for one before it */
#pragma unroll
        for (int c = 0; c < V_TILES; c++) {
            uint32_t(&f)[4][4] = frag[c % 2];
            if (c >= 1) wgmma_wait<1>();
            if (c % HALF_TILES == 0) {
                mbarrier_wait(SHARED_AT(base, empty) + 8 * half, half_parity ^ 1);
#pragma unroll
                for (uint32_t k = 0; k < 4; k++) to[k] = (v ^ (32 * k)) + half * HALF_BYTES;
            }
            if (c < 6) cp_async_wait<6>(), take_chunk(c + 2);
            if (c < F::CODE_CHUNKS)
                code_fragments(c, plain, f);
            else
                rope_fragments(f);
            multiply_chunk(f, c, F::ROPE_IS_V && c == 0);
            keys.ask_chunk(c);
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(to[k] + (uint32_t)(c % HALF_TILES) * TILE_BYTES, f[k]);
            if (c % HALF_TILES == HALF_TILES - 1 && ++half == HALVES) half = 0, half_parity ^= 1;
        }
        wgmma_wait<0>();
        hold(s);
    }

    /* Scores of keys that are none do not count; those of a key with a NaN code are NaN, whatever its other values made of
     * them. The four lanes that have a key look at a quarter of it each. */
    __device__ __forceinline__ void mask()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t bits = noticed[i];
            bits |= __shfl_xor_sync(~0u, bits, 1), bits |= __shfl_xor_sync(~0u, bits, 2);
            const bool nan = nan_noticed(bits);
            const float instead = valid[i] ? __int_as_float(0x7fc00000) : -INFINITY;
            if (!valid[i] || nan)
#pragma unroll
                for (int j = 0; j < 8; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = instead;
        }
    }

    /* Starts a piece; its blocks. */
    __device__ __forceinline__ int begin_piece(int i)
    {
        int length;
        const Piece piece = list_piece(p, shared.list, i, &length);
        const int next = i + shared.list.step;
        load_queries<F>(p, piece.request, base);
        if (p.split.partitions && next <= shared.list.last) prefetch_queries<F>(p, next);
        softmax.begin();
        return blocks_of(piece);
    }

    /* The votes tell ptxas that a warp stays together: it then keeps matrix descriptors in uniform registers. */
    __device__ __forceinline__ void run()
    {
        keys.begin();
        uint32_t buffer = 0, parity = 0;
        for (int i = shared.list.first; __any_sync(~0u, i <= shared.list.last);
             i += shared.list.step, parity ^= 1) {
            for (int left = begin_piece(i); __any_sync(~0u, left > 0); left--, buffer ^= 1) {
                score_block();
                mask();
                softmax.block(s, buffer);
            }
            softmax.end(parity);
        }
        cp_async_wait<0>();
    }
};
