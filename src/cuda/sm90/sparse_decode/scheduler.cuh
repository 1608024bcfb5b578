/* SPDX-License-Identifier: MIT
 *
 * The work of a CTA of Hopper's sparse decode, all kernels of it, and of sparse prefill: formats, its tile of
 * heads, the splits of its list and their blocks, and what it joins.
 */
#pragma once

#include "../../device/gather.cuh"
#include "../../device/join_in_kernel.cuh"
#include "../../device/latent.cuh"
#include "../../device/warpgroup.cuh"

namespace sparse_decode {

enum { KEYS = PLAN_BLOCK /* of a block */, V_TILES = 8 /* of 64 columns */ };

DEVICE int lane()
{
    return (int)(fresh_thread() % 32);
}

DEVICE int warp()
{
    return (int)(fresh_thread() / 32);
}

/* Which blocks of keys have FP4 codes. A block's keys are all of one cache. */
enum Fp4Blocks { NO_BLOCKS, ALL_BLOCKS, BLOCKS_OF_SOME_CACHE };

/* A token is chunks of 64 codes and, with FP8_656 and FP8_584, 64 bf16 values, which belong to K alone or, as
 * V's last tile, to both. FP8_528 and FP4_288 stand for their split forms too. FP4: which blocks are FP4_288
 * in place of FORMAT. */
template <enum kv_format FORMAT_, Fp4Blocks FP4_ = FORMAT_ == KV_FP4_288 ? ALL_BLOCKS : NO_BLOCKS>
struct Format {
    static constexpr enum kv_format FORMAT = FORMAT_;
    static constexpr Fp4Blocks FP4 = FP4_;
    static constexpr bool PREFILL = false, ONE_SPLIT = false;
    /* With more, ptxas converts chunks long before they are multiplied, which takes some 5 % longer; with
     * fewer, these formats spill. */
    static constexpr int SCORE_REGISTERS = FORMAT == KV_FP8_528_F32 || FORMAT == KV_FP8_528 ? 168 : 160;
    static constexpr bool ROPE_IS_V = FORMAT == KV_FP8_584, HAS_ROPE = ROPE_IS_V || FORMAT == KV_FP8_656;
    static constexpr int CODE_CHUNKS = ROPE_IS_V ? 7 : 8;
    static constexpr int ROPE_TILE = HAS_ROPE ? CODE_CHUNKS : -1; /* of Q, and of V if it is in V */
    static constexpr int Q_TILES = CODE_CHUNKS + HAS_ROPE;
    static constexpr int ROPE_OFFSET = ROPE_IS_V ? 448 : 528;
    static constexpr bool F32_SCALES = FORMAT == KV_FP8_656 || FORMAT == KV_FP8_528_F32;
    static constexpr bool NEXT_SPLIT_IN_SHARED = ROPE_IS_V || FP4 == BLOCKS_OF_SOME_CACHE;
    static constexpr int SCALE_WORDS = F32_SCALES ? 4 : 2; /* of a key */

    /* Returns whether a block has FP4 codes. `cache_is_fp4`: whether its cache is FP4. */
    static DEVICE bool fp4(bool cache_is_fp4)
    {
        return FP4 == ALL_BLOCKS || (FP4 == BLOCKS_OF_SOME_CACHE && cache_is_fp4);
    }

    static DEVICE KeyAddress key_address(const struct sparse_cache_params &cache, int index)
    {
        if constexpr (HAS_ROPE) return address_of_key<FORMAT>(cache, index);
        return address_of_key_at_runtime(cache, index);
    }
};

using Fp8_656 = Format<KV_FP8_656>;
using Fp8_584 = Format<KV_FP8_584>;
using Fp8_528 = Format<KV_FP8_528>;
using Fp8_528_F32 = Format<KV_FP8_528_F32>;
using Fp4_288 = Format<KV_FP4_288>;
using Fp8_528_Or_Fp4 = Format<KV_FP8_528, BLOCKS_OF_SOME_CACHE>;
using Fp8_528_F32_Or_Fp4 = Format<KV_FP8_528_F32, BLOCKS_OF_SOME_CACHE>;

DEVICE bool has_fp4(const struct sparse_cache_params &cache)
{
    return cache.format == KV_FP4_288 || cache.format == KV_FP4_288_SPLIT;
}

/* A CTA has one split, the first of its list, if there is any, and joins a range of the rows of the request's
 * parts (JoinRange). This is less code, all of which comes with the launch. If lists have lengths, a
 * request's keys are divided among as many CTAs as it has with full lists; a list's step is then the keys of
 * a split. */
template <typename F> struct OneSplitFormat : F {
    static constexpr bool ONE_SPLIT = true;
};

/* Sparse prefill: requests are tokens, none is split, and workers take them in turns. The largest scores are
 * kept. */
template <typename F> struct PrefillFormat : F {
    static constexpr bool PREFILL = true;
    static constexpr int SCORE_REGISTERS = 168; /* with 160 the kernel of FP8_584 spills */
};

/* Sparse prefill of few tokens, whose lists are split as decode's of few keys are. */
template <typename F> struct PrefillPartFormat : PrefillFormat<F> {
    static constexpr bool ONE_SPLIT = true;
};

/* The worker, query token and tile of heads of this CTA. */
struct CtaCoord {
    int worker, token, tile;

