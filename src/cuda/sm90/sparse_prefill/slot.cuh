/* SPDX-License-Identifier: MIT
 *
 * Partial results of a split of a tile, in global memory until join_splits.cuh joins them.
 */
#pragma once

#include "layout.cuh"

enum { GROUPS = D_V / LINE_ELEMENTS /* of 64 columns */ };

/* Rows are fp16 times a power of two per 64 columns (HalfScale of device/half_rows.cuh). The maximum of an
 * end is the row's largest score. */
struct Slot {
    unsigned char units[UNITS][UNIT_BYTES]; /* as in shared memory */
    float down[ROWS][GROUPS];               /* HalfScale::down */
    part_end end[ROWS];
};
static_assert(sizeof(Slot) == PREFILL_SLOT_BYTES, "");
