/* SPDX-License-Identifier: MIT
 *
 * Iteration of a CTA over the keys: raw keys go to registers one block ahead, indices two blocks ahead. A
 * thread has, of two keys, 16 codes of every 64 of its half, 8 rope values if there are any, and the scales.
 * Entries that name no key give 0.
 */
#pragma once

#include "layout.cuh"

namespace sparse_decode::small {

template <typename F> struct SmallKeys : SmallPhase {
    /* Words of scales per half of a key. */
    enum { SCALES = F::FP4 != NO_BLOCKS ? 4 : F::ROPE_IS_V ? 1 : 2 };

    using SmallPhase::SmallPhase;
    int at;    /* start of the block whose indices are loaded next */
    int index; /* the lane's key of 16, of the previous block, whose raw keys are requested next */
    uint4 code[HALF_CHUNKS][2], rope[2];
    uint32_t scale[2][SCALES];
    bool valid[2];
    bool fp4; /* argument of F::fp4 for the block whose raw keys are requested */

    /* Loads the lane's index of a block. A block begins at a multiple of 64 of the list, so that its
     * entries are of one cache. */
    DEVICE void load_index()
    {
        const SmallSplit &split = shared.split;
        const bool of_extra = at >= split.extra_begin;
        const int end = min(split.end, of_extra ? split.extra_end : split.count),
                  entry = at + 16 * key_group() + lane() % 16;
        index = load_or_none(split.entries[of_extra] + entry, entry < end);
        at += KEYS;
    }

    static DEVICE const uint8_t *of_lane(const uint8_t *pointer, int from)
    {
        return (const uint8_t *)__shfl_sync(~0u, (unsigned long long)pointer, from);
    }

    DEVICE void ask()
    {
        const struct sparse_cache_params &cache = p.cache[at - KEYS >= shared.split.extra_begin];
        const KeyAddress address =
            names_key(cache, index) ? F::key_address(cache, index) : KeyAddress{NULL, NULL};
        const int t = lane() % 4;
        if constexpr (F::FP4 == BLOCKS_OF_SOME_CACHE) fp4 = has_fp4(cache);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = lane() / 4 + 8 * i;
            const uint8_t *const token = of_lane(address.token, from),
                                 *const scales =
                                     F::FORMAT == KV_FP8_656
                                         ? token + kv_layout_of(F::FORMAT, 0).scale_offset + 8 * side()
                                         : of_lane(address.scales, from);
            valid[i] = token != NULL;
            if (F::fp4(fp4)) {
                ask_fp4(i, token, scales);
                continue;
            }
            /* In FP8_584 the last chunk of the second half is rope values, which nobody takes for codes. */
            const uint8_t *const own = token + LINE_ELEMENTS * HALF_CHUNKS * side() + 16 * t;
#pragma unroll
            for (int c = 0; c < HALF_CHUNKS; c++)
                code[c][i] = load_or_zero_16(own + LINE_ELEMENTS * c, valid[i]);
            if constexpr (F::HAS_ROPE)
                rope[i] = load_or_zero_16(token + F::ROPE_OFFSET + 64 * side() + 16 * t, valid[i]);
            if constexpr (F::ROPE_IS_V) {
                scale[i][0] = load_or_zero_4(scales + 4 * side(), valid[i]);
            } else {
                const uint2 two =
                    load_or_zero_8(scales + (F::FORMAT == KV_FP8_656 ? 0 : 8 * side()), valid[i]);
                scale[i][0] = two.x, scale[i][1] = two.y;
            }
        }
    }

    /* Requests key i of a block of FP4 keys. */
    DEVICE void ask_fp4(int i, const uint8_t *token, const uint8_t *scales)
    {
        const uint8_t *const own = token + LINE_ELEMENTS / 2 * HALF_CHUNKS * side() + 8 * (lane() % 4);
#pragma unroll
        for (int c = 0; c < HALF_CHUNKS; c++) {
            const uint2 two = load_or_zero_8(own + LINE_ELEMENTS / 2 * c, valid[i]);
            code[c][i].x = two.x, code[c][i].y = two.y;
        }
        const uint4 four = load_or_zero_16(scales + 16 * side(), valid[i]);
        scale[i][0] = four.x, scale[i][1] = four.y, scale[i][SCALES - 2] = four.z,
        scale[i][SCALES - 1] = four.w;
    }

    /* Packs the scale codes of the lane's four chunks into a word, if scales are codes; called once the
     * scales have arrived. */
    DEVICE void settle_scales()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (F::fp4(fp4))
                scale[i][0] =
                    scales_of_16(scale[i][0], scale[i][1], scale[i][SCALES - 2], scale[i][SCALES - 1]);
            else if constexpr (F::FORMAT == KV_FP8_528)
                scale[i][0] = scales_of_32(scale[i][0], scale[i][1]);
        }
    }

    /* Returns whether fp16 holds what the thread has of the block. */
    DEVICE bool fits() const
    {
        bool fit = true;
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            fit &= scales_fit(scale[i]) | (!F::F32_SCALES && !valid[i]); /* without a key: 0, which fits */
            if constexpr (!F::HAS_ROPE) continue;
            const uint4 &x = rope[i];
            most = larger_bf16x2(larger_bf16x2(most, x.x), x.y);
            most = larger_bf16x2(larger_bf16x2(most, x.z), x.w);
        }
        return fit & !too_large_for_fp16(most);
    }

    /* As Scales::fit, for the scales of the half. */
    DEVICE bool scales_fit(const uint32_t (&word)[SCALES]) const
    {
        if (F::fp4(fp4)) return true;
        if constexpr (!F::F32_SCALES) {
            return !((word[0] ^ SCALE_CODES * 0x01010101u) &
                     (F::ROPE_IS_V && side() ? 0x00f0f0f0u : 0xf0f0f0f0u));
        } else {
            const uint32_t fraction = p.scale > MOST_SOFTMAX_SCALE_FOR_ROUNDED ? 0x007fffffu : 0;
            const uint32_t most = max(word[0], word[1]), least = min(word[0] - 1u, word[1] - 1u);
            return most <= MOST_SCALE & least >= LEAST_SCALE - 1u & !((word[0] | word[1]) & fraction);
        }
    }

    /* Returns the scale of key i in the current chunk, for either conversion. */
    template <typename Element> DEVICE auto scale_now(int i) const
    {
        const uint32_t word = scale[i][0];
        if (F::fp4(fp4)) return fp4_scale<Element>(word & 0xffu);
        if constexpr (Element::IS_BF16) {
            return F::F32_SCALES ? __uint_as_float(word) : num_from_ue8m0((uint8_t)word);
        } else {
            const float x = __uint_as_float(F::F32_SCALES ? word : (word & 0xffu) << 23);
            return Fp16::pack(x, x);
        }
    }

    /* Converts the FP4 codes of the current chunk to e4m3 codes. */
    DEVICE void expand_now()
    {
        if (!F::fp4(fp4)) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 &x = code[0][i];
            const uint2 low = e4m3_of_e2m1(x.x), high = e4m3_of_e2m1(x.y);
            x = make_uint4(low.x, low.y, high.x, high.y);
        }
    }

    /* Moves on from chunk c: the next one takes its place, since the loop over chunks is not unrolled. */
    DEVICE void advance(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int k = 1; k < HALF_CHUNKS; k++) code[k - 1][i] = code[k][i];
            if (!F::F32_SCALES || F::fp4(fp4))
                scale[i][0] >>= 8;
            else if (c == 1)
                scale[i][0] = scale[i][1];
        }
    }
};

} // namespace sparse_decode::small
