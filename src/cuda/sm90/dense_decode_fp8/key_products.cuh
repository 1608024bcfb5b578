/* SPDX-License-Identifier: MIT
 *
 * S^T = K Q^T of a block, where keys are the first factor: ByLines of codes over FP8_656, ConvertedKeys of
 * keys that are converted on their way through registers. KeyScores (key_scores.cuh) calls either.
 */
#pragma once

#include "../../device/mma.cuh"
#include "../../device/shared.cuh"
#include "convert.cuh"
#include "layout.cuh"

#include <float.h>

namespace dense_decode_fp8 {

/* ---- Where S^T goes: shared memory, from which other warps turn it into weights ----------------- */

/* Addresses of a thread's scores in the warpgroup: it has two keys, and two of every eight rows. */
template <typename V> struct ScoreAddress {
    using Sums = float[V::ROWS / 2];
    uint32_t first;

    DEVICE explicit ScoreAddress(uint32_t scores)
    {
        const int lane = (int)(fresh_thread() % 32), warp = (int)(fresh_thread() / 32 % 4);
        first = scores + score_offset<V::ROWS>(16 * warp + lane / 4, 2 * (lane % 4));
        /* Kept in a register: reading the thread index again for every address would stall the block. */
        asm volatile("" : "+r"(first));
    }

    /* `key`: 0 or 1. */
    DEVICE uint32_t at(int eight_rows, int key) const
    {
        return first + score_offset<V::ROWS>(8 * key, 8 * eight_rows);
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

/* ---- Codes, line by line ----------------------------------------------------------------------- */

/* S^T = K Q^T of codes over FP8_656, where each line of 128 columns of a key has a scale. K and Q are read
 * from shared memory as they are stored there; e4m3 products give a partial sum of each line, and the
 * partial sums are added in fp32, each times the key's scale. A thread has two keys, so it needs two scales
 * per line. The last columns are a fifth partial sum, of bf16 products, to which the row's scale does not
 * apply.
 *
 * The products of the first two lines overlap; those of each further line begin when the previous sum has
 * been read from the accumulators. */
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

    DEVICE void score(const struct dense_decode_fp8_params &p, float (&s)[SUMS], uint32_t keys, uint32_t smem,
                      int split_parity, uint32_t, bool, const ScoreAddress<V> &)
    {
        static_assert(LINES == 4, "");
        const uint32_t queries = SHARED_AT(smem, q);
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
        const uint32_t of_rows =
            SHARED_AT(smem, q_scales[0]) + (uint32_t)((split_parity * V::ROWS + column) * 4);
#pragma unroll
        for (int n = 0; n < V::ROWS / 8; n++) {
            const uint2 by = load_shared_8(of_rows + (uint32_t)(32 * n));
#pragma unroll
            for (int e = 4 * n; e < 4 * n + 4; e++)
                s[e] = fmaf(s[e], __uint_as_float(e % 2 ? by.y : by.x), part[e] * of_rope);
        }
    }
};

/* ---- Converted keys ---------------------------------------------------------------------------- */

/* S^T = K Q^T of converted keys. ldmatrix reads codes of 16 keys by 32 columns; each four codes of a row
 * become two pairs of a row of A, and the columns of Q are stored in the resulting order. The products are
 * in fp16, which holds all codes. A row of Q is fp16 times a power of two, so that no bit of bf16 is lost
 * that is at least 2^-29 of the row's largest value. Over FP8_656 codes are multiplied by their scale in
 * fp16; in blocks whose scales do not fit, each line of 128 columns has a sum of its own, which is added in
 * fp32 times the key's scale. The last columns are bf16 times the same power of two. */
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
        const uint2 both = load_shared_8(half_scales + half_scale_offset(key, line));
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
    DEVICE void score(const struct dense_decode_fp8_params &, Sums &s, uint32_t keys, uint32_t smem, int,
                      uint32_t half_scales, bool fits, const ScoreAddress<V> &address)
    {
        const uint32_t queries = SHARED_AT(smem, q);
        if (V::SCALED && SELDOM(!fits)) {
            score_wide(s, keys, queries, address);
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
            if (V::JOIN_IN_KERNEL) __syncwarp(); /* makes ptxas convert a whole step before its products */
        }
        wgmma_wait<0>();
        hold(s);
    }

    /* Scores blocks of FP8_656 whose scales do not fit, which are rare: each line has a sum of its own,
     * which is added times the scales. Meanwhile the total is kept where the thread's S^T will
     * go in shared memory, which is free. */
    DEVICE void score_wide(Sums &s, uint32_t keys, uint32_t queries, const ScoreAddress<V> &address)
    {
        score_rope(s, keys, queries);
        wgmma_wait<0>();
        hold(s);
#pragma unroll 1
        for (int line = 0; line < LINES; line++) {
            const uint32_t of_keys = keys + (uint32_t)(line * KEY_TILE_BYTES),
                           of_queries = queries + (uint32_t)(line * 2 * Shared::QUERY_TILE_BYTES);
            address.store(s);
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
            address.add(s, of_key);
        }
    }
};

} // namespace dense_decode_fp8
