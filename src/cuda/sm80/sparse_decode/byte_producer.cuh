/* SPDX-License-Identifier: MIT
 *
 * Key blocks from lists over caches of bytes of any format: cp.async copies raw tokens to the stage in which
 * they become values, and they are converted there, in place, beside P·V of the previous block.
 *
 *      stage 0     | Q·Kᵀ of block n          | softmax | P·V of block n     | tokens of n + 2 arrive …
 *      stage 1     | tokens of n + 1 arrive   |         | they become values | Q·Kᵀ of block n + 1
 *
 * A key's lines in a stage, one of 128 bytes per group of 64 columns, before and after the conversion:
 *      group          0         1       2         3       …   6           7                    8
 *      before         codes of         codes of              codes of     scales (or, of      values
 *                     0 and 1          2 and 3               6 and 7      FP8_584, values)
 *      after          values    values  values    values      values      values               values
 * The eight threads of a key read the codes of two groups together, and then write their values: they are in
 * one warp, and read nothing that has been overwritten. Values that need no conversion are copied to their
 * final address. In FP8_584 the scales lie behind the codes of group 6.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/gather.cuh"
#include "../../device/shared.cuh"
#include "sparse_decode.cuh"

namespace sparse_decode {

/* KIND selects the formats that the kernel takes (params.h). A kernel of LISTED_ANY looks up the format for
 * each block of keys. */
