/* SPDX-License-Identifier: MIT
 *
 * FP8 codes to what is multiplied.
 */
#pragma once

#include "element.cuh"

/* Four e4m3 codes times a scale, rounded once to bf16. */
__device__ __forceinline__ void convert_codes(uint32_t codes, float scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
    low = Bf16::pack(Fp16::to_float((uint16_t)a) * scale, Fp16::to_float((uint16_t)(a >> 16)) * scale);
    high = Bf16::pack(Fp16::to_float((uint16_t)b) * scale, Fp16::to_float((uint16_t)(b >> 16)) * scale);
}