    DEVICE explicit CtaCoord(const struct sparse_decode_params &p)
    {
        const int block = fresh_block();
        worker = fast_divide(block, p.tiles_divisor);
        const int within = block - worker * p.tiles;
        token = fast_divide(within, p.token_divisor), tile = within - token * p.tiles_of_token;
    }
};

template <typename F> DEVICE SplitList splits_of(const struct sparse_decode_params &p, int worker)
{
    if constexpr (!F::PREFILL && !F::ONE_SPLIT) return split_list(p, (unsigned)worker);
    SplitList list;
    if constexpr (F::ONE_SPLIT) {
        list.request = fast_divide(worker, p.splits_divisor);
        list.first = worker - list.request * p.split.even_splits;
        const int blocks = (int)((unsigned)(request_length(p, list.request) + KEYS - 1) / KEYS),
                  of_split = fast_divide(blocks + p.split.even_splits - 1, p.splits_divisor);
        list.step = of_split * KEYS, list.last = (int)((unsigned)(blocks - 1) / (unsigned)of_split);
        return list;
    }
    list.first = worker, list.step = p.split.num_partitions, list.last = p.b - 1;
    return list;
}

template <typename F>
DEVICE Split split_of(const struct sparse_decode_params &p, const SplitList &list, int i)
{
    int length;
    if constexpr (F::ONE_SPLIT) {
        Split split = {};
        split.request = list.request, split.begin = i * list.step;
        split.end = i < list.last ? split.begin + list.step : request_length(p, list.request);
        split.part = (int64_t)list.request * p.split.even_splits + i; /* even if it is the only split */
        return split;
    }
    if constexpr (!F::PREFILL) return list_split(p, list, i, &length);
    Split split = {};
    split.request = i, split.begin = 0, split.end = request_length(p, i), split.part = DIRECT;
    return split;
}

/* Returns the request of split i of the list. */
template <typename F>
DEVICE int request_of(const struct sparse_decode_params &p, const SplitList &list, int i)
{
    return !F::ONE_SPLIT && (F::PREFILL || p.split.partitions) ? i : list.request;
}

/* Returns the number of blocks of a split. It is at least one, since the result of a split without keys is
 * written all the same. */
DEVICE int blocks_of(const Split &split)
{
    return max(1, (int)((unsigned)(split.end - split.begin + KEYS - 1) / KEYS));
}

/* ---- The join inside the kernel ---------------------------------------------------------------- */

/* Stores the largest score of a head, in powers of two, to max_logits. For prefill, whose requests are
 * tokens. */
DEVICE void store_largest(const struct sparse_decode_params &p, int token, int head, float most)
{
    const struct sparse_prefill_fp8_params &call = (const struct sparse_prefill_fp8_params &)p;
    if (call.max_logits)
        call.max_logits[token * call.max_stride + head] = most * LN_2 * p.output.rules.lse_factor;
}

/* What a CTA joins (../../device/join_in_kernel.cuh): items begin … end - 1 of the tile's heads.
 * BY_SIXTEEN: a lane that stored 64 columns had 16 neighbouring ones (store_half_tile), else eight and
 * eight. */
template <bool BY_SIXTEEN, bool LARGEST_ = false> struct JoinRange {
    static constexpr bool LARGEST = LARGEST_;
    const struct sparse_decode_params &call;
    const struct split_params &split;
    const struct output_params &output;
    int request, token, first_head; /* of the tile */
    int parts, joiners, begin, end;
    int heads, tokens; /* of a request */

    DEVICE JoinRange(const struct sparse_decode_params &p, const SplitList &list, int heads_of_tile)
        : call(p), split(p.split), output(p.output), heads(p.h_q), tokens(p.s_q)
    {
        const CtaCoord cta(p);
        request = list.request, token = cta.token, first_head = cta.tile * heads_of_tile;
        parts = list.last + 1, joiners = p.split.even_splits;
        const int items = 2 * min(heads_of_tile, p.h_q - first_head);
        begin = join_range_up_to(list.first * items, joiners),
        end = join_range_up_to((list.first + 1) * items, joiners);
    }

    DEVICE int64_t part_row(int part, int row) const
    {
        return ((int64_t)request * split.even_splits + part) * (heads * tokens) + token * heads + first_head +
               row;
    }

    DEVICE RowCoord coord(int row) const { return {token, first_head + row}; }

    DEVICE void store_largest(int row, float most) const
    {
        sparse_decode::store_largest(call, request, first_head + row, most);
    }

    static constexpr bool PAIRS = false;
    static DEVICE int column(int half, int lane)
    {
        return half * (HALF_ROW_COLUMNS / 2) +
               (BY_SIXTEEN ? lane / 8 * HALF_ROW_TILE + lane % 4 * 16 + lane / 4 % 2 * 8 : 8 * lane);
    }
};

/* Returns the kernel's parameters, of which p is the call. */
DEVICE const struct sparse_decode_sm90_params &sm90_params(const struct sparse_decode_params &p)
{
    return (const struct sparse_decode_sm90_params &)p;
}

DEVICE uint64_t *cta_group_barrier(const struct sparse_decode_params &p, const CtaCoord &cta, int request)
{
    return sm90_params(p).cta_group_barriers + (int64_t)request * p.tiles + cta.token * p.tiles_of_token +
           cta.tile;
}

/* Called by the thread that will arrive at the group barrier. */
DEVICE void prepare_group_barrier(const struct sparse_decode_params &p, int request)
{
    cta_group_barrier_begin(cta_group_barrier(p, CtaCoord(p), request), sm90_params(p).ticket);
}

} // namespace sparse_decode
