/* SPDX-License-Identifier: MIT
 *
 * A layout as a table: layout.c fills it from the kernels' functions, layout_svg.c draws it.
 */
#ifndef FLASHMLA_TOOL_LAYOUT_VIEW_H
#define FLASHMLA_TOOL_LAYOUT_VIEW_H

#include "reason.h"

#include <stdint.h>

enum { LAYOUT_ROWS = 64, LAYOUT_COLUMNS = 256, LAYOUT_CHUNKS = 8, LAYOUT_GROUPS = 8 /* of 4 banks */ };

/* The lane that holds an element of a tile, and the index in the lane. */
struct layout_cell {
    uint8_t lane, element;
};

struct layout_view {
    const char *name, *summary;
    int rows, columns; /* of elements; in shared memory, of 16-byte chunks */
    int lanes, elements /* per lane */, elements_a_register;
    int lane;   /* lane to show, or -1 */
    int chunks; /* ldmatrix: chunks of 8 elements per row; else 0 */
    bool in_shared_memory;
    struct layout_cell cells[LAYOUT_ROWS][LAYOUT_COLUMNS];
    uint8_t address_lane[LAYOUT_ROWS][LAYOUT_CHUNKS]; /* ldmatrix: lane that gives a chunk's address */
    uint32_t offset[LAYOUT_ROWS][LAYOUT_CHUNKS];      /* shared memory: of a chunk, in bytes */
};

/* Returns the word for the holder of an element: a lane of a warp or a thread of a warpgroup. */
static inline const char *layout_holder(const struct layout_view *view)
{
    return view->lanes > 32 ? "thread" : "lane";
}

/* The 16 bytes of a chunk are in banks 4 g to 4 g + 3; returns g. */
static inline int layout_group(const struct layout_view *view, int row, int chunk)
{
    return (int)(view->offset[row][chunk] / 16 % LAYOUT_GROUPS);
}

/* Returns the number of 32-bank lines that the rows fill. */
static inline int layout_lines(const struct layout_view *view)
{
    return view->rows * view->columns / LAYOUT_GROUPS;
}

/* Finds the chunk at a line and bank group; returns false if there is none. */
bool layout_find(const struct layout_view *view, int line, int group, int *row, int *chunk);

/* Draws the layout: elements coloured by lane, or chunks by bank group. The file is complete or absent. */
bool layout_svg_write(const char *path, const struct layout_view *view, struct reason *reason);

#endif
