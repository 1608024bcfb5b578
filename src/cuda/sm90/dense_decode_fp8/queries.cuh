/* SPDX-License-Identifier: MIT
 *
 * Converts queries given as values to codes, as ../../../queries.h defines them, or to fp16. A warp takes
 * one row at a time; a lane has two columns of every 64.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/half_rows.cuh"
#include "../../device/mma.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include "../../../queries.h"

#include <float.h>

namespace dense_decode_fp8 {

enum { QUERY_WORDS = D_QK / 64 /* per lane, two values each */ };

/* The rows of a tile that a warp takes: first, first + step, … */
struct RowsOfWarp {
    int first, step;
};

/* Returns the offset of columns c and c + 1 of a row of codes; c is even. */
template <int ROWS> DEVICE uint32_t code_offset(int row, int c)
{
    if (c >= D_V)
        return (uint32_t)(D_V * ROWS) + swizzle_64((uint32_t)row, (uint32_t)(c - D_V) / CHUNK_BYTES) +
               (uint32_t)c % CHUNK_BYTES;
    return (uint32_t)(c / CODES_OF_LINE * CODES_OF_LINE * ROWS) +
           swizzle_128((uint32_t)row, (uint32_t)(c % CODES_OF_LINE) / CHUNK_BYTES) +
           (uint32_t)c % CHUNK_BYTES;
}

