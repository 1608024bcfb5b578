/* SPDX-License-Identifier: MIT
 *
 * What tests of values have in common: the kernels that they run, and how near numbers must be.
 */
#ifndef FMLA_VALUES_H
#define FMLA_VALUES_H

#include "filled.h"
#include "tensors.h"

#include <math.h>

static const double log2_e = 1.4426950408889634;

static inline int near(double value, double expected, double relative)
{
    return value == expected || (isfinite(value) && fabs(value - expected) <= relative * fabs(expected));
}

/* Calls `check` for each kernel of an operation that runs here; the oracle must be among them. */
static inline void for_kernels(enum operation operation, void (*check)(const fmla_capability *row))
{
    int kernels = 0, oracles = 0;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (strcmp(row.operation, descriptors[operation].name) != 0 || !row.available) continue;
        kernels++, oracles += !strcmp(row.kernel, "ref");
        check(&row);
    }
    CHECK(kernels >= 2 && oracles == 1, "%s: %d kernels, %d of them the oracle", descriptors[operation].name,
          kernels, oracles);
}

#endif
