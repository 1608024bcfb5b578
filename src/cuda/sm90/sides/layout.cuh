/* SPDX-License-Identifier: MIT
 *
 * The schedule of two sides (schedule.cuh): two warpgroups do the same work on alternate blocks
 * of 64 keys, and each computes the products of its half of V's columns. This directory holds the code that
 * its kernels share: sizes, and addresses in shared memory. A kernel's own layout.cuh includes this file and
 * declares `struct Shared`; the other files of this directory use its members `keys`, `rope`, `q`, `p`,
 * `keys_empty`, `scored` and `p_full`.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/latent.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"

enum { ROWS = 64 /* of a tile */, KEYS = PLAN_BLOCK /* of a block */ };
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

struct Barrier {
    uint64_t state;

    DEVICE void init(int arrivals) { mbarrier_init(shared_address(this), arrivals); }
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

#define SHARED_AT(base, ...) ((base) + (uint32_t)offsetof(Shared, __VA_ARGS__))

DEVICE uint32_t barrier_at(uint32_t first, int index)
{
    return first + (uint32_t)index * (uint32_t)sizeof(Barrier);
}

/* Named barriers: SIDE_BARRIER + side is that of one side's warps; the kernels define the others. */
enum { SIDE_BARRIER = 1 };
