/* SPDX-License-Identifier: MIT
 *
 * Converts FP8 codes and bf16 values to fp16, or to bf16 for keys that fp16 does not hold. Codes become
 * bf16(e4m3 × scale), as everywhere; in fp16 they are exact if the scale is a power of two, else e4m3 ×
 * fp16(scale), nearer to the product than bf16 is. NaN codes become NaN either way.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/element.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"
#include "scheduler.cuh"

namespace sparse_decode {

/* Scales that are multiplied in fp16. Every code times 2^-15 is a multiple of 2^-24, as all of fp16 is, so
 * that powers of two lose nothing; with other scales a value loses 2^-10 of itself and 2^-25, less than
 * bf16 loses if the code is 1/2 or more. Above MOST_SCALE, 448 times the scale is infinite. For ue8m0 the
 * range is one that shows in the upper bits of a byte. */
enum : uint32_t { LEAST_SCALE = 0x38000000 /* 2^-15 */, MOST_SCALE = 0x43120000 /* 146 */ };
static constexpr uint32_t SCALE_CODES = 0x70 /* 2^-15 … 1: the lower four bits are arbitrary */;

/* Scales that are not powers of two may be rounded. How far that moves a score depends on softmax_scale:
 * some 1e-4 at this value, for queries and keys around 1 and 1/10. With a larger softmax_scale they go by
 * bf16. */
static constexpr float MOST_SOFTMAX_SCALE_FOR_ROUNDED = 0.0625f;

/* A bf16 value with |x| from here on is infinite in fp16. */
static constexpr uint32_t BF16_TOO_LARGE = 0x4780;

/* Converts codes c0 … c3 to fp16 pairs (c0, c1), (c2, c3). `scale`: in fp16, in both halves. */
DEVICE void convert_codes(uint32_t codes, uint32_t scale, uint32_t &low, uint32_t &high)
{
    asm("{\n.reg .b16 x, y;\n.reg .b32 a, b;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 a, x;\n"
        "cvt.rn.f16x2.e4m3x2 b, y;\nmul.rn.f16x2 %0, a, %3;\nmul.rn.f16x2 %1, b, %3;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes), "r"(scale));
}

/* Converts the same to bf16, for any scale. */
DEVICE void convert_codes(uint32_t codes, float scale, uint32_t &low, uint32_t &high)
{
    uint32_t a, b;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(a), "=r"(b)
        : "r"(codes));
    low = Bf16::pack(Fp16::to_float((uint16_t)a) * scale, Fp16::to_float((uint16_t)(a >> 16)) * scale);
    high = Bf16::pack(Fp16::to_float((uint16_t)b) * scale, Fp16::to_float((uint16_t)(b >> 16)) * scale);
}

/* Converts an e4m3 scale of e4m3_of_e2m1's codes, for either conversion: fp16 holds all scales, and their
 * products with codes. */
template <typename Element> DEVICE auto fp4_scale(uint32_t code)
{
    uint32_t twice;
    asm("{\n.reg .b16 x;\ncvt.u16.u32 x, %1;\ncvt.rn.f16x2.e4m3x2 %0, x;\n}"
        : "=r"(twice)
        : "r"(code * 0x101u));
    if constexpr (Element::IS_BF16) {
        return Fp16::to_float((uint16_t)twice) * E2M1_IN_E4M3;
    } else {
        const uint32_t by = Fp16::pack(E2M1_IN_E4M3, E2M1_IN_E4M3);
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(twice) : "r"(by));
        return twice;
    }
}

