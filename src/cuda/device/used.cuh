/* SPDX-License-Identifier: MIT
 *
 * Lengths in use of dense MHA's requests. What follows them up to the next request is padding.
 */
#pragma once

#include "kernel.cuh"

#include <stdint.h>

/* Returns how many of the `extent` tokens, or keys, of request `request` are in use; `used`: [b], NULL: all are. */
DEVICE int length_in_use(const int32_t *used, int request, int extent)
{
    return used ? min(max(used[request], 0), extent) : extent;
}
