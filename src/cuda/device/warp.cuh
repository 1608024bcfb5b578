/* SPDX-License-Identifier: MIT
 *
 * Reductions and scans over the lanes of a converged warp.
 */
#pragma once

#include "kernel.cuh"

/* Returns the sum over this lane and the lanes before it. */
template <typename Int> DEVICE Int warp_inclusive_sum(Int x)
{
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const Int other = __shfl_up_sync(~0u, x, lanes);
        if ((int)threadIdx.x % 32 >= lanes) x += other;
    }
    return x;
}

/* Returns the maximum over this lane and the lanes before it. */
DEVICE int warp_inclusive_max(int x)
{
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(~0u, x, lanes);
        if ((int)threadIdx.x % 32 >= lanes) x = max(x, other);
    }
    return x;
}

/* Return the maximum, and the sum, of all lanes in every lane. */
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
