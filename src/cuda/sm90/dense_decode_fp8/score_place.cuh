/* SPDX-License-Identifier: MIT
 *
 * Place of a block's S^T in shared memory, between the warpgroup that computes it and the warps that turn it
 * into weights.
 */
#pragma once

#include "../../device/shared.cuh"
#include "layout.cuh"

/* Addresses of a thread's scores in the warpgroup: it has two keys, and two of every eight rows. */
template <typename V> struct ScorePlace {
    using Sums = float[V::ROWS / 2];
    uint32_t first;

    DEVICE explicit ScorePlace(uint32_t scores)
    {
        const int lane = (int)(fresh_thread() % 32), warp = (int)(fresh_thread() / 32 % 4);
        first = scores + score_place<V::ROWS>(16 * warp + lane / 4, 2 * (lane % 4));
        /* Kept in a register: reading the thread index again for every address would stall the block. */
        asm volatile("" : "+r"(first));
    }

    /* `key`: 0 or 1. */
    DEVICE uint32_t at(int eight_rows, int key) const
    {
        return first + score_place<V::ROWS>(8 * key, 8 * eight_rows);
    }

    DEVICE void store(const Sums &s) const
    {
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++) {
            store_shared_8(at(n, 0), __float_as_uint(s[4 * n]), __float_as_uint(s[4 * n + 1]));
            store_shared_8(at(n, 1), __float_as_uint(s[4 * n + 2]), __float_as_uint(s[4 * n + 3]));
        }
    }

    /* s = the stored sum + s times the key's scale. */
    DEVICE void add(Sums &s, const float (&scale)[2]) const
    {
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint2 sum = load_shared_8(at(n, i));
                s[4 * n + 2 * i] = fmaf(s[4 * n + 2 * i], scale[i], __uint_as_float(sum.x));
                s[4 * n + 2 * i + 1] = fmaf(s[4 * n + 2 * i + 1], scale[i], __uint_as_float(sum.y));
            }
    }
};
