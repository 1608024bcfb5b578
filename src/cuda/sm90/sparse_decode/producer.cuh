/* SPDX-License-Identifier: MIT
 *
 * Iteration of the scores' warps over the keys: indices two blocks ahead, raw keys one block ahead, by
 * cp.async. Every thread copies its own: 16 bytes of every 64 codes of two keys. Entries that name no key
 * are zero-filled. Splits follow each other without a gap.
 */
#pragma once

#include "convert.cuh"
#include "layout.cuh"

namespace sparse_decode {

template <typename F> struct Keys {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;
    int at;             /* start of the block whose indices are loaded next */
    int own_next_split; /* next_split, if there is a register for it */
    int index[2];       /* of the thread's keys, in a block whose raw keys are still to be requested */
    const uint8_t *token[2], *scales; /* of the block whose raw keys are requested */
    bool done;                        /* no split is left whose indices are to be loaded */
    bool valid[2];                    /* whether the key exists; else nothing is read */
    uint32_t fp4;                     /* argument of F::fp4 for the same block */
    uint32_t rope;                    /* address of the thread's rope values of the next block to take */

    DEVICE Keys(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), rope(SHARED_AT(smem, rope))
    {
    }

    /* Returns the thread's key 0 or 1 of a block. */
    static DEVICE int key(int i)
    {
        const unsigned thread =
            fresh_thread(); /* unsigned: halves the instructions; as wgmma_d_row(thread, 2 * i) */
        return (int)(16 * (thread / 32) + thread % 32 / 4) + 8 * i;
    }

    DEVICE Shared::Ahead &ahead() { return shared.ahead[warp()]; }

    /* Returns the split of the list whose indices are loaded next. Some kernels have no register for it. */
    DEVICE int next_split()
    {
        if constexpr (F::NEXT_SPLIT_IN_SHARED)
            return ahead().next_split;
        else
            return own_next_split;
    }

    DEVICE void set_next_split(int which)
    {
        if constexpr (!F::NEXT_SPLIT_IN_SHARED) {
            own_next_split = which;
            return;
        }
        __syncwarp();
        if (lane() == 0) ahead().next_split = which;
        __syncwarp();
    }

    DEVICE void enter_split(int which)
    {
        const Split split = split_of<F>(p, shared.list, which);
        const ListEnds ends = list_ends(p, split.request);
        const CtaCoord cta(p);
        at = split.begin;
        __syncwarp();
        if (lane() == 0) {
            Shared::Ahead &to = ahead();
            to.count = ends.count, to.extra_begin = ends.extra_begin;
            to.extra_end = ends.extra_end, to.end = split.end;
#pragma unroll
            for (int i = 0; i < 2; i++)
                to.entries[i] = p.cache[i].indices + split.request * p.cache[i].indices_stride[0] +
                                cta.token * p.cache[i].indices_stride[1] - (i ? ends.extra_begin : 0);
        }
        __syncwarp();
    }

    /* Loads the indices of a block. A block begins at a multiple of 64 of the list, so that its entries
     * are of one cache. */
    DEVICE void load_indices()
    {
        index[0] = index[1] = -1;
        if (__any_sync(~0u, done)) return;
        const Shared::Ahead &split = ahead();
        const bool of_extra = at >= split.extra_begin;
        const int end = min(split.end, of_extra ? split.extra_end : split.count);
        const int32_t *entries = split.entries[of_extra];
        const int first = at + key(0);
        if (first < end) index[0] = __ldg(entries + first);
        if (first + 8 < end) index[1] = __ldg(entries + first + 8);
        at += KEYS;
        ahead().of_extra = of_extra; /* the same in all lanes */
        if (__any_sync(~0u, at >= split.end)) {
            if constexpr (F::ONE_SPLIT) {
                done = true;
                return;
            }
            const int next = next_split() + shared.list.step;
            set_next_split(next);
            done = next > shared.list.last;
            if (__any_sync(~0u, !done)) enter_split(next);
        }
    }

    DEVICE uint32_t read_of_extra()
    {
        return load_shared_4(shared_address(&ahead().of_extra));
    }

    DEVICE void take_indices(uint32_t of_extra)
    {
        const struct sparse_cache_params &cache = p.cache[of_extra];
        KeyAddress address[2];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* without branches, so that neither key waits for the other */
            valid[i] = names_key(cache, index[i]);
            address[i] = F::key_address(cache, valid[i] ? index[i] : 0);
            token[i] = address[i].token + 16 * (lane() % 4);
        }
        scales = lane() % 2 ? address[1].scales : address[0].scales;
        if constexpr (F::FP4 == BLOCKS_OF_SOME_CACHE) fp4 = has_fp4(cache);
    }

    DEVICE uint32_t raw_at(int c, int i) const
    {
        return SHARED_AT(smem, raw) + (uint32_t)((c * 2 + i) * WARPGROUP_THREADS + (int)threadIdx.x) * 16;
    }

    /* Returns the thread's raw bytes of its key i in chunk c. `first`: raw_at(0, 0). */
    static DEVICE uint4 take_raw(uint32_t first, int c, int i)
    {
        constexpr uint32_t ROW = WARPGROUP_THREADS * 16;
        return load_shared_16(first + (uint32_t)(c * 2 + i) * ROW);
    }

    DEVICE uint32_t rope_at(uint32_t rope_base, int i, int half) const
    {
        return rope_base + (uint32_t)((i * 2 + half) * WARPGROUP_THREADS + (int)threadIdx.x) * 16;
    }

