/* SPDX-License-Identifier: MIT
 *
 * From the top: name, description, column numbers, table. Beside a fragment loaded by ldmatrix are the
 * lanes that give the addresses; below the rows of shared memory is the same memory by banks.
 */
#include "layout_view.h"
#include "svg.h"

#include <stdio.h>

enum {
    LEFT = 64,
    TOP = 112,
    MARGIN = 32, /* right and bottom */
    CELL_HEIGHT = 24,
    CELL_WIDTH = 46,
    WIDE_CELL = 58, /* T127.31 */
    CHUNK_WIDTH = 92,
    GAP = 84,        /* between tables */
    MIN_WIDTH = 720, /* for the text lines */
    TINTS = 4,
    TILE = 8 /* of the 8 × 8 matrices */
};

struct drawing {
    const struct layout_view *view;
    struct svg svg;
};

#define DRAW(d, ...) SVG_DRAW(&(d)->svg, __VA_ARGS__)

/* One colour per 4 lanes, which share a row of a fragment; one tint per lane of these. */
static void draw_lane_cell(struct drawing *d, int x, int y, int width, int lane)
{
    const bool shown = d->view->lane < 0 || d->view->lane == lane;
    char colour[32] = "faint";
    if (shown) snprintf(colour, sizeof colour, "c%d t%d", lane / TINTS % (SVG_COLOURS - 1), lane % TINTS);
    DRAW(d,
         "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"cell %s\"/>"
         "<text x=\"%.1f\" y=\"%d\" class=\"mid%s\">",
         x, y, width, CELL_HEIGHT, colour, x + width / 2.0, y + 16, shown ? "" : " note");
}

static void draw_column_numbers(struct drawing *d, int x, int y, int width, int count)
{
    for (int i = 0; i < count; i++)
        DRAW(d, "<text x=\"%.1f\" y=\"%d\" class=\"mid note\">%d</text>\n", x + (i + 0.5) * width, y - 6, i);
}

static void draw_row_numbers(struct drawing *d, int x, int y, int count)
{
    for (int i = 0; i < count; i++)
        DRAW(d, "<text x=\"%d\" y=\"%d\" class=\"end note\">%d</text>\n", x - 8, y + i * CELL_HEIGHT + 16, i);
}

static void draw_edge(struct drawing *d, int x, int y, int across, int down)
{
    DRAW(d, "<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" class=\"mark\"/>\n", x, x + across, y, y + down);
}

/* Draws lines around a table and between its 8 × 8 matrices or its columns of chunks. */
static void draw_edges(struct drawing *d, int x, int y, int width, int rows, int columns, int every_columns)
{
    for (int row = 0; row < rows; row += TILE) draw_edge(d, x, y + row * CELL_HEIGHT, columns * width, 0);
    draw_edge(d, x, y + rows * CELL_HEIGHT, columns * width, 0);
    for (int column = 0; column <= columns; column += every_columns)
        draw_edge(d, x + column * width, y, 0, rows * CELL_HEIGHT);
}

static int cell_width(const struct layout_view *view)
{
    return view->lanes > 100 ? WIDE_CELL : CELL_WIDTH;
}

static void draw_fragment(struct drawing *d)
{
    const struct layout_view *view = d->view;
    const int width = cell_width(view);
    draw_column_numbers(d, LEFT, TOP, width, view->columns);
    draw_row_numbers(d, LEFT, TOP, view->rows);
    for (int row = 0; row < view->rows; row++)
        for (int column = 0; column < view->columns; column++) {
            const struct layout_cell cell = view->cells[row][column];
            draw_lane_cell(d, LEFT + column * width, TOP + row * CELL_HEIGHT, width, cell.lane);
            DRAW(d, "<title>row %d, column %d: %s %d, element %d, register %d</title>T%d.%d</text>\n", row,
                 column, layout_holder(view), cell.lane, cell.element,
                 cell.element / view->elements_a_register, cell.lane, cell.element);
        }
    draw_edges(d, LEFT, TOP, width, view->rows, view->columns, TILE);
    if (!view->chunks) return;
    const int x = LEFT + view->columns * width + GAP;
    DRAW(d, "<text x=\"%d\" y=\"%d\" class=\"head\">Address of columns</text>\n", x, TOP - 26);
    for (int chunk = 0; chunk < view->chunks; chunk++)
        DRAW(d, "<text x=\"%.1f\" y=\"%d\" class=\"mid note\">%d to %d</text>\n",
             x + (chunk + 0.5) * CHUNK_WIDTH, TOP - 6, TILE * chunk, TILE * chunk + TILE - 1);
    draw_row_numbers(d, x, TOP, view->rows);
    for (int row = 0; row < view->rows; row++)
        for (int chunk = 0; chunk < view->chunks; chunk++) {
            const int lane = view->address_lane[row][chunk];
            draw_lane_cell(d, x + chunk * CHUNK_WIDTH, TOP + row * CELL_HEIGHT, CHUNK_WIDTH, lane);
            DRAW(d, "<title>lane %d gives the address of row %d, columns %d to %d</title>T%d</text>\n", lane,
                 row, TILE * chunk, TILE * chunk + TILE - 1, lane);
        }
    draw_edges(d, x, TOP, CHUNK_WIDTH, view->rows, view->chunks, 1);
}

