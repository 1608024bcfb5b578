/* SPDX-License-Identifier: MIT
 *
 * The next stage of a ring, and the parity of its barriers.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Cycles through N stages; the parity flips at each wrap. */
template <int N> struct Ring {
    int at = 0;
    uint32_t parity = 0;

    DEVICE void step()
    {
        if (++at == N) at = 0, parity ^= 1;
    }
};