/* Returns the codes of two values: NaN for NaN, else the nearest finite code. */
DEVICE uint16_t e4m3_of(float low, float high)
{
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

/* Division by one number, rounded as IEEE requires unless the quotient or the divisor is near the ends of
 * fp32's range: the code that the compiler generates for `/`, without its path for those. */
struct Divisor {
    float by, reciprocal;

    DEVICE explicit Divisor(float divisor) : by(divisor), reciprocal(reciprocal_approx(divisor))
    {
        reciprocal = fmaf(reciprocal, fmaf(-by, reciprocal, 1.0f), reciprocal);
    }

    DEVICE float of(float x) const
    {
        float quotient = x * reciprocal;
        quotient = fmaf(fmaf(-by, quotient, x), reciprocal, quotient);
        return fmaf(fmaf(-by, quotient, x), reciprocal, quotient);
    }
};

/* A row whose divisor is below LEAST_DIVISOR is enlarged by 2^64 for the division. */
static constexpr float LEAST_DIVISOR = 0x1p-60f, ENLARGED = 0x1p64f;

/* Returns the address of a row of the tile, or of the last row of all if it is past the end. */
DEVICE const uint16_t *query_row(const struct dense_decode_params &p, const Task &task, int row)
{
    const RowCoord coord = row_coord(p, min(task.first_row + row, p.rows - 1), task.kv_head);
    return p.q + task.split.request * p.q_stride[0] + coord.token * p.q_stride[1] +
           coord.head * p.q_stride[2];
}

/* Calls put(row, words) for each of the warp's rows, with the lane's words of it; a row past the last one
 * is 0. Words of several rows are loaded together, since a load takes longer than storing a row. */
template <typename V, typename Put>
DEVICE void for_query_rows(const struct dense_decode_params &p, const Task &task, RowsOfWarp rows, Put put)
{
    constexpr int ROWS = V::ROWS, ROWS_AT_ONCE = V::JOIN_IN_KERNEL && ROWS == 16 ? 2 : 3;
    const int lane = (int)(fresh_thread() % 32);
#pragma unroll 1
    for (int first = rows.first; first < ROWS; first += ROWS_AT_ONCE * rows.step) {
        uint32_t words[ROWS_AT_ONCE][QUERY_WORDS];
#pragma unroll
        for (int j = 0; j < ROWS_AT_ONCE; j++) {
            const int row = first + j * rows.step;
            const bool some = row < ROWS && task.first_row + row < p.rows;
            const uint32_t *from = (const uint32_t *)query_row(p, task, row) + lane;
#pragma unroll
            for (int i = 0; i < QUERY_WORDS; i++) words[j][i] = some ? __ldg(from + 32 * i) : 0;
        }
#pragma unroll 1
        for (int row = first; row < min(ROWS, first + ROWS_AT_ONCE * rows.step); row += rows.step) {
            put(row, words[0]);
#pragma unroll
            for (int j = 1; j < ROWS_AT_ONCE; j++)
#pragma unroll
                for (int i = 0; i < QUERY_WORDS; i++) words[j - 1][i] = words[j][i];
        }
    }
}

/* Returns the bits of the largest magnitude among the first COUNT words of all lanes. */
template <int COUNT, int WORDS> DEVICE int32_t largest_magnitude(const uint32_t (&words)[WORDS])
{
    int32_t bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        bits = max(bits, max(query_magnitude(Bf16::to_float((uint16_t)words[i])),
                             query_magnitude(Bf16::to_float((uint16_t)(words[i] >> 16)))));
    return __reduce_max_sync(~0u, bits);
}

/* Converts the words of a row, two values each, to codes. */
struct QueryQuantiser {
    float enlarged;
    Divisor divisor;

    DEVICE explicit QueryQuantiser(float scale)
        : enlarged(scale < LEAST_DIVISOR ? ENLARGED : 1.0f), divisor(scale * enlarged)
    {
    }

    DEVICE uint16_t codes_of(uint32_t word) const
    {
        return e4m3_of(divisor.of(Bf16::to_float((uint16_t)word) * enlarged),
                       divisor.of(Bf16::to_float((uint16_t)(word >> 16)) * enlarged));
    }
};

/* Stores rows of codes. `scales`: address in shared memory of the rows' scales. */
template <typename V>
DEVICE void load_query_codes(const struct dense_decode_fp8_params &p, const Task &task, RowsOfWarp rows,
                             uint32_t q, uint32_t scales)
{
    const int lane = (int)(fresh_thread() % 32);
    for_query_rows<V>(p.dense.call, task, rows, [=](int row, const uint32_t(&words)[QUERY_WORDS]) {
        const float scale = query_scale(largest_magnitude<QUERY_WORDS>(words));
        const QueryQuantiser quantiser(scale);
        if (lane == 0) store_shared_4(scales + 4 * (uint32_t)row, __float_as_uint(scale));
#pragma unroll
        for (int i = 0; i < QUERY_WORDS; i++)
            store_shared_2(q + code_offset<V::ROWS>(row, 64 * i + 2 * lane), quantiser.codes_of(words[i]));
    });
}

/* Stores a row's first columns as codes, in lines; its last columns stay as they are, in a line behind
 * these. `scales`: address of the factors that make scores of sums of codes. They are finite, so that no
 * score is 0 times infinity; a NaN of the queries is in their codes. */
template <typename V>
DEVICE void load_query_lines(const struct dense_decode_fp8_params &p, const Task &task, RowsOfWarp rows,
                             uint32_t q, uint32_t scales)
{
    constexpr int CODE_WORDS = D_V / 64;
    const int lane = (int)(fresh_thread() % 32);
    const float scale_log2 = p.dense.call.scale_log2;
    for_query_rows<V>(p.dense.call, task, rows, [=](int row, const uint32_t(&words)[QUERY_WORDS]) {
        const float scale = query_scale(largest_magnitude<CODE_WORDS>(words));
        const QueryQuantiser quantiser(scale);
        if (lane == 0)
            store_shared_4(scales + 4 * (uint32_t)row, __float_as_uint(fminf(scale * scale_log2, FLT_MAX)));
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++)
            store_shared_2(q + code_offset<V::ROWS>(row, 64 * i + 2 * lane), quantiser.codes_of(words[i]));
        store_shared_4(q + (uint32_t)(LINES * V::ROWS * LINE_BYTES) +
                           swizzle_128((uint32_t)row, (uint32_t)lane / 4) + (uint32_t)(lane % 4 * 4),
                       words[QUERY_WORDS - 1]);
    });
}

