/* SPDX-License-Identifier: MIT
 *
 * Draws a call: an operation, the kernel that is forced, and values of the axes that the cases of checkattn have, of any size
 * and not of a grid.
 */
#ifndef STRESS_DRAW_H
#define STRESS_DRAW_H

#include "../checkattn/case.h"

/* Draws a case for kernels that take `types`. A case for a GPU leaves out what is not said of one. */
void draw_case(struct random_state *random, enum operation operation, int32_t types, bool gpu,
               int64_t v[GRID_AXES]);

#endif
