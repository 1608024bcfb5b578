/* SPDX-License-Identifier: MIT
 *
 * Dense MHA without tensor cores, for any alignment, any strides, any scale and any GPU; not fast. A warp
 * takes a row. It computes the scores of 32 keys, one after the other; each lane keeps one. Then all lanes
 * add the values, key by key.
 */
#include "../device/element.cuh"
#include "../device/kernel.cuh"
#include "../device/result.cuh"
#include "../device/warp.cuh"

#include "mha_request.cuh"

enum { MOST_OF_LANE = 8 /* elements of a vector: lane, lane + 32, … */ };

template <typename Element> DEVICE void mha_forward(const mha_forward_params &p)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = blockIdx.x * (int64_t)MHA_WARPS + threadIdx.x / 32;
    const int64_t tokens = p.starts_q ? p.tokens_q : (int64_t)p.b * p.s_q, at = row / p.h_q;
    const int head = (int)(row - at * p.h_q), key_head = head / p.group;
    if (at >= tokens) return; /* the whole warp */
    RowRequest r;
    RowCoord coord = {0, head};
    if (!find_request<false>(p, at, r, coord.token)) return;
    const int visible = p.causal ? min(r.keys, r.keys - r.tokens + (coord.token - r.token) + 1) : r.keys;

    float q[MOST_OF_LANE], o[MOST_OF_LANE], most = -INFINITY, sum = 0.0f;
    const uint16_t *from =
        p.q + r.number * p.q_stride[0] + coord.token * p.q_stride[1] + head * p.q_stride[2];
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++)
        q[i] = 32 * i < p.d_qk ? Element::to_float(from[32 * i + lane]) * p.scale : 0.0f, o[i] = 0.0f;
    const uint16_t *k = p.k + r.number * p.k_stride[0] + r.key * p.k_stride[1] + key_head * p.k_stride[2];
    const uint16_t *v = p.v + r.number * p.v_stride[0] + r.key * p.v_stride[1] + key_head * p.v_stride[2];
    for (int first = 0; first < visible; first += 32) {
        const int count = min(visible - first, 32);
        float score = -INFINITY;
        for (int j = 0; j < count; j++) {
            const uint16_t *key = k + (int64_t)(first + j) * p.k_stride[1];
            float dot = 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_OF_LANE; i++)
                if (32 * i < p.d_qk) dot = fmaf(q[i], Element::to_float(key[32 * i + lane]), dot);
            dot = warp_sum(dot);
            if (lane == j) score = dot;
        }
        const float higher = fmaxf(most, warp_max(score)), reference = higher == -INFINITY ? 0.0f : higher;
        const float rescale = expf(most - reference), weight = lane < count ? expf(score - reference) : 0.0f;
        most = higher, sum = sum * rescale + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < MOST_OF_LANE; i++) o[i] *= rescale;
        for (int j = 0; j < count; j++) {
            const uint16_t *value = v + (int64_t)(first + j) * p.v_stride[1];
            const float of_key = __shfl_sync(~0u, weight, j);
#pragma unroll
            for (int i = 0; i < MOST_OF_LANE; i++)
                if (32 * i < p.d_v) o[i] = fmaf(of_key, Element::to_float(value[32 * i + lane]), o[i]);
        }
    }
    const float lse = sum == 0.0f ? -INFINITY : (most == -INFINITY ? 0.0f : most) + logf(sum),
                factor = sum == 0.0f ? 0.0f : result_sink_factor(p.output.rules, head, lse) / sum;
    uint16_t *out = p.output.out + out_offset(p.output, r.number, coord);
#pragma unroll
    for (int i = 0; i < MOST_OF_LANE; i++)
        if (32 * i < p.d_v) out[32 * i + lane] = Element::from_float(sum == 0.0f ? 0.0f : o[i] * factor);
    if (lane == 0) store_lse(p.output, r.number, coord, lse);
}

DEFINE_KERNEL(mha_forward_bf16, mha_forward_params, (32 * MHA_WARPS, 3), mha_forward<Bf16>(p))
DEFINE_KERNEL(mha_forward_fp16, mha_forward_params, (32 * MHA_WARPS, 3), mha_forward<Fp16>(p))
