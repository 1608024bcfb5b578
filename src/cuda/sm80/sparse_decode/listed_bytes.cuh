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

/* KIND says which formats the kernel takes (params.h). A kernel of LISTED_ANY looks the format up for each block of keys. */
template <typename Tile, typename Call, int KIND> struct ListedBytes {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool CONVERTS_BESIDE_VALUES = true;
    static constexpr bool LISTED = true, ENOUGH_REGISTERS = true;
    static constexpr int LEAST_STAGES = 2;
    /* The host gives each kernel just these stages. ptxas makes other code of the constant, and not always shorter code: each kernel has
     * the form in which it was measured and checked. */
    static constexpr bool STAGES_ARE_CONSTANT =
        KIND == LISTED_F32 || KIND == LISTED_528 || KIND == LISTED_FP4;
    static constexpr uint32_t KEY_GROUP = Tile::KEY_GROUP, STAGE_BYTES = Tile::STAGE_BYTES,
                              BYTES_BEHIND_RING = KEYS * sizeof(int32_t);
    /* A thread converts a unit, two groups of a key, at a time. The units of a block are spread over the steps of P·V. */
    static constexpr int UNITS_OF_KEY = D_V / LINE_ELEMENTS / 2, UNITS = PASSES * UNITS_OF_KEY;
    static constexpr int VALUE_STEPS = KEYS / 16 * Tile::COLUMN_PAIRS, STEPS_OF_UNIT = VALUE_STEPS / UNITS;
    static_assert(VALUE_STEPS % UNITS == 0 && STEPS_OF_UNIT >= 2,
                  "a step to read a unit's codes, one to write its values");
    static constexpr int COPY_STEPS = 4; /* of the scores, between the copies of two keys of a thread */
    /* Where Q is in registers, or O is large, there are none for copies beside the scores. */
    static constexpr bool COPIES_BESIDE_SCORES = !Tile::Q_IN_REGISTERS && Tile::ROWS < 64;
    using Source = ListSource<Tile, Call>;
    using Flags = typename Source::Flags;

    const Call call;
    Source source;
    uint32_t ring_at;
    uint32_t indices_at; /* of the block that is copied next: KEYS indices, fetched a block ahead */
    Flags flags;
    bool converts, extra; /* the block that has been copied has codes; it is of the extra cache */
    uint32_t codes[4];    /* of the unit that has been read */
    float scale[2];
    bool copies; /* a block, beside the scores */

    DEVICE ListedBytes(const Call &of_call, uint32_t ring)
        : call(of_call), source{of_call}, ring_at(ring),
          indices_at(ring + (STAGES_ARE_CONSTANT ? LEAST_STAGES * STAGE_BYTES
                                                 : (uint32_t)of_call.stages() * STAGE_BYTES)),
          flags{indices_at + KEYS * (uint32_t)sizeof(int32_t)}
    {
    }

    /* Returns the layout of the block that is copied or converted. */
    DEVICE struct listed_layout layout() const
    {
        struct listed_layout l = call.params.layout[extra];
        if constexpr (KIND != LISTED_ANY) {
            l.code_bytes = KIND == LISTED_FP4 ? 256 : KIND == LISTED_584 ? 448 : 512;
            l.code_groups = KIND == LISTED_584 ? 7 : 8;
            l.scale_bytes = KIND == LISTED_FP4 ? 32 : KIND == LISTED_584 ? 8 : 16;
            l.scale_kind = KIND == LISTED_FP4   ? KV_SCALE_E4M3
                           : KIND == LISTED_F32 ? KV_SCALE_F32
                                                : KV_SCALE_UE8M0;
            l.scale_shift = KIND == LISTED_FP4 ? 4 : KIND == LISTED_528 ? 5 : KIND == LISTED_584 ? 6 : 7;
            l.scale_place = KIND == LISTED_584 ? LISTED_584_SCALES : LISTED_SCALES;
        }
        return l;
    }

    /* ---- Copies ---- */

    /* Copies 8 or 16 bytes, from where the cache is aligned to AT_ONCE. */
    template <int AT_ONCE> static DEVICE void copy(uint32_t to, const uint8_t *from, int bytes, bool valid)
    {
        if (AT_ONCE == 16 && bytes == 16) {
            cp_async_16(to, from, valid);
        } else if (AT_ONCE >= 8) {
            for (int i = 0; i < bytes; i += 8) cp_async_8(to + (uint32_t)i, from + i, valid);
        } else {
#pragma unroll 1
            for (int i = 0; i < bytes; i++)
                asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + (uint32_t)i),
                             "r"(valid ? (uint32_t)__ldg(from + i) : 0u)
                             : "memory");
        }
    }

    /* This thread's share of a key. What no index names becomes zeros: codes, scales and values. */
    template <int AT_ONCE> DEVICE void copy_key(int stage, int pass, int index) const
    {
        const struct listed_layout l = layout();
        const struct sparse_cache_params &cache = call.params.call.cache[extra];
        const uint32_t thread = threadIdx.x % 8, row = threadIdx.x / 8 + (uint32_t)(pass * KEYS_AT_ONCE);
        const uint32_t group_0 = ring_at + (uint32_t)stage * STAGE_BYTES, line = group_0 + row * LINE_BYTES;
        const bool named = names_key(cache, index);
        const KeyPlace key = place_of_key_as_told(cache, named ? index : 0);
        const uint8_t *const anything = (const uint8_t *)call.params.call.q;
        const uint8_t *token = named ? key.token : anything, *scales = named ? key.scales : anything;

        /* Codes of two groups are 128 bytes, or of FP4 64. */
        const uint32_t shift = l.code_bytes == D_V / 2 ? 2 : 3;
#pragma unroll
        for (uint32_t i = 0; i < D_V / CHUNK_BYTES / 8; i++) {
            const uint32_t chunk = 8 * i + thread;
            if (chunk < (uint32_t)l.code_bytes / CHUNK_BYTES)
                copy<AT_ONCE>(line + (chunk >> shift) * 2 * KEY_GROUP +
                                  (chunk & ((1u << shift) - 1)) * CHUNK_BYTES,
                              token + chunk * CHUNK_BYTES, 16, named);
        }
#pragma unroll 1
        for (int g = l.code_groups; g < call.d_qk() / LINE_ELEMENTS; g++)
            copy<AT_ONCE>(group_0 + (uint32_t)g * KEY_GROUP + swizzle_128(row, thread),
                          token + l.values_at + (g - l.code_groups) * LINE_BYTES + thread * CHUNK_BYTES, 16,
                          named);
        const uint32_t scales_to = line + scales_at(l) + thread * CHUNK_BYTES;
        if (thread * CHUNK_BYTES < (uint32_t)l.scale_bytes)
            copy<AT_ONCE>(scales_to, scales + thread * CHUNK_BYTES, l.scale_bytes == 8 ? 8 : 16, named);
        flags.set(stage, pass, named);
    }

    /* The index of this thread's key. */
    DEVICE int index_of(unsigned first_key, int pass) const
    {
        const int index =
            (int)load_shared_4(indices_at + 4 * (threadIdx.x / 8 + (uint32_t)(pass * KEYS_AT_ONCE)));
        return source.has_entry(first_key, pass) ? index : -1;
    }

    template <int AT_ONCE> DEVICE void copy_block(int stage, unsigned first_key) const
    {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) copy_key<AT_ONCE>(stage, pass, index_of(first_key, pass));
    }

    DEVICE void copy_unaligned_block(int stage, unsigned first_key) const
    {
        if (call.params.layout[extra].copied_bytes == 8)
            copy_block<8>(stage, first_key);
        else
            copy_block<1>(stage, first_key);
    }

    /* Fetches the indices of a block, where those of the block before have been read. */
    DEVICE void copy_indices(unsigned first_key) const
    {
        __syncwarp();
        if (threadIdx.x % 8) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            if (source.has_entry(first_key, pass))
                cp_async_4(indices_at + 4 * (threadIdx.x / 8 + (uint32_t)(pass * KEYS_AT_ONCE)),
                           source.entry(first_key, pass), true);
    }

    DEVICE bool is_aligned() const
    {
        return call.params.layout[extra].copied_bytes == 16;
    }

    DEVICE void begin_block(unsigned first_key)
    {
        extra = source.is_extra(first_key);
        converts = layout().code_bytes != 0;
    }

    /* From a key's line of group 0. */
    static DEVICE uint32_t scales_at(const struct listed_layout &l)
    {
        return (uint32_t)(l.scale_place / LINE_BYTES) * KEY_GROUP + (uint32_t)(l.scale_place % LINE_BYTES);
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

    DEVICE float load_scale(const struct listed_layout &l, uint32_t line, uint32_t group) const
    {
        const uint32_t index = (group * LINE_ELEMENTS + threadIdx.x % 8 * CHUNK_ELEMENTS) >> l.scale_shift;
        const uint32_t at = line + scales_at(l);
        if (l.scale_kind == KV_SCALE_F32) return __uint_as_float(load_shared_4(at + 4 * index));
        const uint32_t code = load_shared_4(at + (index & ~3u)) >> 8 * (index & 3) & 0xff;
        if (l.scale_kind == KV_SCALE_UE8M0) return num_from_ue8m0((uint8_t)code);
        return Fp16::to_float((uint16_t)fp16_of_e4m3(code).x) * E2M1_IN_E4M3;
    }

    DEVICE void read(int unit, int stage)
    {
        const struct listed_layout l = layout();
        const uint32_t line = ring_at + (uint32_t)stage * STAGE_BYTES + row_of(unit) * LINE_BYTES;
        const uint32_t pair = line + (uint32_t)(2 * (unit % UNITS_OF_KEY)) * KEY_GROUP;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t second = (uint32_t)i ^ (threadIdx.x / 8 & 1);
            uint2 eight;
            if (l.code_bytes == D_V / 2)
                eight = e4m3_of_e2m1(load_shared_4(pair + second * (LINE_ELEMENTS / 2) +
                                                   threadIdx.x % 8 * (CHUNK_ELEMENTS / 2)));
            else
                eight = load_shared_8(pair + second * LINE_ELEMENTS + threadIdx.x % 8 * CHUNK_ELEMENTS);
            codes[2 * i] = eight.x, codes[2 * i + 1] = eight.y;
            scale[i] = load_scale(l, line, group_of(unit, i));
        }
    }

    DEVICE void write(int unit, int stage) const
    {
        const struct listed_layout l = layout();
        const uint32_t to =
            ring_at + (uint32_t)stage * STAGE_BYTES + swizzle_128(row_of(unit), threadIdx.x % 8);
        __syncwarp(); /* the codes have been read */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t group = group_of(unit, i);
            const uint2 first = bf16_of_codes(codes[2 * i], scale[i]),
                        second = bf16_of_codes(codes[2 * i + 1], scale[i]);
            if (group < (uint32_t)l.code_groups)
                store_shared_16(to + group * KEY_GROUP, make_uint4(first.x, first.y, second.x, second.y));
        }
    }

    /* ---- As attend.cuh calls it ---- */

    DEVICE int stages() const
    {
        return STAGES_ARE_CONSTANT ? LEAST_STAGES : call.stages();
    }

    DEVICE int blocks_ahead() const
    {
        return 1;
    }

    /* Threads of a warp have copied what they read. */
    static DEVICE void arrive()
    {
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
    }

    DEVICE void begin(unsigned first_key, bool some)
    {
        converts = extra = false;
        if (some) {
            copy_indices(first_key);
            arrive();
            begin_block(first_key);
            if (is_aligned())
                copy_block<16>(0, first_key);
            else
                copy_unaligned_block(0, first_key);
            copy_indices(first_key + KEYS);
        }
        arrive();
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
        const bool some = ahead < (unsigned)call.end();
        begin_block(ahead);
        converts &= some, copies = some && is_aligned();
        if (some && !copies) copy_unaligned_block(free_stage, ahead);
        if (COPIES_BESIDE_SCORES) return;
        if (copies) copy_block<16>(free_stage, ahead);
        copy_indices(ahead + KEYS);
    }

    DEVICE void beside_scores(int step, int free_stage, unsigned ahead)
    {
        if (!COPIES_BESIDE_SCORES) return;
        if (step % COPY_STEPS == 0 && step / COPY_STEPS < PASSES && copies)
            copy_key<16>(free_stage, step / COPY_STEPS, index_of(ahead, step / COPY_STEPS));
        if (step == COPY_STEPS * PASSES) copy_indices(ahead + KEYS);
    }

    DEVICE void before_values() const
    {
        cp_async_wait<0>();
    }

    /* A kernel of one kind makes something of what is in the stage where no block has been copied, which nobody reads: that is cheaper
     * than to ask at every step. */
    DEVICE void beside_values(int step, int free_stage)
    {
        if (KIND == LISTED_ANY && !converts) return;
        if (step % STEPS_OF_UNIT == 0) read(step / STEPS_OF_UNIT, free_stage);
        if (step % STEPS_OF_UNIT == 1) write(step / STEPS_OF_UNIT, free_stage);
    }
};

template <int KIND, typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS>
struct SparseDecodeOfBytes {
    using Sizes = Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = ListCall<Element>;
    using Kernel = Attend<Sizes, Call, ListedBytes<Sizes, Call, KIND>>;
};

#define LISTED_BYTES_KERNEL(NAME, KIND, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                                   \
    DEFINE_KERNEL(                                                                                           \
        NAME##_##ROWS##x##KEYS, sparse_sm80_params, (32 * (WARPS)),                                          \
        attend<typename SparseDecodeOfBytes<KIND, Bf16, ROWS, KEYS, WARPS, Q_IN_REGISTERS>::Kernel>(p))