    /* Returns the address of the rope values of the block after that: V takes the current ones last, when
     * the next ones are in flight. */
    DEVICE uint32_t next_rope() const
    {
        static_assert(sizeof(Shared::rope) == TILE_BYTES, "");
        return F::ROPE_IS_V ? SHARED_AT(smem, rope) + SHARED_AT(smem, q[V_TILES]) - rope : rope;
    }

    /* Returns the address of the scales of key i. Formats without rope values store up to 32 bytes of
     * scales where the rope goes. */
    DEVICE uint32_t scales_at(int i) const
    {
        static_assert(sizeof(Shared::rope) >= KEYS * 32, "");
        return F::HAS_ROPE ? SHARED_AT(smem, scale) + (uint32_t)key(i) * 16
                           : SHARED_AT(smem, rope) + (uint32_t)key(i) * 32;
    }

    /* ---- Requests: a group of cp.async each, nine a block, always in the same order. If some blocks have
     * FP4 codes, only the scales are a group, and codes go by barriers (convert.cuh) ---- */

    DEVICE void ask_codes(int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) cp_async_16(raw_at(c, i), token[i] + LINE_ELEMENTS * c, valid[i]);
        cp_async_commit();
    }

    /* ask_codes where blocks may have FP4 codes. Two chunks of those are requested with the even one.
     * `parity`: of the block's count. */
    template <int C> DEVICE void ask_either_codes(uint32_t parity)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            constexpr bool SOME = F::FP4 == BLOCKS_OF_SOME_CACHE, EVEN = C % 2 == 0;
            if constexpr (C == 0)
                cp_async_16(raw_at(C, i), token[i], valid[i]);
            else if constexpr (SOME)
                cp_async_16_if<LINE_ELEMENTS * C>(!fp4, raw_at(C, i), token[i], valid[i]);
            if constexpr (C > 0 && EVEN)
                cp_async_16_if<LINE_ELEMENTS / 2 * C>(F::fp4(fp4), raw_at(C, i), token[i], valid[i]);
        }
        if constexpr (C % 2) publish_pair(C / 2, parity);
    }

    /* Signals that all copies of a pair of chunks have been requested, and what they overwrite has been
     * taken. With the first pair one more arrival publishes the kind of the block: an arrival of copies does
     * not order the thread's own writes. The kind of the previous block has a word of its own, since it may
     * still be read; that of the block before it has none, since its codes have all been taken. */
    DEVICE void publish_pair(int pair, uint32_t parity)
    {
        cp_async_arrive(SHARED_AT(smem, landed) + 8 * (uint32_t)pair);
        if (F::FP4 == BLOCKS_OF_SOME_CACHE && pair == 0 && threadIdx.x == 0) {
            store_shared_4(SHARED_AT(smem, fp4) + 4 * parity, fp4);
            mbarrier_arrive(SHARED_AT(smem, landed));
        }
    }

    DEVICE void copy_rope(uint32_t to)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                cp_async_16(rope_at(to, i, half),
                            token[i] + F::ROPE_OFFSET +
                                (F::ROPE_IS_V ? 16 * (lane() % 4) + 16 * half : 64 * half),
                            valid[i]);
    }

    DEVICE void copy_scales()
    {
        const int i = lane() % 2, half = lane() % 4 / 2;
        const bool own_valid = i ? valid[1] : valid[0];
        if (half && !F::fp4(fp4)) return;
        if constexpr (F::ROPE_IS_V)
            cp_async_8(scales_at(i), scales, own_valid);
        else
            cp_async_16(scales_at(i) + 16 * (uint32_t)half, scales + 16 * half, own_valid);
    }

    DEVICE void ask_first(uint32_t rope_to)
    {
        if constexpr (F::HAS_ROPE) copy_rope(rope_to);
        copy_scales();
        cp_async_commit();
    }

    template <int C = 0> DEVICE void ask_chunk(int c, uint32_t parity)
    {
        if constexpr (F::FP4 != NO_BLOCKS) {
            if (c == C)
                ask_either_codes<C>(parity);
            else if constexpr (C + 1 < V_TILES)
                ask_chunk<C + 1>(c, parity);
        } else if (c < F::CODE_CHUNKS) {
            ask_codes(c);
        } else {
            cp_async_commit(); /* empty */
        }
    }

    DEVICE void begin()
    {
        if constexpr (F::PREFILL && !F::ONE_SPLIT) {
            set_next_split(shared.list.first), done = false;
            enter_split(shared.list.first);
            load_indices(), take_indices(read_of_extra()), load_indices();
        } else {
            begin_short();
        }
        ask_first(rope);
#pragma unroll
        for (int c = 0; c < V_TILES; c++) ask_chunk(c, 0);
    }

    /* The same in less code. It starts as if a split without entries preceded the first, so that only one
     * place enters splits. */
    DEVICE void begin_short()
    {
        done = false;
        if constexpr (F::ONE_SPLIT) {
            enter_split(shared.list.first);
#pragma unroll 1
            for (int block = 0; block < 2; block++) {
                if (block > 0) take_indices(read_of_extra());
                load_indices();
            }
            return;
        }
        set_next_split(shared.list.first - shared.list.step);
        at = 0;
        if (lane() == 0) ahead().count = ahead().end = 0, ahead().extra_begin = INT32_MAX;
        __syncwarp();
#pragma unroll 1
        for (int block = -1; block < 2; block++) {
            if (block > 0) take_indices(read_of_extra());
            load_indices();
        }
    }
};

} // namespace sparse_decode
