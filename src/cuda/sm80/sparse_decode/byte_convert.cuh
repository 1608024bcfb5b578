/* SPDX-License-Identifier: MIT
 *
 * Converts the tokens that byte_producer.cuh has copied, in place, in the stage in which they become values;
 * and has the kernels over caches of bytes.
 */
#pragma once

#include "byte_producer.cuh"
#include "convert.cuh"

namespace sparse_decode {

/* Adjacent keys read and write different banks: odd keys take the second group of a unit first. */
template <typename Tile, typename Call, int KIND> DEVICE uint32_t ListedBytes<Tile, Call, KIND>::odd_key()
{
    return threadIdx.x / 8 & 1;
}

template <typename Tile, typename Call, int KIND>
DEVICE uint32_t ListedBytes<Tile, Call, KIND>::line_of(int unit, uint32_t stage_at)
{
    return stage_at + (threadIdx.x / 8 + (uint32_t)(unit / UNITS_OF_KEY * KEYS_AT_ONCE)) * LINE_BYTES;
}

template <typename Tile, typename Call, int KIND>
DEVICE uint32_t ListedBytes<Tile, Call, KIND>::groups_before(int unit)
{
    return (uint32_t)(2 * (unit % UNITS_OF_KEY));
}

/* Loads the scales of a unit's two groups for this thread's columns. Those of a unit are in one word, or
 * in two for FP4. */
template <typename Tile, typename Call, int KIND>
DEVICE void ListedBytes<Tile, Call, KIND>::load_scales(uint32_t scale[2], const struct listed_layout &l,
                                                       uint32_t line, int unit) const
{
    const uint32_t first = groups_before(unit) * LINE_ELEMENTS >> l.scale_shift;
    const uint32_t at = line + scales_at(l) + (l.scale_kind == KV_SCALE_F32 ? 4 * first : first & ~3u);
    const bool two_words = l.scale_kind == KV_SCALE_E4M3;
    uint32_t word = two_words ? 0 : load_shared_4(at);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t group = i ^ odd_key();
        const uint32_t byte =
            ((first & 3) + ((group * LINE_ELEMENTS + threadIdx.x % 8 * CHUNK_ELEMENTS) >> l.scale_shift)) & 3;
        if (two_words) word = load_shared_4(at + 4 * group);
        if (l.scale_kind == KV_SCALE_F32)
            scale[i] = word;
        else if (l.scale_kind == KV_SCALE_E4M3)
            scale[i] =
                scale_of(Fp16::to_float((uint16_t)fp16_of_e4m3(word >> 8 * byte & 0xff).x) * E2M1_IN_E4M3);
        else if (SCALES_ARE_BF16)
            scale[i] = bf16_of_ue8m0(word, byte);
        else
            scale[i] = scale_of(num_from_ue8m0((uint8_t)(word >> 8 * byte)));
    }
}

template <typename Tile, typename Call, int KIND>
DEVICE uint32_t ListedBytes<Tile, Call, KIND>::scale_of(float scale)
{
    return SCALES_ARE_BF16 ? Bf16::pack(scale, scale) : __float_as_uint(scale);
}

template <typename Tile, typename Call, int KIND>
DEVICE uint2 ListedBytes<Tile, Call, KIND>::values_of(uint32_t codes, uint32_t scale)
{
    if constexpr (SCALES_ARE_BF16)
        return bf16_of_codes(codes, scale);
    else
        return bf16_of_codes(codes, __uint_as_float(scale));
}

template <typename Tile, typename Call, int KIND>
DEVICE typename ListedBytes<Tile, Call, KIND>::Unit ListedBytes<Tile, Call, KIND>::read(int unit,
                                                                                        int stage) const
{
    const struct listed_layout l = layout();
    const uint32_t line = line_of(unit, ring_at + (uint32_t)stage * STAGE_BYTES);
    const bool half_bytes = l.code_bytes == D_V / 2;
    const uint32_t bytes = half_bytes ? CHUNK_ELEMENTS / 2 : CHUNK_ELEMENTS;
    const uint32_t first = line + (8 * odd_key() + threadIdx.x % 8) * bytes;
    Unit of;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t from = (first ^ i * 8 * bytes) + groups_before(unit) * KEY_GROUP;
        of.codes[i] = half_bytes ? e4m3_of_e2m1(load_shared_4(from)) : load_shared_8(from);
    }
    load_scales(of.scale, l, line, unit);
    return of;
}

template <typename Tile, typename Call, int KIND>
DEVICE void ListedBytes<Tile, Call, KIND>::read_pair(int pair, int stage)
{
    units[0] = read(2 * pair, stage), units[1] = read(2 * pair + 1, stage);
    __syncwarp(); /* values overwrite the codes */
}

/* Converts and writes the first or second group of a unit that has been read. */
template <typename Tile, typename Call, int KIND>
DEVICE void ListedBytes<Tile, Call, KIND>::write(const Unit &of, uint32_t i, int unit, int stage) const
{
    const uint32_t line = line_of(unit, ring_at + (uint32_t)stage * STAGE_BYTES),
                   to = line + ((threadIdx.x / 8 ^ threadIdx.x) % 8) * CHUNK_BYTES;
    const uint32_t group = i ^ odd_key();
    const uint2 first = values_of(of.codes[i].x, of.scale[i]), second = values_of(of.codes[i].y, of.scale[i]);
    if (groups_before(unit) + group < (uint32_t)layout().code_groups)
        store_shared_16((to + group * KEY_GROUP) + groups_before(unit) * KEY_GROUP,
                        make_uint4(first.x, first.y, second.x, second.y));
}

/* Writes a quarter of the pair of units that has been read. */
template <typename Tile, typename Call, int KIND>
DEVICE void ListedBytes<Tile, Call, KIND>::write_quarter(int pair, int quarter, int stage) const
{
    write(units[quarter / 2], (uint32_t)quarter % 2, 2 * pair + quarter / 2, stage);
}

template <int KIND, typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS>
struct SparseDecodeOfBytes {
    using Sizes = latent::Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = ListCall<Element>;
    using Kernel = latent::Attend<Sizes, Call, ListedBytes<Sizes, Call, KIND>>;
};

} // namespace sparse_decode

#define LISTED_BYTES_KERNEL(NAME, KIND, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                                   \
    DEFINE_KERNEL(NAME##_##ROWS##x##KEYS, sparse_sm80_params, (32 * (WARPS)),                                \
                  latent::kernel<typename sparse_decode::SparseDecodeOfBytes<KIND, Bf16, ROWS, KEYS, WARPS,  \
                                                                             Q_IN_REGISTERS>::Kernel>(p))
