/* SPDX-License-Identifier: MIT
 *
 * What the roles of Hopper's dense decode over caches of bytes agree on: variants, shared memory, barriers.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/latent.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/tma.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"
#include "../dense_decode/work.cuh"

enum {
    KEYS = PLAN_BLOCK /* of a block */,
    D_QK = 576,
    CODES_OF_LINE = LINE_BYTES /* columns of a line */,
    LINES = D_V / CODES_OF_LINE /* of a key; then its end */,
    END_COLUMNS = D_QK - D_V,
    KEY_TILE_BYTES = KEYS * CODES_OF_LINE,
    KEYS_BYTES = KEYS * D_QK,
    BUFFERS = 4 /* of keys */,
    SLOTS = 3 /* of weights */
};
static_assert(KEYS == TILE_LINES, "");

/* Warpgroups. */
enum { PRODUCER, SCORES, VALUES, WARPGROUPS = VALUES + 2, THREADS = WARPGROUPS * WARPGROUP_THREADS };
enum { PRODUCER_REGISTERS = 24, SCORES_REGISTERS = 120, VALUES_REGISTERS = 184 };

/* Named barriers: of the warpgroup with the scores; of those with the values. */
enum { SCORES_BARRIER = 1, VALUES_BARRIER };

/* A tile has 64, 32 or 16 rows: the products of values take as many, those of scores 64 all the same. With TOGETHER a block of threads
 * has one piece (../dense_decode/shares.cuh). */
template <int ROWS_, bool TOGETHER_> struct Variant {
    static constexpr int ROWS = ROWS_, ROW_WARPS = ROWS / 16;
    static constexpr bool TOGETHER = TOGETHER_;
    static_assert(ROWS == 64 || ROWS == 32 || ROWS == 16, "");
};

/* Lines of 64 values of a row on their way out, with a gap, so that words of rows 0, 2, 4, 6 are in different banks. */
enum { STAGE_LINE_BYTES = LINE_BYTES + 16, STAGE_ROWS = 16, STAGE_BYTES = STAGE_ROWS * STAGE_LINE_BYTES };

/* A weighted mean of codes is 448 at most, and of 65536 codes that cancel each other seldom below 2^-17: times this it is a normal number
 * of fp16 in a slot, whatever the row. */
static constexpr float SLOT_UNIT = 64.0f;

template <typename V> struct SharedOf {
    static constexpr int QUERY_TILE_BYTES = V::ROWS * CODES_OF_LINE;

    unsigned char keys[BUFFERS][KEYS_BYTES]; /* four tiles of 64 lines of 128 codes, one of lines of 64 */
    unsigned char q[V::ROWS * D_QK];         /* likewise */
    unsigned char p[SLOTS][V::ROWS * LINE_BYTES];
    unsigned char stage[2][4][STAGE_BYTES]; /* of the warps with values */
    /* Beside a block's weights: */
    float factor[SLOTS][V::ROWS]; /* of what was summed so far, of the rows of warps that have moved */
    float finish[SLOTS][V::ROWS]; /* with the last block of a piece: what makes a row of it */
    float q_scales[V::ROWS];      /* of queries that became codes here */
    uint32_t moved[SLOTS][4];     /* [warp] */
    uint32_t cleared[SLOTS];      /* codes of the block's keys have been cleared */
    uint64_t keys_full[BUFFERS], keys_empty[BUFFERS], q_full, q_empty, p_full[SLOTS], p_empty[SLOTS],
        done[SLOTS]; /* … and with the last block of a piece what makes rows of it is there */
    Task task
        [12]; /* [warp] of those with scores, then of those with values: out of the way until it is asked for */
    PieceList list;
    OnePiece one;
};

#define SHARED_AT(base, ...) ((base) + (uint32_t)offsetof(Shared, __VA_ARGS__))

DEVICE uint32_t barrier_at(uint32_t first, int index)
{
    return first + (uint32_t)index * (uint32_t)sizeof(uint64_t);
}

/* A place in a ring, and the parity of its round. */
template <int COUNT> struct Turn {
    int index = 0;
    uint32_t parity = 0;

    DEVICE void next()
    {
        index++;
        if (index == COUNT) index = 0, parity ^= 1;
    }
};

/* Piece i of the list; or the only one. */
template <typename V>
DEVICE Work work_of(const struct dense_decode_sm90_params &p, const SharedOf<V> &shared, int i,
                    const Place &place)
{
    if constexpr (V::TOGETHER)
        return Work(p, shared.one, place.kv_head, place.tile * V::ROWS, V::ROWS);
    else
        return Work(p, shared.list, i, place.kv_head, place.tile * V::ROWS, V::ROWS);
}
