/* SPDX-License-Identifier: MIT
 *
 * Test grids (docs/semantics.md, "How a grid is meant"): every value of every axis occurs, and every pair of
 * values of two axes occurs in some case; the rest is drawn from a seed. Greedy: take a pair that is missing,
 * draw some completions, keep the one that covers most.
 */
#ifndef CHECKATTN_GRID_H
#define CHECKATTN_GRID_H

#include "random.h"

#include <stdbool.h>

enum { GRID_AXES = 20, GRID_VALUES = 12 };

struct axis {
    const char *name;
    int count;
    int64_t values[GRID_VALUES];
};

struct grid {
    int axes;
    const struct axis *axis;
    bool (*possible)(const int *choice); /* choice[axis] = index of a value, or -1 for not chosen yet */
    double (*cost)(const int *choice);   /* of a whole case */
    /* Do the values of axes i and j play a part in this case? A pair occurs only where they do. */
    bool (*counts)(const int *choice, int i, int j);
    double dear; /* cases above this cost are made only for pairs that have no other */
    struct random_state random;
    int64_t pairs, covered;
    unsigned char *seen; /* one byte a pair of values: 0 missing, 1 covered, 2 impossible */
};

void grid_begin(struct grid *grid);
void grid_end(struct grid *grid);

/* Draws the next case; false once every pair has occurred. */
bool grid_next(struct grid *grid, int choice[GRID_AXES]);

#endif
