/* SPDX-License-Identifier: MIT
 *
 * The scales of a block of keys of FP8_656, by a warp beside the producer: a key's four scales become fp16 factors below 2 and one power
 * of two. Scores are multiplied by the power, and so are weights on their way to values: values of any size pass the products.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/shared.cuh"
#include "layout.cuh"

/* Exponents, as fp32 has them: those below are rounded up, so that rope columns divided by powers of two stay finite. */
enum { LEAST_EXPONENT = 127 - 30, MOST_EXPONENT = 254 };

DEVICE float power_of(uint32_t exponent)
{
    return __uint_as_float(exponent << 23);
}

/* Its reciprocal. */
DEVICE float power_below(uint32_t exponent)
{
    return power_of(254 - exponent);
}

template <typename V>
DEVICE void prepare_scales(const struct dense_decode_fp8_params &p, SharedOf<V> &shared, const Place &place,
                           uint32_t base)
{
    using Shared = SharedOf<V>;
    const int lane = (int)(fresh_thread() % 32);
    Turn<V::BUFFERS> turn;
#pragma unroll 1
    for (int i = shared.list.first; i <= shared.list.last; i += shared.list.step) {
        const int blocks = work_of<V>(p.dense, shared, i, place).blocks;
#pragma unroll 1
        for (int k = 0; k < blocks; k++, turn.next()) {
            mbarrier_wait(barrier_at(SHARED_AT(base, keys_full), turn.index), turn.parity);
            const uint32_t scales = SHARED_AT(base, keys) + (uint32_t)(turn.index * V::KEYS_BYTES +
                                                                       LINES * KEY_TILE_BYTES + ROPE_BYTES);
#pragma unroll 1
            for (int key = lane; key < KEYS; key += 32) {
                const uint4 four = load_shared_16(scales + (uint32_t)key * 16);
                const uint32_t bits[SCALES_OF_KEY] = {four.x, four.y, four.z, four.w};
                uint32_t most = 0;
#pragma unroll
                for (int t = 0; t < SCALES_OF_KEY; t++) most = max(most, bits[t] & 0x7fffffffu);
                const uint32_t exponent =
                    min(max(most >> 23, (uint32_t)LEAST_EXPONENT), (uint32_t)MOST_EXPONENT);
                shared.exponents[turn.index][key] = exponent;
#pragma unroll
                for (int t = 0; t < SCALES_OF_KEY; t++)
                    shared.scales[turn.index][t][key] =
                        Fp16::from_float(__uint_as_float(bits[t]) * power_below(exponent));
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, scaled), turn.index));
        }
    }
}
