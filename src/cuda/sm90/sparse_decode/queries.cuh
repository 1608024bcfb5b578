/* SPDX-License-Identifier: MIT
 *
 * Loads the queries of a tile to shared memory, their columns in the order of the keys' (layout.cuh).
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/tma.cuh"
#include "convert.cuh"
#include "layout.cuh"

namespace sparse_decode {

DEVICE const uint16_t *first_query(const struct sparse_decode_params &p, int request, const CtaCoord &cta)
{
    return p.q + request * p.q_stride[0] + cta.token * p.q_stride[1] +
           (int64_t)(cta.tile * HEADS) * p.q_stride[2];
}

/* Destination of a thread's part of the queries. Eight lanes take 128 bytes of a head, so that both sides of
 * the copy use all banks and whole sectors: a lane takes columns 8 · eighth … of a tile in one head, and in
 * heads a multiple of 8 away. */
struct QueryLanes {
    int head, eighth;

    DEVICE explicit QueryLanes(int warp)
        : head(4 * warp + (int)fresh_thread() % 32 / 8), eighth((int)fresh_thread() % 8)
    {
    }

    /* Returns the offset of a chunk's first word in the head's line of a tile. `halves`: in the order of
     * FP8_656's rope values. */
    DEVICE uint32_t first_word(bool halves) const
    {
        const int lane = halves ? eighth % 4 : eighth / 2, half = halves ? eighth / 4 : eighth % 2;
        return 4 * (uint32_t)lane + ((4 * (uint32_t)half) ^ (head & 7u)) * CHUNK_BYTES;
    }

    /* Returns the address of word w of a chunk whose first word goes to `first`: it is in another chunk of
     * the line. */
    static DEVICE uint32_t other_word(uint32_t first, uint32_t w) { return first ^ (w * CHUNK_BYTES); }

    DEVICE void store(uint32_t line, const uint4 &x, bool halves) const
    {
        const uint32_t to = line + first_word(halves);
        store_shared_4(to, x.x), store_shared_4(other_word(to, 1), x.y);
        store_shared_4(other_word(to, 2), x.z), store_shared_4(other_word(to, 3), x.w);
    }
};

/* ---- By the sums' warps, ahead of the split ------------------------------------------------------ */

enum { PREFETCH_BLOCKS = 4 };

/* Prefetches queries to L2, a head per thread: early enough to arrive, and late enough to be there still,
 * since keys pass through L2 all the time. */
template <typename F> DEVICE void prefetch_queries(const struct sparse_decode_params &p, int request)
{
    const CtaCoord cta(p);
    const int head = (int)fresh_thread() - WARPGROUP_THREADS;
    if (head < min((int)HEADS, p.h_q - cta.tile * HEADS))
        bulk_prefetch(first_query(p, request, cta) + head * p.q_stride[2], F::Q_TILES * LINE_BYTES);
}

enum { ROUNDS = 2, HEADS_AT_ONCE = HEADS / ROUNDS };

DEVICE void signal_q_full(uint32_t smem)
{
    fence_async_shared();
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(SHARED_AT(smem, q_full));
}

/* Moves a thread's part of a split's queries to shared memory. Chunks arrive unconverted in places of
 * their own, in the lines over which they are then spread. All addresses are computed once, since tiles
 * follow each other. */
template <typename F> struct QueryCopy {
    using Chunks = uint4[ROUNDS]; /* of a tile */
    const uint16_t *from;
    int heads;            /* from the thread's first one on */
    uint32_t own;         /* address in tile 0 */
    uint32_t codes, rope; /* address of the first word of a chunk */

    DEVICE QueryCopy(const struct sparse_decode_params &p, int request, uint32_t smem)
    {
        const CtaCoord cta(p);
        const QueryLanes lanes((int)fresh_thread() / 32 - WARPGROUP_THREADS / 32);
        heads = p.h_q - cta.tile * HEADS - lanes.head;
        from = first_query(p, request, cta) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.eighth;
        const uint32_t line = SHARED_AT(smem, q) + (uint32_t)(lanes.head * LINE_BYTES);
        own = line + (uint32_t)(CHUNK_BYTES * lanes.eighth);
        codes = line + lanes.first_word(false), rope = line + lanes.first_word(!F::ROPE_IS_V);
    }

    DEVICE void ask(const struct sparse_decode_params &p, int tile) const
    {
        const int64_t stride = HEADS_AT_ONCE * p.q_stride[2];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const bool valid = i * HEADS_AT_ONCE < heads;
            cp_async_16(own + (uint32_t)(tile * TILE_BYTES + i * HEADS_AT_ONCE * LINE_BYTES),
                        valid ? from + LINE_ELEMENTS * tile + i * stride : p.q, valid);
        }
    }

    DEVICE void take(int tile, Chunks &x) const
    {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            x[i] = load_shared_16(own + (uint32_t)(tile * TILE_BYTES + i * HEADS_AT_ONCE * LINE_BYTES));
    }

    /* Stores a tile as fp16, rope values as they are. All lanes of the warp have taken the tile, since a
     * line belongs to one warp. `most`: becomes the larger of its value and the magnitudes converted to
     * fp16. */
    DEVICE void spread(int tile, const Chunks &x, bool is_rope, uint32_t &most) const
    {
        const uint32_t to = (uint32_t)(tile * TILE_BYTES) + (is_rope ? rope : codes);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            uint32_t word[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            if (!is_rope)
#pragma unroll
                for (int w = 0; w < 4; w++)
                    most = larger_bf16x2(most, word[w]), word[w] = convert_bf16x2<Fp16>(word[w]);
#pragma unroll
            for (uint32_t w = 0; w < 4; w++)
                store_shared_4(QueryLanes::other_word(to, w) + (uint32_t)(i * HEADS_AT_ONCE * LINE_BYTES),
                               word[w]);
        }
    }
};