/* Converts two bf16 values to the element of the products. */
template <typename Element> DEVICE uint32_t convert_bf16x2(uint32_t word)
{
    if constexpr (Element::IS_BF16) return word;
    return Fp16::pack(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

/* Returns the larger magnitudes of two words of bf16 values, with some sign; NaN does not count. */
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

/* Return the lane's scales of a key, one byte per chunk. A chunk has two scales in FP8_528 and four in
 * FP4_288. */
DEVICE uint32_t scales_of_32(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, lane() % 4 < 2 ? 0x6420 : 0x7531);
}

DEVICE uint32_t scales_of_16(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t which = 0x40u + 0x11u * (uint32_t)(lane() % 4);
    return __byte_perm(__byte_perm(a, b, which), __byte_perm(c, d, which), 0x5410);
}

/* The scales of a key: four of 32 bits, or one code per chunk (that of the lane's 16 values if a chunk has
 * several). */
template <typename F> struct Scales {
    uint32_t word[F::SCALE_WORDS];

    DEVICE void load(uint32_t from, bool fp4)
    {
        const uint4 words = load_shared_16(from);
        if (F::fp4(fp4)) {
            const uint4 more = load_shared_16(from + 16);
            word[0] = scales_of_16(words.x, words.y, words.z, words.w);
            word[1] = scales_of_16(more.x, more.y, more.z, more.w);
        } else if constexpr (F::F32_SCALES) {
            word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
        } else if constexpr (F::ROPE_IS_V) {
            word[0] = words.x, word[1] = words.y;
        } else {
            word[0] = scales_of_32(words.x, words.y), word[1] = scales_of_32(words.z, words.w);
        }
    }

    /* Returns whether fp16 holds the products of the codes with these scales. */
    DEVICE bool fit(float softmax_scale, bool fp4) const
    {
        if (F::fp4(fp4)) return true;
        if constexpr (!F::F32_SCALES) {
            constexpr uint32_t all = SCALE_CODES * 0x01010101u;
            constexpr uint32_t last = F::ROPE_IS_V ? 0x00f0f0f0u : 0xf0f0f0f0u; /* seven scales, or eight */
            return !((word[0] ^ all) & 0xf0f0f0f0u) & !((word[1] ^ all) & last);
        } else {
            const uint32_t fraction = softmax_scale > MOST_SOFTMAX_SCALE_FOR_ROUNDED ? 0x007fffffu : 0;
            uint32_t most = 0, least = ~0u, odd = 0;
#pragma unroll
            for (int i = 0; i < F::SCALE_WORDS; i++)
                most = max(most, word[i]), least = min(least, word[i] - 1u) /* 0 fits */, odd |= word[i];
            return most <= MOST_SCALE & least >= LEAST_SCALE - 1u & !(odd & fraction);
        }
    }

    /* Returns the scale of a chunk, for either conversion. */
    template <typename Element> DEVICE auto of_chunk(int chunk) const
    {
        if constexpr (Element::IS_BF16) {
            return F::F32_SCALES ? __uint_as_float(word_of(chunk)) : num_from_ue8m0((uint8_t)code_of(chunk));
        } else {
            const float scale = __uint_as_float(F::F32_SCALES ? word_of(chunk) : code_of(chunk) << 23);
            return Fp16::pack(scale, scale);
        }
    }

    /* Returns the scale of a chunk of FP4 codes. */
    template <typename Element> DEVICE auto fp4_of_chunk(int chunk) const
    {
        return fp4_scale<Element>(code_of(chunk));
    }

    /* ---- Conversion to fp16 where a block may be of either kind: the scales, all of which fit, are
     * brought to one form, so that chunks are converted without a branch ---- */

    /* Factors that a chunk's scale in that form is multiplied by. */
    static constexpr uint32_t ONE_FORM_OF_FP4 = 0x54005400, /* 2^6, twice: E2M1_IN_E4M3 */
        ONE_FORM_OF_FP8 = 0x1c001c00 /* 2^-8, twice */;

    /* Brings the scales to one form. Scales of 32 bits become a word of fp16 for two chunks, already
     * multiplied. Other scales become e4m3 codes; powers of two are stored 2^8 times as large. */
    DEVICE void to_one_form(bool fp4)
    {
        if constexpr (F::F32_SCALES) {
            if (fp4) {
                const uint32_t codes[2] = {word[0], word[1]};
#pragma unroll
                for (int i = 0; i < 4; i++) word[i] = twice_e4m3(codes[i / 2], i % 2, ONE_FORM_OF_FP4);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    word[i] = Fp16::pack(__uint_as_float(word[i]), __uint_as_float(word[i]));
            }
        } else if (!fp4) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t normal =
                    word[i] << 3 & 0x78787878u; /* 0 for 2^-15, which is a subnormal code */
                word[i] = normal | ((0x80808080u - normal) >> 5 & 0x04040404u);
            }
        }
    }

    /* Returns the scale of a chunk in fp16, in both halves of a word. `by`: the block's ONE_FORM_… */
    DEVICE uint32_t of_either(int chunk, uint32_t by) const
    {
        const uint32_t two = F::F32_SCALES ? word[chunk / 2 % F::SCALE_WORDS]
                                           : twice_e4m3(word[chunk / 4 % F::SCALE_WORDS], chunk / 2 % 2, by);
        uint32_t twice;
        if (chunk % 2)
            asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %1;\nmov.b32 %0, {y, y};\n}" : "=r"(twice) : "r"(two));
        else
            asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %1;\nmov.b32 %0, {x, x};\n}" : "=r"(twice) : "r"(two));
        return twice;
    }

  private:
    /* Converts the lower or upper two of four e4m3 codes to fp16, times `by`. The halves are named in
     * PTX, so that ptxas takes the upper one without a shift. */
    static DEVICE uint32_t twice_e4m3(uint32_t codes, bool upper, uint32_t by)
    {
        uint32_t low, high;
        asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.rn.f16x2.e4m3x2 %0, x;\ncvt.rn.f16x2.e4m3x2 %1, "
            "y;\n}"
            : "=r"(low), "=r"(high)
            : "r"(codes));
        uint32_t &two = upper ? high : low;
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(two) : "r"(by));
        return two;
    }

    DEVICE uint32_t word_of(int chunk) const
    {
        return word[chunk / 2 % F::SCALE_WORDS];
    }

    DEVICE uint32_t code_of(int chunk) const /* ue8m0; e4m3 for FP4 */
    {
        return word[chunk / 4 % F::SCALE_WORDS] >> (8 * (chunk % 4)) & 0xffu;
    }
};

