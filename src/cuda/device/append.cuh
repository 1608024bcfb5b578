/* SPDX-License-Identifier: MIT
 *
 * Loads a token's vector from the caller's memory and stores it to the cache; shared by the kernels that
 * write tokens.
 */
#pragma once

#include "cache.cuh"
#include "result.cuh"

/* ---- The caller's vectors ------------------------------------------------------------------- */

/* Loads a unit of elements of BYTES bytes, element by element. */
template <int BYTES> DEVICE uint4 load_elements(const uint8_t *from)
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = BYTES == 4 ? ((const uint32_t *)from)[i]
                              : ((const uint16_t *)from)[2 * i] |
                                    (uint32_t)((const uint16_t *)from)[2 * i + 1] << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* The address of a token's vector. Values below latent_width are in latent, the others in rope; both pointers
 * count from value 0 of the whole vector. */
template <typename In, bool SMALL = false> struct VectorPlace {
    static constexpr int BYTES = 16 / Unit<In>::VALUES;
    const uint8_t *latent, *rope;
    int latent_width;

    DEVICE VectorPlace(const struct cache_params &p, int64_t token)
        : latent((const uint8_t *)p.latent + steps_of<SMALL>(token, p.latent_stride) * BYTES),
          rope((const uint8_t *)p.rope + (steps_of<SMALL>(token, p.rope_stride) - p.latent_width) * BYTES),
          latent_width(p.latent_width)
    {
    }
    DEVICE const uint8_t *at(int value) const
    {
        return (value < latent_width ? latent : rope) + (int64_t)value * BYTES;
    }
    /* A unit never crosses from one tensor to the other. */
    template <bool ALIGNED> DEVICE uint4 load_unit(int first) const { return load<ALIGNED>(at(first)); }
    /* The same for a unit that is in latent. */
    template <bool ALIGNED> DEVICE uint4 load_latent(int first) const
    {
        return load<ALIGNED>(latent + first * BYTES);
    }
    template <bool ALIGNED> static DEVICE uint4 load(const uint8_t *from)
    {
        if constexpr (ALIGNED) return load_once_16(from);
        return load_elements<BYTES>(from);
    }
};

/* ---- Into the cache ------------------------------------------------------------------------- */

/* Stores COUNT words; ALIGNED: the address is a multiple of 4 · COUNT. */
template <bool ALIGNED, int COUNT> DEVICE void store_words(uint8_t *at, const uint32_t words[COUNT])
{
    if (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 4 * COUNT; i++) at[i] = (uint8_t)(words[i / 4] >> i % 4 * 8);
    } else if (COUNT == 4) {
        *(uint4 *)at = make_uint4(words[0], words[1], words[COUNT - 2], words[COUNT - 1]);
    } else if (COUNT == 2) {
        *(uint2 *)at = make_uint2(words[0], words[COUNT - 1]);
    } else {
        *(uint32_t *)at = words[0];
    }
}

template <typename To> struct Cache;
template <> struct Cache<Bf16> {
    static constexpr uint32_t INFINITE = 0x7f80, QUIET = 0x40;
    static DEVICE uint16_t exact(float x) { return num_to_bf16(x); }
};
template <> struct Cache<Fp16> {
    static constexpr uint32_t INFINITE = 0x7c00, QUIET = 0x200;
    static DEVICE uint16_t exact(float x) { return num_to_fp16(x); }
};

/* Makes the NaNs in a word of two values of type To quiet; other values stay. */
template <typename To> DEVICE uint32_t quiet(uint32_t word)
{
    if ((word & 0x7fffu) > Cache<To>::INFINITE) word |= Cache<To>::QUIET;
    if ((word & 0x7fffffffu) >= (Cache<To>::INFINITE << 16 | 0x10000u)) word |= Cache<To>::QUIET << 16;
    return word;
}

/* The same as value_of, but keeps the payload of a NaN. */
template <typename In> DEVICE float exact_value_of(const uint4 &unit, int i)
{
    return value_of<In>(unit, i);
}
template <> DEVICE float exact_value_of<Fp16>(const uint4 &unit, int i)
{
    return num_from_fp16((uint16_t)(word_of(unit, i / 2) >> i % 2 * 16));
}

