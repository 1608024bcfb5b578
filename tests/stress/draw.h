/* SPDX-License-Identifier: MIT
 *
 * Draws a call: an operation, the kernel that is forced, and values of the axes that the cases of checkattn have, of any size
 * and not of a grid.
 */
#ifndef STRESS_DRAW_H
#define STRESS_DRAW_H

#include "../checkattn/case.h"

/* Of kernels that take `dtypes`. What is drawn for a GPU leaves out what is not said of one. */
void draw_case(struct random_state *random, enum subject_index operation, const char *dtypes, bool gpu,
               int64_t v[GRID_AXES]);

#endif
