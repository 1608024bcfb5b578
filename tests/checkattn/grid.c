/* SPDX-License-Identifier: MIT */
#include "grid.h"

#include <stdlib.h>
#include <string.h>

enum { IDS = GRID_AXES * GRID_VALUES, MISSING = 0, COVERED = 1, IMPOSSIBLE = 2 };
enum { COMPLETIONS = 40, PATIENCE = 4000 };

static unsigned char *pair_at(const struct grid *grid, int axis_a, int a, int axis_b, int b)
{
    return &grid->seen[(size_t)(axis_a * GRID_VALUES + a) * IDS + (size_t)(axis_b * GRID_VALUES + b)];
}

void grid_begin(struct grid *grid)
{
    grid->seen = calloc((size_t)IDS * IDS, 1);
    grid->pairs = grid->covered = 0;
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++)
            for (int a = 0; a < grid->axis[i].count; a++)
                for (int b = 0; b < grid->axis[j].count; b++) {
                    int choice[GRID_AXES];
                    for (int k = 0; k < GRID_AXES; k++) choice[k] = -1;
                    choice[i] = a, choice[j] = b;
                    if (grid->possible(choice))
                        grid->pairs++;
                    else
                        *pair_at(grid, i, a, j, b) = IMPOSSIBLE;
                }
}

void grid_end(struct grid *grid)
{
    free(grid->seen);
    grid->seen = NULL;
}

static int new_pairs(const struct grid *grid, const int *choice)
{
    int count = 0;
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++)
            count += *pair_at(grid, i, choice[i], j, choice[j]) == MISSING && grid->counts(choice, i, j);
    return count;
}

struct pair {
    int i, j, a, b;
};

static bool first_missing(const struct grid *grid, struct pair *missing)
{
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++)
            for (int a = 0; a < grid->axis[i].count; a++)
                for (int b = 0; b < grid->axis[j].count; b++) {
                    if (*pair_at(grid, i, a, j, b) != MISSING) continue;
                    *missing = (struct pair){i, j, a, b};
                    return true;
                }
    return false;
}

bool grid_next(struct grid *grid, int choice[GRID_AXES])
{
    struct pair missing;
    if (!first_missing(grid, &missing)) return false;
    int best_new = -1;
    double best_cost = 0.0;
    for (int tried = 0, found = 0; found < COMPLETIONS && (tried < PATIENCE || best_new < 0); tried++) {
        int draw[GRID_AXES];
        for (int i = 0; i < GRID_AXES; i++)
            draw[i] = i < grid->axes ? (int)random_between(&grid->random, 0, grid->axis[i].count - 1) : -1;
        draw[missing.i] = missing.a, draw[missing.j] = missing.b;
        if (!grid->possible(draw) || !grid->counts(draw, missing.i, missing.j)) continue;
        const double cost = grid->cost(draw);
        const int fresh = new_pairs(grid, draw);
        const bool dear = cost > grid->dear, best_dear = best_cost > grid->dear;
        found += !dear;
        const bool better = best_new < 0        ? true
                            : dear != best_dear ? best_dear
                            : dear              ? cost < best_cost
                                                : fresh > best_new;
        if (!better) continue;
        best_new = fresh, best_cost = cost;
        memcpy(choice, draw, sizeof draw);
    }
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++) {
            if (!grid->counts(choice, i, j)) continue;
            unsigned char *pair = pair_at(grid, i, choice[i], j, choice[j]);
            grid->covered += *pair == MISSING;
            *pair = COVERED;
        }
    return true;
}
