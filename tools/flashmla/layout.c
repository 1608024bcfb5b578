/* SPDX-License-Identifier: MIT
 *
 * flashmla layout: shows which lane holds which element of a fragment, and where swizzled shared memory
 * places the chunks of a row. All of it comes from the functions that the kernels compute their addresses
 * with.
 */
#include "layout_view.h"
#include "options.h"

#include "../../src/cuda/device/fragment.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *layout_names[16]; /* filled from the table below */

static const struct command about = {
    "layout",
    "[NAME]",
    "print and draw which lane holds which element of a fragment",
    "\n"
    "Without NAME the command lists the layouts. A cell T5.3 of a fragment is element 3 of lane 5 "
    "(with wgmma, of thread 5 of the warpgroup); elements are counted through the registers in order. "
    "The tables of ldmatrix also show which lane gives the address of each 8 elements. The tables of "
    "a swizzle show at which byte a 16-byte chunk of a row lies, and in which of the 8 groups of 4 "
    "banks: 144:1 is byte 144, banks 4 to 7.\n"
    "\n"
    "Examples\n"
    "  flashmla layout\n"
    "  flashmla layout mma-a --svg mma-a.svg\n"
    "  flashmla layout ldmatrix-tile-trans --lane 9\n"
    "  flashmla layout wgmma-d --columns 64 --svg wgmma-d.svg\n"
    "  flashmla layout swizzle-128\n",
    OPERAND_WORD,
    layout_names};

enum { ANY_COLUMNS = 0, DEFAULT_COLUMNS = 16, SWIZZLE_ROWS = 8 };

struct layout {
    const char *name, *summary;
    int rows, columns /* or ANY_COLUMNS */, lanes, elements_a_register;
    /* Fragment: position of a lane's element e. */
    int (*row)(int lane, int e), (*column)(int lane, int e);
    /* ldmatrix: the 8 elements whose address a lane gives, and the lane and element that a lane's element
     * comes from. */
    int (*address_row)(int lane), (*address_chunk)(int lane);
    int (*source)(int lane, int e), (*source_element)(int lane, int e);
    /* Shared memory: byte offset of a chunk. */
    uint32_t (*offset)(uint32_t row, uint32_t chunk);
};

/* A fragment of 16-bit (two per register) or 32-bit elements (one), at the positions of functions `of`_row
 * and `of`_column. */
#define FRAGMENT(called, words, tile_rows, tile_columns, holders, a_register, of)                            \
    {                                                                                                        \
        .name = (called), .summary = (words), .rows = (tile_rows), .columns = (tile_columns),                \
        .lanes = (holders), .elements_a_register = (a_register), .row = of##_row, .column = of##_column      \
    }
/* ldmatrix.x4: the row and chunk whose address a lane gives, and the source of its elements. */
#define LDMATRIX(called, words, tile_rows, tile_columns, of_row, of_chunk, from)                             \
    {                                                                                                        \
        .name = (called), .summary = (words), .rows = (tile_rows), .columns = (tile_columns),                \
        .lanes = WARP_LANES, .elements_a_register = 2, .address_row = ldmatrix_##of_row,                     \
        .address_chunk = ldmatrix_##of_chunk, .source = ldmatrix_##from,                                     \
        .source_element = ldmatrix_##from##_element                                                          \
    }
#define SWIZZLE(called, words, bytes)                                                                        \
    {                                                                                                        \
        .name = (called), .summary = (words), .rows = SWIZZLE_ROWS, .columns = (bytes) / CHUNK_BYTES,        \
        .offset = swizzle_##bytes                                                                            \
    }

static const struct layout layouts[] = {
    FRAGMENT("mma-a", "A of mma.m16n8k16, rows x k, 16-bit", 16, 16, WARP_LANES, 2, mma_a),
    FRAGMENT("mma-b", "B of mma.m16n8k16, k x columns, 16-bit", 16, 8, WARP_LANES, 2, mma_b),
    FRAGMENT("mma-c", "C and D of mma.m16n8k16, fp32", 16, 8, WARP_LANES, 1, mma_c),
    LDMATRIX("ldmatrix-tile", "ldmatrix.x4 of a 16 x 16 tile: A of mma (Q, P)", 16, 16, tile_row, tile_chunk,
             source),
    LDMATRIX("ldmatrix-tile-trans",
             "ldmatrix.x4.trans of a 16 x 16 tile: two B side by side (V, keys x columns)", 16, 16, tile_row,
             tile_chunk, trans_source),
    LDMATRIX("ldmatrix-8x32", "ldmatrix.x4 of 8 rows x 32 columns: two B along k (K, keys x k)", 8, 32,
             row_of_8, chunk_of_4, source),
    LDMATRIX("ldmatrix-pair", "ldmatrix.x4 of 16 rows x 16 columns: two B of 8 keys each (K, keys x k)", 16,
             16, pair_row, pair_chunk, source),
    FRAGMENT("wgmma-a", "A in registers of wgmma.m64nNk16, rows x k, 16-bit", 64, 16, WARPGROUP_THREADS, 2,
             wgmma_a),
    FRAGMENT("wgmma-d", "D of wgmma.m64nNk16, fp32", 64, ANY_COLUMNS, WARPGROUP_THREADS, 1, wgmma_d),
    SWIZZLE("swizzle-128", "rows of 128 bytes in shared memory, 128-byte swizzle", 128),
    SWIZZLE("swizzle-64", "rows of 64 bytes in shared memory, 64-byte swizzle", 64),
    SWIZZLE("swizzle-32", "rows of 32 bytes in shared memory, 32-byte swizzle", 32),
};
_Static_assert(LINE_BYTES == 128, "the widest rows are lines of all banks");
enum { LAYOUTS = sizeof layouts / sizeof *layouts };
_Static_assert(LAYOUTS < sizeof layout_names / sizeof *layout_names, "the last name is NULL");

