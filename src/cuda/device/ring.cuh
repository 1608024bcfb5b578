/* SPDX-License-Identifier: MIT
 *
 * The position of a producer or a consumer in a ring of stages: the index of its next stage, and the parity
 * of that stage's barriers.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Cycles through N stages; the parity flips at each wrap. */
template <int N> struct Ring {
    int index = 0;
    uint32_t parity = 0;

    DEVICE void advance()
    {
        if (++index == N) index = 0, parity ^= 1;
    }
};
