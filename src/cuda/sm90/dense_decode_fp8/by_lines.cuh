/* SPDX-License-Identifier: MIT
 *
 * S^T = K Q^T of codes over FP8_656, where each line of 128 columns of a key has a scale: K and Q are read from shared memory as they lie
 * there, e4m3 products make a partial sum of each line, and the sums are added in fp32, each times the key's scale. A thread has two keys,
 * so it needs two scales a line. The last columns are a fifth partial sum, of bf16 products, which the row's scale does not concern.
 *
 * Two partial sums take turns: one is added while the next is under way. Those of a block's first two lines are under way while the softmax
 * of the block before runs. Sums of the rows' weights would not fit beside them; mma makes those (RowSums).
 */
#pragma once

#include "../../device/mma.cuh"
#include "queries.cuh"

#include <float.h>

/* The warps of a warpgroup take a row each at a time: codes of its first columns, in lines; its last columns stay as they are, in a line
 * of their own behind. `scales`: where what makes scores of sums of codes goes, in shared memory: finite, so that no score is 0 times
 * infinity; a NaN of queries is in their codes. */
template <typename V>
DEVICE void load_query_lines(const struct dense_decode_params &p, const Task &task, uint32_t q,
                             uint32_t scales)
{
    constexpr int WORDS = D_QK / 64, CODE_WORDS = D_V / 64, ROWS = V::ROWS;
    const int warp = (int)(fresh_thread() / 32 % 4), lane = (int)(fresh_thread() % 32);
#pragma unroll 1
    for (int row = warp; row < ROWS; row += 4) {
        uint32_t words[WORDS];
        load_query_words(words, p, task, row, lane);
        const float scale = query_scale(largest_magnitude<CODE_WORDS>(words));
        const QueryQuantiser quantiser(scale);
        if (lane == 0)
            store_shared_4(scales + 4 * (uint32_t)row, __float_as_uint(fminf(scale * p.scale_log2, FLT_MAX)));
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++)
            store_shared_2(q + code_place<ROWS>(row, 64 * i + 2 * lane), quantiser.codes_of(words[i]));
        store_shared_4(q + (uint32_t)(LINES * ROWS * LINE_BYTES) +
                           swizzle_128((uint32_t)row, (uint32_t)lane / 4) + (uint32_t)(lane % 4 * 4),
                       words[WORDS - 1]);
    }
}

/* A key's scale of a line; `scales`: in shared memory, those of the key. One that is infinite makes a NaN, as the products of its values
 * would: they are of both signs. */
DEVICE float scale_of_line(uint32_t scales, int line)
{
    const float scale = __uint_as_float(load_shared_4(scales + (uint32_t)(4 * line)));
    return fmaf(0.0f, scale, scale);
}

template <typename V> struct ByLines {
    using Shared = SharedOf<V>;
    static constexpr int SUMS = V::ROWS / 2 /* of a thread */, ROPE = LINES /* the number of the last line */;
    float part[2][SUMS];

    /* Asks for line LINE of the keys times that of the queries. */
    template <int LINE> DEVICE void multiply(uint32_t keys, uint32_t queries)
    {
        const uint32_t a = keys + (uint32_t)(LINE * KEY_TILE_BYTES),
                       b = queries + (uint32_t)(LINE * Shared::QUERY_TILE_BYTES);
        float(&to)[SUMS] = part[LINE % 2];
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

    /* Adds line LINE times the scales of the thread's two keys, of which the first has its scales at `scales`. */
    template <int LINE> DEVICE void add(float (&s)[SUMS], uint32_t scales)
    {
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            scale[i] = scale_of_line(scales + (uint32_t)(8 * i * SCALES_BYTES_OF_KEY), LINE);
        if (LINE > 1) wgmma_wait<1>(), hold(part[LINE % 2]);
#pragma unroll
        for (int e = 0; e < SUMS; e++)
            s[e] = LINE == 0 ? part[LINE % 2][e] * scale[e / 2 % 2]
                             : fmaf(part[LINE % 2][e], scale[e / 2 % 2], s[e]);
    }

    /* S^T of the block whose first two lines have been asked for, in powers of two. `of_rows`: in shared memory, what makes scores of the
     * sums, of the first row that the thread has. */
    DEVICE void score(float (&s)[SUMS], uint32_t keys, uint32_t queries, uint32_t scales,
                      const float *of_rows, float of_rope)
    {
        static_assert(LINES == 4, "");
        /* Waits for both: across the back edge of the loop ptxas cannot prove that a wait for the first one suffices. */
        wgmma_wait<0>();
        hold(part[0]), hold(part[1]);
        add<0>(s, scales);
        multiply<2>(keys, queries);
        add<1>(s, scales);
        multiply<3>(keys, queries);
        add<2>(s, scales);
        multiply<ROPE>(keys, queries);
        add<3>(s, scales);
        wgmma_wait<0>();
        float(&rope)[SUMS] = part[ROPE % 2];
        hold(rope);
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++) {
            const float2 by = *(const float2 *)&of_rows[8 * n];
#pragma unroll
            for (int e = 4 * n; e < 4 * n + 4; e++) s[e] = fmaf(s[e], e % 2 ? by.y : by.x, rope[e] * of_rope);
        }
    }

    /* Asks once more for the first two lines of keys that have come only now, and waits for them. */
    DEVICE void multiply_again(uint32_t keys, uint32_t queries)
    {
        end();
        multiply<0>(keys, queries), multiply<1>(keys, queries);
        end();
    }

    /* Drains products whose results are dropped. */
    DEVICE void end()
    {
        wgmma_wait<0>();
        hold(part[0]), hold(part[1]);
    }
};

/* Sums of the weights that a warp stores, of its 16 keys: mma adds them up, 16 rows a product, from shared memory. Lane 4 g + j keeps those
 * of rows 16 j + g and 16 j + 8 + g. */
template <typename V> struct RowSums {
    float sum[2];

    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    /* Does the lane keep sums? */
    DEVICE static bool has() { return lane() % 4 < V::ROW_WARPS; }
    DEVICE static int row(int i) { return 16 * (lane() % 4) + 8 * i + lane() / 4; }

    DEVICE void clear() { sum[0] = sum[1] = 0.0f; }

    /* `weights`: where the lane's row of 16 bytes goes when the first 16 rows are stored. */
    template <typename Element> DEVICE void add(uint32_t weights)
    {
        constexpr uint32_t ONES = Element::IS_BF16 ? 0x3f803f80 : 0x3c003c00;
        /* Sums of bf16 weights are made seldom, and twice a block; the first time few registers are free. */
        constexpr int AT_ONCE = Element::IS_BF16 ? 1 : V::ROW_WARPS;
#pragma unroll AT_ONCE
        for (int j = 0; j < V::ROW_WARPS; j++) {
            uint32_t read[4];
            ldmatrix_x4(read, weights + (uint32_t)(16 * j * LINE_BYTES));
            const uint32_t a[4] = {read[0], read[2], read[1], read[3]}; /* keys in any order: all count 1 */
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_16816<Element>(d, a, ONES, ONES);
            if (lane() % 4 == j) sum[0] += d[0], sum[1] += d[2];
        }
    }

    /* Rescales the sums when references have moved; `factors`: those of the tile's rows. */
    DEVICE void rescale(const float *factors)
    {
        if (has()) sum[0] *= factors[row(0)], sum[1] *= factors[row(1)];
    }

    DEVICE void store(float *of_warp) const
    {
        if (has()) of_warp[row(0)] = sum[0], of_warp[row(1)] = sum[1];
    }
};
