/* SPDX-License-Identifier: MIT
 *
 * What the roles of Hopper's sparse prefill over FP8 pages agree on: formats, shared memory, barriers.
 */
#pragma once

#include "../../../device/async_copy.cuh"
#include "../../../device/codes.cuh"
#include "../../../device/element.cuh"
#include "../../../device/gather.cuh"
#include "../../../device/shared.cuh"
#include "../../../device/tma.cuh"
#include "../../sides/layout.cuh"
#include "../item.cuh"

enum { V_TILES = 8 /* of 64 columns */, BUFFERS = 2 /* blocks of keys */, HALVES = 2 /* of V */ };
enum { HALF_TILES = V_TILES / HALVES, HALF_UNITS = UNITS / HALVES };
enum { WARPS_OF_GROUP = WARPGROUP_THREADS / 32 };

/* A token is tiles of 64 codes, and 64 bf16 values: of K alone, or, V's last tile, of both. */
template <enum kv_format FORMAT_> struct Format {
    static constexpr enum kv_format FORMAT = FORMAT_;
    static constexpr bool ROPE_IS_V = FORMAT == KV_FP8_584;
    static constexpr int CODE_TILES = ROPE_IS_V ? 7 : 8;
    static constexpr int Q_TILES = ROPE_IS_V ? 8 : 9;
    static constexpr int ROPE_TILE = V_TILES; /* of Q, where it is not in V */
    static constexpr int ROPE_OFFSET = ROPE_IS_V ? 448 : 528;
};

struct Shared {
    unsigned char keys[BUFFERS][V_TILES][TILE_BYTES];
    unsigned char q[V_TILES + 1][TILE_BYTES];
    unsigned char rope[TILE_BYTES]; /* of FP8_656 */
    unsigned char p[BUFFERS][TILE_BYTES];
    float factor[BUFFERS][ROWS];   /* by which O shrinks where the references of this block moved */
    float sum[WARPS_OF_GROUP][ROWS], largest[WARPS_OF_GROUP][ROWS]; /* of the tile, what a warp has seen */
    float below[ROWS];             /* minus the references that both are relative to */
    uint32_t moved[BUFFERS];
    uint16_t there[BUFFERS][4];    /* [warp of the producer]: which entries name keys, bit 4 i + r that of key 16 i + 4 warp + r */
    Barrier keys_full[BUFFERS][UNITS], keys_empty[BUFFERS][HALVES];
    Barrier rope_full, rope_empty;
    Barrier q_full;
    Barrier p_full[BUFFERS], p_empty[BUFFERS];
    Barrier scored; /* a block, by the scores' warps */
    Barrier end_full, end_empty; /* sum, largest, below */
};
static_assert(sizeof(Shared) <= 227 * 1024, "what a block of threads may have");

enum { SCORES_BARRIER = 1 /* named: of the scores' warps */, SUMS_BARRIER = 2 /* and 3: of those of a half */ };

__device__ __forceinline__ uint32_t half_at(uint32_t base, uint32_t buffer, int half)
{
    return SHARED_AT(base, keys) + buffer * (V_TILES * TILE_BYTES) + (uint32_t)(half * HALF_TILES) * TILE_BYTES;
}

/* By 128 threads: is `mine` true in any of them? */
__device__ __forceinline__ bool any_of_scores(bool mine)
{
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"((int)mine), "n"((int)SCORES_BARRIER), "n"((int)WARPGROUP_THREADS)
        : "memory");
    return any;
}
