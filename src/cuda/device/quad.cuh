/* SPDX-License-Identifier: MIT
 *
 * Four neighbouring lanes share a row of a fragment: what they do together.
 */
#pragma once

#include <stdint.h>

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Word j of lane i goes to lane j, as its word i. */
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    if (odd)
        w[0] = x, w[2] = y;
    else
        w[1] = x, w[3] = y;
    x = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2);
    y = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    if (high)
        w[0] = x, w[1] = y;
    else
        w[2] = x, w[3] = y;
}
