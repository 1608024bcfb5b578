/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA: the scales of P and dS on tensor cores, and the numbers of a row.
 */
#pragma once

#include "../params.h"

#include "element.cuh"
#include "result.cuh"
#include "warp.cuh"

#include <math.h>

static constexpr float P_SCALE = 32768.0f,
                       P_SCALE_LOG2 = 15.0f; /* factor of P: maps 1 close to the largest fp16 */

/* Factor of dS and delta in addition to P_SCALE. Without it dS in fp16 would overflow, or have few bits left
 * with thousands of keys. */
template <typename Element> static constexpr float DS_SCALE = Element::IS_BF16 ? 1.0f : 64.0f / P_SCALE;
template <typename Element> static constexpr float DS_UNSCALE = 1.0f / (P_SCALE * DS_SCALE<Element>);

template <typename Element> DEVICE float dot_of_pair(uint32_t a, uint32_t b)
{
    return Element::to_float((uint16_t)a) * Element::to_float((uint16_t)b) +
           Element::to_float((uint16_t)(a >> 16)) * Element::to_float((uint16_t)(b >> 16));
}

/* Returns the contribution of eight elements of a row of out and of dO to its delta. */
template <typename Element> DEVICE float dot_of_eight(const uint4 &a, const uint4 &b)
{
    return dot_of_pair<Element>(a.x, b.x) + dot_of_pair<Element>(a.y, b.y) + dot_of_pair<Element>(a.z, b.z) +
           dot_of_pair<Element>(a.w, b.w);
}

/* The products know a row by two numbers, lse in base 2 and delta, in which the sink and the gradient of lse are
 * included. With r = exp(sink - lse), the definition is
 *
 *   P' = P / (1 + r)                       dS = P' (dP - delta) + P dlse
 *      = exp(S - lse - ln(1 + r))             = P' (dP - (delta - (1 + r) dlse))
 *
 * r is at most 2^MOST_RATIO. Beyond, P' is 2^-64 P, which changes no sum, but P' · (1 + r) dlse must be P dlse. Fp32
 * has the range: P_SCALE · 2^-64 · P is not flushed down to a P of 2^-77, and (1 + r) dlse is finite for a dlse
 * below 2^63. Fp16 has not: kernels that keep P in fp16 until dS take no call with both a sink and dlse, whatever
 * these hold. NaN stays NaN. */
struct RowNumbers {
    float lse;       /* in base 2, with the sink; inf: the row sees no key, and the others are 0 */
    float off_delta; /* (1 + r) dlse */
    float dsink;     /* the gradient of the sink is the sum of dsink · delta */
};
static constexpr float MOST_RATIO_LOG2 = 64.0f, LOG2_E = 1.44269504088896341f;

DEVICE RowNumbers row_numbers(const mha_backward_params &call, int64_t request, int64_t token, int head)
{
    const float lse =
        call.lse[request * call.lse_stride[0] + head * call.lse_stride[1] + token] * call.lse_log2;
    if (lse == INFINITY || lse == -INFINITY) return {INFINITY, 0.0f, 0.0f};
    RowNumbers row = {lse, 0.0f, 0.0f};
    if (call.dlse)
        row.off_delta =
            call.dlse[request * call.dlse_stride[0] + head * call.dlse_stride[1] + token] * call.dlse_natural;
    if (!call.attn_sink) return row;
    const float above = call.attn_sink[head] * LOG2_E - lse,
                over = 1.0f + exp2_approx(above > MOST_RATIO_LOG2 ? MOST_RATIO_LOG2 : above);
    row.lse = lse + log2_approx(over);
    row.off_delta *= over;
    row.dsink = -reciprocal_approx(1.0f + exp2_approx(-above));
    return row;
}

/* Returns the sum over the CTA, in an order that is always the same, in thread 0; all threads call. */
template <int THREADS> DEVICE float cta_sum(float x)
{
    __shared__ float of_warp[THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < THREADS / 32; i++) x += of_warp[i];
    return x;
}
