/* SPDX-License-Identifier: MIT
 *
 * S^T = K Q^T of converted keys. ldmatrix reads codes of 16 keys by 32 columns; each four codes of a row
 * become two pairs of a row of A, and the columns of Q are stored in the resulting order. The products are
 * in fp16, which holds all codes. A row of Q is fp16 times a power of two, so that no bit of bf16 is lost
 * that is at least 2^-29 of the row's largest value. Over FP8_656 codes are multiplied by their scale in
 * fp16; in blocks whose scales do not fit, each line of 128 columns has a sum of its own, which is added in
 * fp32 times the key's scale. The last columns are bf16 times the same power of two.
 */
#pragma once

#include "by_lines.cuh"
#include "score_place.cuh"

template <typename V> struct ConvertedKeys {
    using Shared = SharedOf<V>;
    using Sums = float[V::ROWS / 2];
    static constexpr int STEPS_OF_LINE = CODES_OF_LINE / 32,
                         STEPS = V::SCALED ? LINES * STEPS_OF_LINE : D_QK / 32;
    uint32_t fragment[2][2][4], raw[2][4];
    uint32_t line_at, end_at; /* offsets of the lane in a line, and in the end columns, of a block */
    int key;                  /* FP8_656: the thread's first key */

    DEVICE ConvertedKeys()
    {
        const int lane = (int)(fresh_thread() % 32), warp = (int)(fresh_thread() / 32 % 4);
        const uint32_t key = (uint32_t)(16 * warp + lane % 16), chunk = (uint32_t)lane / 16;
        line_at = swizzle_128(key, chunk), end_at = LINES * KEY_TILE_BYTES + swizzle_64(key, chunk);
        this->key = 16 * warp + lane / 4;
        asm volatile("" : "+r"(line_at), "+r"(end_at), "+r"(this->key));
    }

    DEVICE void load(uint32_t (&to)[4], uint32_t keys, int step)
    {
        const bool end = step >= LINES * STEPS_OF_LINE;
        ldmatrix_x4(
            to, ((keys + (end ? end_at : line_at)) ^ (uint32_t)(2 * CHUNK_BYTES * (step % STEPS_OF_LINE))) +
                    (end ? 0 : (uint32_t)(step / STEPS_OF_LINE * KEY_TILE_BYTES)));
    }

    DEVICE void convert(uint32_t (&a)[2][4], const uint32_t (&codes)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) fp16_of_e4m3(a[i / 2][i % 2], a[i / 2][i % 2 + 2], codes[i]);
    }

    /* Issues the products of the last columns of FP8_656, which are bf16 values already. */
    DEVICE void score_rope(Sums &s, uint32_t keys, uint32_t queries)
    {
        const uint32_t lines = keys + LINES * KEY_TILE_BYTES,
                       of_queries = queries + (uint32_t)(D_V / LINE_ELEMENTS * Shared::QUERY_TILE_BYTES);
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < LINE_ELEMENTS / 16; i++)
            wgmma_lines_of<Bf16>(s, wgmma_lines(lines, i), wgmma_lines(of_queries, i), i > 0);
        wgmma_commit();
    }

    /* Issues the two products of a step. `queries`: where the columns of step 0 begin. */
    DEVICE void multiply(Sums &to, const uint32_t (&a)[2][4], uint32_t queries, int step, bool adds)
    {
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < 2; h++)
            wgmma_lines_of<Fp16>(
                to, a[h],
                wgmma_lines(queries + (uint32_t)(step / 2 * Shared::QUERY_TILE_BYTES), 2 * (step % 2) + h),
                adds || h > 0);
        wgmma_commit();
    }

    /* FP8_656: loads the fp16 scales of the thread's two keys for a line, each in both halves of a word. */
    DEVICE void load_pair(uint32_t (&pair)[2], uint32_t half_scales, int line) const
    {
        const uint2 both = load_shared_8(half_scales + half_scale_place(key, line));
        const uint32_t which = key % 2 ? 0x3232 : 0x1010;
        pair[0] = __byte_perm(both.x, 0, which), pair[1] = __byte_perm(both.y, 0, which);
    }

    DEVICE void scale_fragment(uint32_t (&a)[2][4], const uint32_t (&pair)[2])
    {
#pragma unroll
        for (int i = 0; i < 8; i++) a[i / 4][i % 4] = multiply_halves(a[i / 4][i % 4], pair[i % 2]);
    }

    /* Reads the first fragments of a block. Over FP8_576 this happens while S^T of the previous block is
     * being stored, if the keys are there. */
    DEVICE void begin(uint32_t keys)
    {
        load(raw[0], keys, 0);
        load(raw[1], keys, 1);
    }

    /* Computes S^T of a block. Fragments are read two steps ahead and converted one step ahead. */
    DEVICE void score(const struct dense_decode_fp8_params &, Sums &s, uint32_t keys, uint32_t base, int,
                      uint32_t half_scales, bool fits, const ScorePlace<V> &place)
    {
        const uint32_t queries = SHARED_AT(base, q);
        if (V::SCALED && SELDOM(!fits)) {
            score_wide(s, keys, queries, place);
        } else {
            score_narrow(s, keys, queries, half_scales);
        }
    }

    DEVICE void score_narrow(Sums &s, uint32_t keys, uint32_t queries, uint32_t half_scales)
    {
        uint32_t pair[2][2];
        if constexpr (V::SCALED) load_pair(pair[0], half_scales, 0);
        if constexpr (V::SCALED) begin(keys);
        if constexpr (V::SCALED)
            score_rope(s, keys, queries);
        else
            hold(s);
        convert(fragment[0], raw[0]);
        if constexpr (V::SCALED) scale_fragment(fragment[0], pair[0]);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i + 2 < STEPS) load(raw[i % 2], keys, i + 2);
            if constexpr (V::SCALED)
                if (i % STEPS_OF_LINE == 1 && i + STEPS_OF_LINE < STEPS)
                    load_pair(pair[(i / STEPS_OF_LINE + 1) % 2], half_scales, i / STEPS_OF_LINE + 1);
            multiply(s, fragment[i % 2], queries, i, V::SCALED || i > 0);
            if (i > 0 || V::SCALED) wgmma_wait<1>();
            if (i + 1 < STEPS) convert(fragment[(i + 1) % 2], raw[(i + 1) % 2]);
            if constexpr (V::SCALED)
                if (i + 1 < STEPS) scale_fragment(fragment[(i + 1) % 2], pair[(i + 1) / STEPS_OF_LINE % 2]);
            if (V::TOGETHER) __syncwarp(); /* makes ptxas convert a whole step before its products */
        }
        wgmma_wait<0>();
        hold(s);
    }

    /* Scores blocks of FP8_656 whose scales do not fit, which are rare: each line has a sum of its own,
     * which is added times the scales. Meanwhile the total is kept in the thread's place in shared memory,
     * which is free. */
    DEVICE void score_wide(Sums &s, uint32_t keys, uint32_t queries, const ScorePlace<V> &place)
    {
        score_rope(s, keys, queries);
        wgmma_wait<0>();
        hold(s);
#pragma unroll 1
        for (int line = 0; line < LINES; line++) {
            const uint32_t of_keys = keys + (uint32_t)(line * KEY_TILE_BYTES),
                           of_queries = queries + (uint32_t)(line * 2 * Shared::QUERY_TILE_BYTES);
            place.store(s);
            hold(s);
#pragma unroll 1
            for (int i = 0; i < STEPS_OF_LINE; i++) {
                load(raw[0], of_keys, i);
                convert(fragment[0], raw[0]);
                multiply(s, fragment[0], of_queries, i, i > 0);
                wgmma_wait<0>();
                hold(s);
            }
            const float of_key[2] = {scale_of_line(keys, key, line), scale_of_line(keys, key + 8, line)};
            place.add(s, of_key);
        }
    }
};