/* Converts values 2i and 2i + 1 of a unit to a word. NaNs take the exact path, because the hardware
 * conversion would lose their sign and payload. */
template <typename In, typename To> struct Convert {
    static DEVICE uint32_t word(const uint4 &unit, int i)
    {
        const float low = value_of<In>(unit, 2 * i), high = value_of<In>(unit, 2 * i + 1);
        if (low == low && high == high) return To::pack(low, high);
        return Cache<To>::exact(exact_value_of<In>(unit, 2 * i)) |
               (uint32_t)Cache<To>::exact(exact_value_of<In>(unit, 2 * i + 1)) << 16;
    }
};
template <typename To> struct Convert<To, To> {
    static DEVICE uint32_t word(const uint4 &unit, int i) { return quiet<To>(word_of(unit, i)); }
};

/* Stores a unit as 16-bit values. */
template <bool ALIGNED, typename In, typename To> DEVICE void store_unit(uint8_t *at, const uint4 &unit)
{
    constexpr int WORDS = Unit<In>::VALUES / 2;
    uint32_t words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = Convert<In, To>::word(unit, i);
    store_words<ALIGNED, WORDS>(at, words);
}

/* If true, a token that is not stored still goes through all rounds, so that ptxas schedules them together.
 * Off for GPUs before 9.0, where ptxas would spill. */
#if __CUDA_ARCH__ >= 900
static constexpr bool ROUNDS_TOGETHER = true;
#else
static constexpr bool ROUNDS_TOGETHER = false;
#endif

/* ---- The largest magnitude of a group ------------------------------------------------------- */

constexpr uint32_t INFINITE = 0x7f800000; /* fp32 infinity; a NaN is larger */

/* Returns the larger magnitudes of two words of two values each. With NANS a NaN is larger than any number;
 * otherwise it is ignored. */
template <bool NANS, typename In> DEVICE uint32_t larger(uint32_t a, uint32_t b)
{
    uint32_t larger;
    if constexpr (In::IS_BF16 && NANS)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else if constexpr (In::IS_BF16)
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else if constexpr (NANS)
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else
        asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

template <typename In> DEVICE uint32_t magnitudes(uint32_t word)
{
    if constexpr (In::IS_BF16)
        asm("abs.bf16x2 %0, %0;" : "+r"(word));
    else
        asm("abs.f16x2 %0, %0;" : "+r"(word));
    return word;
}

/* Returns the largest magnitude in the units of a group, which neighbouring lanes hold, as fp32 bits. All
 * lanes must call. */
template <bool NANS, typename In> DEVICE uint32_t largest_magnitude(const uint4 &unit, int group)
{
    uint32_t most;
    if constexpr (Unit<In>::VALUES == 8) {
        most = larger<NANS, In>(larger<NANS, In>(magnitudes<In>(unit.x), magnitudes<In>(unit.y)),
                                larger<NANS, In>(magnitudes<In>(unit.z), magnitudes<In>(unit.w)));
#pragma unroll
        for (int lanes = group / 16; lanes; lanes /= 2)
            most = larger<NANS, In>(most, __shfl_xor_sync(~0u, most, lanes));
        const float low = In::to_float((uint16_t)most), high = In::to_float((uint16_t)(most >> 16));
        if (NANS) return max(__float_as_uint(low), __float_as_uint(high));
        return __float_as_uint(fmaxf(fmaxf(low, high), 0.0f));
    }
    most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t one = word_of(unit, i) & 0x7fffffffu;
        most = max(most, NANS || one <= INFINITE ? one : 0);
    }
#pragma unroll
    for (int lanes = group / 8; lanes; lanes /= 2) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    return most;
}

/* ---- FP8 ------------------------------------------------------------------------------------ */

/* Converts four values to e4m3, with the signs of values 4 i … 4 i + 3 of the unit, of which they are
 * positive multiples. */
template <typename In> DEVICE uint32_t signed_e4m3_4(const float value[4], const uint4 &unit, int i)
{
    if constexpr (Unit<In>::VALUES == 4)
        return to_e4m3_4(value, __byte_perm(__byte_perm(unit.x, unit.y, 0x0073),
                                            __byte_perm(unit.z, unit.w, 0x0073), 0x5410));
    return to_e4m3_4(value, __byte_perm(word_of(unit, 2 * i), word_of(unit, 2 * i + 1), 0x7531));
}

