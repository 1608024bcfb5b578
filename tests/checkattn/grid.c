/* SPDX-License-Identifier: MIT */
#include "grid.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IDS = GRID_AXES * GRID_VALUES, MISSING = 0, COVERED = 1, IMPOSSIBLE = 2 };
enum { COMPLETIONS = 40, PATIENCE = 4000 };

static unsigned char *pair_at(const struct grid *grid, int axis_a, int a, int axis_b, int b)
{
    return &grid->seen[(size_t)(axis_a * GRID_VALUES + a) * IDS + (size_t)(axis_b * GRID_VALUES + b)];
}

/* ---- Cases as text ---------------------------------------------------------------------------- */

/* Returns the length of the next word of a line; 0: none. */
static int next_word(const char **at)
{
    *at += strspn(*at, " ()");
    return (int)strcspn(*at, " ()\n");
}

/* Returns the length of a value's word; 0: none. */
static int word_of(const struct axis *axis, int64_t value, const char **word)
{
    if (!axis->words || value < 0) return 0;
    *word = axis->words;
    int length = next_word(word);
    for (; length && value; value--) *word += length, length = next_word(word);
    return length;
}

int axes_define(struct axis axis[GRID_AXES], const char *text)
{
    int axes = 0;
    for (; *text; axis++, axes++, text = strchr(text, '\n') + 1) {
        const int name = (int)strcspn(text, ":");
        snprintf(axis->name, sizeof axis->name, "%.*s", name, text);
        const char *at = text += name + 1;
        const bool numbers = strspn(text, " -0123456789") == strcspn(text, "\n");
        axis->words = numbers ? NULL : text, axis->count = 0;
        int64_t value = 0;
        for (int length; (length = next_word(&at)) > 0; at += length, value++)
            if (numbers || at[-1] != '(')
                axis->values[axis->count++] = numbers ? strtoll(at, NULL, 10) : value;
    }
    return axes;
}

void axes_write(const struct axis *axis, int axes, const int64_t *v, char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; i < axes && used < size; i++) {
        const char *word, *comma = i ? ", " : "";
        const int length = word_of(&axis[i], v[i], &word);
        used += (size_t)(length ? snprintf(text + used, size - used, "%s%s %.*s", comma, axis[i].name, length,
                                           word)
                                : snprintf(text + used, size - used, "%s%s %lld", comma, axis[i].name,
                                           (long long)v[i]));
    }
}

static bool read_value(const struct axis *axis, const char *text, int length, int64_t *value)
{
    char *end;
    *value = strtoll(text, &end, 10);
    if (end == text + length) return true;
    const char *word;
    int of_word;
    for (*value = 0; (of_word = word_of(axis, *value, &word)) > 0; ++*value)
        if (of_word == length && !strncmp(word, text, (size_t)length)) return true;
    return false;
}

void axes_read(const struct axis *axis, int axes, const char *text, int64_t *v)
{
    for (const char *at = text; *at; at += strspn(at, ", ")) {
        const int length = (int)strcspn(at, ",");
        bool known = false;
        for (int i = 0; i < axes && !known; i++) {
            const int name = (int)strlen(axis[i].name);
            if (strncmp(at, axis[i].name, (size_t)name) != 0 || at[name] != ' ') continue;
            known = read_value(&axis[i], at + name + 1, length - name - 1, &v[i]);
        }
        if (!known) {
            fprintf(stderr, "checkattn: a case says \"%.*s\", which is no axis and value\n", length, at);
            exit(3);
        }
        at += length;
    }
}

/* ---- Grids ------------------------------------------------------------------------------------ */

static void values_of(const struct grid *grid, const int *choice, int64_t v[GRID_AXES])
{
    for (int i = 0; i < grid->axes; i++) v[i] = choice[i] < 0 ? -1 : grid->axis[i].values[choice[i]];
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
                    int64_t v[GRID_AXES];
                    values_of(grid, choice, v);
                    if (!grid->possible || grid->possible(v))
                        grid->pairs++;
                    else
                        *pair_at(grid, i, a, j, b) = IMPOSSIBLE;
                }
}

static int new_pairs(const struct grid *grid, const int *choice, const int64_t *v)
{
    int count = 0;
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++)
            count += *pair_at(grid, i, choice[i], j, choice[j]) == MISSING && grid->counts(v, i, j);
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

bool grid_next(struct grid *grid, int64_t v[GRID_AXES])
{
    struct pair missing;
    int choice[GRID_AXES];
    if (!first_missing(grid, &missing)) return false;
    int best_new = -1;
    double best_cost = 0.0;
    for (int tried = 0, found = 0; found < COMPLETIONS && (tried < PATIENCE || best_new < 0); tried++) {
        int draw[GRID_AXES];
        for (int i = 0; i < GRID_AXES; i++)
            draw[i] = i < grid->axes ? (int)random_between(&grid->random, 0, grid->axis[i].count - 1) : -1;
        draw[missing.i] = missing.a, draw[missing.j] = missing.b;
        values_of(grid, draw, v);
        if ((grid->possible && !grid->possible(v)) || !grid->counts(v, missing.i, missing.j)) continue;
        const double cost = grid->cost(v);
        const int fresh = new_pairs(grid, draw, v);
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
    values_of(grid, choice, v);
    for (int i = 0; i < grid->axes; i++)
        for (int j = i + 1; j < grid->axes; j++) {
            if (!grid->counts(v, i, j)) continue;
            unsigned char *pair = pair_at(grid, i, choice[i], j, choice[j]);
            grid->covered += *pair == MISSING;
            *pair = COVERED;
        }
    return true;
}
