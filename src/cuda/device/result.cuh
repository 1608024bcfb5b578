/* SPDX-License-Identifier: MIT
 *
 * The epilogue of a finished row: the sink, both conventions of lse, and its address.
 */
#pragma once

#include "../params.h"
#include "divide.cuh"

#include <math.h>

static constexpr float LN_2 = 0.693147180559945309f;

/* The special function unit's approximations. */
#define APPROXIMATION(NAME, INSTRUCTION)                                                                     \
    DEVICE float NAME(float x)                                                                               \
    {                                                                                                        \
        float y;                                                                                             \
        asm(INSTRUCTION ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));                                       \
        return y;                                                                                            \
    }
APPROXIMATION(exp2_approx, "ex2") /* 2 ulp */
APPROXIMATION(log2_approx, "lg2") /* 2^-22 near 1, relative elsewhere */
APPROXIMATION(reciprocal_approx, "rcp")

/* Returns the natural lse of a row whose weights are relative to 2^max and have the sum `sum`; -inf if the sum
 * is 0. Then the row saw no key, since its largest weight would be at least 2^-8. */
DEVICE float score_lse(float max, float sum)
{
    return sum == 0.0f ? -INFINITY : (log2_approx(sum) + max) * LN_2;
}

/* Returns the factor by which the sink scales a row with this natural lse (-inf: the row saw no key and its
 * out is 0). */
DEVICE float result_sink_factor(const struct result_params &rules, int64_t head, float lse)
{
    if (!rules.attn_sink || lse == -INFINITY) return 1.0f;
    return 1.0f / (1.0f + expf(rules.attn_sink[head] - lse));
}

/* Converts lse to the caller's convention. */
DEVICE float result_lse(const struct result_params &rules, float lse)
{
    return lse == -INFINITY ? rules.lse_of_empty : lse * rules.lse_factor;
}

/* A row of a request: its query token and head. */
struct RowCoord {
    int token, head;
};

/* Returns the coordinates of row `row` of a key head. */
template <typename Params> DEVICE RowCoord row_coord(const Params &p, int row, int kv_head)
{
    RowCoord coord;
    coord.token = fast_divide(row, p.group_divisor);
    coord.head = kv_head * p.group + row - coord.token * p.group;
    return coord;
}

DEVICE int64_t out_offset(const struct output_params &output, int64_t request, RowCoord coord)
{
    return request * output.out_stride[0] + coord.token * output.out_stride[1] +
           coord.head * output.out_stride[2];
}

DEVICE void store_lse(const struct output_params &output, int64_t request, RowCoord coord, float lse)
{
    if (output.lse)
        output.lse[request * output.lse_stride[0] + coord.head * output.lse_stride[1] + coord.token] =
            result_lse(output.rules, lse);
}

/* Stores two neighbouring elements; `aligned`: as one word. */
template <typename Element> DEVICE void store_pair(uint16_t *to, bool aligned, float low, float high)
{
    if (aligned) {
        *(uint32_t *)to = Element::pack(low, high);
    } else {
        to[0] = Element::from_float(low);
        to[1] = Element::from_float(high);
    }
}

template <typename Element>
DEVICE void store_pair(const struct output_params &output, int64_t at, float low, float high)
{
    store_pair<Element>(output.out + at, output.pairs_aligned, low, high);
}

/* Stores two values, 8 bytes, if `stores`: without a branch, as below. */
DEVICE void store_global_8(float *to, float first, float second, bool stores)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to),
                 "f"(first), "f"(second), "r"((int)stores)
                 : "memory");
}

/* Stores 16 bytes if `stores`. Inline PTX, because nvcc splits a plain store in a branch of its own into
 * four. */
DEVICE void store_global_16(void *to, uint4 words, bool stores)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"((int)stores)
        : "memory");
}
