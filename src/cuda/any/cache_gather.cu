/* SPDX-License-Identifier: MIT
 *
 * Reads vectors from pages (fmla_cache_gather). A warp takes a token; a CTA has CACHE_WARPS warps.
 *
 *   slot of the token               everything waits for it; the other warps of the SM hide the latency
 *   all units of the token, scales  independent loads of 16, 8 or 4 bytes per lane
 *   16 bytes per lane to out
 *
 * Registers only. Limit: memory, with 656 bytes read and 1152 written for a bf16 token of FP8_656. The values
 * equal those of kv_load (kvformat.h); a NaN stays a NaN, with unspecified bits.
 */
#include "../device/codes.cuh"

/* ---- The cache ------------------------------------------------------------------------------ */

/* Loads COUNT words from an address that is a multiple of 4 · COUNT. */
template <int COUNT> DEVICE uint4 load_words(const uint8_t *at)
{
    return COUNT == 4 ? load_once_16(at) : COUNT == 2 ? load_once_8(at) : load_once_4(at);
}

/* ---- The output ----------------------------------------------------------------------------- */

template <typename Out> struct Vector {
    static constexpr int BYTES = 2;
    static DEVICE uint4 make(const float *x)
    {
        return make_uint4(Out::pack(x[0], x[1]), Out::pack(x[2], x[3]), Out::pack(x[4], x[5]),
                          Out::pack(x[6], x[7]));
    }
    static DEVICE void store_one(uint8_t *at, float x) { *(uint16_t *)at = Out::from_float(x); }
};
template <> struct Vector<F32> {
    static constexpr int BYTES = 4;
    static DEVICE uint4 make(const float *x)
    {
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
    }
    static DEVICE void store_one(uint8_t *at, float x) { *(float *)at = x; }
};

/* Converts a unit of 16-bit values to one of the caller's vector. */
template <typename From, typename Out> struct Convert {
    static DEVICE uint4 unit(const uint4 &raw)
    {
        float x[Unit<Out>::VALUES];
#pragma unroll
        for (int i = 0; i < Unit<Out>::VALUES; i++) x[i] = value_of<From>(raw, i);
        return Vector<Out>::make(x);
    }
};
template <typename Same> struct Convert<Same, Same> {
    static DEVICE uint4 unit(const uint4 &raw) { return raw; }
};

/* Returns e4m3 × scale, rounded to bf16 unless EXACT, as a unit of the caller's vector. */
template <bool EXACT, typename Out> DEVICE uint4 from_e4m3(const uint4 &raw, float scale)
{
    constexpr int VALUES = Unit<Out>::VALUES;
    if constexpr (EXACT) {
        float x[VALUES];
        scaled_e4m3<VALUES>(raw, scale, x);
        return Vector<Out>::make(x);
    }
    return Convert<Bf16, Out>::unit(bf16_of_e4m3<VALUES>(raw, scale));
}

/* Loads the codes of a unit of FP4: 4 or 2 bytes. */
template <int VALUES> DEVICE uint4 load_fp4(const uint8_t *at)
{
    if (VALUES == 8) return load_once_4(at);
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=r"(v.x) : "l"(at) : "memory");
    return v;
}

/* Returns e2m1 × scale, exact in bf16, as a unit of the caller's vector. */
template <typename Out> DEVICE uint4 from_e2m1(const uint4 &raw, float scale)
{
    return Convert<Bf16, Out>::unit(bf16_of_e2m1<Unit<Out>::VALUES>(raw, scale));
}

/* Gathers value by value, from any address. */
template <typename Out>
DEVICE void gather_any(const struct cache_params &p, const struct kv_layout &l, const SlotAddress &address,
                       bool some, uint8_t *to)
{
    const bool whole_page = l.scale_bytes > 0; /* other formats are treated as pages of one slot */
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < p.d_qk; i += 32) {
        float x = 0.0f;
        if (some)
            x = kv_load(&l, whole_page ? address.page : address.values, whole_page ? p.page_size : 1,
                        whole_page ? address.in_page : 0, i, p.cache_scale);
        Vector<Out>::store_one(to + (int64_t)i * Vector<Out>::BYTES, x);
    }
}

/* ---- A token --------------------------------------------------------------------------------- */

template <bool ALIGNED, typename Out, int FORMAT>
DEVICE void gather_fp8(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int VALUES = Unit<Out>::VALUES, MOST = 576, ROUNDS = (MOST / VALUES + 31) / 32;
    constexpr bool EXACT = FORMAT == KV_FP8_576; /* kv_is_exact */
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    const int lane = threadIdx.x & 31, width = l.nope + l.rope;
    const bool some = is_slot(p, slot);
    const SlotAddress address = slot_address(p, some ? slot : 0);
    uint8_t *to = (uint8_t *)p.out + token * p.out_stride * Vector<Out>::BYTES;
    if constexpr (!ALIGNED) {
        gather_any<Out>(p, l, address, some, to);
    } else {
        const uint8_t *scales = scales_at(p, l, address);
        uint4 raw[ROUNDS];
        float scale[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int first = (lane + 32 * r) * VALUES;
            raw[r] = make_uint4(0, 0, 0, 0), scale[r] = 0.0f;
            if (!some) continue;
            if (first < l.nope) {
                raw[r] = l.element == KV_ELEMENT_E2M1 ? load_fp4<VALUES>(address.values + first / 2)
                                                      : load_words<VALUES / 4>(address.values + first);
                scale[r] = l.group ? load_scale(l, scales, first / l.group) : p.cache_scale;
            } else if (first < width) {
                raw[r] = load_words<VALUES / 2>(address.values + l.rope_offset + 2 * (first - l.nope));
            }
        }
        __syncwarp(); /* all loads are issued before the first is waited for */
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int first = (lane + 32 * r) * VALUES;
            uint4 *at = (uint4 *)(to + first * Vector<Out>::BYTES);
            if (first < l.nope)
                *at = l.element == KV_ELEMENT_E2M1 ? from_e2m1<Out>(raw[r], scale[r])
                                                   : from_e4m3<EXACT, Out>(raw[r], scale[r]);
            else if (first < width)
                *at = Convert<Bf16, Out>::unit(raw[r]);
        }
    }
}

template <bool ALIGNED, typename Out, typename From>
DEVICE void gather_16(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int VALUES = Unit<Out>::VALUES, ROUNDS = (576 / VALUES + 31) / 32;
    const int lane = threadIdx.x & 31;
    const bool some = is_slot(p, slot);
    const SlotAddress address = slot_address(p, some ? slot : 0);
    uint8_t *to = (uint8_t *)p.out + token * p.out_stride * Vector<Out>::BYTES;
    if constexpr (!ALIGNED) {
        gather_any<Out>(p, kv_layout_of(From::IS_BF16 ? KV_BF16 : KV_FP16, p.d_qk), address, some, to);
    } else {
#pragma unroll 1
        for (int begin = 0; begin < p.d_qk; begin += 32 * VALUES * ROUNDS) {
            uint4 raw[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int first = begin + (lane + 32 * r) * VALUES;
                raw[r] = make_uint4(0, 0, 0, 0);
                if (some && first < p.d_qk)
                    raw[r] = load_words<VALUES / 2>(address.values + 2 * (int64_t)first);
            }
            __syncwarp();
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int first = begin + (lane + 32 * r) * VALUES;
                if (first < p.d_qk)
                    *(uint4 *)(to + (int64_t)first * Vector<Out>::BYTES) = Convert<From, Out>::unit(raw[r]);
            }
        }
    }
}

CACHE_KERNELS(cache_gather, gather_16, gather_fp8)
