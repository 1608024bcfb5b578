/* SPDX-License-Identifier: MIT
 *
 * What the lanes of a converged warp work out together of a number each.
 */
#pragma once

#include "kernel.cuh"

/* The sum of the numbers of this lane and of the lanes in front of it. */
template <typename Int> DEVICE Int warp_inclusive_sum(Int x)
{
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const Int other = __shfl_up_sync(~0u, x, lanes);
        if ((int)threadIdx.x % 32 >= lanes) x += other;
    }
    return x;
}

/* The largest of them. */
DEVICE int warp_inclusive_max(int x)
{
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(~0u, x, lanes);
        if ((int)threadIdx.x % 32 >= lanes) x = max(x, other);
    }
    return x;
}

/* In all lanes: the largest number, and the sum of all. */
DEVICE float warp_max(float x)
{
    for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

DEVICE float warp_sum(float x)
{
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}
