/* SPDX-License-Identifier: MIT
 *
 * The queries of a tile to shared memory, their columns in the order of the keys' (layout.cuh).
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "convert.cuh"
#include "layout.cuh"

DEVICE const uint16_t *first_query(const struct sparse_decode_params &p, int request, const Place &place)
{
    return p.q + request * p.q_stride[0] + place.token * p.q_stride[1] +
           (int64_t)(place.tile * HEADS) * p.q_stride[2];
}

/* Where a thread's part of the queries goes. Eight lanes take 128 bytes of a head, so that both sides of the copy take all
 * banks and whole sectors: of a tile, columns 8 · piece … of a head, and of others a multiple of 8 away. */
struct QueryLanes {
    int head, piece;

    DEVICE explicit QueryLanes(int warp)
        : head(4 * warp + (int)fresh_thread() % 32 / 8), piece((int)fresh_thread() % 8)
    {
    }

    /* To the head's line of a tile; `halves`: in the order of FP8_656's rope values. */
    DEVICE void store(uint32_t line, const uint4 &x, bool halves) const
    {
        const int lane = halves ? piece % 4 : piece / 2, half = halves ? piece / 4 : piece % 2;
        const uint32_t chunk = (4 * (uint32_t)half) ^ (head & 7u), to = line + 4 * (uint32_t)lane;
        store_shared_4(to + chunk * CHUNK_BYTES, x.x);
        store_shared_4(to + (chunk ^ 1) * CHUNK_BYTES, x.y);
        store_shared_4(to + (chunk ^ 2) * CHUNK_BYTES, x.z);
        store_shared_4(to + (chunk ^ 3) * CHUNK_BYTES, x.w);
    }
};

/* ---- By the sums' warps, ahead of the piece ------------------------------------------------------ */

enum { LOADING_THREADS = 2 * WARPGROUP_THREADS, PREFETCH_BLOCKS = 4 };

/* To L2. Early enough to come, and late enough to be there still: keys pass through L2 all the time. */
template <typename F> DEVICE void prefetch_queries(const struct sparse_decode_params &p, int request)
{
    const Place place(p);
    const char *from = (const char *)first_query(p, request, place);
    const int heads = min((int)HEADS, p.h_q - place.tile * HEADS);
#pragma unroll 1
    for (int line = (int)fresh_thread() - WARPGROUP_THREADS; line < heads * F::Q_TILES;
         line += LOADING_THREADS)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line / F::Q_TILES * (2 * p.q_stride[2]) +
                                                      line % F::Q_TILES * LINE_BYTES));
}

enum { ROUNDS = 2, HEADS_APART = HEADS / ROUNDS };

/* Whether a tile is that of the rope values: known to the compiler, or by its number. */
enum rope_tile { NO_ROPE, IS_ROPE, BY_TILE };

/* What a thread has of a tile to shared memory, as fp16, of the rope values as it is. most: the larger of what it was and the
 * magnitudes that became fp16. */
template <typename F, enum rope_tile ROPE = BY_TILE>
DEVICE void store_queries(const QueryLanes &lanes, uint32_t base, int tile, uint4 (&words)[ROUNDS],
                          uint32_t &most)
{
    const bool rope = ROPE == BY_TILE ? tile == F::ROPE_TILE : ROPE == IS_ROPE;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        uint4 &x = words[i];
        if (!rope) {
            most = larger_bf16x2(larger_bf16x2(most, x.x), x.y);
            most = larger_bf16x2(larger_bf16x2(most, x.z), x.w);
            x = make_uint4(convert_bf16x2<Fp16>(x.x), convert_bf16x2<Fp16>(x.y), convert_bf16x2<Fp16>(x.z),
                           convert_bf16x2<Fp16>(x.w));
        }
        lanes.store(SHARED_AT(base, q) + (uint32_t)tile * TILE_BYTES +
                        (uint32_t)(lanes.head + i * HEADS_APART) * LINE_BYTES,
                    x, !F::ROPE_IS_V && rope);
    }
}

DEVICE void queries_are_there(uint32_t base)
{
    fence_async_shared();
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(SHARED_AT(base, q_full));
}

/* Loads the queries of the first piece. All copies are on their way at once; a thread copies its chunks unconverted to places of their
 * own in the lines of shared memory over which it spreads them afterwards. */
template <typename F>
DEVICE void load_first_queries(const struct sparse_decode_params &p, int request, Shared &shared,
                               uint32_t base)
{
    enum { TOGETHER = F::Q_TILES % 3 ? 4 : 3 };
    static_assert(F::Q_TILES % TOGETHER == 0, "");
    const Place place(p);
    const QueryLanes lanes((int)fresh_thread() / 32 - WARPGROUP_THREADS / 32);
    const int heads = p.h_q - place.tile * HEADS - lanes.head;
    const uint32_t own = SHARED_AT(base, q) + (uint32_t)(lanes.head * LINE_BYTES + CHUNK_BYTES * lanes.piece);
    const uint16_t *from =
        first_query(p, request, place) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.piece;
    const int64_t apart = HEADS_APART * p.q_stride[2];
#pragma unroll 1
    for (int tile = 0; tile < F::Q_TILES; tile++, from += LINE_ELEMENTS)
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const bool there = i * HEADS_APART < heads;
            cp_async_16(own + (uint32_t)(tile * TILE_BYTES + i * HEADS_APART * LINE_BYTES),
                        there ? from + i * apart : p.q, there);
        }
    cp_async_commit();
    cp_async_wait<0>();
    uint32_t most = 0;