/* Appends a round of units with one scale per group. All lanes must call. Lanes past `nope` do nothing after
 * the shuffles. `there`: the result is stored. */
template <bool ALIGNED, typename In>
DEVICE void append_groups(const struct kv_layout &l, const uint4 &unit, int first, uint8_t *values,
                          uint8_t *scales, bool there)
{
    constexpr int VALUES = Unit<In>::VALUES;
    const int code = fast_ue8m0_scale(largest_magnitude<false, In>(unit, l.group));
    const float inverse = fast_ue8m0_inverse(code);
    float y[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) y[i] = value_of<In>(unit, i) * inverse;
    if (first >= l.nope || !(there || ROUNDS_TOGETHER)) return;
    uint32_t words[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) words[i] = signed_e4m3_4<In>(y + 4 * i, unit, i);
    if (there) store_words<ALIGNED, VALUES / 4>(values + first, words);
    if (first % l.group || !there) return;
    const uint32_t scale = (uint32_t)code << 23; /* between 2^-13 and 2^127 */
    if (l.scale == KV_SCALE_F32)
        store_words<ALIGNED, 1>(scales + first / l.group * 4, &scale);
    else
        scales[first / l.group] = (uint8_t)code;
}

/* Appends a unit with the cache's single scale. */
template <bool ALIGNED, typename In>
DEVICE void append_unit(const struct cache_params &p, const uint4 &unit, uint8_t *at)
{
    constexpr int VALUES = Unit<In>::VALUES;
    float x[VALUES], y[VALUES];
    uint32_t words[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        x[i] = value_of<In>(unit, i);
        y[i] = fast_quotient(x[i] * p.prescale, p.cache_scale, p.inverse);
    }
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) words[i] = signed_e4m3_4<In>(y + 4 * i, unit, i);
    store_words<ALIGNED, VALUES / 4>(at, words);
}

/* ---- FP4 ------------------------------------------------------------------------------------ */

/* num_e4m3_scale of a number: amax is clamped before the division by 6, which is a product with 1 / 6 and one
 * correction step. */
DEVICE uint8_t fp4_scale(float amax)
{
    constexpr float BY = 6.0f, INVERSE = 1.0f / 6.0f;
    const float clamped = fminf(fmaxf(amax, BY * 0x1p-9f), BY * 448.0f), quotient = clamped * INVERSE,
                scale = fmaf(fmaf(-quotient, BY, clamped), INVERSE, quotient);
    const float four[4] = {scale, scale, scale, scale};
    return (uint8_t)to_e4m3_4(four, 0);
}

/* Returns x / scale as e2m1, with one correction step as in fast_quotient. Where fp32 overflows, the
 * correction makes a NaN, and its minimum with 6 is 6. Rounding adds a number whose last bit has the weight
 * of an e2m1 step; steps are 0.5 below 2, 1 below 4, and 2 above. */
DEVICE uint32_t to_e2m1(float x, float scale, float inverse)
{
    constexpr float HALVES = 0x1p22f, ONES = 0x1p23f, TWOS = 0x1p24f;
    const float quotient = x * inverse,
                magnitude = fminf(fabsf(fmaf(fmaf(-quotient, scale, x), inverse, quotient)), 6.0f);
    const float by = magnitude < 2.0f ? HALVES : magnitude < 4.0f ? ONES : TWOS;
    const uint32_t first = magnitude < 2.0f ? 0 : magnitude < 4.0f ? 2 : 4;
    return (__float_as_uint(magnitude + by) - __float_as_uint(by) + first) | (__float_as_uint(x) >> 28 & 8u);
}

/* Converts eight bf16 values to e2m1. `inverse` is the reciprocal of 2^14 times the scale. It maps 1, the
 * smallest normal number of e2m1, to the smallest normal number of fp16: the upper bits of fp16 are then the
 * code, and rounding to nearest even is an integer addition. The quotient of a bf16 value and a scale of four
 * bits is either a tie between two codes or at least 2^-8 of itself away from one, so rounding to fp16 first
 * keeps ties apart. Values i and i + 4 share a word. */
