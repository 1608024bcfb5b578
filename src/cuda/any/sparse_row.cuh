/* SPDX-License-Identifier: MIT
 *
 * A row (query token, head) of the sparse operations without tensor cores, for every format and type, any
 * alignment and any GPU.
 *
 * A warp takes the row through its keys, one at a time: a lane has 16 columns of V, four of every 128, and
 * two of the columns that only K has. It looks up 32 keys at a time, one per lane, and skips entries that
 * name none. All arithmetic is fp32.
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

/* Returns the first of a lane's columns in a group. */
DEVICE int column_of(int group)
{
    return GROUP_COLUMNS * group + OF_LANE * lane_of_warp();
}

/* The address and the format of a key. */
struct RowKey {
    KeyAddress address;
    int format; /* enum kv_format */
};

/* Returns the key that an index names in a cache of any format. */
DEVICE RowKey row_key(const struct sparse_cache_params &cache, int index)
{
    if (!names_key(cache, index)) return {{NULL, NULL}, 0};
    const int page = fast_divide(index, cache.page_divisor), slot = index - page * cache.page_size;
    const uint8_t *data = cache.data + page * cache.page_bytes;
    return {{data + slot * cache.slot_bytes, data + cache.scale_base + slot * cache.scale_step},
            cache.format};
}

/* A key's values in the columns of a lane. */
template <typename Element> struct KeyValues {
    float v[GROUPS][OF_LANE], tail[TAIL];

    template <typename Type> static DEVICE float value_16(const uint8_t *from)
    {
        return Type::to_float(__ldg((const uint16_t *)from));
    }

    /* Returns the scale of the group of values that has a column; groups have a power-of-two size. */
    static DEVICE float scale_of(const struct kv_layout &layout, const uint8_t *scales, int column)
    {
        const int group = column >> (31 - __clz(layout.group));
        if (layout.scale == KV_SCALE_F32) return __ldg((const float *)scales + group);
        const uint8_t code = __ldg(scales + group);
        return layout.scale == KV_SCALE_UE8M0 ? num_from_ue8m0(code) : num_from_e4m3(code);
    }

    /* Loads the values of one group from an even column on. */
    static DEVICE void load_codes(float (&to)[OF_LANE], const struct kv_layout &layout, const KeyAddress &key,
                                  int column)
    {
        const float scale = scale_of(layout, key.scales, column);
#pragma unroll
        for (int e = 0; e < OF_LANE; e++) {
            const bool halves = layout.element == KV_ELEMENT_E2M1;
            const uint8_t byte = __ldg(key.token + (halves ? (column + e) / 2 : column + e));
            const float code =
                halves ? num_from_e2m1((uint8_t)(byte >> 4 * (e % 2) & 15)) : num_from_e4m3(byte);
            to[e] = num_from_bf16(num_to_bf16(code * scale));
        }
    }

    /* Loads a key of the queries' type. */
    DEVICE void load(const uint8_t *token, int d_qk)
    {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) v[g][e] = value_16<Element>(token + 2 * (column_of(g) + e));
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            tail[e] = d_qk > D_V ? value_16<Element>(token + 2 * (D_V + TAIL * lane_of_warp() + e)) : 0.0f;
    }

    /* Loads a key of any format. */
    DEVICE void load(const RowKey &key, int d_qk)
    {
        if (key.format == KV_BF16 || key.format == KV_FP16) {
            load(key.address.token, d_qk);
            return;
        }
        const struct kv_layout layout = kv_layout_of((enum kv_format)key.format, d_qk);
        const uint8_t *rope = key.address.token + layout.rope_offset;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int column = column_of(g);
            if (column < layout.nope) {
                load_codes(v[g], layout, key.address, column);
                continue;
            }
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) v[g][e] = value_16<Bf16>(rope + 2 * (column + e - layout.nope));
        }
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            tail[e] = d_qk > D_V ? value_16<Bf16>(rope + 2 * (TAIL * lane_of_warp() + e)) : 0.0f;
    }
};

/* BYTES: keys have any format; otherwise they have the queries' type. */
template <bool BYTES, typename Element> struct SparseRow {
    const int d_qk;
    const float scale_log2;
    float q[GROUPS][OF_LANE], q_tail[TAIL];
    float sum[GROUPS][OF_LANE], total; /* unnormalised, relative to 2^most */
    float most;                        /* the largest score so far, in powers of two */

    DEVICE SparseRow(int width, float scale) : d_qk(width), scale_log2(scale) {}

    /* Starts a row, with no keys yet. */
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

    DEVICE void add_key(const RowKey &key)
    {
        KeyValues<Element> k;
        if constexpr (BYTES)
            k.load(key, d_qk);
        else
            k.load(key.address.token, d_qk);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS * OF_LANE; i++)
            dot = fmaf(q[i / OF_LANE][i % OF_LANE], k.v[i / OF_LANE][i % OF_LANE], dot);
#pragma unroll
        for (int e = 0; e < TAIL; e++) dot = fmaf(q_tail[e], k.tail[e], dot);
        dot = warp_sum(dot);
        const float score = scale_log2 * dot, before = most;
        most = fmaxf(most, score); /* fmaxf ignores a NaN, which still reaches the sum */
        const float reference = most == -INFINITY ? 0.0f : most;
        const float factor = before == -INFINITY ? 1.0f : exp2f(before - reference),
                    weight = exp2f(score - reference);
        total = fmaf(total, factor, weight);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) sum[g][e] = fmaf(weight, k.v[g][e], sum[g][e] * factor);
    }

    /* Adds entries [begin, end) of a list. find(at) returns the key of an entry and is called within the
     * range only. */
    template <typename Find> DEVICE void add_keys(int begin, int end, Find find)
    {
#pragma unroll 1
        for (int64_t first = begin; first < end; first += 32) {
            const int64_t at = first + lane_of_warp();
            const RowKey mine = at < end ? find((int)at) : RowKey{{NULL, NULL}, 0};
            uint32_t named = __ballot_sync(~0u, mine.address.token != NULL);
#pragma unroll 1
            for (; named; named &= named - 1) {
                const int source = __ffs((int)named) - 1;
                RowKey key = {};
                key.address.token =
                    (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.address.token, source);
                if constexpr (BYTES) {
                    key.address.scales =
                        (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.address.scales, source);
                    key.format = __shfl_sync(~0u, mine.format, source);
                }
                add_key(key);
            }
        }
    }

    DEVICE bool empty() const
    {
        return total == 0.0f;
    }

    /* Returns the natural lse; -inf: no key. */
    DEVICE float lse() const
    {
        return empty() ? -INFINITY : (most + log2f(total)) * LN_2;
    }

    /* Returns the factor that normalises the sums, times `by`. */
    DEVICE float factor(float by) const
    {
        return (empty() ? 0.0f : 1.0f / total) * by;
    }

    DEVICE float value(int group, int e, float factor) const
    {
        return empty() ? 0.0f : sum[group][e] * factor;
    }
};
