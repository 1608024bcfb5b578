/* SPDX-License-Identifier: MIT
 *
 * What the roles of Hopper's sparse prefill over bf16 keys agree on: shared memory and barriers.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/element.cuh"
#include "../../device/tma.cuh"
#include "../sides/layout.cuh"
#include "item.cuh"

/* Where keys of 512 columns are waited for, more of Q·Kᵀ after the block before has been multiplied is faster. */
template <int D_QK_> struct Variant {
    using Element = Bf16;
    static constexpr bool ROPE = D_QK_ > D_V;
    static constexpr int EARLY_UNITS = 2; /* of Q·Kᵀ, done before that */
    static_assert(D_QK_ == D_V || D_QK_ == D_V + LINE_ELEMENTS, "");
};

/* ---- Shared memory ----------------------------------------------------------------------------- */

/* Index [side]: the side that owns the block, 0 for even blocks. Units in the order of their columns. */
struct Shared {
    unsigned char keys[2][UNITS][UNIT_BYTES];
    unsigned char rope[2][TILE_BYTES];
    unsigned char q[UNITS][UNIT_BYTES];
    unsigned char p[2][TILE_BYTES];
    float reference[2][ROWS];
    float2 end[2][2]
              [ROWS]; /* [tile % 2][side]: its sum, and how far its largest score is above the reference */
    uint32_t rescaled[2][4]; /* [side][warp]: this block moved the reference */
    uint16_t there[2][4];    /* [side][warp of the producer]: which entries name keys, bit 4 i + r that of key
                                16 i + 4 warp + r */
    Barrier keys_full[2][UNITS], keys_empty[2][UNITS];
    Barrier rope_full[2], rope_empty[2];
    Barrier q_full, q_empty;
    Barrier p_full[2];
    Barrier scored[2]; /* Q·Kᵀ of the block has been issued */
};
static_assert(sizeof(Shared) <= 227 * 1024, "what a block of threads may have");
static_assert(offsetof(Shared, there) % 8 == 0, "read as one");

/* The units of a side's block in the order in which they are asked for: those first that are freed first. */
__device__ __forceinline__ constexpr int unit_in_turn(int side, int i)
{
    return 2 * (side ^ (i & 1)) + (i >> 1);
}

__device__ __forceinline__ constexpr int last_unit(int side)
{
    return unit_in_turn(side, UNITS - 1);
}