DEVICE uint32_t to_e2m1_8(const uint4 &unit, const float (&x)[8], float inverse)
{
    constexpr uint32_t MOST = 0x0e000e00 /* 6 */, CODES = MOST, BELOW_HALF = 0x00ff00ff, ODD = 0x00010001;
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = Fp16::pack(x[i] * inverse, x[i + 4] * inverse);
        asm("{\n.reg .b32 a;\nabs.f16x2 a, %0;\nmin.f16x2 %0, a, %1;\n}" : "+r"(two) : "r"(MOST));
        rounded[i] = two + BELOW_HALF + (two >> 9 & ODD);
    }
    const uint32_t low = (rounded[0] & CODES) | (rounded[1] << 4 & CODES << 4),
                   high = (rounded[2] & CODES) | (rounded[3] << 4 & CODES << 4);
    uint32_t signs[2]; /* one per byte */
    asm("prmt.b32 %0, %1, %2, 0xfbd9;" : "=r"(signs[0]) : "r"(unit.x), "r"(unit.y));
    asm("prmt.b32 %0, %1, %2, 0xfbd9;" : "=r"(signs[1]) : "r"(unit.z), "r"(unit.w));
    return low >> 9 | high >> 1 | (__byte_perm(signs[0], signs[1], 0x5410) & 0x08080808) |
           (__byte_perm(signs[0], signs[1], 0x7632) & 0x80808080);
}

/* Appends a round of FP4 units; two or four units share a scale. All lanes must call. A NaN in the group
 * makes the scale NaN. */
template <bool ALIGNED, typename In>
DEVICE void append_fp4(const struct kv_layout &l, const uint4 &unit, int first, uint8_t *values,
                       uint8_t *scales, bool there)
{
    constexpr int VALUES = Unit<In>::VALUES;
    const uint32_t most = largest_magnitude<true, In>(unit, l.group);
    const uint8_t code = most > INFINITE ? 0x7f : fp4_scale(__uint_as_float(most));
    const float scale = from_e4m3_2(code).x, inverse = reciprocal_approx(scale);
    if (first >= l.nope || !(there || ROUNDS_TOGETHER)) return;
    float x[VALUES];
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) x[i] = value_of<In>(unit, i);
    if constexpr (In::IS_BF16) {
        word = to_e2m1_8(unit, x, inverse * 0x1p-14f);
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; i++) word |= to_e2m1(x[i], scale, inverse) << 4 * i;
    }
    if (most > INFINITE) word = 0;
    if (!there) return;
    uint8_t *const at = values + first / 2;
    if (VALUES == 8)
        store_words<ALIGNED, 1>(at, &word);
    else if (ALIGNED)
        *(uint16_t *)at = (uint16_t)word;
    else
        at[0] = (uint8_t)word, at[1] = (uint8_t)(word >> 8);
    if (first % l.group == 0) scales[first / l.group] = code;
}

/* ---- A token --------------------------------------------------------------------------------- */

/* Stores a whole token; lane i of LANES has units i, i + LANES, …. All lanes must call. `there`: the token is
 * stored. */
template <bool ALIGNED, typename In, int FORMAT, bool SMALL = false, int LANES = 32, int ROUNDS>
DEVICE void store_quantised(const struct cache_params &p, const uint4 (&unit)[ROUNDS], int64_t slot,
                            bool there = true)
{
    constexpr int VALUES = Unit<In>::VALUES;
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    const int lane = threadIdx.x % LANES, width = l.nope + l.rope;
    const SlotAddress address = slot_address<SMALL>(p, slot);
    uint8_t *scales = scales_at(p, l, address);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = (lane + LANES * r) * VALUES;
        if (l.element == KV_ELEMENT_E2M1 && LANES * r * VALUES < l.nope)
            append_fp4<ALIGNED, In>(l, unit[r], first, address.values, scales, there);
        else if (l.group && LANES * r * VALUES < l.nope)
            append_groups<ALIGNED, In>(l, unit[r], first, address.values, scales, there);
        if (!l.group && first < l.nope && there) append_unit<ALIGNED, In>(p, unit[r], address.values + first);
        if (first >= l.nope && first < width && there)
            store_unit<ALIGNED, In, Bf16>(address.values + l.rope_offset + 2 * (first - l.nope), unit[r]);
    }
    if (l.scale_bytes > l.scales && lane == LANES - 1 && there) scales[l.scales] = 0; /* the pad byte */
}
