/* SPDX-License-Identifier: MIT
 *
 * Division by a number that is known when a kernel is launched: a multiplication and a shift (divisor_of in params.h).
 */
#pragma once

#include "../params.h"

__device__ __forceinline__ int fast_divide(int n, struct divisor d)
{
    return (int)((uint64_t)(uint32_t)n * d.multiplier >> d.shift);
}
