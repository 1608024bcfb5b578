/* SPDX-License-Identifier: MIT
 *
 * The join kernels of Hopper's decodes whose parts are rows of fp16, or of 24 bits for fp16 results
 * (half_rows.cuh).
 */
#include "../../device/half_rows.cuh"
#include "../../device/join.cuh"

namespace latent {

/* The values that a lane reads of a few parts of a row; has the interface of PartsOfLane. */
template <int VECTORS_> struct HalvesOfLane {
    static constexpr int VECTORS = VECTORS_;
    static constexpr bool IN_HALVES = true;
    static constexpr int MANY = MANY_PARTS_IN_HALVES;
    static constexpr int BLOCKS_OF_SM = 2;
    static constexpr int COUNT = VECTORS == 1 ? MANY : VECTORS == 2 ? 8 : 4; /* limited by registers */
    part_end end[COUNT];
    uint2 values[COUNT][VECTORS];
    float scales[COUNT][VECTORS];

    DEVICE void load_values(const struct join_params &p, int i, int64_t part_row, int position)
    {
        const uint16_t *from = half_row(p.split, part_row) + position;
        const float *scale = half_row_scales(p.split, part_row) + position / HALF_ROW_TILE;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            values[i][v] = __ldg((const uint2 *)(from + VECTOR_COLUMNS * v));
            scales[i][v] = __ldg(scale + VECTOR_COLUMNS / HALF_ROW_TILE * v);
        }
    }

    DEVICE float4 value(int i, int v) const
    {
        const uint2 x = values[i][v];
        return make_float4(Fp16::to_float((uint16_t)x.x), Fp16::to_float((uint16_t)(x.x >> 16)),
                           Fp16::to_float((uint16_t)x.y), Fp16::to_float((uint16_t)(x.y >> 16)));
    }
    DEVICE float scale(int i, int v) const
    {
        return scales[i][v];
    }
};

/* The same of parts of 24 bits. */
template <int VECTORS_> struct ThirdsOfLane {
    static constexpr int VECTORS = VECTORS_;
    static constexpr bool IN_HALVES = true;
    static constexpr int MANY = MANY_PARTS_IN_HALVES;
    static constexpr int BLOCKS_OF_SM = 2;
    static constexpr int COUNT = HalvesOfLane<VECTORS>::COUNT;
    part_end end[COUNT];
    uint2 halves[COUNT][VECTORS];
    uint32_t bytes[COUNT][VECTORS];

    DEVICE void load_values(const struct join_params &p, int i, int64_t part_row, int position)
    {
        const uint16_t *from = half_row(p.split, part_row) + position;
        const uint8_t *more = third_bytes(p.split, part_row) + third_byte_position(position);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            halves[i][v] = __ldg((const uint2 *)(from + VECTOR_COLUMNS * v));
            bytes[i][v] = __ldg((const uint32_t *)(more + VECTOR_COLUMNS * v));
        }
    }

    DEVICE float4 value(int i, int v) const
    {
        const uint2 x = halves[i][v];
        const uint32_t y = bytes[i][v];
        return make_float4(value_of_24_bits(x.x, y, 0), value_of_24_bits(x.x, y, 1),
                           value_of_24_bits(x.y, y, 2), value_of_24_bits(x.y, y, 3));
    }
    DEVICE float scale(int, int) const
    {
        return 1.0f;
    }
};

} // namespace latent

JOIN_KERNELS(join_half_rows_bf16, Bf16, latent::HalvesOfLane)
JOIN_KERNELS(join_half_rows_fp16, Fp16, latent::ThirdsOfLane)