/* Loads the queries of a CTA that has one split. */
template <typename F>
DEVICE void load_only_queries(const struct sparse_decode_params &p, int request, Shared &shared,
                              uint32_t smem)
{
    enum { TILES_AT_ONCE = F::Q_TILES % 3 ? 4 : 3 };
    static_assert(F::Q_TILES % TILES_AT_ONCE == 0, "");
    const QueryCopy<F> copy(p, request, smem);
    uint32_t most = 0;
#pragma unroll 1
    for (int tile = 0; tile < F::Q_TILES; tile++) copy.ask(p, tile);
    cp_async_commit();
    cp_async_wait<0>();
#pragma unroll 1
    for (int first = 0; first < F::Q_TILES; first += TILES_AT_ONCE) {
        typename QueryCopy<F>::Chunks x[TILES_AT_ONCE];
#pragma unroll
        for (int c = 0; c < TILES_AT_ONCE; c++) copy.take(first + c, x[c]);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < TILES_AT_ONCE; c++) copy.spread(first + c, x[c], first + c == F::ROPE_TILE, most);
    }
    if (too_large_for_fp16(most)) shared.q_beyond = 1;
    signal_q_full(smem);
}

/* Loads the queries of split `count`. For the first split all groups of tiles are requested, and spread
 * when they have arrived; for others a group is requested as soon as the scores' warps no longer need that
 * of the previous split, and spread while others are in flight. */
template <typename F>
DEVICE void load_queries(const struct sparse_decode_params &p, int request, Shared &shared, uint32_t smem,
                         uint32_t count)
{
    enum { ON_THEIR_WAY = 2 };
    const auto first_tile = [](int group) { return group ? 2 * group - 2 : (int)F::ROPE_TILE; };
    const auto has_one = [](int group) { return F::HAS_ROPE || group; };
    const auto has_two = [&](int group) { return group && first_tile(group) + 1 < F::CODE_CHUNKS; };
    const QueryCopy<F> copy(p, request, smem);
    const int behind = count ? (int)ON_THEIR_WAY : (int)Q_GROUPS;
    uint32_t most = 0;
#pragma unroll 1
    for (int step = 0; step < Q_GROUPS + behind; step++) {
        if (step < Q_GROUPS && has_one(step)) {
            mbarrier_wait(SHARED_AT(smem, q_empty) + 8 * (uint32_t)step, (count & 1) ^ 1);
            copy.ask(p, first_tile(step));
            if (has_two(step)) copy.ask(p, first_tile(step) + 1);
        }
        cp_async_commit();
        if (step < behind) continue;
        cp_async_wait<ON_THEIR_WAY>();
        const int group = step - behind, tile = first_tile(group);
        if (!has_one(group)) continue;
        const bool two = has_two(group);
        typename QueryCopy<F>::Chunks x[2];
        copy.take(tile, x[0]);
        if (two) copy.take(tile + 1, x[1]);
        __syncwarp();
        copy.spread(tile, x[0], group == 0, most);
        if (two) copy.spread(tile + 1, x[1], false, most);
    }
    if (too_large_for_fp16(most)) shared.q_beyond = count + 1;
    signal_q_full(smem);
}

/* ---- By the scores' warps, as bf16 ---------------------------------------------------------------- */

/* Loads the queries of a split again that are there as fp16; rare, so it need not be fast. */
template <typename F>
DEVICE void reload_queries(const struct sparse_decode_params &p, int request, uint32_t smem)
{
    enum { HEADS_AT_ONCE = 16 };
    const CtaCoord cta(p);
    const QueryLanes lanes((int)fresh_thread() / 32);
    const int heads = p.h_q - cta.tile * HEADS;
    const uint16_t *from =
        first_query(p, request, cta) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.eighth;
    uint32_t line = SHARED_AT(smem, q) + (uint32_t)lanes.head * LINE_BYTES;
    barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* all products with the fp16 queries are done */
#pragma unroll 1
    for (int head = lanes.head; head < HEADS; head += HEADS_AT_ONCE) {
#pragma unroll 1
        for (int c = 0; c < F::Q_TILES; c++)
            lanes.store(line + (uint32_t)c * TILE_BYTES,
                        head < heads ? __ldg((const uint4 *)(from + LINE_ELEMENTS * c))
                                     : make_uint4(0, 0, 0, 0),
                        !F::ROPE_IS_V && c == F::ROPE_TILE);
        from += HEADS_AT_ONCE * p.q_stride[2], line += HEADS_AT_ONCE * LINE_BYTES;
    }
    fence_async_shared();
    barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
}

} // namespace sparse_decode
