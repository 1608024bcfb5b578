/* SPDX-License-Identifier: MIT
 *
 * FP8 codes to bf16: bf16(e4m3 × scale), as everywhere. Where the scales of a warp's keys are powers of two below 2^8, by bit
 * moves and one multiplication, which is exact; the others by fp32. NaN codes are noticed by their bits alone: a key that
 * has one makes NaN of all that sees it, so that its scores are set to NaN (softmax.cuh) and its values do not matter.
 */
#pragma once

#include "layout.cuh"

enum {
    CODE_SHIFT = 120 /* the bits of a code, moved to those of a bf16, are worth 2^-120 of it */,
    MOST_EXPONENT = 254 - CODE_SHIFT /* of a scale whose product with 2^120 is finite */
};

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* Codes c0 … c3 to (c0, c2), (c1, c3); `scale`: scale · 2^120, twice. */
__device__ __forceinline__ void convert_plain(uint32_t codes, uint32_t scale, uint32_t &even, uint32_t &odd)
{
    even = multiply_bf16x2(((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u), scale);
    odd = multiply_bf16x2((codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u), scale);
}

/* The same by fp32, for any scale. */
__device__ __forceinline__ void convert_any(uint32_t codes, float scale, uint32_t &even, uint32_t &odd)
{
    uint32_t low, high;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
    even = Bf16::pack(Fp16::to_float((uint16_t)low) * scale, Fp16::to_float((uint16_t)high) * scale);
    odd = Bf16::pack(Fp16::to_float((uint16_t)(low >> 16)) * scale,
                     Fp16::to_float((uint16_t)(high >> 16)) * scale);
}

/* Gathers in bit 7 of a byte whether its code was NaN (S.1111.111): adding 1 then changes that bit. A carry comes out of a NaN
 * alone. */
__device__ __forceinline__ void notice_nan(uint32_t &noticed, uint32_t codes)
{
    noticed |= (codes + 0x01010101u) ^ codes;
}

__device__ __forceinline__ bool nan_noticed(uint32_t noticed)
{
    return noticed & 0x80808080u;
}

/* The scales of a key. */
template <typename F> struct Scales {
    uint32_t word[F::SCALE_WORDS];

    __device__ __forceinline__ void load(uint32_t from)
    {
        const uint4 words = load_shared_16(from);
        word[0] = words.x, word[1] = words.y;
        if constexpr (!F::ROPE_IS_V) word[2] = words.z, word[3] = words.w;
    }

    /* Are all powers of two up to 2^7? */
    __device__ __forceinline__ bool plain() const
    {
        if constexpr (F::ROPE_IS_V) {
            const uint32_t high = (word[0] & ((word[0] & 0x7f7f7f7fu) + 0x79797979u)) | /* 135 and above */
                                  ((word[1] & ((word[1] & 0x7f7f7f7fu) + 0x79797979u)) & 0x00ffffffu);
            static_assert(MOST_EXPONENT + 1 + 0x79 == 0x100, "a byte above it carries into bit 7");
            return !(high & 0x80808080u);
        } else {
            bool all = true;
#pragma unroll
            for (int i = 0; i < F::SCALE_WORDS; i++)
                all &= !(word[i] & 0x807fffffu) & (word[i] - 1u < (uint32_t)MOST_EXPONENT << 23);
            return all;
        }
    }

    __device__ __forceinline__ uint32_t code_of(int chunk) const /* ue8m0 */
    {
        return word[chunk / 4 % F::SCALE_WORDS] >> (8 * (chunk % 4)) & 0xffu;
    }

    /* Of a chunk: times 2^120 in bf16, twice in a word, if all are plain; a key that is none has scales 0, and codes 0. */
    __device__ __forceinline__ uint32_t shifted(int chunk) const
    {
        if constexpr (F::ROPE_IS_V) return ((code_of(chunk) + CODE_SHIFT) << 7) * 0x10001u;
        return __byte_perm(word[chunk / 2] + ((uint32_t)CODE_SHIFT << 23), 0, 0x3232);
    }

    __device__ __forceinline__ float value(int chunk) const
    {
        if constexpr (F::ROPE_IS_V) return num_from_ue8m0((uint8_t)code_of(chunk));
        return __uint_as_float(word[chunk / 2]);
    }
};