static void draw_chunk(struct drawing *d, int x, int y, int row, int chunk)
{
    const int group = layout_group(d->view, row, chunk);
    DRAW(d,
         "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"cell c%d\"/>"
         "<text x=\"%.1f\" y=\"%d\" class=\"mid\"><title>row %d, chunk %d: byte %u, banks %d to %d</title>",
         x, y, CHUNK_WIDTH, CELL_HEIGHT, group, x + CHUNK_WIDTH / 2.0, y + 16, row, chunk,
         (unsigned)d->view->offset[row][chunk], 4 * group, 4 * group + 3);
}

static void draw_shared(struct drawing *d)
{
    const struct layout_view *view = d->view;
    const int lines_top = TOP + view->rows * CELL_HEIGHT + GAP;
    DRAW(d, "<text x=\"%d\" y=\"%d\" class=\"head\">Row and chunk: byte, bank group</text>\n", LEFT,
         TOP - 26);
    draw_column_numbers(d, LEFT, TOP, CHUNK_WIDTH, view->columns);
    draw_row_numbers(d, LEFT, TOP, view->rows);
    for (int row = 0; row < view->rows; row++)
        for (int chunk = 0; chunk < view->columns; chunk++) {
            draw_chunk(d, LEFT + chunk * CHUNK_WIDTH, TOP + row * CELL_HEIGHT, row, chunk);
            DRAW(d, "%u : %d</text>\n", (unsigned)view->offset[row][chunk], layout_group(view, row, chunk));
        }
    draw_edges(d, LEFT, TOP, CHUNK_WIDTH, view->rows, view->columns, 1);
    DRAW(d, "<text x=\"%d\" y=\"%d\" class=\"head\">128-byte line and bank group: row, chunk</text>\n", LEFT,
         lines_top - 26);
    draw_column_numbers(d, LEFT, lines_top, CHUNK_WIDTH, LAYOUT_GROUPS);
    draw_row_numbers(d, LEFT, lines_top, layout_lines(view));
    for (int line = 0; line < layout_lines(view); line++)
        for (int group = 0; group < LAYOUT_GROUPS; group++) {
            int row, chunk;
            if (!layout_find(view, line, group, &row, &chunk)) continue;
            draw_chunk(d, LEFT + group * CHUNK_WIDTH, lines_top + line * CELL_HEIGHT, row, chunk);
            DRAW(d, "row %d, chunk %d</text>\n", row, chunk);
        }
    draw_edges(d, LEFT, lines_top, CHUNK_WIDTH, layout_lines(view), LAYOUT_GROUPS, 1);
}

static void draw_title(struct drawing *d)
{
    const struct layout_view *view = d->view;
    DRAW(d, "<text x=\"%d\" y=\"32\" class=\"title\">%s</text>\n<text x=\"%d\" y=\"52\" class=\"note\">%s. ",
         LEFT, view->name, LEFT, view->summary);
    if (view->in_shared_memory)
        DRAW(d, "A colour is a group of 4 banks; eight rows of one chunk meet all eight.</text>\n");
    else
        DRAW(d, "T0.1: %s 0, element 1. %d %ss, %d elements each, %s a register.</text>\n",
             layout_holder(view), view->lanes, layout_holder(view), view->elements,
             view->elements_a_register == 2 ? "two" : "one");
}

bool layout_svg_write(const char *path, const struct layout_view *view, struct reason *reason)
{
    struct drawing d = {.view = view};
    int width = LEFT + LAYOUT_GROUPS * CHUNK_WIDTH, height = TOP + view->rows * CELL_HEIGHT;
    if (view->in_shared_memory)
        height += GAP + layout_lines(view) * CELL_HEIGHT;
    else
        width =
            LEFT + view->columns * cell_width(view) + (view->chunks ? GAP + view->chunks * CHUNK_WIDTH : 0);
    if (width < MIN_WIDTH) width = MIN_WIDTH;
    if (!svg_open(&d.svg, path, width + MARGIN, height + MARGIN, reason)) return false;
    draw_title(&d);
    if (view->in_shared_memory)
        draw_shared(&d);
    else
        draw_fragment(&d);
    return svg_close(&d.svg);
}
