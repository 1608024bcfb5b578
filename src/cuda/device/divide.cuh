/* SPDX-License-Identifier: MIT
 *
 * Integer division by a divisor known at the launch, as a multiplication and a shift (divisor_of in
 * params.h), and by a divisor that a kernel computes and uses often.
 */
#pragma once

#include "../params.h"
#include "kernel.cuh"

DEVICE int fast_divide(int n, struct divisor d)
{
    return (int)((uint64_t)(uint32_t)n * d.multiplier >> d.shift);
}

struct reciprocal {
    uint32_t divisor, inverse; /* inverse: (2^32 - 1) / divisor */
};

DEVICE struct reciprocal reciprocal_of(uint32_t divisor)
{
    return {divisor, UINT32_MAX / divisor};
}

/* Returns n / divisor for n in [0, 2^31). inverse is at least 2^32 / divisor - 1, so the product falls short
 * of n / divisor by less than a half, and the quotient by at most one. */
DEVICE uint32_t divide(uint32_t n, struct reciprocal by)
{
    const uint32_t quotient = __umulhi(n, by.inverse);
    return quotient + (n - quotient * by.divisor >= by.divisor);
}