#pragma unroll 1
    for (int first = 0; first < F::Q_TILES; first += TOGETHER) {
        uint4 words[TOGETHER][ROUNDS];
#pragma unroll
        for (int c = 0; c < TOGETHER; c++)
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                words[c][i] =
                    load_shared_16(own + (uint32_t)((first + c) * TILE_BYTES + i * HEADS_APART * LINE_BYTES));
        __syncwarp(); /* a line is one warp's */
#pragma unroll
        for (int c = 0; c < TOGETHER; c++) store_queries<F>(lanes, base, first + c, words[c], most);
    }
    if (too_large_for_fp16(most)) shared.q_beyond = 1;
    queries_are_there(base);
}

/* Prefill's: all tiles are under way together, since its blocks of threads stay and code is no matter. */
template <typename F>
DEVICE void load_all_queries(const struct sparse_decode_params &p, int request, Shared &shared, uint32_t base)
{
    const Place place(p);
    const QueryLanes lanes((int)fresh_thread() / 32 - WARPGROUP_THREADS / 32);
    const int heads = p.h_q - place.tile * HEADS - lanes.head;
    const uint16_t *from =
        first_query(p, request, place) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.piece;
    uint4 words[F::Q_TILES][ROUNDS];
    uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < F::Q_TILES; c++)
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int tile = (c + F::ROPE_TILE) % F::Q_TILES;
            words[tile][i] =
                i * HEADS_APART < heads
                    ? __ldg((const uint4 *)(from + i * HEADS_APART * p.q_stride[2] + LINE_ELEMENTS * tile))
                    : make_uint4(0, 0, 0, 0);
        }
    store_queries<F>(lanes, base, F::ROPE_TILE, words[F::ROPE_TILE], most);
#pragma unroll
    for (int c = 0; c < F::CODE_CHUNKS; c++) store_queries<F>(lanes, base, c, words[c], most);
    if (too_large_for_fp16(most)) shared.q_beyond = 1;
    queries_are_there(base);
}

/* Of the next piece: a group of tiles as soon as the scores' warps need it no more. `count`: of the piece. */
template <typename F, typename Request>
DEVICE void load_queries(const struct sparse_decode_params &p, const Request &request, Shared &shared,
                         uint32_t base, uint32_t count)
{
#pragma unroll 1
    for (int group = 0; group < Q_GROUPS; group++) {
        /* Anew each time: O leaves few registers. */
        const Place place(p);
        const QueryLanes lanes((int)fresh_thread() / 32 - WARPGROUP_THREADS / 32);
        const int heads = p.h_q - place.tile * HEADS - lanes.head;
        const uint16_t *from =
            first_query(p, request(), place) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.piece;
        const int first = group ? 2 * group - 2 : F::ROPE_TILE;
        const bool two = group && first + 1 < F::CODE_CHUNKS;
        uint4 words[2][ROUNDS];
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                words[c][i] = (c == 0 || two) && i * HEADS_APART < heads
                                  ? __ldg((const uint4 *)(from + i * HEADS_APART * p.q_stride[2] +
                                                          LINE_ELEMENTS * (first + c)))
                                  : make_uint4(0, 0, 0, 0);
        mbarrier_wait(SHARED_AT(base, q_free) + 8 * (uint32_t)group, (count & 1) ^ 1);
        uint32_t most = 0;
        if (!F::PREFILL)
            store_queries<F>(lanes, base, first, words[0], most);
        else if (group)
            store_queries<F, NO_ROPE>(lanes, base, first, words[0], most);
        else
            store_queries<F, IS_ROPE>(lanes, base, first, words[0], most);
        if (two) store_queries<F, F::PREFILL ? NO_ROPE : BY_TILE>(lanes, base, first + 1, words[1], most);
        if (too_large_for_fp16(most)) shared.q_beyond = count + 1;
    }
    queries_are_there(base);
}

/* ---- By the scores' warps, as bf16 ---------------------------------------------------------------- */

/* Of a piece whose queries are there as fp16; rare, so that it need not be fast. */
template <typename F>
DEVICE void reload_queries(const struct sparse_decode_params &p, int request, uint32_t base)
{
    enum { HEADS_APART = 16 };
    const Place place(p);
    const QueryLanes lanes((int)fresh_thread() / 32);
    const int heads = p.h_q - place.tile * HEADS;
    const uint16_t *from =
        first_query(p, request, place) + lanes.head * p.q_stride[2] + CHUNK_ELEMENTS * lanes.piece;
    uint32_t line = SHARED_AT(base, q) + (uint32_t)lanes.head * LINE_BYTES;
    barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); /* all products with the others are done */
#pragma unroll 1
    for (int head = lanes.head; head < HEADS; head += HEADS_APART) {
#pragma unroll 1
        for (int c = 0; c < F::Q_TILES; c++)
            lanes.store(line + (uint32_t)c * TILE_BYTES,
                        head < heads ? __ldg((const uint4 *)(from + LINE_ELEMENTS * c))
                                     : make_uint4(0, 0, 0, 0),
                        !F::ROPE_IS_V && c == F::ROPE_TILE);
        from += HEADS_APART * p.q_stride[2], line += HEADS_APART * LINE_BYTES;
    }
    fence_async_shared();
    barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS);
}
