/* SPDX-License-Identifier: MIT
 *
 * The schedule of two sides (dense_decode.cuh draws it): two warpgroups that do the same work on alternate blocks of 64 keys, each
 * with the products of its half of V's columns. What its kernels share: the size of things, and how shared memory is addressed.
 * A kernel's own layout.cuh includes this and declares `struct Shared`, whose members `keys`, `rope`, `q`, `p`, `keys_empty`,
 * `scored`, `p_full` the other files of this room use.
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

/* A side's home is its half of the columns of V, two units: it multiplies these of every block. */
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

/* Who a thread of the sides is. */
struct SideThread {
    static DEVICE int lane() { return (int)threadIdx.x % 32; }
    static DEVICE int warp() /* of the side */ { return (int)threadIdx.x / 32 % 4; }
    static DEVICE int side() { return (int)(fresh_thread() / WARPGROUP_THREADS) - 1; }

    /* The shuffle tells ptxas that a warp is of one side: what is computed from it stays in uniform registers. */
    static DEVICE int uniform_side() { return __shfl_sync(~0u, side(), 0); }

    /* This thread has that row of the tile, and the one eight on. */
    static DEVICE int row() { return wgmma_d_row((int)(fresh_thread() % WARPGROUP_THREADS), 0); }
};

#define SHARED_AT(base, ...) ((base) + (uint32_t)offsetof(Shared, __VA_ARGS__))

DEVICE uint32_t barrier_at(uint32_t first, int index)
{
    return first + (uint32_t)index * (uint32_t)sizeof(Barrier);
}

/* Named barriers: of one side's warps, SIDE_BARRIER + side; others are the kernel's. */
enum { SIDE_BARRIER = 1 };
