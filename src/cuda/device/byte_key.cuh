/* SPDX-License-Identifier: MIT
 *
 * Keys of dense decode in a cache of bytes (src/kvformat.h). The format is a property of the call, so its
 * branches are uniform over the launch.
 */
#pragma once

#include "by_rows.cuh"
#include "cache.cuh"
#include "shared.cuh"

/* Converts eight codes to bf16(code · scale). */
DEVICE uint4 bf16_of_codes(uint2 codes, float scale)
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = from_e4m3_2((i < 2 ? codes.x : codes.y) >> i % 2 * 16);
        words[i] = Bf16::pack(x.x * scale, x.y * scale);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* The part of a format's layout that the kernels need. */
struct ByteLayout {
    enum kv_scale kind;
    int nope, group_shift, token_bytes, rope_offset, scale_offset, scale_bytes;

    DEVICE explicit ByteLayout(const struct dense_decode_params &p)
    {
        if (p.kv_format == KV_FP8_656)
            set(kv_layout_of(KV_FP8_656, 0));
        else if (p.kv_format == KV_FP8_584)
            set(kv_layout_of(KV_FP8_584, 0));
        else
            set(kv_layout_of(KV_FP8_576, 0));
    }

    DEVICE void set(const struct kv_layout &l)
    {
        kind = l.scale, nope = l.nope, token_bytes = l.token_bytes;
        group_shift = l.group == 128 ? 7 : 6;
        rope_offset = l.rope_offset, scale_bytes = l.scale_bytes;
        scale_offset = l.scale_bytes ? l.token_bytes : l.scale_offset;
    }

    /* Returns the scale of a column of a token in shared memory, where the scales are in the token or
     * directly after it. The scale of an FP8_576 cache is no part of its keys here: it multiplies scores and
     * results (ByteKey::scale_of_cache). */
    DEVICE float scale(uint32_t token, int column) const
    {
        const uint32_t at = token + (uint32_t)scale_offset, index = (uint32_t)column >> group_shift;
        if (kind == KV_SCALE_F32) return __uint_as_float(load_shared_4(at + 4 * index));
        if (kind == KV_SCALE_UE8M0)
            return num_from_ue8m0((uint8_t)(load_shared_4(at + (index & ~3u)) >> 8 * (index & 3)));
        return 1.0f;
    }
};

struct ByteKey {
    const uint8_t *token, *scales; /* the scales are in the token, or after all tokens of its page */

    DEVICE ByteKey(const struct dense_decode_params &p, int64_t page, int64_t slot)
    {
        const ByteLayout layout(p);
        const uint8_t *const from = (const uint8_t *)p.kv + page * p.kv_stride[0];
        token = from + slot * p.kv_stride[1];
        scales = layout.scale_bytes
                     ? from + (int64_t)p.page_size * layout.token_bytes + slot * layout.scale_bytes
                     : token + layout.scale_offset;
    }

    DEVICE ByteKey(const struct dense_decode_params &p, const Task &task, int key)
        : ByteKey(p, KeySlot(p, task, key).page, KeySlot(p, task, key).slot)
    {
    }

    /* Returns the scale of an FP8_576 cache; 1 for other formats. */
    static DEVICE float scale_of_cache(const struct dense_decode_params &p)
    {
        return p.kv_scale ? __ldg(p.kv_scale) : 1.0f;
    }

    /* Reads one value, the cache's scale included, from global memory. */
    DEVICE float value(const struct dense_decode_params &p, int column) const
    {
        const ByteLayout layout(p);
        if (column >= layout.nope)
            return Bf16::to_float(
                __ldg((const uint16_t *)(token + layout.rope_offset + 2 * (column - layout.nope))));
        const float code = num_from_e4m3(__ldg(token + column));
        if (layout.kind == KV_SCALE_OF_CACHE) return code * scale_of_cache(p);
        const int index = column >> layout.group_shift;
        const float scale = layout.kind == KV_SCALE_F32 ? __ldg((const float *)scales + index)
                                                        : num_from_ue8m0(__ldg(scales + index));
        return Bf16::to_float(Bf16::from_float(code * scale));
    }
};
