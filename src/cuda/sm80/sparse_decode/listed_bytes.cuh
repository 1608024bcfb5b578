/* SPDX-License-Identifier: MIT
 *
 * Blocks of keys from lists over caches of bytes, of any format: cp.async brings tokens to the stage in which they become values,
 * and they are converted there, in place, beside P·V of the block before.
 *
 *      stage 0     | Q·Kᵀ of block n          | softmax | P·V of block n             | tokens of block n + 2 arrive …
 *      stage 1     | tokens of n + 1 arrive   |         | become values              | Q·Kᵀ of block n + 1
 *
 * A key's lines in a stage, one of 128 bytes for each group of 64 columns, before and after:
 *      group          0         1       2         3       …   6           7                    8
 *      before         codes of         codes of              codes of     scales (or, of      values
 *                     0 and 1          2 and 3               6 and 7      FP8_584, values)
 *      after          values    values  values    values      values      values               values
 * The eight threads of a key read the codes of two groups together, and then write their values: they are in one warp, and read
 * nothing that was written over. Values are copied where they stay. Of FP8_584 the scales lie behind the codes of group 6.
 */
#pragma once

#include "../../device/shared.cuh"
#include "convert.cuh"
#include "sparse_decode.cuh"

template <typename Tile, typename Call> struct ListedBytes {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool LISTED = true, ENOUGH_REGISTERS = true;
    static constexpr int LEAST_STAGES = 2;
    static constexpr uint32_t KEY_GROUP = Tile::KEY_GROUP, STAGE_BYTES = Tile::STAGE_BYTES,
                              BYTES_BEHIND_RING = 0;
    /* Of two groups of a key, by a thread; as many as a block has, spread over the steps of P·V. */
    static constexpr int UNITS_OF_KEY = D_V / LINE_ELEMENTS / 2, UNITS = PASSES * UNITS_OF_KEY;
    static constexpr int VALUE_STEPS = KEYS / 16 * Tile::COLUMN_PAIRS, STEPS_OF_UNIT = VALUE_STEPS / UNITS;
    static_assert(VALUE_STEPS % UNITS == 0 && STEPS_OF_UNIT >= 2,
                  "a step to read a unit's codes, one to write its values");
    using Source = ListSource<Tile, Call>;
    using Flags = typename Source::Flags;

    const Call call;
    Source source;
    uint32_t ring_at;
    Flags flags;
    typename Source::Places places; /* of the block that is copied next */
    bool converts, extra;           /* the block that has been copied has codes; it is of the extra cache */
    uint32_t codes[4];              /* of the unit that has been read */
    float scale[2];

    DEVICE ListedBytes(const Call &of_call, uint32_t ring, uint32_t, Flags of_flags)
        : call(of_call), source{of_call}, ring_at(ring), flags(of_flags)
    {
    }

    /* ---- Copies ---- */

    /* Copies 16 bytes, from wherever the cache is aligned to `at_once`. */
    static DEVICE void copy_16(uint32_t to, const uint8_t *from, int at_once, bool valid)
    {
        if (at_once == 16) {
            cp_async_16(to, from, valid);
        } else if (at_once == 8) {
            cp_async_8(to, from, valid), cp_async_8(to + 8, from + 8, valid);
        } else {
#pragma unroll 1
            for (int i = 0; i < 16; i++)
                asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + (uint32_t)i),
                             "r"(valid ? (uint32_t)__ldg(from + i) : 0u)
                             : "memory");
        }
    }

    /* The tokens of a block, to a stage. What no index names becomes zeros: codes, scales and values. */
    DEVICE void copy_keys(int stage, unsigned first_key)
    {
        const uint32_t thread = threadIdx.x % 8;
        extra = source.is_extra(first_key);
        const struct sparse_cache_params &cache = call.params.call.cache[extra];
        const struct listed_layout &layout = call.params.layout[extra];
        converts = layout.code_bytes != 0;
        bool named[PASSES];
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const uint32_t row = threadIdx.x / 8 + (uint32_t)(pass * KEYS_AT_ONCE);
            const uint32_t line = ring_at + (uint32_t)stage * STAGE_BYTES + row * LINE_BYTES;
            const int index = places.index[pass];
            named[pass] = names_key(cache, index);
            const KeyPlace key = place_of_key_as_told(cache, named[pass] ? index : 0);
            const uint8_t *token = named[pass] ? key.token : (const uint8_t *)call.params.call.q;
            const uint8_t *scales = named[pass] ? key.scales : (const uint8_t *)call.params.call.q;
            const int at_once = layout.copied_bytes;
            /* Codes of two groups are 128 bytes, or of FP4 64. */
            const uint32_t pieces_shift = layout.code_bytes == D_V / 2 ? 2 : 3;
#pragma unroll 1
            for (uint32_t i = thread; i < (uint32_t)layout.code_bytes / CHUNK_BYTES; i += 8)
                copy_16(line + (i >> pieces_shift) * 2 * KEY_GROUP +
                            (i & ((1u << pieces_shift) - 1)) * CHUNK_BYTES,
                        token + i * CHUNK_BYTES, at_once, named[pass]);
#pragma unroll 1
            for (int g = layout.code_groups; g < call.d_qk() / LINE_ELEMENTS; g++)
                copy_16((line & ~(uint32_t)(LINE_BYTES - 1)) + (uint32_t)g * KEY_GROUP +
                            ((thread ^ (row & 7)) * CHUNK_BYTES),
                        token + layout.values_at + (g - layout.code_groups) * LINE_BYTES +
                            thread * CHUNK_BYTES,
                        at_once, named[pass]);
            const uint32_t scales_to = line + scales_at(layout) + thread * CHUNK_BYTES;
            if (layout.scale_bytes == 8) {
                if (thread == 0) copy_8(scales_to, scales, at_once, named[pass]);
            } else if (thread * CHUNK_BYTES < (uint32_t)layout.scale_bytes) {
                copy_16(scales_to, scales + thread * CHUNK_BYTES, at_once, named[pass]);
            }
        }
        flags.set(stage, named);
    }

    static DEVICE void copy_8(uint32_t to, const uint8_t *from, int at_once, bool valid)
    {
        if (at_once >= 8) {
            cp_async_8(to, from, valid);
        } else {
#pragma unroll 1
            for (int i = 0; i < 8; i++)
                asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + (uint32_t)i),
                             "r"(valid ? (uint32_t)__ldg(from + i) : 0u)
                             : "memory");
        }
    }

    /* From a key's line of group 0. */
    static DEVICE uint32_t scales_at(const struct listed_layout &layout)
    {
        return (uint32_t)(layout.scale_place / LINE_BYTES) * KEY_GROUP +
               (uint32_t)(layout.scale_place % LINE_BYTES);
    }

    /* ---- Conversion ---- */

    static DEVICE uint32_t row_of(int unit)
    {
        return threadIdx.x / 8 + (uint32_t)(unit / UNITS_OF_KEY * KEYS_AT_ONCE);
    }

    /* Which of the two groups of a unit comes first: neighbouring keys read different banks. */
    static DEVICE uint32_t group_of(int unit, int i)
    {
        return (uint32_t)(2 * (unit % UNITS_OF_KEY)) + ((uint32_t)i ^ (threadIdx.x / 8 & 1));
    }

    DEVICE float load_scale(const struct listed_layout &layout, uint32_t line, uint32_t group) const
    {
        const uint32_t index =
            (group * LINE_ELEMENTS + threadIdx.x % 8 * CHUNK_ELEMENTS) >> layout.scale_shift;
        const uint32_t at = line + scales_at(layout);
        if (layout.scale_kind == KV_SCALE_F32) return __uint_as_float(load_shared_4(at + 4 * index));
        const uint32_t code = load_shared_4(at + (index & ~3u)) >> 8 * (index & 3) & 0xff;
        if (layout.scale_kind == KV_SCALE_UE8M0) return num_from_ue8m0((uint8_t)code);
        return Fp16::to_float((uint16_t)fp16_of_e4m3(code).x) * E2M1_IN_E4M3;
    }

    DEVICE void read(int unit, int stage)
    {
        const struct listed_layout &layout = call.params.layout[extra];
        const uint32_t line = ring_at + (uint32_t)stage * STAGE_BYTES + row_of(unit) * LINE_BYTES;
        const uint32_t pair = line + (uint32_t)(2 * (unit % UNITS_OF_KEY)) * KEY_GROUP;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t second = (uint32_t)i ^ (threadIdx.x / 8 & 1);
            uint2 eight;
            if (layout.code_bytes == D_V / 2)
                eight = e4m3_of_e2m1(load_shared_4(pair + second * (LINE_ELEMENTS / 2) +
                                                   threadIdx.x % 8 * (CHUNK_ELEMENTS / 2)));
            else
                eight = load_shared_8(pair + second * LINE_ELEMENTS + threadIdx.x % 8 * CHUNK_ELEMENTS);
            codes[2 * i] = eight.x, codes[2 * i + 1] = eight.y;
            scale[i] = load_scale(layout, line, group_of(unit, i));
        }
    }

    DEVICE void write(int unit, int stage) const
    {
        const struct listed_layout &layout = call.params.layout[extra];
        const uint32_t to =
            ring_at + (uint32_t)stage * STAGE_BYTES + swizzle_128(row_of(unit), threadIdx.x % 8);
        __syncwarp(); /* the codes have been read */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t group = group_of(unit, i);
            const uint2 first = bf16_of_codes(codes[2 * i], scale[i]),
                        second = bf16_of_codes(codes[2 * i + 1], scale[i]);
            if (group < (uint32_t)layout.code_groups)
                store_shared_16(to + group * KEY_GROUP, make_uint4(first.x, first.y, second.x, second.y));
        }
    }

    /* ---- As attend.cuh calls it ---- */

    DEVICE int blocks_ahead() const
    {
        return 1;
    }

    DEVICE void begin(unsigned first_key, bool some)
    {
        converts = false;
        if (some) {
            places = source.find(first_key);
            copy_keys(0, first_key);
            places = source.find(first_key + KEYS);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp(); /* threads of a warp have copied what they read */
        if (!some || !converts) return;
#pragma unroll 1
        for (int unit = 0; unit < UNITS; unit++) {
            read(unit, 0);
            write(unit, 0);
        }
    }

    DEVICE void wait_for_block() const
    {
        cp_async_wait<0>();
    }

    DEVICE void before_scores(int, int free_stage, unsigned, unsigned ahead)
    {
        converts = false;
        if (ahead >= (unsigned)call.end()) return;
        copy_keys(free_stage, ahead);
        places = source.find(ahead + KEYS);
    }

    DEVICE void beside_scores(int, int, unsigned) const {}

    DEVICE void before_values() const
    {
        cp_async_wait<0>();
    }

    DEVICE void beside_values(int step, int free_stage)
    {
        if (!converts) return;
        if (step % STEPS_OF_UNIT == 0) read(step / STEPS_OF_UNIT, free_stage);
        if (step % STEPS_OF_UNIT == 1) write(step / STEPS_OF_UNIT, free_stage);
    }
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct SparseDecodeOfBytes {
    using Sizes = Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = ListCall<Element>;
    using Kernel = Attend<Sizes, Call, ListedBytes<Sizes, Call>>;
};
