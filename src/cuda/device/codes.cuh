/* SPDX-License-Identifier: MIT
 *
 * Loads codes and scales from a cache and converts them to bf16; shared by gather and convert.
 */
#pragma once

#include "cache.cuh"

/* Loads the scale of a group. */
DEVICE float load_scale(const struct kv_layout &l, const uint8_t *scales, int group)
{
    float scale;
    uint32_t code;
    if (l.scale == KV_SCALE_F32) {
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(scales + 4 * group) : "memory");
        return scale;
    }
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(code) : "l"(scales + group) : "memory");
    return l.scale == KV_SCALE_E4M3 ? num_from_e4m3((uint8_t)code) : num_from_ue8m0((uint8_t)code);
}

/* Computes e4m3 × scale in fp32. */
template <int VALUES> DEVICE void scaled_e4m3(const uint4 &raw, float scale, float (&x)[VALUES])
{
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++) {
        const float2 two = from_e4m3_2(word_of(raw, i / 2) >> i % 2 * 16);
        x[2 * i] = two.x * scale, x[2 * i + 1] = two.y * scale;
    }
}

/* Returns e4m3 × scale, rounded to bf16, for VALUES values (a unit of the destination). */
template <int VALUES> DEVICE uint4 bf16_of_e4m3(const uint4 &raw, float scale)
{
    uint32_t pairs[4] = {0, 0, 0, 0};
    float x[VALUES];
    scaled_e4m3<VALUES>(raw, scale, x);
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++) pairs[i] = Bf16::pack(x[2 * i], x[2 * i + 1]);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/* Returns e2m1 × scale, which is exact in bf16. */
template <int VALUES> DEVICE uint4 bf16_of_e2m1(const uint4 &raw, float scale)
{
    uint32_t pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++) {
        const uint32_t two = raw.x >> 8 * i;
        pairs[i] = Bf16::pack(num_from_e2m1((uint8_t)(two & 15)) * scale,
                              num_from_e2m1((uint8_t)(two >> 4 & 15)) * scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
