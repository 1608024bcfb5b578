/* SPDX-License-Identifier: MIT
 *
 * Definitions shared by the roles of Hopper's sparse decode: shared memory, barriers, the order of columns.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/element.cuh"
#include "../../device/gather.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "scheduler.cuh"

namespace sparse_decode {

enum { HEADS = 64 /* of a tile */ };
enum { Q_GROUPS = 5 /* of Q's tiles: that of the rope values, then two tiles each */ };
enum { HALVES = 3 /* of V, in turns */, HALF_TILES = V_TILES / 2, HALF_BYTES = HALF_TILES * TILE_BYTES };
static_assert(KEYS == TILE_LINES && HEADS == TILE_LINES, "");

enum { PAIRS = V_TILES / 2 /* of chunks, of a block's raw keys */ };

/* Raw keys: a thread's own 16 bytes, by chunk, key of its two, thread. Nobody else reads them, except
 * those of FP4, which the sums' warps convert (convert.cuh). */
struct Shared {
    static constexpr bool ALL_PUBLISH = false; /* one thread writes `block` */
    unsigned char v[HALVES][HALF_BYTES];
    unsigned char q[V_TILES + 1][TILE_BYTES]; /* FP8_584 has no ninth: rope values of every other block */
    unsigned char p[2][TILE_BYTES];
    unsigned char raw[V_TILES][2][WARPGROUP_THREADS][16], rope[2][2][WARPGROUP_THREADS][16];
    unsigned char scale[KEYS][16];
    float factor[2][HEADS];         /* rescales O if the references of this block moved */
    float sum[HEADS], below[HEADS]; /* of the split: sums, and minus the references */
    float largest[HEADS];           /* of the split's scores; prefill only */
    uint32_t block[2];              /* BLOCK_… */
    struct Ahead {
        const int32_t *entries[2]; /* of the token, in either cache, by list position */
        int count, extra_begin, extra_end, end;
        int next_split;    /* of the list: split whose indices are loaded next */
        uint32_t of_extra; /* the block whose raw keys are requested next is of the extra cache */
    } ahead[4];            /* [warp] of the scores: the split whose keys are requested */
    SplitList list;        /* of the CTA; the scores' warps have no registers for it */
    Split split[8];        /* [warp] of the sums: kept here until the end of the split */
    uint32_t q_beyond;     /* the split, counted from 1, whose queries fp16 does not hold */
    uint64_t full[2], empty[HALVES], products_done, sum_full, sum_empty, q_full, q_empty[Q_GROUPS];
    uint64_t landed[PAIRS], converted[PAIRS]; /* raw keys, if some blocks have FP4 codes */
    uint32_t fp4[2];                          /* [count % 2]: the block has FP4 codes */
};
static_assert(sizeof(Shared) <= 227 * 1024, "exceeds the shared memory of a CTA");

/* Return, for the sums' warps, the half of the columns that a thread has, and the first of its two rows. */
DEVICE int side()
{
    return (int)(fresh_thread() / WARPGROUP_THREADS) - 1;
}

DEVICE int row()
{
    return wgmma_d_row((int)(fresh_thread() % WARPGROUP_THREADS), 0);
}

enum { SCORES_BARRIER = 1 /* of the scores' warps */, SUMS_BARRIER = 2 /* of the sums' warps */ };

/* Order of columns: lane t of four has 16 neighbours of every 64, four of them (c0 … c3, a word of codes) in
 * each step of 16 of a product: as k = 2t, 2t + 1 (c0, c1) and 2t + 8, 2t + 9 (c2, c3) of A's fragment. Q, V
 * and O have the same order. A lane has 8 neighbours in either half of FP8_656's 64 rope values, which are
 * not in V and O: a load then has 64 consecutive bytes of a key. */

/* Flags of a block for the sums' warpgroups. */
enum {
    BLOCK_MOVED = 1 /* references have moved: O is rescaled by `factor` */,
    BLOCK_BF16 = 2 /* P and V are bf16; else fp16 */
};

/* Returns whether `mine` is true in any of the scores' 128 threads. */
DEVICE bool any_of_scores(bool mine)
{
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"((int)mine), "n"((int)SCORES_BARRIER), "n"((int)WARPGROUP_THREADS)
        : "memory");
    return any;
}

} // namespace sparse_decode
