/* SPDX-License-Identifier: MIT
 *
 * The two 16-bit types of queries and caches, as template arguments, with conversions to and from fp32.
 */
#pragma once

#include "kernel.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

struct Bf16 {
    static constexpr bool IS_BF16 = true;
    static constexpr uint32_t EXPONENT = 0x7f80; /* all ones: infinity or NaN */

    static DEVICE float to_float(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
    static DEVICE uint16_t from_float(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
    /* `low` goes to the lower half of the word. */
    static DEVICE uint32_t pack(float low, float high)
    {
        uint32_t word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
};

struct Fp16 {
    static constexpr bool IS_BF16 = false;
    static constexpr uint32_t EXPONENT = 0x7c00;

    static DEVICE float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static DEVICE uint16_t from_float(float x) { return __half_as_ushort(__float2half_rn(x)); }
    static DEVICE uint32_t pack(float low, float high)
    {
        uint32_t word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
};

/* Returns whether one of the two values of a word is infinite or NaN. */
template <typename Element> DEVICE bool any_not_finite(uint32_t word)
{
    return (word & Element::EXPONENT) == Element::EXPONENT ||
           (word >> 16 & Element::EXPONENT) == Element::EXPONENT;
}
