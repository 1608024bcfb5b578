/* SPDX-License-Identifier: MIT
 *
 * Converts codes of a cache to bf16 values: bf16(code × scale), as everywhere. FP4 codes become e4m3 codes
 * first. Below compute capability 8.9, which has no e4m3 conversion, fp16 is assembled from the code's bits.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/element.cuh"

#include "../../../num.h"

namespace sparse_decode {

/* Converts four e4m3 codes to fp16, two per word. */
DEVICE uint2 fp16_of_e4m3(uint32_t codes)
{
    uint2 halves;
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
#else
    /* The exponent of fp16 has one more bit at the top: the code's bits, one bit further down, are 2^-8 of
     * its value. */
    constexpr uint32_t SIGNS = 0x80008000, MAGNITUDES = 0x3f803f80, TWO_TO_8 = 0x5c005c00, NANS = 0x7fff7fff;
    const uint32_t all = ((codes & 0x7f7f7f7f) + 0x01010101) & 0x80808080; /* top bits of the NaN codes */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t upper = __byte_perm(codes, 0, i ? 0x3424 : 0x1404);
        uint32_t &to = i ? halves.y : halves.x;
        to = (upper >> 1 & MAGNITUDES) | (upper & SIGNS);
        asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(to) : "r"(TWO_TO_8), "r"(0x80008000u));
    }
    if (SELDOM(all)) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (all >> (8 * i + 7) & 1) (i < 2 ? halves.x : halves.y) |= NANS & 0xffffu << i % 2 * 16;
    }
#endif
    return halves;
}

/* Converts four e4m3 codes times an fp32 scale to bf16. */
DEVICE uint2 bf16_of_codes(uint32_t codes, float scale)
{
    const uint2 halves = fp16_of_e4m3(codes);
    const float2 low = __half22float2(*(const __half2 *)&halves.x),
                 high = __half22float2(*(const __half2 *)&halves.y);
    return make_uint2(Bf16::pack(low.x * scale, low.y * scale), Bf16::pack(high.x * scale, high.y * scale));
}

/* The same if the scale and the products are exact in bf16; `scale` is twice in its word. */
DEVICE uint2 bf16_of_codes(uint32_t codes, uint32_t scale)
{
    constexpr uint32_t MINUS_ZEROS = 0x80008000;
    uint2 values = bf16_of_codes(codes, 1.0f);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(values.x) : "r"(scale), "r"(MINUS_ZEROS));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(values.y) : "r"(scale), "r"(MINUS_ZEROS));
    return values;
}

/* Returns a ue8m0 scale as bf16, twice in a word. For the exponents of 0 and of NaN the next lower bit is
 * set, too: 2^-127 is subnormal. */
DEVICE uint32_t bf16_of_ue8m0(uint32_t word, uint32_t byte)
{
    const uint32_t twice = __byte_perm(word, 0, 0x4040 | byte << 8 | byte);
    return twice << 7 | (((twice + 1) & 0xfe) ? 0 : 0x00400040);
}

} // namespace sparse_decode