template <typename Tile, typename Call, int KIND> struct ListedBytes {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE, KEYS = Tile::KEYS;
    static constexpr bool CONVERTS_BESIDE_VALUES = true;
    static constexpr bool LISTED = true, ENOUGH_REGISTERS = true;
    static constexpr bool LOADS_FAR_AHEAD = KIND != LISTED_ANY; /* else registers do not suffice */
    static constexpr int LEAST_STAGES = 2;
    static constexpr uint32_t KEY_GROUP = Tile::KEY_GROUP, STAGE_BYTES = Tile::STAGE_BYTES,
                              BYTES_BEHIND_RING = KEYS * sizeof(int32_t);
    /* A thread converts two units at a time; a unit is two groups of a key. The pairs of units of a block are
     * spread over P·V, which processes 16 keys at a time. */
    static constexpr int UNITS_OF_KEY = D_V / LINE_ELEMENTS / 2, UNIT_PAIRS = PASSES * UNITS_OF_KEY / 2;
    static_assert(4 * UNIT_PAIRS == KEYS / 16 * Tile::COLUMN_PAIRS, "a group of 64 columns each step of P·V");
    static constexpr uint32_t KEYS_OF_WARP = 4 * PASSES; /* copied and converted by a warp */
    static constexpr int COPY_STEPS = 4;                 /* steps of the scores between a thread's copies */
    /* Where Q is in registers, none are left for copies beside the scores. */
    static constexpr bool COPIES_BESIDE_SCORES = !Tile::Q_IN_REGISTERS;
    using Source = ListSource<Tile, Call>;
    using Flags = typename Source::Flags;

    const Call call;
    Source source;
    uint32_t ring_at;
    uint32_t indices_at; /* of the next block to copy: KEYS indices, fetched a block ahead */
    Flags flags;
    bool converts, extra; /* the copied block has codes; it is of the extra cache */
    bool copies;          /* a block is copied beside the scores */
    /* A pair of units is read while the previous one is written, where registers suffice. */
    static constexpr bool READS_AHEAD = KIND != LISTED_ANY || !Tile::Q_IN_REGISTERS;
    /* Power-of-two scales and those of FP4 are exact in bf16, and so are their products with codes. */
    static constexpr bool SCALES_ARE_BF16 = KIND != LISTED_F32 && KIND != LISTED_ANY;
    struct Unit { /* eight codes of each group of a unit, and their scales: fp32, or bf16 twice */
        uint2 codes[2];
        uint32_t scale[2];
    };
    Unit units[2]; /* read, not yet written */

    /* A block that is being copied to a stage: the address of the lane's own key, and the warp's keys that
     * are named. Unnamed keys become zeros: codes, scales and values. The lanes of a warp find the addresses
     * of its keys and pass each to the eight lanes that copy the key. */
    struct Copies {
        uint64_t token;
        unsigned named;
    };
    Copies copied;

    DEVICE ListedBytes(const Call &of_call, uint32_t ring)
        : call(of_call), source{of_call}, ring_at(ring),
          indices_at(ring + LEAST_STAGES * STAGE_BYTES), flags{indices_at + KEYS * (uint32_t)sizeof(int32_t)}
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

    /* Copies 8 or 16 bytes from a cache that is aligned to AT_ONCE bytes. */
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

    /* Returns the lane's own key among those that its warp copies: the lane finds its address and copies its
     * scales. */
    static DEVICE uint32_t own_key()
    {
        const uint32_t lane = threadIdx.x % 32, of_warp = lane % KEYS_OF_WARP;
        return threadIdx.x / 32 * 4 + of_warp % 4 + of_warp / 4 * KEYS_AT_ONCE;
    }

    /* Finds the addresses of a block's keys and issues the copies of their scales. */
    template <int AT_ONCE> DEVICE Copies find(int stage, unsigned first_key) const
    {
        const struct listed_layout l = layout();
        const struct sparse_cache_params &cache = call.params.call.cache[extra];
        const uint32_t lane = threadIdx.x % 32, key = own_key();
        const uint32_t line = ring_at + (uint32_t)stage * STAGE_BYTES + key * LINE_BYTES;
        const int entry = (int)load_shared_4(indices_at + 4 * key);
        const int index = source.has_entry(first_key, key) ? entry : -1;
        const bool named = names_key(cache, index);
        const KeyAddress address = address_of_key_at_runtime(cache, named ? index : 0);
        const uint8_t *const anything = (const uint8_t *)call.params.call.q;
        const uint32_t chunk = lane / KEYS_OF_WARP * CHUNK_BYTES;
        if (chunk < (uint32_t)l.scale_bytes)
            copy<AT_ONCE>(line + scales_at(l) + chunk, (named ? address.scales : anything) + chunk,
                          l.scale_bytes == 8 ? 8 : 16, named);
        if (lane < KEYS_OF_WARP) flags.set_key(stage, key, named);
        return {(uint64_t)(named ? address.token : anything), __ballot_sync(~0u, named)};
    }

    template <int AT_ONCE> DEVICE void copy_pass(const Copies &of, int stage, int pass) const
    {
        const int from_lane = (int)threadIdx.x % 32 / 8 + 4 * pass;
        const uint8_t *const token = (const uint8_t *)__shfl_sync(~0u, of.token, from_lane);
        const uint32_t group_0 = ring_at + (uint32_t)stage * STAGE_BYTES,
                       key = threadIdx.x / 8 + (uint32_t)(pass * KEYS_AT_ONCE);
        copy_token<AT_ONCE>(layout(), group_0, key, token, of.named >> from_lane & 1);
    }

    template <int AT_ONCE> DEVICE void copy_block(int stage, unsigned first_key) const
    {
        const Copies all = find<AT_ONCE>(stage, first_key);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) copy_pass<AT_ONCE>(all, stage, pass);
    }

    /* Copies this thread's chunks of a token, without scales. */
    template <int AT_ONCE>
    DEVICE void copy_token(const struct listed_layout &l, uint32_t group_0, uint32_t key,
                           const uint8_t *token, bool named) const
    {
        const uint32_t thread = threadIdx.x % 8, line = group_0 + key * LINE_BYTES;
        /* Codes of two groups take 128 bytes, those of FP4 64. */
        const uint32_t shift = l.code_bytes == D_V / 2 ? 2 : 3;
#pragma unroll
        for (uint32_t i = 0; i < D_V / CHUNK_BYTES / 8; i++) {
            const uint32_t chunk = 8 * i + thread;
            if (chunk < (uint32_t)l.code_bytes / CHUNK_BYTES)
                copy<AT_ONCE>(line + (chunk >> shift) * 2 * KEY_GROUP +
                                  (chunk & ((1u << shift) - 1)) * CHUNK_BYTES,
                              token + chunk * CHUNK_BYTES, 16, named);
        }
#pragma unroll(KIND == LISTED_ANY ? 1 : MAX_GROUPS)
        for (int g = KIND == LISTED_ANY ? l.code_groups : 7; g < MAX_GROUPS; g++)
            if (g >= l.code_groups && g < call.d_qk() / LINE_ELEMENTS)
                copy<AT_ONCE>(group_0 + (uint32_t)g * KEY_GROUP + swizzle_128(key, thread),
                              token + l.values_at + (g - l.code_groups) * LINE_BYTES + thread * CHUNK_BYTES,
                              16, named);
    }

    DEVICE void copy_unaligned_block(int stage, unsigned first_key) const
    {
        if (call.params.layout[extra].copied_bytes == 8)
            copy_block<8>(stage, first_key);
        else
            copy_block<1>(stage, first_key);
    }

    /* Fetches the indices of a block; those of the previous block have been read. */
    DEVICE void copy_indices(unsigned first_key) const
    {
        __syncwarp();
        if (threadIdx.x % 32 < KEYS_OF_WARP && source.has_entry(first_key, own_key()))
            cp_async_4(indices_at + 4 * own_key(), source.entry(first_key, own_key()), true);
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

    /* Returns the offset of the scales from a key's line of group 0. */
    static DEVICE uint32_t scales_at(const struct listed_layout &l)
    {
        return (uint32_t)(l.scale_place / LINE_BYTES) * KEY_GROUP + (uint32_t)(l.scale_place % LINE_BYTES);
    }

    /* ---- Conversion (byte_convert.cuh) ---- */

    static DEVICE uint32_t odd_key();
    static DEVICE uint32_t line_of(int unit, uint32_t stage_at);
    static DEVICE uint32_t groups_before(int unit);
    DEVICE void load_scales(uint32_t scale[2], const struct listed_layout &l, uint32_t line, int unit) const;
    static DEVICE uint32_t scale_of(float scale);
    static DEVICE uint2 values_of(uint32_t codes, uint32_t scale);
    DEVICE Unit read(int unit, int stage) const;
    DEVICE void read_pair(int pair, int stage);
    DEVICE void write(const Unit &of, uint32_t i, int unit, int stage) const;
    DEVICE void write_quarter(int pair, int quarter, int stage) const;

    /* ---- Interface to latent/mainloop.cuh ---- */

    /* The host always gives these kernels LEAST_STAGES stages. */
    DEVICE int stages() const
    {
        return LEAST_STAGES;
    }

    DEVICE int blocks_ahead() const
    {
        return 1;
    }

    /* Waits for the warp's copies; a warp reads only what its own threads have copied. */
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
        for (int pair = 0; pair < UNIT_PAIRS; pair++) {
            read_pair(pair, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) write_quarter(pair, i, 0);
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
        if (step == 0 && copies) copied = find<16>(free_stage, ahead);
        if (step % COPY_STEPS == 0 && step > 0 && step / COPY_STEPS <= PASSES && copies)
            copy_pass<16>(copied, free_stage, step / COPY_STEPS - 1);
        if (step == COPY_STEPS * (PASSES + 1)) copy_indices(ahead + KEYS);
    }

    DEVICE void before_values(int free_stage)
    {
        arrive();
        if (READS_AHEAD && (KIND != LISTED_ANY || converts)) read_pair(0, free_stage);
    }

    /* A kernel of one kind converts the stage's contents even if no block has been copied; nobody reads the
     * result, and that is cheaper than a test at every step. */
    DEVICE void beside_values(int step, int free_stage)
    {
        if (KIND == LISTED_ANY && !converts) return;
        if (!READS_AHEAD && step % 2 == 0) {
            units[step % 4 / 2] = read(step / 2, free_stage);
            __syncwarp();
        }
        write_quarter(step / 4, step % 4, free_stage);
        if (READS_AHEAD && step % 4 == 3) read_pair((step / 4 + 1) % UNIT_PAIRS, free_stage);
    }
};

} // namespace sparse_decode
