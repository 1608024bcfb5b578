/* SPDX-License-Identifier: MIT
 *
 * Definitions shared by the phases of Hopper's sparse decode for small batches.
 */
#pragma once

#include "../../../device/fragment.h"
#include "../../../device/mma.cuh"
#include "../../../device/result.cuh"
#include "../convert.cuh"

namespace sparse_decode::small {

enum {
    SMALL_HEADS = 16 /* of a tile */,
    SMALL_WARPS = 8,
    SMALL_THREADS = 32 * SMALL_WARPS,
    V_TILE_BYTES = KEYS * LINE_BYTES,
    Q_TILE_BYTES = SMALL_HEADS * LINE_BYTES
};
enum { HALF_CHUNKS = V_TILES / 2 /* chunks of 64 columns that a warp takes of its keys */ };
enum { SCORE_LINE = KEYS + 4 /* floats: lanes of a fragment then write to different banks */ };

/* The current split; one thread fills it in for all. */
struct SmallSplit {
    const int32_t *entries[2]; /* of the token, in either cache, by list position */
    int request, begin, end, blocks;
    int count, extra_begin, extra_end;
    int64_t part;
    bool valid;  /* false: no more splits */
    bool beyond; /* fp16 does not hold its queries */
};

struct Shared {
    unsigned char v[V_TILES][V_TILE_BYTES];
    unsigned char q[V_TILES + 1][Q_TILE_BYTES];
    unsigned char p[SMALL_HEADS * LINE_BYTES];
    float s[2][SMALL_HEADS][SCORE_LINE]; /* of the first half of the columns, and of the second */
    float factor[SMALL_HEADS];           /* rescales O */
    float last_factor[SMALL_HEADS];      /* final factor of O at the end of a split; negative: O is 0 */
    SmallSplit split;
    SplitList list; /* of the CTA */
    int next_split; /* index in the list */
};
static_assert(sizeof(Shared) <= 96 * 1024, "two CTAs do not fit an SM");

/* A phase of a CTA's work. */
struct SmallPhase {
    const struct sparse_decode_params &p;
    Shared &shared;

    DEVICE SmallPhase(const struct sparse_decode_params &params, Shared &memory) : p(params), shared(memory)
    {
    }
};

/* Loads 16 bytes that nothing changes while the kernel runs; if `valid` is false it reads nothing and
 * returns 0. Written in PTX to avoid copies, which the compiler makes for a choice between the two. */
static DEVICE uint4 load_or_zero_16(const void *from, bool valid)
{
    uint4 x;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, "
                 "0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(from), "r"((uint32_t)valid));
    return x;
}

static DEVICE uint2 load_or_zero_8(const void *from, bool valid)
{
    uint2 x;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
                 "@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
                 : "=&r"(x.x), "=&r"(x.y)
                 : "l"(from), "r"((uint32_t)valid));
    return x;
}

static DEVICE uint32_t load_or_zero_4(const void *from, bool valid)
{
    uint32_t x;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
                 : "=&r"(x)
                 : "l"(from), "r"((uint32_t)valid));
    return x;
}

/* Loads an index, or returns -1; volatile, so that it is issued before the code behind it. */
static DEVICE int load_or_none(const int32_t *from, bool valid)
{
    int x;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.s32 %0, -1;\n@p ld.global.nc.s32 %0, [%1];\n}"
                 : "=&r"(x)
                 : "l"(from), "r"((uint32_t)valid));
    return x;
}

/* Return which 16 keys of a block a warp has, and which half of their columns. */
static DEVICE int key_group()
{
    return warp() % 4;
}

static DEVICE int side()
{
    return warp() / 4;
}

/* Order of columns: lane t of four has 16 neighbours of every 64, four of them (c0 … c3, a word of codes) in
 * each step of 16 of a product: as k = 2t, 2t + 1 (c0, c1) and 2t + 8, 2t + 9 (c2, c3) of both fragments. So
 * V and Q are stored in their own order. Lane t of a half has 8 neighbours of the half's 32 rope values, in
 * two steps. Returns the offset of the first 16 bytes of the 16 neighbours, in eight lines; the others are at
 * ^ CHUNK_BYTES. */
static DEVICE uint32_t own_line()
{
    return swizzle_128((uint32_t)lane() / 4, 2 * ((uint32_t)lane() % 4));
}

static DEVICE uint32_t own_rope()
{
    return swizzle_128((uint32_t)lane() / 4, 4 * (uint32_t)side() + (uint32_t)lane() % 4);
}

/* ---- Queries ----------------------------------------------------------------------------------- */

/* Loads the queries of a tile of 16 heads to shared memory. Eight lanes take a line of 128 bytes, and the CTA
 * two tiles of 64 columns at a time; a thread converts what it copied. */
template <typename F> struct SmallQueries {
    enum { TILES_AT_ONCE = SMALL_THREADS / 8 / SMALL_HEADS };
    enum { ROUNDS = (F::Q_TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE };

    static DEVICE int first_tile() { return (int)(fresh_thread() / (8 * SMALL_HEADS)); }

    /* Returns the thread's address in its first tile. */
    static DEVICE uint32_t address(uint32_t smem)
    {
        return SHARED_AT(smem, q) + (uint32_t)first_tile() * Q_TILE_BYTES +
               swizzle_128(fresh_thread() / 8 % SMALL_HEADS, fresh_thread() % 8);
    }

    /* Requests the queries, as bf16. */
    static DEVICE void ask(const struct sparse_decode_params &p, int request, uint32_t smem)
    {
        const CtaCoord cta(p);
        const int head = cta.tile * SMALL_HEADS + (int)(fresh_thread() / 8 % SMALL_HEADS);
        const bool valid = head < p.h_q;
        const uint16_t *from = p.q + request * p.q_stride[0] + cta.token * p.q_stride[1] +
                               (valid ? head : 0) * p.q_stride[2] + LINE_ELEMENTS * first_tile() +
                               CHUNK_ELEMENTS * (int)(fresh_thread() % 8);
        const uint32_t to = address(smem);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (first_tile() + TILES_AT_ONCE * i < F::Q_TILES)
                cp_async_16(to + TILES_AT_ONCE * Q_TILE_BYTES * i, from + LINE_ELEMENTS * TILES_AT_ONCE * i,
                            valid);
        cp_async_commit();
    }

    /* Converts what the thread requested to fp16; returns whether fp16 holds it. */
    static DEVICE bool convert(uint32_t smem)
    {
        uint32_t at = address(smem), most = 0;
        cp_async_wait<0>();
#pragma unroll 1
        for (int tile = first_tile(); tile < F::Q_TILES; tile += TILES_AT_ONCE) {
            const uint4 x = load_shared_16(at);
            most = larger_bf16x2(larger_bf16x2(most, x.x), x.y);
            most = larger_bf16x2(larger_bf16x2(most, x.z), x.w);
            store_shared_16(at, make_uint4(convert_bf16x2<Fp16>(x.x), convert_bf16x2<Fp16>(x.y),
                                           convert_bf16x2<Fp16>(x.z), convert_bf16x2<Fp16>(x.w)));
            at += TILES_AT_ONCE * Q_TILE_BYTES;
        }
        return !too_large_for_fp16(most);
    }
};

} // namespace sparse_decode::small