/* ---- The filled table ----------------------------------------------------------------------- */

static void place(const struct layout *layout, int lane, int e, int *row, int *column)
{
    if (layout->source) {
        const int from = layout->source(lane, e);
        *row = layout->address_row(from);
        *column = CHUNK_ELEMENTS * layout->address_chunk(from) + layout->source_element(lane, e);
    } else {
        *row = layout->row(lane, e);
        *column = layout->column(lane, e);
    }
}

static void fill(struct layout_view *view, const struct layout *layout, int columns, int lane)
{
    memset(view, 0, sizeof *view);
    view->name = layout->name, view->summary = layout->summary;
    view->rows = layout->rows, view->columns = columns, view->lane = lane;
    view->in_shared_memory = layout->offset != NULL;
    for (int row = 0; layout->offset && row < view->rows; row++)
        for (int chunk = 0; chunk < columns; chunk++)
            view->offset[row][chunk] = layout->offset((uint32_t)row, (uint32_t)chunk);
    if (layout->offset) return;
    view->lanes = layout->lanes, view->elements_a_register = layout->elements_a_register;
    view->elements = view->rows * columns / view->lanes;
    view->chunks = layout->source ? columns / CHUNK_ELEMENTS : 0;
    for (int l = 0; l < view->lanes; l++) {
        for (int e = 0; e < view->elements; e++) {
            int row, column;
            place(layout, l, e, &row, &column);
            view->cells[row][column] = (struct layout_cell){(uint8_t)l, (uint8_t)e};
        }
        if (layout->source) view->address_lane[layout->address_row(l)][layout->address_chunk(l)] = (uint8_t)l;
    }
}

bool layout_find(const struct layout_view *view, int line, int group, int *row, int *chunk)
{
    for (*row = 0; *row < view->rows; ++*row)
        for (*chunk = 0; *chunk < view->columns; ++*chunk)
            if (view->offset[*row][*chunk] == (uint32_t)(line * LINE_BYTES + group * CHUNK_BYTES))
                return true;
    return false;
}

/* ---- Text ----------------------------------------------------------------------------------- */

static void print_list(void)
{
    printf("%-20s %-8s %-15s %s\n", "layout", "tile", "lanes", "what");
    for (const struct layout *layout = layouts; layout < layouts + LAYOUTS; layout++) {
        char tile[32], lanes[32] = "-";
        if (layout->columns == ANY_COLUMNS) {
            snprintf(tile, sizeof tile, "%d x N", layout->rows);
            snprintf(lanes, sizeof lanes, "%d x N/%d", layout->lanes, layout->lanes / layout->rows);
        } else {
            snprintf(tile, sizeof tile, "%d x %d", layout->rows, layout->columns);
            if (layout->lanes)
                snprintf(lanes, sizeof lanes, "%d x %d", layout->lanes,
                         layout->rows * layout->columns / layout->lanes);
        }
        printf("%-20s %-8s %-15s %s\n", layout->name, tile, lanes, layout->summary);
    }
}

/* Writes the text of a cell. */
typedef void cell_words(const struct layout_view *view, int row, int column, char text[24]);

static void print_cells(const struct layout_view *view, const char *corner, int width, int rows, int columns,
                        cell_words *words)
{
    char text[24];
    printf("%6s", corner);
    for (int i = 0; i < columns; i++) printf(" %*d", width, i);
    putchar('\n');
    for (int row = 0; row < rows; row++) {
        printf("%6d", row);
        for (int column = 0; column < columns; column++) {
            words(view, row, column, text);
            printf(" %*s", width, text);
        }
        putchar('\n');
    }
}

static void element_words(const struct layout_view *view, int row, int column, char text[24])
{
    const struct layout_cell cell = view->cells[row][column];
    snprintf(text, 24, "T%d.%d", cell.lane, cell.element);
}

static void address_words(const struct layout_view *view, int row, int chunk, char text[24])
{
    snprintf(text, 24, "T%d", view->address_lane[row][chunk]);
}

static void byte_words(const struct layout_view *view, int row, int chunk, char text[24])
{
    snprintf(text, 24, "%" PRIu32 ":%d", view->offset[row][chunk], layout_group(view, row, chunk));
}

static void chunk_words(const struct layout_view *view, int line, int group, char text[24])
{
    int row, chunk;
    snprintf(text, 24, "-");
    if (layout_find(view, line, group, &row, &chunk)) snprintf(text, 24, "%d.%d", row, chunk);
}

