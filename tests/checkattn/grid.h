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
#include <stddef.h>

enum { GRID_AXES = 23, GRID_VALUES = 12 };

struct axis {
    char name[24];
    const char *words; /* what values 0, 1, … mean; NULL: numbers */
    int count;
    int64_t values[GRID_VALUES];
};

/* Axes from lines "name: value value …\n", of numbers, or of words that mean 0, 1, …; one in parentheses is not of the grid.
 * How many. */
int axes_define(struct axis axis[GRID_AXES], const char *text);

/* Is there a word for that value? */
bool axis_has_word(const struct axis *axis, int64_t value);

/* The values of a case as text, "b 3, s_q 1, lengths varied", and back. What a text does not name stays as it is in v. */
void axes_write(const struct axis *axis, int axes, const int64_t *v, char *text, size_t size);
void axes_read(const struct axis *axis, int axes, const char *text, int64_t *v);

struct grid {
    int axes;
    const struct axis *axis;
    /* Looks at the values of a case; those that are not chosen yet are -1. NULL: all are. */
    bool (*possible)(const int64_t *v);
    double (*cost)(const int64_t *v); /* of a whole case */
    /* Do the values of axes i and j play a part in this case? A pair occurs only where they do. */
    bool (*counts)(const int64_t *v, int i, int j);
    double dear; /* cases above this cost are made only for pairs that have no other */
    struct random_state random;
    int64_t pairs, covered;
    unsigned char *seen; /* one byte a pair of values: 0 missing, 1 covered, 2 impossible */
};

void grid_begin(struct grid *grid);
void grid_end(struct grid *grid);

/* Draws the next case; false once every pair has occurred. */
bool grid_next(struct grid *grid, int64_t v[GRID_AXES]);

#endif