/* ---- FP4 codes, by the sums' warps ------------------------------------------------------------- */

/* Conversion of raw FP4 keys to e4m3 codes, stored where the scores' threads take the codes of FP8. The
 * sums' warps convert, since they wait most of the time.
 *
 * The scores' threads copy 16 bytes of a key per pair of chunks, 32 codes: four lanes have the 128 columns
 * of a pair. The copies land where the even chunk's codes go; the codes go from there to both chunks, 16
 * to each of two lanes.
 *
 *      landed[pair], by the scores' threads    the pair's copies have arrived, and the earlier codes of both
 *                                              chunks have been taken
 *      converted[pair], by the sums' warps     e4m3 codes are stored
 *
 * All blocks pass through both barriers, also FP8 blocks and the block that is requested after the last one,
 * so that the phase is the count of blocks. */

/* The warps of the first half of the columns convert: those of the second half would convert late, behind
 * a product that waits for scores. */
enum { CONVERTING_WARPS = 4 };
static_assert(CONVERTING_WARPS == 4 || CONVERTING_WARPS == 8, "");

/* Converts the keys of block `count`. The sums' warps call it before they wait for P of the previous
 * block: the scores of block `count`, which the second warpgroup's product waits for (Mainloop::add_block),
 * need these codes. */
template <typename F> DEVICE void convert_fp4(Shared &shared, uint32_t smem, uint32_t count)
{
    constexpr uint32_t VECTORS = 2 * WARPGROUP_THREADS, /* of 16 bytes, per chunk */
        AT_ONCE = CONVERTING_WARPS * 32, CHUNK = VECTORS * 16;
    const uint32_t vector = fresh_thread() - WARPGROUP_THREADS, quarter = vector % 4, parity = count & 1;
    if (__any_sync(~0u, vector >= AT_ONCE)) return;
    /* Which half of its 16 bytes a lane takes first, so that eight lanes store to all banks. */
    const uint32_t half = (vector / 2 ^ vector / 8) % 2, raw = SHARED_AT(smem, raw);
    const uint32_t from = raw + 16 * vector + 8 * half;
    const uint32_t to = raw + quarter / 2 * CHUNK + 16 * (vector - quarter) + 32 * (quarter % 2) + 16 * half;
#pragma unroll 1
    for (uint32_t pair = 0; pair < PAIRS; pair++) {
        mbarrier_wait(SHARED_AT(smem, landed) + 8 * pair, parity);
        if (F::FP4 == ALL_BLOCKS || __any_sync(~0u, load_shared_4(SHARED_AT(smem, fp4) + 4 * parity)))
#pragma unroll
            for (uint32_t at = 2 * pair * CHUNK; at < 2 * pair * CHUNK + 16 * VECTORS; at += 16 * AT_ONCE) {
                const uint2 x = load_shared_8(from + at), y = load_shared_8((from ^ 8) + at);
                __syncwarp(); /* all lanes have read what they overwrite */
                const uint2 x0 = e4m3_of_e2m1(x.x), x1 = e4m3_of_e2m1(x.y);
                store_shared_16(to + at, make_uint4(x0.x, x0.y, x1.x, x1.y));
                const uint2 y0 = e4m3_of_e2m1(y.x), y1 = e4m3_of_e2m1(y.y);
                store_shared_16((to ^ 16) + at, make_uint4(y0.x, y0.y, y1.x, y1.y));
            }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, converted) + 8 * pair);
    }
}

} // namespace sparse_decode
