/* SPDX-License-Identifier: MIT
 *
 * Queries given as values, which become codes here, the same as ../../../queries.h has them. A warp takes a row at a time; a lane has two
 * columns of every 64.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/mma.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

#include "../../../queries.h"

/* Where columns c and c + 1 of a row stand, c even. */
template <int ROWS> DEVICE uint32_t code_place(int row, int c)
{
    if (c >= D_V)
        return (uint32_t)(D_V * ROWS) + swizzle_64((uint32_t)row, (uint32_t)(c - D_V) / CHUNK_BYTES) +
               (uint32_t)c % CHUNK_BYTES;
    return (uint32_t)(c / CODES_OF_LINE * CODES_OF_LINE * ROWS) +
           swizzle_128((uint32_t)row, (uint32_t)(c % CODES_OF_LINE) / CHUNK_BYTES) +
           (uint32_t)c % CHUNK_BYTES;
}

/* The codes of two values; NaN where one is, else the nearest that are finite. */
DEVICE uint16_t e4m3_of(float low, float high)
{
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

/* Division by one number, rounded as IEEE has it where neither the quotient nor the divisor is near the ends of fp32: what the compiler
 * makes of `/` without its ways for those. */
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

/* Rows of smaller values are divided 2^64 times as large. */
static constexpr float LEAST_DIVISOR = 0x1p-60f, ENLARGED = 0x1p64f;

/* Reads the lane's words of a row of the tile, two values each; a row past the last one is 0. */
template <int WORDS>
DEVICE void load_query_words(uint32_t (&words)[WORDS], const struct dense_decode_params &p, const Task &task,
                             int row, int lane)
{
    const bool some = task.first_row + row < p.rows;
    const RowPlace place = row_place(p, min(task.first_row + row, p.rows - 1), task.kv_head);
    const uint32_t *from = (const uint32_t *)(p.q + task.piece.request * p.q_stride[0] +
                                              place.token * p.q_stride[1] + place.head * p.q_stride[2]) +
                           lane;
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = some ? __ldg(from + 32 * i) : 0;
}

/* The bits of the largest magnitude among the first COUNT words of all lanes. */
template <int COUNT, int WORDS> DEVICE int32_t largest_magnitude(const uint32_t (&words)[WORDS])
{
    int32_t bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        bits = max(bits, max(query_magnitude(Bf16::to_float((uint16_t)words[i])),
                             query_magnitude(Bf16::to_float((uint16_t)(words[i] >> 16)))));
    return __reduce_max_sync(~0u, bits);
}

/* Makes codes of a row's words, which have two values each. */
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

/* The warps of a warpgroup take a row each at a time. `scales`: where those of the rows go, in shared memory. */
template <int ROWS>
DEVICE void quantize_queries(const struct dense_decode_params &p, const Task &task, uint32_t q,
                             uint32_t scales)
{
    constexpr int WORDS = D_QK / 64;
    const int warp = (int)(fresh_thread() / 32 % 4), lane = (int)(fresh_thread() % 32);
#pragma unroll 1
    for (int row = warp; row < ROWS; row += 4) {
        uint32_t words[WORDS];
        load_query_words(words, p, task, row, lane);
        const float scale = query_scale(largest_magnitude<WORDS>(words));
        const QueryQuantiser quantiser(scale);
        if (lane == 0) store_shared_4(scales + 4 * (uint32_t)row, __float_as_uint(scale));
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            store_shared_2(q + code_place<ROWS>(row, 64 * i + 2 * lane), quantiser.codes_of(words[i]));
    }
}
