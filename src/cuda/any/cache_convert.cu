/* SPDX-License-Identifier: MIT
 *
 * Copies tokens from pages of one format to pages of another (fmla_cache_convert). A warp takes a token; a
 * CTA has CACHE_WARPS warps. There is a kernel per destination format; the source format is a property of the
 * call, so its branches are uniform over the launch.
 *
 *   both slots of the token
 *   codes and scales of all units    independent loads of 16, 8 or 4 bytes per lane
 *   values                           fp16 for FP16, fp32 for FP8_576; else bf16, which is exact
 *   into the slot                    as in cache_append.cu
 *
 * Registers only. Limit: memory, with 656 bytes read and 576 written for a token from FP8_656 to FP8_576. The
 * bytes equal those of kv_store_token applied to kv_load (kvformat.h), except that a code that is NaN or has
 * a NaN scale becomes the positive NaN with all bits set, as the hardware converts it.
 */
#include "../device/append.cuh"
#include "../device/codes.cuh"

/* ---- The source ----------------------------------------------------------------------------- */

struct SourceAddress {
    const uint8_t *page, *values, *scales;
    int64_t in_page;

    DEVICE SourceAddress(const struct cache_params &p, int64_t slot)
    {
        const int64_t number = p.few_source_slots ? (int64_t)fast_divide((int)slot, p.source_page_divisor)
                                                  : slot / p.source_page_size;
        in_page = slot - number * p.source_page_size;
        page = p.source + number * p.source_page_stride;
        values = page + in_page * p.source_slot_stride;
        const struct kv_layout &l = p.source_layout;
        scales =
            l.scale_bytes ? page + kv_scales_at(&l, p.source_page_size, in_page) : values + l.scale_offset;
    }
    /* Returns value i as it is written to another cache, computed by kvformat.h alone. */
    DEVICE float converted(const struct cache_params &p, int i) const
    {
        const struct kv_layout &l = p.source_layout;
        const bool whole_page = l.scale_bytes > 0; /* other formats are treated as pages of one slot */
        const float x = kv_load(&l, whole_page ? page : values, whole_page ? p.source_page_size : 1,
                                whole_page ? in_page : 0, i, p.source_scale);
        return kv_convert(&l, i, x);
    }
};

/* The loaded form of a unit of a source with 16-bit values: codes and a scale, or the values. */
template <typename In> struct Raw {
    uint4 bits;
    float scale;

    DEVICE void load(const struct cache_params &p, const SourceAddress &from, int first)
    {
        const struct kv_layout &l = p.source_layout;
        if (!kv_is_quantised(&l) || first >= l.nope) {
            bits = load_once_16(from.values + (kv_is_quantised(&l) ? l.rope_offset - 2 * l.nope : 0) +
                                2 * (int64_t)first);
            return;
        }
        bits = l.element == KV_ELEMENT_E2M1 ? load_once_4(from.values + first / 2)
                                            : load_once_8(from.values + first);
        scale = load_scale(l, from.scales, first >> p.source_group_shift);
    }
    DEVICE uint4 unit(const struct cache_params &p, int first) const
    {
        const struct kv_layout &l = p.source_layout;
        if (!kv_is_quantised(&l) || first >= l.nope) return bits;
        return l.element == KV_ELEMENT_E2M1 ? bf16_of_e2m1<8>(bits, scale) : bf16_of_e4m3<8>(bits, scale);
    }
};

/* The same of FP8_576, whose values are fp32. */
template <> struct Raw<F32> {
    uint4 bits;
    float scale;

    DEVICE void load(const struct cache_params &p, const SourceAddress &from, int first)
    {
        bits = load_once_4(from.values + first), scale = p.source_scale;
    }
    DEVICE uint4 unit(const struct cache_params &, int) const
    {
        float x[4];
        scaled_e4m3<4>(bits, scale, x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (x[i] != x[i]) x[i] = num_from_bf16(0x7fff); /* as kv_convert */
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
    }
};

/* Loads ROUNDS rounds of units of a token, from value `begin` on. */
template <typename In, int ROUNDS>
DEVICE void load_units(const struct cache_params &p, const SourceAddress &from, int begin, int d_qk,
                       uint4 (&unit)[ROUNDS])
{
    constexpr int VALUES = Unit<In>::VALUES;
    const int lane = threadIdx.x & 31;
    Raw<In> raw[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = begin + (lane + 32 * r) * VALUES;
        raw[r].bits = make_uint4(0, 0, 0, 0), raw[r].scale = 0.0f;
        if (first < d_qk) raw[r].load(p, from, first);
    }
    __syncwarp(); /* all loads are issued before the first is waited for */
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) unit[r] = raw[r].unit(p, begin + (lane + 32 * r) * VALUES);
}

/* A value of type In in memory. */
template <typename In> struct Stored {
    using Type = uint16_t;
    static DEVICE Type of(float x) { return Cache<In>::exact(x); }
};
template <> struct Stored<F32> {
    using Type = float;
    static DEVICE Type of(float x) { return x; }
};

