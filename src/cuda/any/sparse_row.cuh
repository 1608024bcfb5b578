/* SPDX-License-Identifier: MIT
 *
 * A row (query token, head) of the sparse operations without tensor cores: every format and type, any alignment, any GPU.
 *
 * A warp takes the row through its keys, one at a time: a lane has 16 columns of V, four of every 128, and two of those that
 * only K has. It finds 32 keys at a time, a lane one, and passes over entries that name none. All in fp32.
 */
#pragma once

#include "../device/element.cuh"
#include "../device/gather.cuh"
#include "../device/latent.cuh"
#include "../device/result.cuh"
#include "../device/warp.cuh"

static constexpr int GROUPS = 4, GROUP_COLUMNS = D_V / GROUPS, OF_LANE = GROUP_COLUMNS / 32;
static constexpr int TAIL = 2 /* columns of a lane past D_V */;

DEVICE int lane_of_warp()
{
    return (int)threadIdx.x % 32;
}

/* The first of a lane's columns in a group. */
DEVICE int column_of(int group)
{
    return GROUP_COLUMNS * group + OF_LANE * lane_of_warp();
}

/* A key's values in the columns of a lane. */
template <enum kv_format FORMAT> struct KeyValues {
    float v[GROUPS][OF_LANE], tail[TAIL];

    static DEVICE float scale_of(const uint8_t *scales, int column)
    {
        if constexpr (FORMAT == KV_FP8_656) return __ldg((const float *)scales + column / 128);
        return num_from_ue8m0(__ldg(scales + column / 64));
    }

    static DEVICE float value_16(const uint8_t *from)
    {
        const uint16_t bits = __ldg((const uint16_t *)from);
        return FORMAT == KV_FP16 ? Fp16::to_float(bits) : Bf16::to_float(bits);
    }

    DEVICE void load(const KeyPlace &key, int d_qk)
    {
        const struct kv_layout layout = kv_layout_of(FORMAT, 0);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int column = column_of(g);
            if constexpr (FORMAT == KV_FP8_656 || FORMAT == KV_FP8_584) {
                if (column < layout.nope) {
                    const float scale = scale_of(key.scales, column);
#pragma unroll
                    for (int e = 0; e < OF_LANE; e++)
                        v[g][e] =
                            num_from_bf16(num_to_bf16(num_from_e4m3(__ldg(key.token + column + e)) * scale));
                    continue;
                }
            }
            const int rope = FORMAT == KV_FP8_584 ? layout.rope_offset - 2 * layout.nope : 0;
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) v[g][e] = value_16(key.token + rope + 2 * (column + e));
        }
        const int rope = FORMAT == KV_FP8_656 ? layout.rope_offset : 2 * D_V;
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            tail[e] = d_qk > D_V ? value_16(key.token + rope + 2 * (TAIL * lane_of_warp() + e)) : 0.0f;
    }
};

template <enum kv_format FORMAT, typename Element> struct SparseRow {
    const int d_qk;
    const float scale;
    float q[GROUPS][OF_LANE], q_tail[TAIL];
    float sum[GROUPS][OF_LANE], most, total; /* unnormalised, against the largest score so far */

    DEVICE SparseRow(int width, float softmax_scale) : d_qk(width), scale(softmax_scale) {}

    /* Without keys yet. */
    DEVICE void begin(const uint16_t *from)
    {
        most = -INFINITY, total = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) {
                sum[g][e] = 0.0f;
                q[g][e] = Element::to_float(__ldg(from + column_of(g) + e));
            }
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            q_tail[e] = d_qk > D_V ? Element::to_float(__ldg(from + D_V + TAIL * lane_of_warp() + e)) : 0.0f;
    }

    DEVICE void add_key(const KeyPlace &key)
    {
        KeyValues<FORMAT> k;
        k.load(key, d_qk);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS * OF_LANE; i++)
            dot = fmaf(q[i / OF_LANE][i % OF_LANE], k.v[i / OF_LANE][i % OF_LANE], dot);
#pragma unroll
        for (int e = 0; e < TAIL; e++) dot = fmaf(q_tail[e], k.tail[e], dot);
        dot = warp_sum(dot);
        const float score = scale * dot, before = most;
        most = fmaxf(most, score); /* a NaN does not become the largest; it reaches the sum */
        const float base = most == -INFINITY ? 0.0f : most;
        const float factor = before == -INFINITY ? 1.0f : expf(before - base), weight = expf(score - base);
        total = fmaf(total, factor, weight);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) sum[g][e] = fmaf(weight, k.v[g][e], sum[g][e] * factor);
    }

    /* Entries [begin, end) of a list; place(at) is the key of one, asked for inside of it only. */
    template <typename Place> DEVICE void add_keys(int begin, int end, Place place)
    {
#pragma unroll 1
        for (int64_t first = begin; first < end; first += 32) {
            const int64_t at = first + lane_of_warp();
            const KeyPlace mine = at < end ? place((int)at) : KeyPlace{NULL, NULL};
            uint32_t there = __ballot_sync(~0u, mine.token != NULL);
#pragma unroll 1
            for (; there; there &= there - 1) {
                const int source = __ffs((int)there) - 1;
                const KeyPlace key = {
                    (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.token, source),
                    (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.scales, source)};
                add_key(key);
            }
        }
    }

    DEVICE bool empty() const
    {
        return total == 0.0f;
    }

    /* Natural; -inf: no key. */
    DEVICE float lse() const
    {
        return empty() ? -INFINITY : most + logf(total);
    }

    /* What brings sums to out, times `by`. */
    DEVICE float factor(float by) const
    {
        return (empty() ? 0.0f : 1.0f / total) * by;
    }

    DEVICE float value(int group, int e, float factor) const
    {
        return empty() ? 0.0f : sum[group][e] * factor;
    }
};
