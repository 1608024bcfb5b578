/* SPDX-License-Identifier: MIT
 *
 * A layout as a filled table: made by layout.c from the functions of the kernels, drawn by layout_svg.c.
 */
#ifndef FLASHMLA_TOOL_LAYOUT_VIEW_H
#define FLASHMLA_TOOL_LAYOUT_VIEW_H

#include "fault.h"

#include <stdint.h>

enum { LAYOUT_ROWS = 64, LAYOUT_COLUMNS = 256, LAYOUT_CHUNKS = 8, LAYOUT_GROUPS = 8 /* of 4 banks */ };

/* Who holds an element of a tile. */
struct layout_cell {
    uint8_t lane, element;
};

struct layout_view {
    const char *name, *summary;
    int rows, columns; /* of elements; in shared memory, of 16-byte chunks */
    int lanes, elements /* of each lane */, elements_a_register;
    int lane;   /* the one to show, or -1 */
    int chunks; /* ldmatrix: of 8 elements in a row; else 0 */
    bool in_shared_memory;
    struct layout_cell cells[LAYOUT_ROWS][LAYOUT_COLUMNS];
    uint8_t address_lane[LAYOUT_ROWS][LAYOUT_CHUNKS]; /* ldmatrix: who gives the address of a chunk */
    uint32_t offset[LAYOUT_ROWS][LAYOUT_CHUNKS];      /* shared memory: of a chunk, in bytes */
};

/* Of a warp, or of a warpgroup. */
static inline const char *layout_holder(const struct layout_view *view)
{
    return view->lanes > 32 ? "thread" : "lane";
}

/* The 16 bytes of a chunk lie in the banks 4 g to 4 g + 3. */
static inline int layout_group(const struct layout_view *view, int row, int chunk)
{
    return (int)(view->offset[row][chunk] / 16 % LAYOUT_GROUPS);
}

/* Lines of all 32 banks that the rows fill. */
static inline int layout_lines(const struct layout_view *view)
{
    return view->rows * view->columns / LAYOUT_GROUPS;
}

/* The chunk that lies at a line and bank group; false if none does. */
bool layout_find(const struct layout_view *view, int line, int group, int *row, int *chunk);

/* Draws it: elements coloured by lane, or chunks by bank group. The file is whole or absent. */
bool layout_svg_write(const char *path, const struct layout_view *view, struct fault *fault);

#endif
