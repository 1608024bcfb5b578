/* SPDX-License-Identifier: MIT
 *
 * Shared by the cache kernels: vector types, slot addresses, conversions between e4m3 and fp32.
 *
 * The values of a token are handled in units of 16 bytes of the caller's vector. Lane u mod 32 has unit u, so
 * that every load and store of a warp is contiguous: 16 bytes per lane on the side of the vectors, and 16, 8
 * or 4 on the side of the cache.
 */
#pragma once

#include "../cache_params.h"
#include "divide.cuh"
#include "element.cuh"

#include "../../kvformat.h"
#include "../../num_fast.h"

struct F32 {
    static constexpr bool IS_BF16 = false;
};

template <typename Element> struct Unit {
    static constexpr int VALUES = 8;
};
template <> struct Unit<F32> {
    static constexpr int VALUES = 4;
};

/* ---- Slot addresses ------------------------------------------------------------------------- */

/* Returns count · step. SMALL: all counts and steps of the call are below 2^31. */
template <bool SMALL> DEVICE int64_t steps_of(int64_t count, int64_t step)
{
    if constexpr (SMALL) return (int64_t)((uint64_t)(uint32_t)count * (uint32_t)step);
    return count * step;
}

struct SlotAddress {
    uint8_t *page, *values;
    int64_t in_page;
};

template <bool SMALL = false> DEVICE SlotAddress slot_address(const struct cache_params &p, int64_t slot)
{
    int64_t page;
    if (SMALL || p.few_slots)
        page = fast_divide((int)slot, p.page_divisor);
    else
        page = slot / p.page_size;
    SlotAddress address;
    address.in_page = SMALL ? (int)slot - (int)page * (int)p.page_size : slot - page * p.page_size;
    address.page = p.cache + steps_of<SMALL>(page, p.page_stride);
    address.values = address.page + steps_of<SMALL>(address.in_page, p.slot_stride);
    return address;
}

DEVICE bool is_slot(const struct cache_params &p, int64_t slot)
{
    return slot >= 0 && slot < p.slots_of_cache;
}

DEVICE uint8_t *scales_at(const struct cache_params &p, const struct kv_layout &l, const SlotAddress &address)
{
    return l.scale_bytes ? address.page + kv_scales_at(&l, p.page_size, address.in_page)
                         : address.values + l.scale_offset;
}

/* ---- Memory --------------------------------------------------------------------------------- */

/* Loads data that is read once, without allocating it in L1. These are not ld.global.nc, and they clobber
 * "memory", so that __syncwarp() after a group of them keeps the compiler from moving one behind the wait for
 * another. */
template <int OFFSET = 0> DEVICE uint4 load_once_16(const void *at)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at), "n"(OFFSET)
                 : "memory");
    return v;
}

DEVICE uint4 load_once_8(const void *at)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(at)
                 : "memory");
    return v;
}

DEVICE uint4 load_once_4(const void *at)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v.x) : "l"(at) : "memory");
    return v;
}

/* ---- A unit as fp32 ------------------------------------------------------------------------- */

DEVICE uint32_t word_of(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <typename Element> DEVICE float value_of(const uint4 &unit, int i)
{
    return Element::to_float((uint16_t)(word_of(unit, i / 2) >> i % 2 * 16));
}

/* The hardware conversion loses the sign of a NaN; this restores the input's. */
template <> DEVICE float value_of<Fp16>(const uint4 &unit, int i)
{
    const uint16_t bits = (uint16_t)(word_of(unit, i / 2) >> i % 2 * 16);
    return __uint_as_float(__float_as_uint(Fp16::to_float(bits)) | (uint32_t)(bits & 0x8000u) << 16);
}

template <> DEVICE float value_of<F32>(const uint4 &unit, int i)
{
    return __uint_as_float(word_of(unit, i));
}

/* ---- e4m3 ----------------------------------------------------------------------------------- */

/* Converts four values to e4m3. `signs` has their signs in the upper bit of each byte: a NaN from the
 * hardware conversion or from a product has lost its sign. */
DEVICE uint32_t to_e4m3_4(const float value[4], uint32_t signs)
{
    uint32_t word;
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high;\n"
        " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        " mov.b32 %0, {low, high};}"
        : "=r"(word)
        : "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]));
#else
    word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (uint32_t)fast_to_e4m3(value[i]) << 8 * i;
#endif
    return word | (signs & 0x80808080u);
}

