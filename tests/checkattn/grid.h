/* SPDX-License-Identifier: MIT
 *
 * Test grids (docs/semantics.md, "How a grid is meant"): every value of every axis occurs, and every pair
 * of values of two axes occurs in some case; the rest is random from a seed. Greedy: take a missing pair,
 * draw some completions, keep the one that covers most pairs.
 */
#ifndef CHECKATTN_GRID_H
#define CHECKATTN_GRID_H

#include "random.h"

#include <stdbool.h>
#include <stddef.h>

enum { GRID_AXES = 23, GRID_VALUES = 12 };

struct axis {
    char name[24];
    const char *words; /* names of values 0, 1, …; NULL: numbers */
    int count;
    int64_t values[GRID_VALUES];
};

/* Reads axes from lines "name: value value …
 * " of numbers, or of words for 0, 1, …, and returns their number. A word in parentheses is outside the
 * grid. */
int axes_define(struct axis axis[GRID_AXES], const char *text);

/* Convert the values of a case to text, "b 3, s_q 1, lengths varied", and back. Values that a text does
 * not name keep their value in v. */
void axes_write(const struct axis *axis, int axes, const int64_t *v, char *text, size_t size);
void axes_read(const struct axis *axis, int axes, const char *text, int64_t *v);

struct grid {
    int axes;
    const struct axis *axis;
    /* Returns true if the case is possible; values not chosen yet are -1. NULL: always. */
    bool (*possible)(const int64_t *v);
    double (*cost)(const int64_t *v); /* of a complete case */
    /* Returns true if the values of axes i and j matter in this case; only then their pair occurs. */
    bool (*counts)(const int64_t *v, int i, int j);
    double dear; /* cases above this cost are made only for pairs without another case */
    struct random_state random;
    int64_t pairs, covered;
    unsigned char *seen; /* one byte per pair of values */
};

void grid_begin(struct grid *grid); /* makes `seen`, which its owner frees */

/* Draws the next case; false once every pair has occurred. */
bool grid_next(struct grid *grid, int64_t v[GRID_AXES]);

#endif
