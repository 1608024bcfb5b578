/* SPDX-License-Identifier: MIT
 *
 * Hopper's sparse decode for small batches: what its phases agree on.
 */
#pragma once

#include "../../../device/fragment.h"
#include "../../../device/mma.cuh"
#include "../../../device/result.cuh"
#include "../convert.cuh"

enum {
    SMALL_HEADS = 16 /* of a tile */,
    SMALL_WARPS = 8,
    SMALL_THREADS = 32 * SMALL_WARPS,
    V_TILE_BYTES = KEYS * LINE_BYTES,
    Q_TILE_BYTES = SMALL_HEADS * LINE_BYTES
};
enum { HALF_CHUNKS = V_TILES / 2 /* chunks of 64 columns that a warp takes of its keys */ };
enum { SCORE_LINE = KEYS + 4 /* floats: lanes of a fragment then write to banks of their own */ };

/* Of the piece in hand: by one thread for all. */
struct SmallPiece {
    const int32_t *entries[2]; /* of the token, in either cache: at its list position */
    int request, begin, end, blocks;
    int count, extra_begin, extra_end;
    int64_t slot;
    bool there;  /* else there are no more pieces */
    bool beyond; /* fp16 does not hold its queries */
};

struct Shared {
    unsigned char v[V_TILES][V_TILE_BYTES];
    unsigned char q[V_TILES + 1][Q_TILE_BYTES];
    unsigned char p[SMALL_HEADS * LINE_BYTES];
    float s[2][SMALL_HEADS][SCORE_LINE]; /* of the first half of the columns, and of the second */
    float factor[SMALL_HEADS];           /* by which O shrinks */
    float last_factor[SMALL_HEADS]; /* by which it is multiplied at the end of a piece; negative: O is 0 */
    SmallPiece piece;
    PieceList list; /* of the block of threads */
    int next_piece; /* of it */
};
static_assert(sizeof(Shared) <= 96 * 1024, "two blocks of threads an SM");

/* A part of what a block of threads does. */
struct SmallPhase {
    const struct sparse_decode_params &p;
    Shared &shared;

    DEVICE SmallPhase(const struct sparse_decode_params &params, Shared &memory) : p(params), shared(memory)
    {
    }
};

#define SHARED_AT(base, ...) ((base) + (uint32_t)offsetof(Shared, __VA_ARGS__))

/* 16 bytes that nothing changes while the kernel runs; where `valid` is false nothing is read, and they are 0. Without
 * a copy: the compiler makes some of a choice between the two. */
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

/* An index, or -1; before what stands behind it. */
static DEVICE int load_or_none(const int32_t *from, bool valid)
{
    int x;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.s32 %0, -1;\n@p ld.global.nc.s32 %0, [%1];\n}"
                 : "=&r"(x)
                 : "l"(from), "r"((uint32_t)valid));
    return x;
}

/* Which 16 keys of a block a warp has, and which half of their columns. */
static DEVICE int key_group()
{
    return warp() % 4;
}

static DEVICE int side()
{
    return warp() / 4;
}

/* Of every 64 columns lane t of four has 16 neighbours, four of them (c0 … c3, a word of codes) in each step of 16 of a
 * product: as k = 2t, 2t + 1 (c0, c1) and 2t + 8, 2t + 9 (c2, c3) of both fragments. So V and Q lie in their own order.
 * Of the rope values lane t of a half has 8 neighbours of 32, in two steps. Here: where the first 16 bytes of the
 * 16 neighbours are, in eight lines; the others: ^ CHUNK_BYTES. */
static DEVICE uint32_t own_line()
{
    return swizzle_128((uint32_t)lane() / 4, 2 * ((uint32_t)lane() % 4));
}

static DEVICE uint32_t own_rope()
{
    return swizzle_128((uint32_t)lane() / 4, 4 * (uint32_t)side() + (uint32_t)lane() % 4);
}