/* Returns the offset of columns c and c + 1 of a row of values; c is even. The first pair of the four codes
 * that a lane reads is among the first eight columns of a product's sixteen, the second pair among the last
 * eight. */
template <int ROWS> DEVICE uint32_t value_offset(int row, int c)
{
    const int pair = c / 2 % 8, word = pair % 2 * 4 + pair / 2, column = c / 16 * 16 + 2 * word;
    return (uint32_t)(column / LINE_ELEMENTS * ROWS * LINE_BYTES) +
           swizzle_128((uint32_t)row, (uint32_t)(column % LINE_ELEMENTS / CHUNK_ELEMENTS)) +
           (uint32_t)(column % CHUNK_ELEMENTS * 2);
}

/* Stores rows of fp16, each times a power of two. `scales`: address of the factors that make scores of
 * products. The last columns of FP8_656 have a tile of their own. */
template <typename V>
DEVICE void load_query_values(const struct dense_decode_fp8_params &p, const Task &task, RowsOfWarp rows,
                              uint32_t q, uint32_t scales)
{
    constexpr int CODE_WORDS = V::SCALED ? D_V / 64 : QUERY_WORDS, ROWS = V::ROWS;
    const int lane = (int)(fresh_thread() % 32);
    const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f,
                of_all = fminf(of_cache * p.dense.call.scale_log2, FLT_MAX);
    for_query_rows<V>(p.dense.call, task, rows, [=](int row, const uint32_t(&words)[QUERY_WORDS]) {
        const HalfScale power(__uint_as_float((uint32_t)largest_magnitude<QUERY_WORDS>(words)));
        if (lane == 0)
            store_shared_4(scales + 4 * (uint32_t)row, __float_as_uint(fminf(power.down * of_all, FLT_MAX)));
#pragma unroll
        for (int i = 0; i < QUERY_WORDS; i++) {
            const float low = Bf16::to_float((uint16_t)words[i]) * power.up,
                        high = Bf16::to_float((uint16_t)(words[i] >> 16)) * power.up;
            if (i < CODE_WORDS)
                store_shared_4(q + value_offset<ROWS>(row, 64 * i + 2 * lane), Fp16::pack(low, high));
            else
                store_shared_4(q + (uint32_t)(CODE_WORDS * ROWS * LINE_BYTES) +
                                   swizzle_128((uint32_t)row, (uint32_t)lane / 4) + (uint32_t)(lane % 4 * 4),
                               Bf16::pack(low, high));
        }
    });
}

/* Stores the queries of a split as the products of scores need them, and fences for the async proxy.
 * `split_parity`: splits so far % 2. */
template <typename V>
DEVICE void load_queries(const struct dense_decode_fp8_params &p, const Task &task, RowsOfWarp rows,
                         uint32_t smem, int split_parity)
{
    using Shared = SharedOf<V>;
    const uint32_t q = SHARED_AT(smem, q), scales = SHARED_AT(smem, q_scales[0]) +
                                                    (uint32_t)(split_parity * V::ROWS * (int)sizeof(float));
    if constexpr (V::BY_LINES)
        load_query_lines<V>(p, task, rows, q, scales);
    else if constexpr (V::OF_CODES)
        load_query_codes<V>(p, task, rows, q, scales);
    else
        load_query_values<V>(p, task, rows, q, scales);
    fence_async_shared();
}

/* Prefetches the queries of the split after split i of the list to L2; called by the warpgroup with the
 * scores, one row per thread. */
template <typename V>
DEVICE void prefetch_next_queries(const struct dense_decode_fp8_params &p, const SharedOf<V> &shared, int i)
{
    const int next = i + shared.list.step;
    if (__all_sync(~0u, next <= shared.list.last)) {
        const Task task = work_tile_of<V>(p.dense, shared, next, CtaCoord(p.dense)).task;
        const int row = (int)(fresh_thread() % WARPGROUP_THREADS);
        if (row < V::ROWS) bulk_prefetch(query_row(p.dense.call, task, row), D_QK * (int)sizeof(uint16_t));
    }
}

} // namespace dense_decode_fp8
