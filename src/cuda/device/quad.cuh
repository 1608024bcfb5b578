/* SPDX-License-Identifier: MIT
 *
 * Operations of four neighbouring lanes, which share a row of a fragment.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Transposes 32 columns of 16 bits within the quad: on entry a lane has a pair of columns in each eight, as
 * in a C of mma; on return it has all of one eight. */
DEVICE uint4 quad_gather_eight(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        w[i] = odd ? got : w[i], w[i + 1] = odd ? w[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
        w[i] = high ? got : w[i], w[i + 2] = high ? w[i + 2] : got;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Returns the largest magnitude of the four lanes' values. */
template <int COUNT> DEVICE float quad_magnitude(const float (&x)[COUNT])
{
    float most = 0.0f;
#pragma unroll
    for (int e = 0; e < COUNT; e++) most = fmaxf(most, fabsf(x[e]));
    return quad_max(most);
}