static void print_fragment(const struct layout_view *view)
{
    const int width = view->lanes > 100 ? 7 : 5;
    printf("%d x %d elements; %d %ss with %d each, %s a register\n\n", view->rows, view->columns, view->lanes,
           layout_holder(view), view->elements, view->elements_a_register == 2 ? "two" : "one");
    print_cells(view, "row", width, view->rows, view->columns, element_words);
    if (!view->chunks) return;
    printf("\nlane that gives the address of the columns 8 c to 8 c + 7 of a row, under c\n\n");
    print_cells(view, "row", width, view->rows, view->chunks, address_words);
}

static void print_lane(const struct layout *layout, const struct layout_view *view)
{
    printf("%s %d holds\n\n%8s %9s %6s %7s\n", layout_holder(view), view->lane, "element", "register", "row",
           "column");
    for (int e = 0; e < view->elements; e++) {
        int row, column;
        place(layout, view->lane, e, &row, &column);
        char in_register[24];
        snprintf(in_register, sizeof in_register, "%d%s", e / view->elements_a_register,
                 view->elements_a_register == 1 ? ""
                 : e % 2                        ? " high"
                                                : " low");
        printf("%8d %9s %6d %7d\n", e, in_register, row, column);
    }
    if (!layout->source) return;
    const int first = CHUNK_ELEMENTS * layout->address_chunk(view->lane);
    printf("\nand gives the address of row %d, columns %d to %d\n", layout->address_row(view->lane), first,
           first + CHUNK_ELEMENTS - 1);
}

static void print_shared(const struct layout_view *view)
{
    printf("%d rows of %d chunks of %d bytes; byte:bank group of each\n\n", view->rows, view->columns,
           CHUNK_BYTES);
    print_cells(view, "row", 7, view->rows, view->columns, byte_words);
    printf("\nrow.chunk that lies at a line of all banks and a bank group\n\n");
    print_cells(view, "line", 7, layout_lines(view), LAYOUT_GROUPS, chunk_words);
}

/* ---- The command ---------------------------------------------------------------------------- */

struct layout_options {
    int64_t lane, columns;
    bool lane_given, columns_given;
    const char *svg;
};

static int list(const struct layout_options *options)
{
    const char *const needs = options->svg             ? "--svg"
                              : options->lane_given    ? "--lane"
                              : options->columns_given ? "--columns"
                                                       : NULL;
    if (needs) return complain(&about, EXIT_USAGE, "%s: needs the NAME of a layout", needs);
    print_list();
    return EXIT_GOOD;
}

static int show(const char *name, const struct layout_options *options)
{
    const struct layout *layout = layouts;
    while (layout < layouts + LAYOUTS && strcmp(layout->name, name) != 0) layout++;
    if (layout == layouts + LAYOUTS) return no_such(&about, "layout", name, layout_names, "");
    if (options->columns_given && layout->columns != ANY_COLUMNS)
        return complain(&about, EXIT_USAGE, "--columns: %s has %d; only wgmma-d takes a number", name,
                        layout->columns);
    if (options->columns % 8)
        return complain(&about, EXIT_USAGE, "--columns: %" PRId64 " must be a multiple of 8",
                        options->columns);
    if (options->lane_given && !layout->lanes)
        return complain(&about, EXIT_USAGE, "--lane: %s is shared memory and has no lanes", name);
    if (options->lane_given && options->lane >= layout->lanes)
        return complain(&about, EXIT_USAGE, "--lane: %" PRId64 " must be in [0, %d] with %s", options->lane,
                        layout->lanes - 1, name);
    static struct layout_view view; /* 37 KiB */
    struct reason reason = {""};
    const int columns = layout->columns == ANY_COLUMNS ? (int)options->columns : layout->columns;
    fill(&view, layout, columns, options->lane_given ? (int)options->lane : -1);
    if (options->svg && !layout_svg_write(options->svg, &view, &reason))
        return complain(&about, EXIT_FAILED, "%s", reason.text);
    printf("%s: %s\n", view.name, view.summary);
    if (view.in_shared_memory)
        print_shared(&view);
    else if (options->lane_given)
        print_lane(layout, &view);
    else
        print_fragment(&view);
    return EXIT_GOOD;
}

int command_layout(int argc, char **argv)
{
    struct layout_options o = {.columns = DEFAULT_COLUMNS};
    const char *name = NULL;
    const struct option options[] = {
        OPTION_NUMBER("--lane", &o.lane, 0, WARPGROUP_THREADS - 1, "show this lane alone", &o.lane_given),
        OPTION_NUMBER("--columns", &o.columns, 8, LAYOUT_COLUMNS,
                      "columns of wgmma-d, a multiple of 8; default 16", &o.columns_given),
        OPTION_FILE("--svg", &o.svg, "draw the layout there"),
        {0}};
    for (int i = 0; i < LAYOUTS; i++) layout_names[i] = layouts[i].name;
    const int done = options_parse(&about, options, argc, argv, &name);
    return done >= 0 ? done : name ? show(name, &o) : list(&o);
}
