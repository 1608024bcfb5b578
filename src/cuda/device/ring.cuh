/* SPDX-License-Identifier: MIT
 *
 * The place of a ring that comes next, and the parity of its barriers.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Goes round `N` places; the parity changes when it begins again. */
template <int N> struct Ring {
    int at = 0;
    uint32_t parity = 0;

    DEVICE void step()
    {
        if (++at == N) at = 0, parity ^= 1;
    }
};
