/* SPDX-License-Identifier: MIT
 *
 * FP8 codes and bf16 values to what is multiplied: fp16, or bf16 for the keys that fp16 does not hold. Codes become
 * bf16(e4m3 × scale), as everywhere; in fp16 exactly, where the scale is a power of two, and else e4m3 × fp16(scale), nearer to
 * the product than bf16 is. NaN codes become NaN either way.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/shared.cuh"
#include "common.cuh"

/* Scales that are multiplied in fp16: every code times 2^-15 is a multiple of 2^-24, as all of fp16 is, so that powers of two
 * lose nothing; with others a value loses 2^-10 of itself and 2^-25, less than bf16 loses wherever the code is 1/2 or more. Above,
 * 448 times the scale is infinite. Of ue8m0 a range that shows in the upper bits of a byte. */
enum : uint32_t { LEAST_SCALE = 0x38000000 /* 2^-15 */, MOST_SCALE = 0x43120000 /* 146 */ };
static constexpr uint32_t SCALE_CODES = 0x70 /* 2^-15 … 1: with the lower four bits anything */;

/* Scales that are no powers of two may be rounded. How far that moves a score goes by softmax_scale: some 1e-4 here, of queries
 * and keys around 1 and 1/10. With larger ones they go by bf16. */
static constexpr float MOST_SOFTMAX_SCALE_FOR_ROUNDED = 0.0625f;

/* |x| of a bf16 value from here on is infinite in fp16. */
static constexpr uint32_t BF16_TOO_LARGE = 0x4780;

/* Codes c0 … c3 to (c0, c1), (c2, c3); `scale`: in fp16, twice. */
DEVICE void convert_codes(uint32_t codes, uint32_t scale, uint32_t &low, uint32_t &high)
{
    asm("{\n.reg .b16 x, y;\n.reg .b32 a, b;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 a, x;\n"
        "cvt.rn.f16x2.e4m3x2 b, y;\nmul.rn.f16x2 %0, a, %3;\nmul.rn.f16x2 %1, b, %3;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes), "r"(scale));
}

/* The same to bf16, for any scale. */
DEVICE void convert_codes(uint32_t codes, float scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
    low = Bf16::pack(Fp16::to_float((uint16_t)a) * scale, Fp16::to_float((uint16_t)(a >> 16)) * scale);
    high = Bf16::pack(Fp16::to_float((uint16_t)b) * scale, Fp16::to_float((uint16_t)(b >> 16)) * scale);
}

/* Two bf16 values to what is multiplied. */
template <typename Element> DEVICE uint32_t convert_bf16x2(uint32_t word)
{
    if constexpr (Element::IS_BF16) return word;
    return Fp16::pack(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

/* The larger magnitudes of two words of bf16 values, with some sign; NaN does not count. */
DEVICE uint32_t larger_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t larger;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

DEVICE bool too_large_for_fp16(uint32_t word)
{
    return (word & 0x7fffu) >= BF16_TOO_LARGE || (word >> 16 & 0x7fffu) >= BF16_TOO_LARGE;
}

/* The scales of a key. */
template <typename F> struct Scales {
    uint32_t word[F::SCALE_WORDS];

    DEVICE void load(uint32_t from)
    {
        const uint4 words = load_shared_16(from);
        word[0] = words.x, word[1] = words.y;
        if constexpr (!F::ROPE_IS_V) word[2] = words.z, word[3] = words.w;
    }

    /* Does fp16 hold what the codes make with them? */
    DEVICE bool fit(float softmax_scale) const
    {
        if constexpr (F::ROPE_IS_V) {
            constexpr uint32_t all = SCALE_CODES * 0x01010101u;
            return !((word[0] ^ all) & 0xf0f0f0f0u) & !((word[1] ^ all) & 0x00f0f0f0u);
        } else {
            const uint32_t fraction = softmax_scale > MOST_SOFTMAX_SCALE_FOR_ROUNDED ? 0x007fffffu : 0;
            uint32_t most = 0, least = ~0u, odd = 0;
#pragma unroll
            for (int i = 0; i < F::SCALE_WORDS; i++)
                most = max(most, word[i]), least = min(least, word[i] - 1u) /* 0 fits */, odd |= word[i];
            return most <= MOST_SCALE & least >= LEAST_SCALE - 1u & !(odd & fraction);
        }
    }

    /* Of a chunk, for either conversion. */
    template <typename Element> DEVICE auto of_chunk(int chunk) const
    {
        if constexpr (Element::IS_BF16) {
            return F::ROPE_IS_V ? num_from_ue8m0((uint8_t)code_of(chunk)) : __uint_as_float(word_of(chunk));
        } else {
            const float scale = __uint_as_float(F::ROPE_IS_V ? code_of(chunk) << 23 : word_of(chunk));
            return Fp16::pack(scale, scale);
        }
    }

  private:
    DEVICE uint32_t word_of(int chunk) const
    {
        return word[chunk / 2 % F::SCALE_WORDS];
    }

    DEVICE uint32_t code_of(int chunk) const /* ue8m0 */
    {
        return word[chunk / 4 % F::SCALE_WORDS] >> (8 * (chunk % 4)) & 0xffu;
    }
};