/* Converts the lower two bytes of `bytes`. */
DEVICE float2 from_e4m3_2(uint32_t bytes)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)bytes));
    return make_float2(Fp16::to_float((uint16_t)halves), Fp16::to_float((uint16_t)(halves >> 16)));
#else
    return make_float2(num_from_e4m3((uint8_t)bytes), num_from_e4m3((uint8_t)(bytes >> 8)));
#endif
}

/* Converts eight e2m1 codes to e4m3 codes of 2^-6 times their values, in the same order. */
DEVICE uint2 e4m3_of_e2m1(uint32_t codes)
{
    constexpr uint32_t SIGNS = 0x80808080, MAGNITUDES = 0x1c1c1c1c;
    const uint32_t even = (codes << 4 & SIGNS) | (codes << 2 & MAGNITUDES),
                   odd = (codes & SIGNS) | (codes >> 2 & MAGNITUDES);
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

static constexpr float E2M1_IN_E4M3 = 64.0f; /* compensated by the scale */

/* ---- The kernels of an operation ------------------------------------------------------------ */

/* Alignment is decided once, outside the loop, so that no load waits for the code of the other path. */
#define EACH_TOKEN(call, ...)                                                                                \
    const int64_t step = (int64_t)gridDim.x * CACHE_WARPS;                                                   \
    int64_t token = (int64_t)blockIdx.x * CACHE_WARPS + threadIdx.x / 32;                                    \
    if (p.aligned)                                                                                           \
        for (; token < p.tokens; token += step) call<true, __VA_ARGS__>(p, token, __ldg(p.slots + token));   \
    else                                                                                                     \
        for (; token < p.tokens; token += step) call<false, __VA_ARGS__>(p, token, __ldg(p.slots + token))

#ifndef CACHE_KERNEL /* a file may define its own */
#define CACHE_KERNEL(NAME, ...) DEFINE_KERNEL(NAME, cache_params, (32 * CACHE_WARPS), EACH_TOKEN(__VA_ARGS__))
#endif

/* Defines the kernels of a cache format for vectors of each type; `call` processes a token. */
#define CACHE_KERNELS_OF(NAME, call, FORMAT)                                                                 \
    CACHE_KERNEL(NAME##_bf16, call, Bf16, FORMAT)                                                            \
    CACHE_KERNEL(NAME##_fp16, call, Fp16, FORMAT)                                                            \
    CACHE_KERNEL(NAME##_fp32, call, F32, FORMAT)

#define CACHE_KERNELS(NAME, call_16, call_fp8)                                                               \
    CACHE_KERNELS_OF(NAME##_bf16, call_16, Bf16)                                                             \
    CACHE_KERNELS_OF(NAME##_fp16, call_16, Fp16)                                                             \
    CACHE_KERNELS_OF(NAME##_fp8_656, call_fp8, KV_FP8_656)                                                   \
    CACHE_KERNELS_OF(NAME##_fp8_584, call_fp8, KV_FP8_584)                                                   \
    CACHE_KERNELS_OF(NAME##_fp8_576, call_fp8, KV_FP8_576)                                                   \
    CACHE_KERNELS_OF(NAME##_fp8_528, call_fp8, KV_FP8_528)                                                   \
    CACHE_KERNELS_OF(NAME##_fp8_528_split, call_fp8, KV_FP8_528_SPLIT)                                       \
    CACHE_KERNELS_OF(NAME##_fp4_288, call_fp8, KV_FP4_288)                                                   \
    CACHE_KERNELS_OF(NAME##_fp4_288_split, call_fp8, KV_FP4_288_SPLIT)                                       \
    CACHE_KERNELS_OF(NAME##_fp8_528_f32, call_fp8, KV_FP8_528_F32)
