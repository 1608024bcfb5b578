/* SPDX-License-Identifier: MIT
 *
 * Draws a call: an operation, the forced kernel, and values of the axes of checkattn's cases, of any size
 * and not from a grid.
 */
#ifndef STRESS_DRAW_H
#define STRESS_DRAW_H

#include "../checkattn/case.h"

/* Draws a case for kernels that take `types`. A case for a GPU avoids behaviour that is unspecified there. */
void draw_case(struct random_state *random, enum operation operation, int32_t types, bool gpu,
               int64_t v[GRID_AXES]);

#endif
