/* SPDX-License-Identifier: MIT
 *
 * Appends vectors to pages (fmla_cache_append). A warp takes a token; a CTA has CACHE_WARPS warps.
 *
 *   slot of the token, all units of its vector       independent loads
 *   FP8, FP4: largest magnitude of each group        shuffles; a group is 2 to 32 neighbouring lanes
 *   codes, scales, RoPE into the slot                contiguous stores of neighbouring lanes
 *
 * Registers only: 3 (16-bit vectors) or 5 (fp32) units per lane. Limit: memory, with 1152 bytes read and 656
 * written for a bf16 token of FP8_656. The bytes equal those of kv_store_token (kvformat.h), NaN included.
 */
/* Without the bound of 8 CTAs per SM, ptxas uses 48 registers and spills one. */
#define CACHE_KERNEL(NAME, ...)                                                                              \
    DEFINE_KERNEL(NAME, cache_params, (32 * CACHE_WARPS, 8), EACH_TOKEN(__VA_ARGS__))
#include "../device/append.cuh"

/* ---- FP8 and FP4 ---------------------------------------------------------------------------- */

template <bool ALIGNED, typename In, int FORMAT>
DEVICE void append_fp8(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int VALUES = Unit<In>::VALUES, MOST = 576, ROUNDS = (MOST / VALUES + 31) / 32;
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    const int lane = threadIdx.x & 31, width = l.nope + l.rope;
    const VectorPlace<In> vector(p, token);
    uint4 unit[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = (lane + 32 * r) * VALUES;
        unit[r] = make_uint4(0, 0, 0, 0);
        if (first < width) unit[r] = vector.template load_unit<ALIGNED>(first);
    }
    __syncwarp(); /* keeps the loads above from sinking below the test of the slot */
    if (!is_slot(p, slot)) return;
    store_quantised<ALIGNED, In, FORMAT>(p, unit, slot);
}

/* ---- 16 bits -------------------------------------------------------------------------------- */

template <bool ALIGNED, typename In, typename To>
DEVICE void append_16(const struct cache_params &p, int64_t token, int64_t slot)
{
    constexpr int VALUES = Unit<In>::VALUES, ROUNDS = (576 / VALUES + 31) / 32;
    const int lane = threadIdx.x & 31;
    const VectorPlace<In> vector(p, token);
    if constexpr (ALIGNED) {
        for (int begin = 0; begin < p.d_qk; begin += 32 * VALUES * ROUNDS) {
            uint4 unit[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int first = begin + (lane + 32 * r) * VALUES;
                unit[r] = make_uint4(0, 0, 0, 0);
                if (first < p.d_qk) unit[r] = vector.template load_unit<ALIGNED>(first);
            }
            __syncwarp();
            if (!is_slot(p, slot)) return;
            uint8_t *const values = slot_address(p, slot).values;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int first = begin + (lane + 32 * r) * VALUES;
                if (first < p.d_qk) store_unit<ALIGNED, In, To>(values + 2 * (int64_t)first, unit[r]);
            }
        }
    } else { /* value by value */
        if (!is_slot(p, slot)) return;
        uint16_t *const values = (uint16_t *)slot_address(p, slot).values;
        for (int i = lane; i < p.d_qk; i += 32) {
            const uint8_t *at = vector.at(i);
            const uint32_t bits = VALUES == 4 ? *(const uint32_t *)at : *(const uint16_t *)at;
            values[i] = (uint16_t)Convert<In, To>::word(make_uint4(bits, 0, 0, 0), 0);
        }
    }
}

CACHE_KERNELS(cache_append, append_16, append_fp8)
