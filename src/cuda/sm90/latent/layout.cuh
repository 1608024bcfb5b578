/* SPDX-License-Identifier: MIT
 *
 * What Hopper's kernels of latent attention over 16-bit keys share: the seesaw (mainloop.cuh), FlashMLA's
 * schedule of two warpgroups, here called sides. They do the same work on alternate blocks of 64 keys, and
 * each computes the products of its half of V's columns. This file has sizes, the common part of shared
 * memory and its addresses, and barriers. A kernel's own layout.cuh declares `struct Shared`, which begins
 * with the member `tiles` and has `barriers` and `rescaled`.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/latent.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/shared.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"

namespace latent {

enum { ROWS = 64 /* of a tile */, KEYS = PLAN_BLOCK /* of a block */ };
enum { WARPS_OF_SIDE = WARPGROUP_THREADS / 32 };
enum { UNIT_BYTES = 2 * TILE_BYTES /* 64 lines of 128 columns */, UNITS = 4 /* of V */ };
static_assert(KEYS == TILE_LINES && ROWS == TILE_LINES, "");

/* A side's home is its half of the columns of V, two units: it computes P·V of these for every block. */
DEVICE constexpr int first_of_home(int side)
{
    return 2 * side;
}

DEVICE constexpr int second_of_home(int side)
{
    return 2 * side + 1;
}

/* Returns unit i of a side's block in the order in which they are loaded: units that are released first come
 * first. */
DEVICE constexpr int unit_in_order(int side, int i)
{
    return 2 * (side ^ (i & 1)) + (i >> 1);
}

/* Operands of the products, and references, in shared memory. Index [side]: the side that owns the block, 0
 * for even blocks. Units are in the order of their columns. */
struct SideTiles {
    unsigned char keys[2][UNITS][UNIT_BYTES];
    unsigned char rope[2][TILE_BYTES];
    unsigned char q[UNITS][UNIT_BYTES];
    unsigned char p[2][TILE_BYTES];
    float reference[2][ROWS];
};

/* mbarriers of the producer and the sides (docs/kernels/dense-decode.md has a table). `full`: has arrived;
 * `empty`: is no longer read. */
struct SideBarriers {
    Barrier keys_full[2][UNITS], keys_empty[2][UNITS];
    Barrier rope_full[2], rope_empty[2];
    Barrier q_full, q_empty;
    Barrier p_full[2];
    Barrier scored[2]; /* Q·Kᵀ of the block has been issued */

    /* Initializes the barriers of blocks. keys(side, unit), rope: numbers of arrivals by which a unit and the
     * rope columns are complete. */
    template <typename Arrivals> DEVICE void init_blocks(const Arrivals &keys, int rope)
    {
        for (int side = 0; side < 2; side++) {
            for (int unit = 0; unit < UNITS; unit++) {
                keys_full[side][unit].init(keys(side, unit));
                keys_empty[side][unit].init(WARPS_OF_SIDE); /* of the side whose home the unit is */
            }
            rope_full[side].init(rope), rope_empty[side].init(WARPS_OF_SIDE);
            p_full[side].init(WARPS_OF_SIDE), scored[side].init(WARPS_OF_SIDE);
        }
    }

    DEVICE void init_queries() { q_full.init(1), q_empty.init(2 * WARPS_OF_SIDE); }
};

/* Indices of a thread of the sides. */
struct SideThread {
    static DEVICE int lane() { return (int)threadIdx.x % 32; }
    static DEVICE int warp() /* of the side */ { return (int)threadIdx.x / 32 % 4; }
    static DEVICE int side() { return (int)(fresh_thread() / WARPGROUP_THREADS) - 1; }

    /* The shuffle tells ptxas that the side is uniform in a warp: values computed from it stay in uniform
     * registers. */
    static DEVICE int uniform_side() { return __shfl_sync(~0u, side(), 0); }

    /* Returns the first of the thread's two rows of the tile; the second is row() + 8. */
    static DEVICE int row() { return wgmma_d_row((int)(fresh_thread() % WARPGROUP_THREADS), 0); }
};

/* Addresses of operands. `smem`: the address of SideTiles, which is that of the kernel's shared memory, so
 * that all are constants apart from it. */
DEVICE uint32_t unit_at(uint32_t smem, int side, int unit)
{
    return smem + (uint32_t)offsetof(SideTiles, keys) + (uint32_t)(side * UNITS + unit) * UNIT_BYTES;
}

DEVICE uint32_t rope_at(uint32_t smem, int side)
{
    return smem + (uint32_t)offsetof(SideTiles, rope) + (uint32_t)side * TILE_BYTES;
}

DEVICE uint32_t q_unit_at(uint32_t smem, int unit)
{
    return smem + (uint32_t)offsetof(SideTiles, q) + (uint32_t)unit * UNIT_BYTES;
}

DEVICE uint32_t weights_at(uint32_t smem, int side)
{
    return smem + (uint32_t)offsetof(SideTiles, p) + (uint32_t)side * TILE_BYTES;
}

/* Named barriers: SIDE_BARRIER + side is that of one side's warps; the kernels define the others. */
enum { SIDE_BARRIER = 1 };

} // namespace latent
