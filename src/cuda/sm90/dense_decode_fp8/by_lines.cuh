/* SPDX-License-Identifier: MIT
 *
 * S^T = K Q^T of codes over FP8_656, where each line of 128 columns of a key has a scale. K and Q are read
 * from shared memory as they are stored there; e4m3 products give a partial sum of each line, and the
 * partial sums are added in fp32, each times the key's scale. A thread has two keys, so it needs two scales
 * per line. The last columns are a fifth partial sum, of bf16 products, to which the row's scale does not
 * apply.
 *
 * The products of the first two lines overlap; those of each further line begin when the previous sum has
 * been read from the accumulators.
 */
#pragma once

#include "../../device/mma.cuh"
#include "half_scales.cuh"
#include "score_place.cuh"

#include <float.h>

template <typename V> struct ByLines {
    using Shared = SharedOf<V>;
    static constexpr int SUMS = V::ROWS / 2 /* per thread */, ROPE = LINES /* index of the last line */;
    float part[SUMS];
    int key, column; /* the thread's first key; the first of its two rows of every eight */

    DEVICE ByLines()
        : key((int)(fresh_thread() / 32 % 4 * 16 + fresh_thread() % 32 / 4)),
          column(2 * (int)(fresh_thread() % 4))
    {
        asm volatile("" : "+r"(key), "+r"(column));
    }

    /* Issues the products of line LINE of the keys and of the queries. */
    template <int LINE> DEVICE void multiply(float (&to)[SUMS], uint32_t keys, uint32_t queries)
    {
        const uint32_t a = keys + (uint32_t)(LINE * KEY_TILE_BYTES),
                       b = queries + (uint32_t)(LINE * Shared::QUERY_TILE_BYTES);
        hold(to);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < LINE_BYTES / 32; i++)
            if (LINE == ROPE)
                wgmma_lines_of<Bf16>(to, wgmma_lines(a, i), wgmma_lines(b, i), i > 0);
            else
                wgmma_lines_of_e4m3(to, wgmma_lines(a, i), wgmma_lines(b, i), i > 0);
        wgmma_commit();
    }

    /* Adds the sum of line LINE (`of_line`) times the scales of the thread's two keys. */
    template <int LINE> DEVICE void add(float (&s)[SUMS], float (&of_line)[SUMS], const float (&scale)[2])
    {
#pragma unroll
        for (int e = 0; e < SUMS; e++)
            s[e] = LINE == 0 ? of_line[e] * scale[e / 2 % 2] : fmaf(of_line[e], scale[e / 2 % 2], s[e]);
    }

    template <int LINE> DEVICE void load(float (&scale)[2], uint32_t keys) const
    {
        scale[0] = scale_of_line(keys, key, LINE), scale[1] = scale_of_line(keys, key + 8, LINE);
    }

    DEVICE void score(const struct dense_decode_fp8_params &p, float (&s)[SUMS], uint32_t keys, uint32_t base,
                      int turn, uint32_t, bool, const ScorePlace<V> &)
    {
        static_assert(LINES == 4, "");
        const uint32_t queries = SHARED_AT(base, q);
        float scale[LINES][2];
        load<0>(scale[0], keys), load<1>(scale[1], keys), load<2>(scale[2], keys), load<3>(scale[3], keys);
        multiply<0>(s, keys, queries), multiply<1>(part, keys, queries);
        wgmma_wait<1>(), hold(s);
        add<0>(s, s, scale[0]);
        wgmma_wait<0>(), hold(part);
        add<1>(s, part, scale[1]);
        multiply<2>(part, keys, queries);
        wgmma_wait<0>(), hold(part);
        add<2>(s, part, scale[2]);
        multiply<3>(part, keys, queries);
        wgmma_wait<0>(), hold(part);
        add<3>(s, part, scale[3]);
        multiply<ROPE>(part, keys, queries);
        wgmma_wait<0>(), hold(part);
        const float of_rope = fminf(p.dense.call.scale_log2, FLT_MAX);
        const uint32_t of_rows = SHARED_AT(base, q_scales[0]) + (uint32_t)((turn * V::ROWS + column) * 4);
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++) {
            const uint2 by = load_shared_8(of_rows + (uint32_t)(32 * n));
#pragma unroll
            for (int e = 4 * n; e < 4 * n + 4; e++)
                s[e] = fmaf(s[e], __uint_as_float(e % 2 ? by.y : by.x), part[e] * of_rope);
        }
    }
};
