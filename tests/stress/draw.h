/* SPDX-License-Identifier: MIT
 *
 * Draws a call: an operation, the kernel that is forced, and values of the axes that the cases of checkattn have, of any size
 * and not of a grid.
 */
#ifndef STRESS_DRAW_H
#define STRESS_DRAW_H

#include "../checkattn/checkattn.h"
#include "random.h"

enum operation { DENSE_DECODE, SPARSE_DECODE, SPARSE_PREFILL, MERGE, CACHE_APPEND, CACHE_GATHER, OPERATIONS };
enum { MOST_AXES = 24 };

extern const char *const operation_names[OPERATIONS];

/* Of kernels that take `dtypes`. What is drawn for a GPU leaves out what is not said of one. */
void draw_case(struct random_state *random, enum operation operation, const char *dtypes, bool gpu,
               int64_t v[MOST_AXES]);

/* Runs it, and compares. */
void run_drawn(const struct run *run, enum operation operation, const int64_t v[MOST_AXES], uint64_t seed,
               struct tally *tally);

#endif