/* Loads all units of a token value by value, from any address. They pass through shared memory, so that the
 * loop need not be unrolled: kv_load is long, and 24 copies of it in each kernel took a minute to compile. All
 * lanes must call. */
template <typename In, int ROUNDS>
DEVICE void load_units_any(const struct cache_params &p, const SourceAddress &from, int d_qk,
                           uint4 (&unit)[ROUNDS])
{
    constexpr int VALUES = Unit<In>::VALUES, MOST = 576;
    using Value = typename Stored<In>::Type;
    __shared__ __align__(16) Value memory[CACHE_WARPS][MOST];
    const int lane = threadIdx.x & 31;
    Value *const values = memory[threadIdx.x / 32];
    __syncwarp(); /* the units of the token before have been read */
#pragma unroll 1
    for (int i = lane; i < d_qk; i += 32) values[i] = Stored<In>::of(from.converted(p, i));
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = (lane + 32 * r) * VALUES;
        unit[r] = make_uint4(0, 0, 0, 0);
        if (first < d_qk) unit[r] = *(const uint4 *)(values + first);
    }
}

/* ---- A token ---------------------------------------------------------------------------------- */

DEVICE bool is_source_slot(const struct cache_params &p, int64_t slot)
{
    return slot >= 0 && slot < p.source_slots_of_cache;
}

template <bool ALIGNED, typename In, int FORMAT>
DEVICE void convert_fp8(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int ROUNDS = (576 / Unit<In>::VALUES + 31) / 32;
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    const int64_t source_slot = __ldg(p.source_slots + token);
    if (!is_slot(p, slot) || !is_source_slot(p, source_slot)) return;
    const SourceAddress from(p, source_slot);
    uint4 unit[ROUNDS];
    if constexpr (ALIGNED)
        load_units<In>(p, from, 0, l.nope + l.rope, unit);
    else
        load_units_any<In>(p, from, l.nope + l.rope, unit);
    store_quantised<ALIGNED, In, FORMAT>(p, unit, slot);
}

template <bool ALIGNED, typename In, typename To>
DEVICE void convert_16(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int VALUES = Unit<In>::VALUES, ROUNDS = (576 / VALUES + 31) / 32;
    const int lane = threadIdx.x & 31;
    const int64_t source_slot = __ldg(p.source_slots + token);
    if (!is_slot(p, slot) || !is_source_slot(p, source_slot)) return;
    const SourceAddress from(p, source_slot);
    uint8_t *const values = slot_address(p, slot).values;
    if constexpr (ALIGNED) {
        for (int begin = 0; begin < p.d_qk; begin += 32 * VALUES * ROUNDS) {
            uint4 unit[ROUNDS];
            load_units<In>(p, from, begin, p.d_qk, unit);
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int first = begin + (lane + 32 * r) * VALUES;
                if (first < p.d_qk) store_unit<ALIGNED, In, To>(values + 2 * (int64_t)first, unit[r]);
            }
        }
    } else { /* value by value */
        for (int i = lane; i < p.d_qk; i += 32)
            ((uint16_t *)values)[i] = Cache<To>::exact(from.converted(p, i));
    }
}

/* For sources with bf16 values, and for FP16. */
#define CONVERT_KERNELS(FORMAT, call, KIND)                                                                  \
    CACHE_KERNEL(cache_convert_##FORMAT##_bf16, call, Bf16, KIND)                                            \
    CACHE_KERNEL(cache_convert_##FORMAT##_fp16, call, Fp16, KIND)
CONVERT_KERNELS(bf16, convert_16, Bf16)
CONVERT_KERNELS(fp16, convert_16, Fp16)
CONVERT_KERNELS(fp8_656, convert_fp8, KV_FP8_656)
CONVERT_KERNELS(fp8_584, convert_fp8, KV_FP8_584)
CONVERT_KERNELS(fp8_576, convert_fp8, KV_FP8_576)
CONVERT_KERNELS(fp8_528, convert_fp8, KV_FP8_528)
CONVERT_KERNELS(fp8_528_split, convert_fp8, KV_FP8_528_SPLIT)
CONVERT_KERNELS(fp4_288, convert_fp8, KV_FP4_288)
CONVERT_KERNELS(fp4_288_split, convert_fp8, KV_FP4_288_SPLIT)
CONVERT_KERNELS(fp8_528_f32, convert_fp8, KV_FP8_528_F32)

/* For FP8_576, whose values are fp32, to the formats that are as wide. */
CACHE_KERNEL(cache_convert_bf16_fp32, convert_16, F32, Bf16)
CACHE_KERNEL(cache_convert_fp16_fp32, convert_16, F32, Fp16)
CACHE_KERNEL(cache_convert_fp8_656_fp32, convert_fp8, F32, KV_FP8_656)
CACHE_KERNEL(cache_convert_fp8_576_fp32, convert_fp8, F32, KV_FP8_576)
